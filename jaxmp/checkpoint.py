"""Checkpoints through orbax that never change a dtype silently.

Every leaf is saved under its name ("params/blocks/0/kernel"), with a manifest of dtypes and
shapes that `restore` compares with the template before it reads an array. Orbax writes into a
temporary directory and renames it, so a checkpoint is there as a whole or not at all. Needs the
extra `jaxmp[checkpoint]`.
"""

import importlib
import os
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp import _manifest, _tree
from jaxmp._manifest import CheckpointMismatchError

T = TypeVar("T")

__all__ = ["CheckpointMismatchError", "latest_step", "restore", "save"]


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
        ValueError: if a leaf cannot be saved, two leaves have one name, or the step is there
            already. Nothing is written then.
        ImportError: without the extra.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     _ = save(directory, {"w": jnp.ones(2, jnp.bfloat16)}, step=7)
        ...     restore(directory, {"w": jnp.zeros(2, jnp.bfloat16)}), latest_step(directory)
        ({'w': Array([1, 1], dtype=bfloat16)}, 7)
    """
    if step is None:
        step = int(state.step) if hasattr(state, "step") else -1
    if step < 0:
        raise ValueError(
            "The state has no step, so the checkpoint needs a number: save(..., step=7)."
            if not hasattr(state, "step")
            else f"step is {step}, but a checkpoint's number starts at 0."
        )
    if keep is not None and keep < 1:
        raise ValueError(f"keep is {keep}, but at least one checkpoint is kept: use keep=1.")
    leaves = _tree.named_leaves(state)
    manifest = _manifest.describe(leaves)
    arrays = {
        name: _to_array(leaf, manifest[name]["kind"])
        for name, leaf in leaves.items()
        if manifest[name]["kind"] in ("array", "bytes")
    }
    ocp = _orbax()
    with _manager(ocp, directory, create=True, max_to_keep=keep) as manager:
        if step in manager.all_steps():
            raise ValueError(
                f"Step {step} is in {directory} already, and is not overwritten. Save under "
                "another step or directory."
            )
        parts = {"manifest": ocp.args.JsonSave({"format": 1, "leaves": manifest})}
        if arrays:
            parts["arrays"] = ocp.args.PyTreeSave(arrays)
        manager.save(step, args=ocp.args.Composite(**parts))
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
        parts = ocp.args.Composite(manifest=ocp.args.JsonRestore())
        saved = manager.restore(step, args=parts)["manifest"]["leaves"]
        leaves = _tree.named_leaves(template)
        source_of = _manifest.match(saved, template, cast=cast)
        to_read = {
            source: leaves[name]
            for name, source in source_of.items()
            if source is not None and saved[source]["kind"] in ("array", "bytes")
        }
        arrays = _read_arrays(ocp, manager, step, to_read)

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
        return sorted(manager.all_steps())


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
    return np.asarray(leaf).view(np.uint8) if kind == "bytes" else leaf


def _from_array(array: Any, leaf: Any) -> Any:
    """Returns what was read as the kind of leaf that the template has; None is a zero-size one."""
    if array is None:
        array = np.zeros(leaf.shape, leaf.dtype)
    if _tree.is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
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
