"""Arrays in blocks that share a scale: MXFP8 and NVFP4."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxmp._dtypes import FLOAT32
from jaxmp.fp8._formats import E8M0, LARGEST, BlockFormat, block_format
from jaxmp.fp8._quantize import (
    SMALLEST_SCALE,
    Quantized,
    amax,
    encode,
    in_float32,
    normalized_axes,
)

_BIAS = 127
_NAN_SCALE = 255  # of e8m0


def quantize_blocks(
    x: Any, fmt: str = "mxfp8", *, axis: int | Sequence[int] = -1, key: Any = None
) -> Quantized:
    """Returns an array in blocks, each with a scale of its own.

    In mxfp8 (OCP Microscaling Formats 1.0) 32 numbers of e4m3 share a power of two: the smallest by
    which none of them is too large (Mishra et al., Recipes for Pre-training LLMs with MXFP8, 2025),
    in integer arithmetic, so that every device has the same. In nvfp4 16 numbers of e2m1 share a
    scale of e4m3, and all of them one of f32. A block of zeros is zero; one with a number that is
    not finite is NaN.

    Args:
        x: f32, bf16 or f16[...].
        fmt: "mxfp8", "mxfp8_e5m2" or "nvfp4".
        axis: along which blocks lie, the contracted one of a matmul. Of two axes, blocks are
            squares: the scales of a weight and of its transpose are then the same.
        key: a PRNG key, for stochastic rounding.

    Raises:
        TypeError: if `x` is not of f32, bf16 or f16.
        ValueError: for an unknown format, or an axis that is no multiple of the block.

    Example:
        >>> quantized = quantize_blocks(jnp.ones((2, 64)))
        >>> quantized.codes.dtype.name, quantized.scales.dtype.name, quantized.scales.shape
        ('float8_e4m3fn', 'float8_e8m0fnu', (2, 2))
    """
    how, wide = block_format(fmt), in_float32(x)
    axes = normalized_axes(axis, wide.shape)
    _check_blocks(fmt, how, wide.shape, axes)
    split, inner = _split_shape(wide.shape, axes, how.size)
    blocks = _with_whole_blocks(wide, axes, how.size).reshape(split)
    largest = amax(blocks, inner)
    is_finite = jnp.all(jnp.isfinite(blocks), axis=inner, keepdims=True)
    # A block whose scale is NaN needs no NaN among its codes.
    blocks = jnp.where(jnp.isfinite(blocks), blocks, 0)
    if how.scales == E8M0:
        scaled, scales, tensor_scale = _mx(blocks, largest, is_finite, how)
    else:
        scaled, scales, tensor_scale = _nv(blocks, largest, is_finite, how)
    codes = encode(scaled.reshape(wide.shape), how.codes, key)
    return Quantized(codes, jnp.squeeze(scales, inner), tensor_scale)


def _check_blocks(fmt: str, how: BlockFormat, shape: Sequence[int], axes: Sequence[int]) -> None:
    for axis in axes:
        if shape[axis] % how.size:
            raise ValueError(
                f"Axis {axis} of x{list(shape)} has {shape[axis]} numbers, but {fmt} has blocks of "
                f"{how.size}: pad it to {-(-shape[axis] // how.size) * how.size}, or leave this "
                "product in bfloat16."
            )


def _with_whole_blocks(x: jax.Array, axes: Sequence[int], size: int) -> jax.Array:
    """Gathers the axes of which an explicit mesh has less than whole blocks on each device."""
    aval: Any = jax.typeof(x)
    spec, sizes = aval.sharding.spec, aval.sharding.mesh.shape
    kept = list(spec)
    for axis in axes:
        names = (spec[axis],) if isinstance(spec[axis], str) else spec[axis] or ()
        if x.shape[axis] // math.prod(sizes[name] for name in names) % size:
            kept[axis] = None
    return x if kept == list(spec) else jax.sharding.reshard(x, PartitionSpec(*kept))


def _split_shape(
    shape: Sequence[int], axes: Sequence[int], size: int
) -> tuple[list[int], tuple[int, ...]]:
    """Returns the shape with each blocked axis as [blocks, size], and where the sizes stand."""
    split, inner = [], []
    for axis, length in enumerate(shape):
        if axis in axes:
            split += [length // size, size]
            inner.append(len(split) - 1)
        else:
            split.append(length)
    return split, tuple(inner)


def _mx(
    blocks: jax.Array, largest: jax.Array, is_finite: jax.Array, how: BlockFormat
) -> tuple[jax.Array, jax.Array, None]:
    """Returns scaled blocks, and powers of two as e8m0."""
    fraction, exponent = math.frexp(LARGEST[how.codes])  # of 448: 7/8 and 9
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    # 2^e (1 + m) fits at the scale 2^(e + 1 - exponent), unless 1 + m is more than 2 fraction.
    is_over = (bits & 0x7FFFFF) > round((2 * fraction - 1) * 2**23)
    biased = jnp.maximum((bits >> 23) + 1 - exponent + is_over.astype(jnp.int32), 0)
    inverse = lax.bitcast_convert_type((2 * _BIAS - biased) << 23, FLOAT32)
    stored = jnp.where(is_finite, biased, _NAN_SCALE).astype(jnp.uint8)
    return blocks * inverse, lax.bitcast_convert_type(stored, E8M0), None


def _nv(
    blocks: jax.Array, largest: jax.Array, is_finite: jax.Array, how: BlockFormat
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns scaled blocks, scales as e4m3, and the scale of all."""
    most = LARGEST[how.codes]
    of_all = jnp.max(largest, initial=0) / (most * LARGEST[how.scales])
    of_all = jnp.where(of_all > 0, jnp.maximum(of_all, SMALLEST_SCALE), 1)
    scales = encode(largest / of_all / most, how.scales)
    wide = scales.astype(FLOAT32)
    inverse = jnp.where(wide > 0, 1 / wide, 0)
    nan = jnp.array(np.nan, how.scales)
    # Two steps, since the product of both inverses may be infinite.
    return blocks * (1 / of_all) * inverse, jnp.where(is_finite, scales, nan), of_all
