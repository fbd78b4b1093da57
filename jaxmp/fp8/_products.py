"""Products of quantized operands, on any hardware."""

import json
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxmp._dtypes import BFLOAT16, FLOAT32
from jaxmp._placement import Placement
from jaxmp._product import Dtypes, Route
from jaxmp.fp8._blocks import quantize_blocks
from jaxmp.fp8._quantize import Quantized, dequantize, repeated


def gathered(quantized: Quantized, place: Placement | None) -> Quantized:
    """Returns an operand whose codes are sent between devices, if it has a place on a mesh."""
    if place is None:
        return quantized
    return quantized._replace(codes=place.gather(quantized.codes))


def scaled_product(
    left: Quantized,
    right: Quantized,
    dimension_numbers: Any,
    dtypes: Dtypes,
    route: Route,
    *,
    exact: bool,
) -> jax.Array:
    """Returns the product of operands with a scale for all of each, or for each row.

    Args:
        left: codes of 8 bits, and scales of size one along what is contracted.
        right: like `left`.
        dimension_numbers: of the product; there are no batch axes.
        dtypes: of the result.
        route: how the platform multiplies.
        exact: whether scales are powers of two. Then a bfloat16 result is multiplied by them
            without another rounding; float16 has not the range for that.
    """
    narrow = exact and dtypes.accum_dtype == FLOAT32 and dtypes.out_dtype == BFLOAT16
    asked = BFLOAT16 if narrow else dtypes.accum_dtype
    result = route.dot(left.codes, right.codes, dimension_numbers, preferred_element_type=asked)
    scale = _outer(left.scales, right.scales, dimension_numbers[0])
    return lax.convert_element_type(
        result * lax.convert_element_type(scale, asked), dtypes.out_dtype
    )


def _outer(left: jax.Array, right: jax.Array, contracted: Any) -> jax.Array:
    """Returns the scales of a result from those of its operands."""
    if left.size == right.size == 1:
        return lax.reshape(left, ()) * lax.reshape(right, ())
    left, right = (lax.squeeze(x, axes) for x, axes in zip((left, right), contracted, strict=True))
    return left.reshape(*left.shape, *(1,) * right.ndim) * right


def block_product(
    fmt: str, operands: Sequence[Any], dimension_numbers: Any, dtypes: Dtypes, route: Route
) -> jax.Array:
    """Returns the product of operands in blocks along what is contracted.

    Args:
        fmt: "mxfp8" or "nvfp4".
        operands: two, f32, bf16 or f16.
        dimension_numbers: of the product; there are no batch axes.
        dtypes: of the result, and what each operand is.
        route: how the platform multiplies.
    """
    blocks, shape = [], []
    sides = zip(operands, dtypes.roles, dimension_numbers[0], dtypes.places, strict=True)
    for operand, role, axes, place in sides:
        free = [axis for axis in range(operand.ndim) if axis not in axes]
        shape += [operand.shape[axis] for axis in free]
        ordered = lax.transpose(operand, (*free, *axes))
        matrix = ordered.reshape(math.prod(ordered.shape[: len(free)]), -1)
        at = place and place.transposed((*free, *axes)).reshaped(ordered.shape, matrix.shape)
        blocks.append(gathered(_in_blocks(fmt, matrix, role), at))
    left, right = blocks
    scales = [x.tensor_scale for x in (left, right) if x.tensor_scale is not None]
    narrow = dtypes.out_dtype == BFLOAT16 and not scales
    asked = BFLOAT16 if narrow and dtypes.accum_dtype == FLOAT32 else dtypes.accum_dtype
    if route.takes_blocks:
        result = _block_scaled_dot(left, right, asked)
    else:
        # A code times its block's scale has at most eight significant bits.
        wide = (dequantize(each._replace(tensor_scale=None), BFLOAT16) for each in (left, right))
        result = route.dot(*wide, (((1,), (1,)), ((), ())), preferred_element_type=asked)
    if scales:
        result = result * lax.convert_element_type(math.prod(scales), result.dtype)
    return lax.convert_element_type(result, dtypes.out_dtype).reshape(shape)


def _in_blocks(fmt: str, matrix: jax.Array, role: str) -> Quantized:
    is_square = fmt == "nvfp4" and role == "w"
    return quantize_blocks(matrix, fmt, axis=(0, 1) if is_square else 1)


def _block_scaled_dot(left: Quantized, right: Quantized, dtype: np.dtype) -> jax.Array:
    """The call that `jax.nn.scaled_matmul` makes: of cuDNN on Blackwell, of bfloat16 before that.

    It is made here since that function looks for the devices of a program, which are not known
    where a primitive is lowered.
    """
    config = {
        "lhs_batch_dimensions": [0],
        "rhs_batch_dimensions": [0],
        "dequantize_type": _XLA_NAMES[dtype],
    }
    call = jax.ffi.ffi_call(
        "__op$block_scaled_dot",
        jax.ShapeDtypeStruct((1, left.codes.shape[0], right.codes.shape[0]), dtype),
        custom_call_api_version=2,
        legacy_backend_config=json.dumps({"scaled_dot_backend_config": config}),
    )
    codes = (left.codes[None], right.codes[None])
    return call(*codes, *(_for_each_row(blocks)[None] for blocks in (left, right)))[0]


_XLA_NAMES = {FLOAT32: "F32", BFLOAT16: "BF16"}


def _for_each_row(blocks: Quantized) -> jax.Array:
    rows = blocks.codes.shape[0]
    return repeated(blocks.scales, rows // blocks.scales.shape[0], axis=0)
