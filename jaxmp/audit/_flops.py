"""Floating point operations of a product in optimized HLO; a multiply-add counts as two."""

import dataclasses
import math
import re
from collections.abc import Sequence

from jaxmp.audit._cost import valid_taps
from jaxmp.audit._hlo import Array, Instruction

# Which operands of a cuDNN convolution play the part of (input, kernel, output); -1 is the result.
_CONVOLUTION_ROLES = {"BackwardInput": (-1, 1, 0), "BackwardFilter": (0, -1, 1)}


def product_flops(instruction: Instruction, lhs: Array, rhs: Array, result: Array) -> int:
    """Returns the operations of one execution of a product.

    Convolutions count only the taps that fall on an element of the input: not on padding, not into
    the holes of a dilated input. That is what XLA's `HloCostAnalysis::HandleConvolution` counts,
    and it makes a batched matmul that a TPU writes as a dilated convolution cost what it does.
    """
    if "dim_labels" in instruction.attributes:
        return _convolution_flops(instruction, lhs, rhs, result)
    if "fmha" in instruction.target:
        return _attention_flops(instruction, lhs, rhs)
    return _matmul_flops(instruction, lhs, rhs, result)


def _matmul_flops(instruction: Instruction, lhs: Array, rhs: Array, result: Array) -> int:
    contracted = instruction.numbers("lhs_contracting_dims")
    if dimensions := instruction.config.get("gemm_backend_config", {}).get("dot_dimension_numbers"):
        contracted = tuple(int(dim) for dim in dimensions["lhs_contracting_dimensions"])
    if not contracted:
        # |lhs| = b·m·k, |rhs| = b·k·n, |result| = b·m·n, so their product is b³ (m·k·n)².
        batch = math.prod(_common_prefix(lhs.dims[:-2], rhs.dims[:-2]))
        return 2 * math.isqrt(lhs.size * rhs.size * result.size // max(batch, 1))
    flops = 2 * result.size * math.prod(lhs.dims[dim] for dim in contracted)
    ragged = instruction.numbers("lhs_ragged_dims")
    if ragged and ragged[0] in contracted:  # each group contracts its own part of the dimension
        return flops // max(result.dims[0], 1)
    return flops


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> Sequence[int]:
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return a[: min(len(a), len(b)) if length is None else length]


def _attention_flops(instruction: Instruction, query: Array, key: Array) -> int:
    """Two products of the size of queries × keys, five in the backward pass."""
    config = instruction.config.get("fmha_backend_config", {})
    dimensions = config.get("bmm1_dot_dimension_numbers", {})
    batch = [int(dim) for dim in dimensions.get("lhs_batch_dimensions", ())]
    contracted = [int(dim) for dim in dimensions.get("lhs_contracting_dimensions", ())]
    shared = math.prod(query.dims[dim] for dim in (*batch, *contracted))
    products = 5 if "Backward" in instruction.target else 2
    return products * 2 * query.size * key.size // max(shared, 1)


def _convolution_flops(instruction: Instruction, lhs: Array, rhs: Array, result: Array) -> int:
    roles = (0, 1, -1)
    for name, backward in _CONVOLUTION_ROLES.items():
        roles = backward if name in instruction.target else roles
    image, kernel, output = ((lhs, rhs, result)[role].dims for role in roles)
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", instruction.attributes["dim_labels"])
    if not labels:  # a vectorized layout: the elements of the kernel, once for each place
        return 2 * result.size * math.prod(kernel) // max(kernel[0], 1)
    image_labels, kernel_labels, output_labels = labels.groups()
    flops = 2 * kernel[kernel_labels.index("i")]
    flops *= output[output_labels.index("b")] * output[output_labels.index("f")]
    for number, axis in enumerate(_window(instruction, len(image) - 2)):
        label = str(number)
        flops *= valid_taps(
            output[output_labels.index(label)],
            kernel[kernel_labels.index(label)],
            image[image_labels.index(label)],
            stride=axis.stride,
            padding=axis.pad,
            left_dilation=axis.lhs_dilate,
            right_dilation=axis.rhs_dilate,
        )
    return flops


@dataclasses.dataclass(frozen=True)
class _Axis:
    """How a window moves along one spatial axis."""

    stride: int = 1
    pad: int = 0
    lhs_dilate: int = 1
    rhs_dilate: int = 1


def _window(instruction: Instruction, rank: int) -> list[_Axis]:
    """Reads `window={size=3x3 stride=2x2 pad=1_1x1_1}`; of the padding only what comes before."""
    stated = dict(re.findall(r"(\w+)=([\w\-]+)", instruction.attributes.get("window", "")))
    known = [field.name for field in dataclasses.fields(_Axis) if field.name in stated]
    columns = {
        name: [int(part.split("_")[0]) for part in stated[name].split("x")] for name in known
    }
    return [_Axis(**{name: columns[name][axis] for name in known}) for axis in range(rank)]
