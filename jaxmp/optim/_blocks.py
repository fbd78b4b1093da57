"""Arrays of 8 bits a number: blocks of 256 that share an f32 scale."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxmp._rounding import round_stochastically

BLOCK = 256
CODE = np.dtype(ml_dtypes.float8_e4m3fn)
_LARGEST = float(jnp.finfo(CODE).max)
_SMALLEST = float(jnp.finfo(CODE).smallest_subnormal)


class Blocks(NamedTuple):
    """An array in 8 bits a number and one f32 scale for 256 of them.

    Attributes:
        codes: float8_e4m3fn, of the shape of the array.
        scales: f32[..., blocks]. Blocks lie along the last axes, as many as make 256 numbers.
    """

    codes: jax.Array
    scales: jax.Array


def encode(array: jax.Array, bits: jax.Array, *, is_square: bool) -> Blocks:
    """Returns an array in blocks, stochastically rounded.

    Args:
        array: f32[...].
        bits: u32[...], random.
        is_square: whether its square roots are stored, which have half the exponents: for second
            moments. Of a number that is not zero the root is not rounded to zero.
    """
    values = jnp.sqrt(jnp.maximum(array, 0)) if is_square else array
    blocks = _in_blocks(values)
    scales = jnp.max(jnp.abs(blocks), axis=-1) / _LARGEST
    scaled = blocks / jnp.where(scales > 0, scales, 1)[..., None]
    rounded = round_stochastically(scaled, CODE, _in_blocks(bits))
    if is_square:
        rounded = jnp.where(scaled > 0, jnp.maximum(rounded, _SMALLEST), rounded)
    return Blocks(_out_of_blocks(rounded, array.shape).astype(CODE), scales)


def decode(stored: Blocks, *, is_square: bool) -> jax.Array:
    """Returns the array that was put in blocks, f32[...]."""
    values = _in_blocks(stored.codes.astype(jnp.float32)) * stored.scales[..., None]
    array = _out_of_blocks(values, stored.codes.shape)
    return jnp.square(array) if is_square else array


def _in_blocks(array: Any) -> jax.Array:
    """Returns an array as [..., blocks, BLOCK], zeros at the end of its last blocks."""
    kept = _leading_axes(array.shape)
    rows = array.reshape(*array.shape[:kept], -1)
    padding = [(0, 0)] * kept + [(0, -rows.shape[-1] % BLOCK)]
    return jnp.pad(rows, padding).reshape(*array.shape[:kept], -1, BLOCK)


def _out_of_blocks(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    kept = _leading_axes(shape)
    rows = blocks.reshape(*shape[:kept], -1)
    return rows[..., : math.prod(shape[kept:])].reshape(shape)


def _leading_axes(shape: tuple[int, ...]) -> int:
    """Returns how many axes stay outside of blocks, so that they can be sharded."""
    kept, size = len(shape), 1
    while kept > 0 and size < BLOCK:
        kept -= 1
        size *= shape[kept]
    return kept
