"""Arrays in 8 bits a number with a scale for all of them, or for each row."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._dtypes import FLOAT32, dtype_of, is_real_float
from jaxmp._rounding import round_stochastically, round_to_small
from jaxmp.fp8._formats import LARGEST, code_dtype

# Below this the inverse of a scale would be infinite.
SMALLEST_SCALE = 2.0**-126
_EXPONENT = 0x01000000  # one of the exponent, without the sign


class Quantized(NamedTuple):
    """An array in few bits a number: about `codes * scales * tensor_scale`.

    Attributes:
        codes: float8_e4m3fn, float8_e5m2 or float4_e2m1fn, of the shape of the array.
        scales: f32 of as many axes, each of size one or the array's; or, in blocks, a dtype of 8
            bits, each axis as long as it has blocks.
        tensor_scale: f32[] where there is one more for all, else None.
    """

    codes: jax.Array
    scales: jax.Array
    tensor_scale: jax.Array | None = None


def quantize(
    x: Any,
    fmt: str = "e4m3",
    *,
    axis: int | Sequence[int] | None = None,
    scale: Any = None,
    power_of_two: bool = False,
    key: Any = None,
) -> Quantized:
    """Returns an array in 8 bits a number: rounded to nearest even, and saturated.

    What is too large becomes the largest number (448 in e4m3, 57344 in e5m2). NaN stays NaN and
    infinity becomes NaN, so that a check for finite numbers sees it; e4m3 has no infinity. The
    scale is of the finite numbers alone, and finite and positive.

    Args:
        x: f32, bf16 or f16[...].
        fmt: "e4m3" or "e5m2".
        axis: along which the numbers share a scale, the contracted one of a matmul for a scale of
            each row; None: all of them do.
        scale: f32[], one to use instead, such as that of the steps before (delayed scaling).
        power_of_two: whether scales are powers of two, by which scaling does not round.
        key: a PRNG key, for stochastic rounding.

    Raises:
        TypeError: if `x` is not of f32, bf16 or f16.
        ValueError: for an unknown format or axis, or `scale` with `power_of_two`.

    Example:
        >>> quantized = quantize(jnp.array([1.0, -2.0, 0.3]))
        >>> quantized.codes.tolist(), dequantize(quantized).round(2).tolist()
        ([224.0, -448.0, 64.0], [1.0, -2.0, 0.28999999165534973])
    """
    dtype, wide = code_dtype(fmt), in_float32(x)
    if scale is not None and power_of_two:
        raise ValueError("power_of_two is of the scale that is computed, but scale was given.")
    if scale is None:
        axes = tuple(range(wide.ndim)) if axis is None else normalized_axes(axis, wide.shape)
        scale = scale_for(amax(wide, axes), fmt, power_of_two=power_of_two)
        scaled = wide * (1 / scale)
    else:
        scale = jnp.asarray(scale, FLOAT32)
        # Of a finite number far above the scale's range it would be infinite, which becomes NaN.
        limit = jnp.float32(np.finfo(np.float32).max)
        scaled = lax.clamp(-limit, wide * (1 / scale), limit) + wide * 0
    return Quantized(encode(scaled, dtype, key), scale)


def dequantize(quantized: Quantized, dtype: Any = jnp.float32) -> jax.Array:
    """Returns the array that was quantized, as far as the codes have it.

    Args:
        quantized: what `quantize` or `quantize_blocks` gave.
        dtype: of the result.

    Example:
        >>> dequantize(quantize(jnp.array([0.0, 3.0])))
        Array([0., 3.], dtype=float32)
    """
    scales = _for_each(quantized.scales.astype(FLOAT32), quantized.codes.shape)
    values = quantized.codes.astype(FLOAT32) * scales
    if quantized.tensor_scale is not None:
        values = values * quantized.tensor_scale
    return values.astype(dtype)


def scale_for(largest: Any, fmt: str = "e4m3", *, power_of_two: bool = False) -> jax.Array:
    """Returns by what the codes of numbers are multiplied, of which the largest is given.

    It is finite and positive, and so is its inverse: 1 for zero, infinity and NaN, and never below
    2^-126.

    Args:
        largest: f32[...], the largest of the absolute values.
        fmt: "e4m3" or "e5m2".
        power_of_two: whether to take the next power of two above.

    Example:
        >>> scale_for(jnp.array([448.0, 0.0, jnp.inf])).tolist()
        [1.0, 1.0, 1.0]
    """
    largest = jnp.asarray(largest, FLOAT32)
    scale = jnp.maximum(largest / LARGEST[code_dtype(fmt)], SMALLEST_SCALE)
    scale = jnp.where((largest > 0) & jnp.isfinite(largest), scale, 1)
    return next_power_of_two(scale) if power_of_two else scale


def next_power_of_two(scale: jax.Array) -> jax.Array:
    """Returns the smallest power of two that is no less than f32[...], positive and normal."""
    bits = lax.bitcast_convert_type(scale, jnp.uint32)
    exponent = (bits + jnp.uint32(2**23 - 1)) & jnp.uint32(0xFF800000)
    return lax.bitcast_convert_type(exponent, FLOAT32)


def in_float32(x: Any) -> jax.Array:
    """Returns an array in f32; TypeError for what is no f32, bf16 or f16."""
    dtype = dtype_of(x)
    if not is_real_float(dtype):
        raise TypeError(
            f"x is {type(x).__name__ if dtype is None else dtype}, but only float32, bfloat16 and "
            "float16 are quantized: cast it first."
        )
    return jnp.asarray(x).astype(FLOAT32)


def normalized_axes(axis: int | Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Returns axes counted from the first, in order; ValueError for one that is not there."""
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    missing = [each for each in axes if not -len(shape) <= each < len(shape)]
    if missing:
        raise ValueError(f"x has the shape {tuple(shape)}: it has no axis {missing[0]}.")
    return tuple(sorted({each % len(shape) for each in axes}))


