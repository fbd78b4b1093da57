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


def round_to_small(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """Rounds f32 values to the nearest of a float of at most 8 bits, ties to even, staying in f32.

    What is too large becomes the largest; infinities and NaN become NaN. The cast to the dtype is
    exact then, whatever a compiler makes of it: some go by way of a half precision dtype. There is
    nothing to select in it, so that it is fused with a transpose into one kernel.

    Args:
        x: f32[...].
        dtype: float8_e4m3fn, float8_e5m2 or float4_e2m1fn.

    Returns:
        f32[...].

    Example:
        >>> round_to_small(jnp.array([0.3, 500.0]), jnp.float8_e4m3fn)
        Array([3.125e-01, 4.480e+02], dtype=float32)
    """
    info = jnp.finfo(dtype)
    largest = jnp.float32(float(info.max))
    power = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0x7F800000)
    step = lax.bitcast_convert_type(power, jnp.float32) * jnp.float32(2.0**-info.nmant)
    step = jnp.maximum(step, jnp.float32(float(info.smallest_subnormal)))
    rounded = lax.round(x / step, lax.RoundingMethod.TO_NEAREST_EVEN) * step
    return jnp.clip(rounded, -largest, largest)


def round_stochastically(x: jax.Array, dtype: np.dtype | str, bits: jax.Array) -> jax.Array:
    """Rounds f32 values up or down to a narrower dtype, the nearer the likelier, staying in f32.

    The mean over the random bits is the value itself (Croci et al., Stochastic rounding, 2022).
    Values that the dtype has, zeros of both signs, infinities and NaN stay what they are. Nothing
    that is finite becomes infinite unless `round_to` makes it so; where a dtype has no infinity
    the result stays at its largest value.

    Args:
        x: f32[...].
        dtype: bfloat16, float16, or a float of 8 bits.
        bits: u32[...], random, of the shape of `x`.

    Returns:
        f32[...].

    Example:
        >>> bits = jax.random.bits(jax.random.key(0), (10000,))
        >>> rounded = round_stochastically(jnp.full(10000, 1.001), "bfloat16", bits)
        >>> sorted(set(rounded.tolist())), round(float(rounded.mean()), 3)
        ([1.0, 1.0078125], 1.001)
    """
    if x.dtype != jnp.float32 or bits.dtype != jnp.uint32 or bits.shape != x.shape:
        raise ValueError(
            f"x is {x.dtype}{list(x.shape)} and bits {bits.dtype}{list(bits.shape)}, but they must "
            "be float32 and uint32 of one shape: jax.random.bits(key, x.shape)."
        )
    info = jnp.finfo(dtype)
    dropped = 23 - info.nmant
    dither = lax.shift_right_logical(bits, jnp.uint32(32 - dropped))
    kept = ~jnp.uint32((1 << dropped) - 1)
    raised = (lax.bitcast_convert_type(x, jnp.uint32) + dither) & kept
    rounded = lax.bitcast_convert_type(raised, jnp.float32)
    largest = jnp.float32(float(info.max))
    if float(info.smallest_normal) > float(jnp.finfo(jnp.float32).smallest_normal):
        rounded = lax.select(
            jnp.abs(x) < float(info.smallest_normal),
            _to_steps(x, float(info.smallest_subnormal), bits),
            rounded,
        )
    rounded = jnp.clip(rounded, -largest, largest)
    if info.bits > 8:
        rounded = lax.select(jnp.abs(x) > largest, round_to(x, dtype), rounded)
    return lax.select(jnp.isfinite(x), rounded, x)


def _to_steps(x: jax.Array, step: float, bits: jax.Array) -> jax.Array:
    """Rounds to multiples of a power of two, up with the probability of what is over."""
    steps = jnp.abs(x) / jnp.float32(step)
    whole = jnp.floor(steps)
    uniform = lax.shift_right_logical(bits, jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2**-24)
    up = (uniform < steps - whole).astype(jnp.float32)
    return jnp.copysign((whole + up) * jnp.float32(step), x)
