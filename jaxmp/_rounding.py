"""Rounding that a compiler may not drop.

XLA may remove a round trip f32 -> bf16 -> f32 on a GPU (`xla_allow_excess_precision`). Where a
result relies on the rounding, round with `round_to`: `lax.reduce_precision` is never removed.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._dtypes import dtype_name, parse_dtype

_FLOAT16_MIN_NORMAL = 2.0**-14
_FLOAT16_SUBNORMAL_STEP = 2.0**-24


def round_to(x: jax.Array, dtype: np.dtype | str) -> jax.Array:
    """Rounds f32 values to the nearest value of a narrower dtype, ties to even, staying in f32.

    Args:
        x: f32[...].
        dtype: float32, bfloat16 or float16.

    Returns:
        f32[...], bit for bit `x.astype(dtype).astype(float32)`: overflow gives infinity, NaN
        stays NaN, the subnormals of float16 are kept.

    Raises:
        ValueError: if `x` is not f32, or `dtype` is wider than f32.

    Example:
        >>> round_to(jnp.float32(1.001), "bfloat16")
        Array(1., dtype=float32)
    """
    x, dtype = jnp.asarray(x), parse_dtype(dtype)
    if x.dtype != jnp.float32:
        raise ValueError(f"x is {x.dtype}, but only float32 is rounded: cast it first.")
    info = jnp.finfo(dtype)
    if info.bits > 32:
        raise ValueError(f"{dtype_name(dtype)} is wider than float32: nothing to round to.")
    rounded = lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    if dtype != jnp.float16:
        return rounded
    # reduce_precision flushes what is subnormal in the narrow format. Scaling by a power of two is
    # exact, and rounding to an integer makes multiples of the subnormal step.
    step = jnp.float32(_FLOAT16_SUBNORMAL_STEP)
    subnormal = lax.round(x / step, lax.RoundingMethod.TO_NEAREST_EVEN) * step
    return lax.select(jnp.abs(x) < _FLOAT16_MIN_NORMAL, subnormal, rounded)


def narrow(x: jax.Array, dtype: np.dtype | str) -> jax.Array:
    """Casts f32 to a narrower dtype by a rounding that survives compilation.

    Example:
        >>> narrow(jnp.float32(1.001), "bfloat16")
        Array(1, dtype=bfloat16)
    """
    return round_to(x, dtype).astype(parse_dtype(dtype))