def amax(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns the largest of the finite absolute values along axes, which stay with size one.

    It is that of the bits as integers, without a select: the compiler for TPUs keeps masks in
    memory, for which it packs them. Without its sign, and with a one added to its exponent, what is
    not finite is over the end of the integers, and small.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32) << 1
    largest = jnp.max(bits + jnp.uint32(_EXPONENT), axis=axes, keepdims=True, initial=0)
    largest = jnp.maximum(largest, jnp.uint32(_EXPONENT)) - jnp.uint32(_EXPONENT)
    return lax.bitcast_convert_type(largest >> 1, FLOAT32)


def encode(scaled: jax.Array, dtype: np.dtype, key: Any = None) -> jax.Array:
    """Returns f32[...] as codes, saturated; rounded to nearest even, or stochastically by a key."""
    if key is None:
        return round_to_small(scaled, dtype).astype(dtype)
    bits = jax.random.bits(key, scaled.shape, jnp.uint32)
    finite = jnp.where(jnp.isinf(scaled), jnp.nan, scaled)
    return round_stochastically(finite, dtype, bits).astype(dtype)


def _for_each(scales: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns scales of blocks as often as blocks have numbers."""
    for axis, (blocks, size) in enumerate(zip(scales.shape, shape[: scales.ndim], strict=True)):
        if blocks not in (1, size):
            scales = repeated(scales, size // blocks, axis)
    return scales


def repeated(x: jax.Array, times: int, axis: int) -> jax.Array:
    """`jnp.repeat`, which does not take an axis that is sharded over one of an explicit mesh."""
    many = lax.broadcast_in_dim(
        x,
        (*x.shape[: axis + 1], times, *x.shape[axis + 1 :]),
        [i + (i > axis) for i in range(x.ndim)],
    )
    return many.reshape(*x.shape[:axis], x.shape[axis] * times, *x.shape[axis + 1 :])
