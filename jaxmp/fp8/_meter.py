"""How large the operands of a product are, gradients included, read off by differentiation.

A meter is an operand that a product ignores, whose gradient says what was seen. Gradients of one
array are added up over its uses, turns of a loop, microbatches and devices, and what is wanted is a
maximum. So a meter counts, in bins of powers of two: of sums of counts the highest bin is read.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from jaxmp._dtypes import FLOAT32
from jaxmp._product import vary_alike
from jaxmp._rebind import in_front
from jaxmp.fp8._quantize import amax

# Bin b is for numbers up to 1.75 * 2^(b - 127), which is what a power of two as scale lets through:
# 448 and 57344 are 1.75 times one. Bin 0 is for none.
BINS = 256
_LARGEST_BIN = 254
_STEEPEST = 0x600000  # the mantissa of 1.75

# Operands: the result of a product; the meter, f32[batch..., 3, BINS]; what was seen of the other
# two, f32[batch..., 2, BINS]. Parameters: `every`, whether all numbers are counted and not just the
# largest; `batch`, how many axes of all operands are of separate meters.
meter_p = Primitive("fp8_meter")


def metered(result: Any, meter: Any, seen: Any, *, every: bool) -> jax.Array:
    """Returns the result of a product as it is; the gradient of the meter is what was seen.

    Args:
        result: of the product.
        meter: f32[3, BINS], for activations, weight and gradient.
        seen: f32[2, BINS], what `counts` gave for activations and weight.
        every: whether all numbers of the gradient are counted, and not just the largest.
    """
    operands = vary_alike((result, meter, lax.stop_gradient(seen)))
    return meter_p.bind(*operands, every=every, batch=0)


def counts(x: jax.Array, *, every: bool = False, batch: int = 0) -> jax.Array:
    """Returns in which bin the largest finite number is, or how many are in each.

    Args:
        x: f32, bf16 or f16[batch..., ...].
        every: whether all numbers that are finite and not zero are counted.
        batch: how many leading axes have counts of their own.

    Returns:
        f32[batch..., BINS].
    """
    wide = lax.stop_gradient(x).astype(FLOAT32)
    if every:
        # A histogram has no rule for the axes of an explicit mesh.
        if any(axis is not None for axis in jax.typeof(wide).sharding.spec):
            wide = jax.sharding.reshard(wide, PartitionSpec(*(None,) * wide.ndim))
        flat = wide.reshape(*x.shape[:batch], -1)
        bins = _bins(jnp.where(jnp.isfinite(flat), jnp.abs(flat), 0))
        add = jnp.vectorize(lambda each: jnp.bincount(each, length=BINS), signature="(n)->(b)")
        return add(bins).astype(FLOAT32).at[..., 0].set(0)
    axes = tuple(range(batch, x.ndim))
    bins = _bins(amax(wide, axes).reshape(x.shape[:batch]))
    return jax.nn.one_hot(jnp.where(bins > 0, bins, BINS), BINS, dtype=FLOAT32)


def largest_of(seen: jax.Array) -> jax.Array:
    """Returns the largest number that counts have, rounded up to 1.75 times a power of two.

    Args:
        seen: f32[..., BINS], or sums and means of such.

    Returns:
        f32[...], 0 where there is none.
    """
    bins = jnp.max(jnp.where(seen > 0, jnp.arange(BINS, dtype=jnp.int32), 0), axis=-1)
    return jnp.where(bins > 0, limit_of(bins), 0)


def limit_of(bins: jax.Array) -> jax.Array:
    """Returns up to what the numbers of bins are, f32[...] for i32[...]."""
    return jnp.float32(1.75) * lax.bitcast_convert_type(bins << 23, FLOAT32)


def _bins(magnitudes: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(magnitudes, jnp.int32)
    is_over = (bits & 0x7FFFFF) > _STEEPEST
    return jnp.minimum((bits >> 23) + is_over.astype(jnp.int32), _LARGEST_BIN)


@meter_p.def_impl
def _impl(result: Any, _meter: Any, _seen: Any, **_: Any) -> Any:
    return result


@meter_p.def_abstract_eval
def _abstract(result: Any, _meter: Any, _seen: Any, **_: Any) -> Any:
    return result


mlir.register_lowering(meter_p, mlir.lower_fun(_impl, multiple_results=False))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    result, meter, seen = primals
    out = meter_p.bind(result, meter, seen, **params)
    if all(isinstance(tangent, ad.Zero) for tangent in tangents[:2]):
        return out, ad.Zero(jax.typeof(out))
    linear = [ad.instantiate_zeros(tangent) for tangent in tangents[:2]]
    return out, meter_p.bind(*linear, seen, **params)


ad.primitive_jvps[meter_p] = _jvp


def _transpose(
    cotangent: Any, result: Any, meter: Any, seen: Any, *, every: bool, batch: int
) -> list[Any]:
    found: list[Any] = [None, None, None]
    if ad.is_undefined_primal(result):
        found[0] = cotangent
    if ad.is_undefined_primal(meter):
        found[1] = ad.Zero(meter.aval)
        if not isinstance(cotangent, ad.Zero):
            own = counts(cotangent, every=every, batch=batch)[..., None, :]
            found[1] = jnp.concatenate(vary_alike((seen, own)), axis=-2)
    return found


ad.primitive_transposes[meter_p] = _transpose


def _batch(args: Any, dims: Any, *, every: bool, batch: int) -> tuple[Any, Any]:
    result, meter, seen = args
    places = [dim if isinstance(dim, int) else None for dim in dims]
    if places[1] is None:
        if places[2] is not None:
            seen = jnp.sum(seen, axis=places[2])
        if places[0] is not None:
            result = jnp.moveaxis(result, places[0], batch)
        bound = meter_p.bind(result, meter, seen, every=every, batch=batch)
        return bound, None if places[0] is None else batch
    operands = in_front(args, dims)
    return meter_p.bind(*operands, every=every, batch=batch + 1), 0


batching.primitive_batchers[meter_p] = _batch
