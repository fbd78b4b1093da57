"""Real text that every machine has: the sources of Python's standard library, as bytes.

The split is by file, and a batch is a function of the seed and the step alone: nothing is consumed,
so a resumed run reads what the uninterrupted one would have read. Another Python version has
another text, which `Corpus.checksum` tells apart.
"""

import dataclasses
import os
import sysconfig
import zlib
from pathlib import Path

import numpy as np

_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and validation text.

    Attributes:
        train: u8[N], the training files one after the other.
        valid: u8[M], the validation files.
        checksum: CRC-32 of all of it.
    """

    train: np.ndarray
    valid: np.ndarray
    checksum: int


def library_root() -> Path:
    """Returns the folder of the standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def source_files(root: Path) -> list[str]:
    """Returns the Python sources below `root`, without tests and installed packages.

    Returns:
        Relative paths with forward slashes, sorted, so that every machine has the same order.
    """
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        relative = Path(folder).relative_to(root)
        files += [(relative / name).as_posix() for name in names if name.endswith(".py")]
    return sorted(files)


def is_validation(path: str) -> bool:
    """Whether a file is held out: one in ten, by the hash of its relative path."""
    return zlib.crc32(path.encode()) % 10 == 0


def load_corpus(root: Path | None = None) -> Corpus:
    """Reads the text.

    Args:
        root: the folder to read; the standard library if left out.

    Raises:
        FileNotFoundError: if there are too few sources for a split.
    """
    root = library_root() if root is None else root
    files = source_files(root)
    train, valid = (
        b"".join((root / path).read_bytes() for path in files if is_validation(path) == held_out)
        for held_out in (False, True)
    )
    if not train or not valid:
        raise FileNotFoundError(
            f"Only {len(files)} Python sources in {root}: this Python comes without its library's "
            "sources. Use one from python.org, conda, uv or a distribution."
        )
    return Corpus(
        np.frombuffer(train, np.uint8),
        np.frombuffer(valid, np.uint8),
        zlib.crc32(valid, zlib.crc32(train)),
    )


def batch_at(data: np.ndarray, step: int, *, seed: int, batch_size: int, length: int) -> np.ndarray:
    """Returns the training batch of one step: random windows of the text.

    Args:
        data: u8[N].
        step: the index of the step.
        seed: the seed of the run.
        batch_size: windows per batch, B.
        length: context length of the model, T.

    Returns:
        i32[B, T + 1]: the inputs are all bytes but the last, the targets all but the first.
    """
    starts = np.random.default_rng((seed, step)).integers(0, len(data) - length, batch_size)
    return _windows(data, starts, length)


def spread_batches(
    data: np.ndarray, *, count: int, batch_size: int, length: int
) -> list[np.ndarray]:
    """Returns `count` batches of evenly spread windows, i32[B, T + 1] each, the same every time."""
    starts = np.linspace(0, len(data) - length - 1, count * batch_size).astype(np.int64)
    return [_windows(data, part, length) for part in np.split(starts, count)]


def _windows(data: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    return data[starts[:, None] + np.arange(length + 1)].astype(np.int32)
