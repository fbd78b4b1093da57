"""Images to classify: scikit-learn's digits, or CIFAR-10 from a folder."""

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _run import UserError
from sklearn.datasets import load_digits

CIFAR_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_TORCHVISION, _TFDS = "cifar-10-batches-py", "cifar10"


@dataclasses.dataclass(frozen=True)
class Split:
    """Images f32[N, H, W, C] of mean 0 and deviation 1 over the training set, labels i32[N]."""

    images: np.ndarray
    labels: np.ndarray


@dataclasses.dataclass(frozen=True)
class Images:
    """A data set.

    Attributes:
        name: of it.
        train: to train on.
        test: held out.
        classes: the names of the labels.
        flips: whether a mirrored image shows the same.
    """

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    flips: bool


def load_images(folder: Path | None, limit: int | None = None) -> Images:
    """Returns a data set.

    Args:
        folder: where CIFAR-10 lies, in the layout of torchvision (`cifar-10-batches-py`) or of
            tensorflow_datasets (`cifar10`, which needs that package); the digits of scikit-learn,
            8x8 pixels repeated to 32x32, if None.
        limit: at most so many images of each part.

    Raises:
        UserError: if the folder holds no CIFAR-10.
    """
    if folder is None:
        name, parts, classes = "digits", _digits(), tuple("0123456789")
    elif (folder / _TORCHVISION).is_dir():
        name, parts, classes = "CIFAR-10", _torchvision(folder / _TORCHVISION), CIFAR_CLASSES
    elif (folder / _TFDS).is_dir():
        name, parts, classes = "CIFAR-10", _tfds(folder), CIFAR_CLASSES
    else:
        raise UserError(
            f"--data {folder}: no {_TORCHVISION} or {_TFDS} in it. Download CIFAR-10 with "
            "torchvision.datasets.CIFAR10(folder, download=True) or tfds.load('cifar10', "
            "data_dir=folder), or leave --data out."
        )
    (train_x, train_y), (test_x, test_y) = ((x[:limit], y[:limit]) for x, y in parts)
    mean, deviation = train_x.mean((0, 1, 2)), train_x.std((0, 1, 2))

    def split(x: np.ndarray, y: np.ndarray) -> Split:
        return Split(((x - mean) / deviation).astype(np.float32), y.astype(np.int32))

    return Images(name, split(train_x, train_y), split(test_x, test_y), classes, folder is not None)


def _digits() -> list[tuple[np.ndarray, np.ndarray]]:
    data: Any = load_digits()
    images = np.repeat(np.repeat(data.images / 16, 4, axis=1), 4, axis=2)[..., None]
    order = np.random.default_rng(0).permutation(len(images))
    test, train = order[:297], order[297:]
    return [(images[part], data.target[part]) for part in (train, test)]


def _torchvision(folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    def read(names: list[str]) -> tuple[np.ndarray, np.ndarray]:
        batches = [pickle.loads((folder / name).read_bytes(), encoding="bytes") for name in names]
        pixels = np.concatenate([batch[b"data"] for batch in batches])
        labels = np.concatenate([batch[b"labels"] for batch in batches])
        return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1) / 255, labels

    return [read([f"data_batch_{i}" for i in range(1, 6)]), read(["test_batch"])]


def _tfds(folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    try:
        import tensorflow_datasets as tfds  # noqa: PLC0415
    except ImportError:
        raise UserError(
            f"--data {folder}: reading {_TFDS} needs tensorflow_datasets: pip install "
            "tensorflow-datasets, or use torchvision's layout."
        ) from None
    parts = tfds.load("cifar10", data_dir=folder, download=False, batch_size=-1)
    arrays = [tfds.as_numpy(parts[name]) for name in ("train", "test")]
    return [(part["image"] / 255, part["label"]) for part in arrays]


def augmented(images: jax.Array, key: jax.Array, *, flips: bool) -> jax.Array:
    """Shifts each image by up to an eighth of its size, and mirrors half of them.

    Args:
        images: f32[B, H, W, C].
        key: a PRNG key.
        flips: whether to mirror.
    """
    count, size = images.shape[0], images.shape[1]
    margin = size // 8
    shift_key, flip_key = jax.random.split(key)
    shifts = jax.random.randint(shift_key, (count, 2), 0, 2 * margin + 1)
    wide = jnp.pad(images, ((0, 0), (margin, margin), (margin, margin), (0, 0)), mode="edge")

    def crop(image: jax.Array, shift: jax.Array) -> jax.Array:
        start = (shift[0], shift[1], jnp.zeros_like(shift[0]))
        return jax.lax.dynamic_slice(image, start, images.shape[1:])

    cropped = jax.vmap(crop)(wide, shifts)
    if not flips:
        return cropped
    mirrored = jax.random.bernoulli(flip_key, shape=(count, 1, 1, 1))
    return jnp.where(mirrored, cropped[:, :, ::-1], cropped)
