"""Floating point operations, bytes and dtypes of matmuls and convolutions.

A multiply-add counts as two operations. Of a convolution only the taps that fall on the input are
counted, not those on padding, as XLA's cost analysis does.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp._dtypes import BFLOAT16, FLOAT16

# Plain products, and the one of `jaxmp.matmul`, which holds the parameters of a plain one.
_MIXED = "mixed_product"
PRODUCTS = frozenset(
    {"dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot", _MIXED}
)


def name_of(eqn: JaxprEqn) -> str:
    """Returns the primitive of a product, of the plain one for a mixed product."""
    return eqn.params["base"].name if eqn.primitive.name == _MIXED else eqn.primitive.name


def _params(eqn: JaxprEqn) -> dict[str, Any]:
    return dict(eqn.params["params"]) if eqn.primitive.name == _MIXED else eqn.params


def nbytes(aval: Any) -> int:
    """Returns the size of an array of an abstract value; 0 for PRNG keys and tokens."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
        return 0
    return math.prod(aval.shape) * np.dtype(dtype).itemsize


def _shaped(atom: Any) -> Any:
    """Returns the abstract value of a variable that is known to be an array."""
    return atom.aval


def flops(eqn: JaxprEqn) -> int:
    """Returns the operations of one execution of a matmul or convolution."""
    left, right = (_shaped(atom).shape for atom in eqn.invars[:2])
    out = _shaped(eqn.outvars[0]).shape
    match name_of(eqn):
        case "dot_general":
            (contracted, _), _ = _params(eqn)["dimension_numbers"]
            return 2 * math.prod(out) * math.prod(left[i] for i in contracted)
        case "conv_general_dilated":
            return _convolution_flops(_params(eqn), left, right, out)
        case _:
            return _ragged_flops(eqn, left, right)


def _convolution_flops(
    params: dict[str, Any], left: Sequence[int], right: Sequence[int], out: Sequence[int]
) -> int:
    numbers = params["dimension_numbers"]
    taps = math.prod(
        valid_taps(
            out[numbers.out_spec[2 + i]],
            right[numbers.rhs_spec[2 + i]],
            left[numbers.lhs_spec[2 + i]],
            stride=params["window_strides"][i],
            padding=params["padding"][i][0],
            left_dilation=params["lhs_dilation"][i],
            right_dilation=params["rhs_dilation"][i],
        )
        for i in range(len(params["window_strides"]))
    )
    batch, features = out[numbers.out_spec[0]], out[numbers.out_spec[1]]
    return 2 * batch * features * right[numbers.rhs_spec[1]] * taps


def valid_taps(
    out: int,
    taps: int,
    size: int,
    *,
    stride: int,
    padding: int,
    left_dilation: int,
    right_dilation: int,
) -> int:
    """Counts the pairs (output position, tap) along one axis that meet an input element."""
    found = 0
    period = left_dilation // math.gcd(left_dilation, stride)
    for tap in range(taps):
        # Position o meets element (o * stride + offset) / left_dilation, if that is one.
        offset = tap * right_dilation - padding
        first = max(0, -(offset // stride))
        last = min(out - 1, ((size - 1) * left_dilation - offset) // stride)
        hits = (
            o for o in range(first, first + period) if (o * stride + offset) % left_dilation == 0
        )
        start = next(hits, None)
        if start is not None and start <= last:
            found += (last - start) // period + 1
    return found


def _ragged_flops(eqn: JaxprEqn, left: Sequence[int], right: Sequence[int]) -> int:
    """Operations of a product whose groups add up to the whole ragged axis."""
    numbers = _params(eqn)["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    groups = set(numbers.rhs_group_dimensions)
    free = [
        size for i, size in enumerate(right) if i not in {*contracted, *batch} and i not in groups
    ]
    return 2 * math.prod(left) * math.prod(free)


# Algorithms that round f32 operands once. Those in several passes (X3, X6, X9) keep their accuracy.
_ROUNDING_ALGORITHMS = {
    jax.lax.DotAlgorithmPreset.F16_F16_F16: FLOAT16,
    jax.lax.DotAlgorithmPreset.F16_F16_F32: FLOAT16,
    jax.lax.DotAlgorithmPreset.BF16_BF16_BF16: BFLOAT16,
    jax.lax.DotAlgorithmPreset.BF16_BF16_F32: BFLOAT16,
}


def operand_dtypes(eqn: JaxprEqn) -> tuple[np.dtype, np.dtype]:
    """Returns the dtypes that are multiplied: the operands', or the algorithm's if it rounds."""
    left, right = (np.dtype(_shaped(atom).dtype) for atom in eqn.invars[:2])
    if eqn.primitive.name == _MIXED:
        if eqn.params["recipe"] is not None:
            return eqn.params["recipe"].dtypes(eqn.params["roles"])
        return eqn.params["compute_dtype"], eqn.params["compute_dtype"]
    precision = eqn.params.get("precision")
    if isinstance(precision, jax.lax.DotAlgorithm) and precision.num_primitive_operations == 1:
        return (
            _narrower(left, np.dtype(precision.lhs_precision_type)),
            _narrower(right, np.dtype(precision.rhs_precision_type)),
        )
    if isinstance(precision, jax.lax.DotAlgorithmPreset) and precision in _ROUNDING_ALGORITHMS:
        rounded = _ROUNDING_ALGORITHMS[precision]
        return _narrower(left, rounded), _narrower(right, rounded)
    return left, right


def _narrower(dtype: np.dtype, other: np.dtype) -> np.dtype:
    return other if other.itemsize < dtype.itemsize else dtype


def accumulation_dtype(eqn: JaxprEqn) -> np.dtype:
    """Returns the dtype that the program asks a product to be summed in."""
    if eqn.primitive.name == _MIXED:
        return eqn.params["accum_dtype"]
    precision = eqn.params.get("precision")
    if isinstance(precision, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset):
        named = precision.accumulation_type
        if named is not None:
            return np.dtype(named)
    asked = eqn.params.get("preferred_element_type")
    return np.dtype(asked if asked is not None else _shaped(eqn.outvars[0]).dtype)
