"""Checkpoints through orbax that never change a dtype silently.

Every leaf is saved under its name ("params/blocks/0/kernel"), with a manifest of dtypes and
shapes that `restore` compares with the template before it reads an array. Orbax writes into a
temporary directory and renames it, so a checkpoint is there as a whole or not at all. Needs the
extra `jaxmp[checkpoint]`.
"""

import contextlib
import importlib
import operator
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp import _manifest, _tree
from jaxmp._checksum import checksum
from jaxmp._errors import bullet_list
from jaxmp._manifest import CheckpointMismatchError

T = TypeVar("T")


class CheckpointDamagedError(ValueError):
    """The files of a checkpoint are not those that were written."""


__all__ = ["CheckpointDamagedError", "CheckpointMismatchError", "latest_step", "restore", "save"]


def save(
    directory: str | os.PathLike[str],
    state: Any,
    *,
    step: int | None = None,
    keep: int | None = None,
) -> Path:
    """Saves a pytree as one step of a directory of checkpoints, and waits until it is written.

    Args:
        directory: where checkpoints lie; made if it is not there.
        state: any pytree of arrays (of every dtype, fp8 and int4 too), PRNG keys, Python numbers,
            strings and None.
        step: the number of the checkpoint; `state.step` if left out.
        keep: how many checkpoints to keep, the newest; all if left out.

    Returns:
        The path of the checkpoint.

    Raises:
        ValueError: if a leaf cannot be saved, two leaves have one name, the step is not after
            those that are there, or the directory holds something else under a number. Nothing
            is written then.
        ImportError: without the extra.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     _ = save(directory, {"w": jnp.ones(2, jnp.bfloat16)}, step=7)
        ...     restore(directory, {"w": jnp.zeros(2, jnp.bfloat16)}), latest_step(directory)
        ({'w': Array([1, 1], dtype=bfloat16)}, 7)
    """
    step = _step_number(state, step)
    if keep is not None and keep < 1:
        raise ValueError(f"keep is {keep}, but at least one checkpoint is kept: use keep=1.")
    leaves = _tree.named_leaves(state)
    manifest = _manifest.describe(leaves)
    arrays = {
        name: _to_array(leaf, manifest[name]["kind"])
        for name, leaf in leaves.items()
        if manifest[name]["kind"] in ("array", "bytes")
    }
    for name, array in arrays.items():
        manifest[name]["checksum"] = checksum(array)
    ocp = _orbax()
    with _manager(ocp, directory, create=True, max_to_keep=keep) as manager:
        _check_directory(directory, step, manager.all_steps())
        parts = {"manifest": ocp.args.JsonSave({"format": 1, "leaves": manifest})}
        if arrays:
            parts["arrays"] = ocp.args.PyTreeSave(arrays)
        if not manager.save(step, args=ocp.args.Composite(**parts)):
            raise RuntimeError(f"orbax did not save step {step} in {directory}.")
    return Path(directory).resolve() / str(step)


def restore(
    directory: str | os.PathLike[str], template: T, *, step: int | None = None, cast: bool = False
) -> T:
    """Returns a saved state with the structure, dtypes, shapes and shardings of a template.

    A checkpoint without a loss scale (from before `mixed_precision`, or from a bf16 run) loads
    with a warning, and the template's loss scale starts afresh; so does one whose loss scale the
    template has no place for. Options of a loss scale come from the template.

    Args:
        directory: what `save` was given.
        template: a pytree like the saved one; arrays or `jax.ShapeDtypeStruct`s.
        step: which checkpoint; the newest if left out.
        cast: whether to cast saved floats to the template's dtypes where they differ.

    Returns:
        A tree like the template: JAX arrays, and NumPy arrays and Python values where the
        template has them.

    Raises:
        CheckpointMismatchError: if leaves are missing, left over, or of another shape or dtype.
        CheckpointDamagedError: if files are missing or their contents have changed.
        FileNotFoundError: if there is no checkpoint.
        ImportError: without the extra.
    """
    ocp = _orbax()
    steps = _steps(ocp, directory)
    step = max(steps, default=None) if step is None else step
    if step is None or step not in steps:
        raise FileNotFoundError(
            f"No checkpoint {'' if step is None else f'of step {step} '}in {directory}. "
            f"Steps there: {', '.join(map(str, steps)) or 'none'}."
        )
    with _manager(ocp, directory) as manager:
        with _damage_reported(directory, step):
            parts = ocp.args.Composite(manifest=ocp.args.JsonRestore())
            saved = manager.restore(step, args=parts)["manifest"]["leaves"]
        leaves = _tree.named_leaves(template)
        source_of = _manifest.match(saved, template, cast=cast)
        to_read = {
            source: leaves[name]
            for name, source in source_of.items()
            if source is not None and saved[source]["kind"] in ("array", "bytes")
        }
        with _damage_reported(directory, step):
            arrays = _read_arrays(ocp, manager, step, to_read)
    sums = {name: checksum(array) for name, array in arrays.items()}
    wrong = [name for name, found in sums.items() if found != saved[name].get("checksum")]
    if wrong:
        raise CheckpointDamagedError(_damage(directory, step, "\n" + bullet_list(wrong)))

    def leaf_fn(name: str, leaf: Any) -> Any:
        source = source_of[name or "(root)"]
        if source is None:
            return leaf
        if saved[source]["kind"] == "python":
            return _manifest.python_value(saved[source])
        array = arrays.get(source)
        if saved[source]["kind"] == "bytes":
            array = np.asarray(array).view(leaf.dtype)
        return _from_array(array, leaf)

    return _tree.map_named(leaf_fn, template)


