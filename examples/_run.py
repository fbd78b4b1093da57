"""A run on disk that Ctrl-C can stop at any time and that resumes bit for bit.

DIR/run.json             settings, policies, and the checksum of the text
DIR/<policy>/<step>/     checkpoints of `jaxmp.checkpoint`: the state and the history
"""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import jaxmp

History = dict[str, np.ndarray]


class UserError(Exception):
    """Something that the person at the command line can put right; shown as one line."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run depends on: two runs of equal settings are equal bit for bit.

    Attributes:
        size: the name of a model size.
        steps: training steps, which the learning rate schedule depends on.
        batch_size: windows of text in a batch.
        microbatches: parts that a batch is computed in.
        seed: of the parameters and of the data order.
    """

    size: str
    steps: int
    batch_size: int
    microbatches: int
    seed: int


@dataclasses.dataclass(frozen=True)
class Run:
    """One run: what is trained, and where it is kept.

    Attributes:
        directory: the folder of the run.
        settings: what all policies share.
        policies: their names.
        checksum: that of the text.
        replaces: the finished run in the folder, or None.
    """

    directory: Path
    settings: Settings
    policies: list[str]
    checksum: int
    replaces: "Run | None" = None

    def write(self) -> None:
        """Writes `run.json`; deletes the run that this one takes the place of."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.replaces is not None:
            _manifest(self.directory).unlink()
            for name in self.replaces.policies:
                shutil.rmtree(self.replaces._folder(name), ignore_errors=True)
        fields = {"settings": dataclasses.asdict(self.settings), "policies": self.policies}
        text = json.dumps(fields | {"checksum": self.checksum}, indent=1)
        _manifest(self.directory).write_text(text + "\n")

    def newest_steps(self) -> list[int | None]:
        """Returns the step of each policy's newest checkpoint, None where there is none."""
        return [jaxmp.checkpoint.latest_step(self._folder(name)) for name in self.policies]

    def load(self, policy: str, state: jaxmp.TrainState) -> tuple[jaxmp.TrainState, History]:
        """Returns what was saved last for a policy.

        Args:
            policy: its name.
            state: the state before the first step, which is returned if nothing was saved.

        Returns:
            The state, and its history: f32[steps] arrays "loss", "valid_loss" and "seconds", NaN
            where nothing is known.
        """
        keys = ("loss", "valid_loss", "seconds")
        history = {key: np.full(self.settings.steps, np.nan, np.float32) for key in keys}
        if jaxmp.checkpoint.latest_step(self._folder(policy)) is None:
            return state, history
        tree = {"state": state, "history": history}
        saved = jaxmp.checkpoint.restore(self._folder(policy), tree)
        return saved["state"], saved["history"]

    def save(self, policy: str, state: jaxmp.TrainState, history: History) -> None:
        """Saves a checkpoint, unless that of the same step is there already."""
        folder, step = self._folder(policy), int(state.step)
        if jaxmp.checkpoint.latest_step(folder) != step:
            tree = {"state": state, "history": history}
            jaxmp.checkpoint.save(folder, tree, step=step, keep=2)

    def _folder(self, policy: str) -> Path:
        if re.fullmatch(r"\w[\w.=,-]{0,99}", policy):
            return self.directory / policy
        readable = re.sub(r"[^\w=,-]", "_", policy)[:60]
        return self.directory / f"{readable}-{zlib.crc32(policy.encode()):08x}"


def new_run(directory: Path, settings: Settings, policies: list[str], checksum: int) -> Run:
    """Returns a new run.

    Raises:
        UserError: if the settings do not fit together, or the folder holds a run that somebody
            may want to continue.
    """
    if settings.batch_size % settings.microbatches:
        raise UserError(
            f"--microbatches {settings.microbatches} does not divide --batch-size "
            f"{settings.batch_size}: choose a divisor."
        )
    old = find_run(directory)
    run = Run(directory, settings, policies, checksum, replaces=old)
    newest = (old or run).newest_steps()
    is_finished = old is not None and all(step == old.settings.steps for step in newest)
    if not is_finished and any(step is not None for step in newest):
        raise UserError(
            f"{directory} holds a run that is not finished: continue it with --resume "
            f"{directory}, or choose another --out."
        )
    return run


def resumed_run(directory: Path, given: dict[str, Any], policies: list[str], checksum: int) -> Run:
    """Returns the run in a folder, with new policies added to its comparison.

    Args:
        directory: the folder.
        given: the settings on the command line; they must be those of the run.
        policies: the policies on the command line.
        checksum: that of the text now.

    Raises:
        UserError: if there is no run, or it is another one.
    """
    run = find_run(directory)
    if run is None:
        raise UserError(f"No run to resume in {directory}: start one with --out {directory}.")
    for name, value in given.items():
        have, option = getattr(run.settings, name), f"--{name.replace('_', '-')}"
        if value != have:
            raise UserError(
                f"{option} is {value}, but the run in {directory} was started with {have}: leave "
                f"{option} out, or start another run with --out."
            )
    if checksum != run.checksum:
        raise UserError(
            f"The run in {directory} reads the library of another Python: resume it with that one."
        )
    return dataclasses.replace(run, policies=list(dict.fromkeys([*run.policies, *policies])))


def find_run(directory: Path) -> Run | None:
    """Returns the run in a folder, or None.

    Raises:
        UserError: if its `run.json` cannot be read.
    """
    if not _manifest(directory).exists():
        return None
    try:
        saved = json.loads(_manifest(directory).read_text())
        settings = Settings(**saved["settings"])
        return Run(directory, settings, saved["policies"], saved["checksum"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{_manifest(directory)} is damaged ({error!r}): choose another --out."
        ) from None


def _manifest(directory: Path) -> Path:
    return directory / "run.json"


class StopRequest:
    """A signal handler that notes that Ctrl-C was pressed."""

    requested = False

    def __call__(self, signum: int, frame: Any) -> None:
        """Handles the signal."""
        if not self.requested:
            # Not print: the signal may come in the middle of one, which cannot be entered twice.
            os.write(2, b"\nStopping after this step; saving ...\n")
        self.requested = True


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[StopRequest]:
    """Within, Ctrl-C only sets `requested`; KeyboardInterrupt follows at the end.

    So neither a step nor a checkpoint is cut in half, however often the keys are pressed. Once
    they were, further presses do nothing: the program is about to end.
    """
    stop = StopRequest()
    previous = signal.signal(signal.SIGINT, stop)
    try:
        yield stop
    finally:
        if not stop.requested:
            signal.signal(signal.SIGINT, previous)
    if stop.requested:
        raise KeyboardInterrupt
