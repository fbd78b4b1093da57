"""What a run shows: the progress bar, the table and the loss curves."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import jaxmp


@dataclasses.dataclass(frozen=True)
class Result:
    """A trained policy.

    Attributes:
        policy: its name.
        history: f32[steps] arrays "loss", "valid_loss" and "seconds", NaN where not known.
        memory_bytes: peak memory of the compiled training step.
        skipped_steps: steps skipped because of infinite or NaN gradients.
        loss_scale: the last loss scale.
    """

    policy: str
    history: dict[str, np.ndarray]
    memory_bytes: int
    skipped_steps: int
    loss_scale: float

    @property
    def valid_loss(self) -> float:
        """The validation loss after the last step."""
        return float(self.history["valid_loss"][-1])

    @property
    def train_loss(self) -> float:
        """The mean training loss of the last 20 steps."""
        return float(np.mean(self.history["loss"][-20:]))

    @property
    def step_seconds(self) -> float:
        """The median time of a step; NaN if the run was too short to tell."""
        known = self.history["seconds"][np.isfinite(self.history["seconds"])]
        return float(np.median(known)) if known.size else float("nan")


def make_result(
    policy: str,
    program: jax.stages.Compiled,
    state: jaxmp.TrainState,
    history: dict[str, np.ndarray],
) -> Result:
    """Returns what is known of a policy after training with a compiled step."""
    stats = program.memory_analysis()
    mixed = jaxmp.optim.get_mixed_precision_state(state.opt_state)
    return Result(
        policy=policy,
        history=history,
        # The state is donated, so that it counts once.
        memory_bytes=stats.temp_size_in_bytes
        + stats.argument_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes,
        skipped_steps=int(mixed.skipped_steps),
        loss_scale=float(mixed.loss_scale.loss_scale),
    )


class Progress:
    """A bar on a terminal; elsewhere a plain line for each validation."""

    def __init__(self, policy: str, step: int, steps: int, tokens_per_step: int) -> None:
        self._policy, self._steps, self._tokens = policy, steps, tokens_per_step
        self._bar = tqdm(desc=policy, initial=step, total=steps, unit="step", disable=None)
        self._shown = {"loss": "–", "val": "–"}

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()

    def steps_done(self, infos: Sequence[jaxmp.StepInfo], seconds: float) -> None:
        """Shows steps that are finished.

        Args:
            infos: what they reported, on the host.
            seconds: how long they took together.
        """
        last = infos[-1]
        self._shown |= {
            "loss": f"{last.loss:.3f}",
            "tok/s": f"{self._tokens * len(infos) / seconds:,.0f}",
            "scale": f"{last.loss_scale:g}",
            "skips": f"{last.skipped_steps}",
        }
        self._bar.set_postfix(self._shown, refresh=False)
        self._bar.update(len(infos))

    def validated(self, step: int, valid_loss: float) -> None:
        """Shows a validation loss."""
        self._shown["val"] = f"{valid_loss:.3f}"
        self._bar.set_postfix(self._shown)
        if self._bar.disable:
            numbers = " ".join(f"{key}={value}" for key, value in self._shown.items())
            line = f"{self._policy}: step {step}/{self._steps} {numbers}"
            print(line, file=sys.stderr, flush=True)


def print_table(results: Sequence[Result]) -> None:
    """Prints one row for each policy."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("policy", overflow="fold")
    for name in (
        "step (ms)",
        "peak memory (MB)",
        "train loss",
        "val loss",
        "vs float32",
        "skipped",
        "loss scale",
    ):
        table.add_column(name, justify="right")
    baseline = _baseline(results)
    for result in results:
        change = result.valid_loss / baseline.valid_loss - 1 if baseline else float("nan")
        table.add_row(
            result.policy,
            _number(result.step_seconds * 1e3, ".1f"),
            f"{result.memory_bytes / 1e6:.1f}",
            f"{result.train_loss:.4f}",
            f"{result.valid_loss:.4f}",
            _number(change, "+.2%"),
            str(result.skipped_steps),
            f"{result.loss_scale:g}",
        )
    # A pipe has no width of its own, and the default of 80 would wrap the numbers.
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def plot_losses(results: Sequence[Result], path: Path) -> None:
    """Draws the loss curves of all policies, and how far each is from float32, into a PNG."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    losses, changes = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    baseline = _baseline(results)
    for index, result in enumerate(results):
        color, steps = f"C{index}", np.arange(1, len(result.history["loss"]) + 1)
        valid = result.history["valid_loss"]
        known = np.isfinite(valid)
        losses.plot(steps, result.history["loss"], color=color, alpha=0.25, linewidth=1)
        losses.plot(steps[known], valid[known], "o-", color=color, label=result.policy)
        if baseline:
            change = 100 * (valid / baseline.history["valid_loss"] - 1)
            changes.plot(steps[known], change[known], "o-", color=color)
    losses.set_ylabel("loss (nats per byte)")
    losses.set_title("training (faint) and validation (points)")
    losses.legend()
    changes.set_ylabel("val vs float32 (%)")
    changes.set_xlabel("step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _baseline(results: Sequence[Result]) -> Result | None:
    return next((result for result in results if result.policy == "float32"), None)


def _number(value: float, spec: str) -> str:
    return format(value, spec) if np.isfinite(value) else "–"
