"""The manifest of a checkpoint: what each leaf was, and whether a template fits it."""

import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp import _tree
from jaxmp._dtypes import FLOAT64, dtype_of, is_real_float
from jaxmp._errors import bullet_list
from jaxmp.optim import MixedPrecisionState
from jaxmp.optim._checks import named_states

Entry = dict[str, Any]

_PYTHON = {
    "bool": (lambda value: value, bool),
    "int": (lambda value: value, int),
    "float": (float.hex, float.fromhex),
    "complex": (repr, complex),
    "str": (lambda value: value, str),
}


_STORABLE = {"bfloat16", "int4", "float8_e4m3fn", "float8_e5m2"}


class CheckpointMismatchError(ValueError):
    """A checkpoint does not fit the template; the message lists the leaves."""


def describe(leaves: dict[str, Any]) -> dict[str, Entry]:
    """Returns the manifest of a state's leaves.

    The kind of an entry is "array" (also a PRNG key, with its implementation), "bytes" (an array
    stored as uint8), "empty" (an array without elements, which is not stored) or "python" (the
    value stands in the manifest).

    Raises:
        ValueError: lists the leaves that no checkpoint can hold.
    """
    bad = [f"{name}: {type(leaf).__name__}" for name, leaf in leaves.items() if not _savable(leaf)]
    if bad:
        raise ValueError(
            f"These leaves cannot be in a checkpoint:\n{bullet_list(bad)}\n"
            "It holds arrays, PRNG keys, numbers and strings; keep the rest out of it."
        )
    return {name: _entry(leaf) for name, leaf in leaves.items()}


def _savable(leaf: Any) -> bool:
    if _tree.is_traced(leaf):
        return False
    if _tree.is_key(leaf) or _is_python(leaf):
        return True
    # A float wider than 64 bits is not the same on every machine.
    return dtype_of(leaf) is not None and leaf.dtype.itemsize <= (
        16 if leaf.dtype.kind == "c" else 8
    )


def _is_python(leaf: Any) -> bool:
    # By identity, since NumPy's bool is named "bool" too.
    return type(leaf) in (bool, int, float, complex, str)


def _entry(leaf: Any) -> Entry:
    if _is_python(leaf):
        kind = type(leaf).__name__
        return {"kind": "python", "dtype": kind, "shape": [], "value": _PYTHON[kind][0](leaf)}
    is_key = _tree.is_key(leaf)
    dtype = f"key<{jax.random.key_impl(leaf)}>" if is_key else str(leaf.dtype)
    kind = "array" if is_key or _is_storable(leaf.dtype) else "bytes"
    kind = kind if math.prod(leaf.shape) else "empty"
    return {"kind": kind, "dtype": dtype, "shape": list(leaf.shape)}


def _is_storable(dtype: np.dtype) -> bool:
    """Whether TensorStore has the dtype: NumPy's own ones, and those of ml_dtypes it knows."""
    return dtype.isbuiltin == 1 or dtype.name in _STORABLE


def python_value(entry: Entry) -> Any:
    """Returns the Python value of an entry of kind "python"."""
    return _PYTHON[entry["dtype"]][1](entry["value"])


def match(saved: dict[str, Entry], template: Any, *, cast: bool) -> dict[str, str | None]:
    """Returns which saved leaf each leaf of the template comes from; None keeps the template's.

    Raises:
        CheckpointMismatchError: lists every leaf that does not fit.
    """
    leaves = _tree.named_leaves(template)
    describe(leaves)
    prefixes = _mixed_precision_prefixes(template)
    source_of: dict[str, str | None] = {}
    problems, fresh = [], []
    for name, leaf in leaves.items():
        source, is_scaling = _source(name, saved, prefixes)
        if source is not None:
            problems += _misfit(name, leaf, saved[source], cast=cast)
        elif is_scaling and not isinstance(leaf, jax.ShapeDtypeStruct):
            fresh.append(name)
        else:
            problems.append(f"{name}: not in the checkpoint")
        source_of[name] = source
    used = set(source_of.values())
    left_over = [name for name in saved if name not in used]
    ignored = [name for name in left_over if _is_loss_scale(name, prefixes)]
    problems += [f"{name}: not in the template" for name in left_over if name not in ignored]
    if problems:
        raise CheckpointMismatchError(
            f"The checkpoint does not fit the template:\n{bullet_list(problems)}\n"
            "Give a template made as the saved state was; for other float dtypes, restore(..., "
            "cast=True)."
        )
    if fresh or ignored:
        lost = "has a loss scale that the template has no place for; it is dropped"
        did = "has no loss scale; the template's starts afresh" if fresh else lost
        warnings.warn(f"The checkpoint {did} ({', '.join(fresh or ignored)}).", stacklevel=3)
    return source_of


def _mixed_precision_prefixes(template: Any) -> list[str]:
    return [f"{name}/" if name else "" for name, _ in named_states(MixedPrecisionState, template)]


def _source(name: str, saved: dict[str, Entry], prefixes: list[str]) -> tuple[str | None, bool]:
    """Returns the saved name of a leaf, and whether it is state that scaling adds to optax's."""
    if name in saved:
        return name, False
    for prefix in prefixes:
        inner = f"{prefix}inner_state/"
        if name.startswith(inner):
            plain = prefix + name.removeprefix(inner)
            return (plain if plain in saved else None), False
        if name.startswith(prefix):
            return None, True
    return None, False


def _is_loss_scale(name: str, prefixes: list[str]) -> bool:
    return any(name.startswith(f"{prefix}loss_scale/") for prefix in prefixes)


def _misfit(name: str, leaf: Any, entry: Entry, *, cast: bool) -> list[str]:
    want = _entry(leaf)
    same_shape = want["shape"] == entry["shape"]
    python = "python" in (want["kind"], entry["kind"])
    castable = cast and not python and _is_float(want["dtype"]) and _is_float(entry["dtype"])
    same_dtype = want["dtype"] == entry["dtype"] or castable
    if same_shape and same_dtype and (want["kind"] == entry["kind"]):
        return []
    have, want_text = (f"{e['dtype']}{e['shape']}" for e in (entry, want))
    return [f"{name}: {have} in the checkpoint, {want_text} in the template"]


def _is_float(name: str) -> bool:
    try:
        dtype = jnp.dtype(name)
    except TypeError:
        return False
    return is_real_float(dtype) or dtype == FLOAT64