def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """Returns the number of the newest whole checkpoint in `directory`, or None."""
    return max(_steps(_orbax(), directory), default=None)


def _damage(directory: str | os.PathLike[str], step: int, what: Any) -> str:
    return (
        f"Step {step} in {directory} is damaged, and is not restored: {what}\n"
        "Restore an older step with restore(..., step=...)."
    )


@contextlib.contextmanager
def _damage_reported(directory: str | os.PathLike[str], step: int) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        cause = f"{type(error).__name__}: {str(error)[:300]}"
        raise CheckpointDamagedError(_damage(directory, step, cause)) from error


def _orbax() -> Any:
    try:
        return importlib.import_module("orbax.checkpoint")
    except ImportError as error:
        raise ImportError(
            "Checkpoints need orbax-checkpoint: pip install 'jaxmp[checkpoint]'."
        ) from error


def _manager(ocp: Any, directory: str | os.PathLike[str], **options: Any) -> Any:
    options = {"create": False, "enable_async_checkpointing": False} | options
    return ocp.CheckpointManager(
        Path(directory).resolve(), options=ocp.CheckpointManagerOptions(**options)
    )


def _steps(ocp: Any, directory: str | os.PathLike[str]) -> list[int]:
    if not Path(directory).is_dir():
        return []
    with _manager(ocp, directory) as manager:
        return sorted(step for step in manager.all_steps() if _is_ours(directory, step))


def _is_ours(directory: str | os.PathLike[str], step: int) -> bool:
    return (Path(directory) / str(step) / "manifest").is_dir()


def _is_foreign(directory: str | os.PathLike[str], step: int) -> bool:
    """Whether a checkpoint has parts that jaxmp does not write.

    One that lacks the manifest alone was being deleted, to keep only the newest, at a kill.
    """
    names = {path.name for path in (Path(directory) / str(step)).iterdir()}
    return not names or not names <= {
        "manifest",
        "arrays",
        "_CHECKPOINT_METADATA",
        "commit_success.txt",
    }


def _step_number(state: Any, step: int | None) -> int:
    if step is None and not hasattr(state, "step"):
        raise ValueError(
            "The state has no step, so the checkpoint needs a number: save(..., step=7)."
        )
    try:
        number = operator.index(state.step if step is None else step)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"step is {step!r}, but a checkpoint's number is an integer from 0.")
    return number


def _check_directory(directory: str | os.PathLike[str], step: int, steps: Sequence[int]) -> None:
    foreign = [str(other) for other in sorted(steps) if _is_foreign(directory, other)]
    if foreign:
        raise ValueError(
            f"{directory} holds {', '.join(foreign)}, which jaxmp did not write. Save in a "
            "directory of its own."
        )
    newest = max(steps, default=-1)
    if step <= newest:
        raise ValueError(
            f"Step {step} is not after step {newest}, the newest in {directory}; nothing there is "
            "overwritten. Save in another directory, or delete the steps from there on."
        )


def _read_arrays(ocp: Any, manager: Any, step: int, to_read: dict[str, Any]) -> dict[str, Any]:
    if not to_read:
        return {}
    args = ocp.args.PyTreeRestore(
        dict.fromkeys(to_read, 0),
        restore_args={name: _restore_args(ocp, leaf) for name, leaf in to_read.items()},
        partial_restore=True,
    )
    return manager.restore(step, args=ocp.args.Composite(arrays=args))["arrays"]


def _restore_args(ocp: Any, leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    if sharding is not None and len(sharding.device_set) > 1 and not _tree.is_key(leaf):
        return ocp.ArrayRestoreArgs(sharding=sharding)
    return ocp.RestoreArgs(restore_type=np.ndarray)


def _to_array(leaf: Any, kind: str) -> Any:
    if _tree.is_key(leaf):
        return jax.random.key_data(leaf)
    if kind == "bytes":
        return np.asarray(leaf).view(np.uint8)
    return np.asarray(leaf) if isinstance(leaf, np.generic) else leaf


def _from_array(array: Any, leaf: Any) -> Any:
    """Returns what was read as the kind of leaf that the template has; None is a zero-size one."""
    if _tree.is_key(leaf):
        data = jnp.zeros_like(jax.random.key_data(leaf)) if array is None else jnp.asarray(array)
        keys = jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        return jax.device_put(keys, leaf.sharding) if leaf.committed else keys
    if array is None:
        array = np.zeros(leaf.shape, leaf.dtype)
    if isinstance(leaf, np.generic):
        return array[()].astype(leaf.dtype)
    if isinstance(leaf, np.ndarray):
        return array.astype(leaf.dtype)
    if isinstance(array, jax.Array):
        return array.astype(leaf.dtype)
    fresh = jnp.array(array, leaf.dtype, copy=True)
    committed = isinstance(leaf, jax.Array) and leaf.committed
    sharding = leaf.sharding if committed or isinstance(leaf, jax.ShapeDtypeStruct) else None
    return fresh if sharding is None else jax.device_put(fresh, sharding)
