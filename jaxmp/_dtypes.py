"""Dtypes: canonical forms, names people use for them, and which kinds a policy touches."""

from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxmp._errors import nearest

FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)

HALF_DTYPES = frozenset({FLOAT16, BFLOAT16})

# Every dtype that may stand in a policy, with the names people use for it; the first is canonical.
# "full" and "half" are jmp's, "fp16" and "fp32" are torch's.
_NAMES: dict[np.dtype, tuple[str, ...]] = {
    FLOAT32: ("float32", "f32", "fp32", "full"),
    BFLOAT16: ("bfloat16", "bf16"),
    FLOAT16: ("float16", "f16", "fp16"),
    FLOAT64: ("float64", "f64", "fp64"),
}
_DTYPE_OF_NAME = {name: dtype for dtype, names in _NAMES.items() for name in names}


def half_dtype() -> np.dtype:
    """Returns the half precision dtype of the default backend: bfloat16 on TPU, else float16.

    The rule is jmp's. `jaxmp.get_policy("auto")` looks at the device more closely.

    Example:
        >>> half_dtype() in (jnp.float16, jnp.bfloat16)
        True
    """
    return BFLOAT16 if jax.local_devices()[0].platform == "tpu" else FLOAT16


def parse_dtype(value: Any) -> np.dtype:
    """Returns the canonical `np.dtype` of a name or a dtype-like object.

    Args:
        value: a name ("float32", "f32", "fp32", "full", "half", "bf16", ...), or anything that
            `np.dtype` takes (`jnp.bfloat16`, `np.float16`, `jnp.dtype("float32")`, ...).

    Returns:
        One of float32, bfloat16, float16 and float64.

    Raises:
        ValueError: if the dtype is none of these.

    Example:
        >>> parse_dtype("bf16") == jnp.bfloat16
        True
    """
    # A bare comparison would be true of np.dtype("float16"), which has this name too.
    if isinstance(value, str) and value == "half":
        return half_dtype()
    try:
        # np.dtype(None) would be float64.
        names = value is None or isinstance(value, str)
        dtype = _DTYPE_OF_NAME.get(value or "") if names else np.dtype(value).newbyteorder("=")
    except TypeError:
        dtype = None
    if dtype is None or dtype not in _NAMES:
        raise ValueError(_unknown_dtype(value, dtype))
    return dtype


def _unknown_dtype(value: Any, dtype: np.dtype | None) -> str:
    names = ", ".join(names[0] for names in _NAMES.values())
    given = str(value) if dtype is None else dtype.name
    near = nearest(given, _DTYPE_OF_NAME)
    if given.startswith(("float8", "fp8")):
        hint = " An fp8 format is chosen by the policy's recipe, not by a dtype."
    else:
        hint = f" Did you mean {_NAMES[_DTYPE_OF_NAME[near]][0]!r}?" if near else ""
    return f"Unknown dtype {given!r}. Use one of {names}.{hint}"


def dtype_name(dtype: np.dtype) -> str:
    """Returns the canonical name of a policy's dtype, such as `"bfloat16"`."""
    return _NAMES[np.dtype(dtype)][0]


def dtype_of(leaf: Any) -> np.dtype | None:
    """Returns the dtype that JAX gives to `leaf`, or None if the leaf is no numeric array.

    NumPy arrays and scalars count as the JAX arrays that they become, so a float64 NumPy array is
    float32 unless 64-bit types are enabled. Python numbers have the dtype that they are weakly
    typed to. PRNG keys, float0 arrays, strings, callables and other opaque leaves have none.
    """
    if isinstance(leaf, bool | int | float | complex) and not isinstance(leaf, np.generic):
        return np.dtype(jnp.result_type(leaf))
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        return None
    dtype = leaf.dtype
    if dtype == jax.dtypes.float0 or jnp.issubdtype(dtype, jax.dtypes.extended):
        return None
    dtype = np.dtype(dtype)
    if dtype.kind not in "biufcV":
        return None
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def is_real_float(dtype: np.dtype | None) -> bool:
    """Whether `dtype` is float16, bfloat16 or float32: the dtypes that policies cast."""
    return dtype == FLOAT32 or dtype in HALF_DTYPES


def has_gradient(dtype: np.dtype | None) -> TypeGuard[np.dtype]:
    """Whether leaves of `dtype` are differentiated: inexact ones, except the 8-bit and smaller."""
    return is_inexact(dtype) and dtype.itemsize > 1


def is_inexact(dtype: np.dtype | None) -> TypeGuard[np.dtype]:
    """Whether `dtype` has infinities or NaN: every float and complex dtype."""
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))


def widened(dtype: np.dtype) -> np.dtype:
    """Returns float32 for a float dtype that is narrower, else `dtype` itself."""
    return FLOAT32 if is_inexact(dtype) and dtype.itemsize < FLOAT32.itemsize else dtype
