"""Recipes: which matmuls are computed in fp8, and how their operands get scales."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxmp._errors import nearest
from jaxmp.fp8._formats import code_dtype
from jaxmp.fp8._quantize import Quantized, quantize


@dataclasses.dataclass(frozen=True)
class CurrentScaling:
    """fp8 with the scale that each tensor needs now; there is no state.

    Activations and weights are quantized as `forward`, gradients as `gradients`, each with one
    scale for all of it: the next power of two of what its largest number needs (Micikevicius et
    al., FP8 Formats for Deep Learning, 2022, have e4m3 and e5m2). A power of two can be applied to
    a bf16 result without another rounding, so a GPU does that in the matmul itself.

    A matmul gains if the sizes of both sides and of what is contracted are multiples of `multiple`,
    as the hardware needs it, and it has no batch axis when it is written: layers, not attention
    scores. All else is computed in the policy's compute dtype.

    Attributes:
        forward: the format of activations and weights, "e4m3" or "e5m2".
        gradients: the format of gradients that are multiplied.
        multiple: what the sizes of a product are multiples of.

    Raises:
        ValueError: for an unknown format, or a `multiple` below 1.

    Example:
        >>> import jaxmp
        >>> jaxmp.get_policy("mixed_float8").recipe
        'current'
    """

    forward: str = "e4m3"
    gradients: str = "e5m2"
    multiple: int = 16

    def __post_init__(self) -> None:
        code_dtype(self.forward)
        code_dtype(self.gradients)
        if self.multiple < 1:
            raise ValueError(f"multiple is {self.multiple}, but must be at least 1.")

    def takes(self, lhs: Sequence[int], rhs: Sequence[int], dimension_numbers: Any) -> bool:
        """Whether a matmul of operands of these shapes is computed in fp8."""
        (left, right), (batch, _) = dimension_numbers
        sizes = (
            math.prod(lhs[i] for i in left),
            math.prod(size for i, size in enumerate(lhs) if i not in left),
            math.prod(size for i, size in enumerate(rhs) if i not in right),
        )
        return not batch and all(size and size % self.multiple == 0 for size in sizes)

    def dtypes(self, gradient: int | None) -> tuple[np.dtype, np.dtype]:
        """Returns the dtypes of the operands of a product; see `quantized`."""
        left, right = (
            code_dtype(self.gradients if side == gradient else self.forward) for side in (0, 1)
        )
        return left, right

    def quantized(
        self, lhs: jax.Array, rhs: jax.Array, gradient: int | None
    ) -> tuple[Quantized, Quantized]:
        """Returns both operands of a product, quantized.

        Args:
            lhs: f32, bf16 or f16[...].
            rhs: like `lhs`.
            gradient: which of them is a gradient, 0 or 1; None in the forward product.
        """
        left, right = (
            quantize(x, self.gradients if side == gradient else self.forward, power_of_two=True)
            for side, x in enumerate((lhs, rhs))
        )
        return left, right


_RECIPES = {"current": CurrentScaling()}
_PLANNED = ("delayed", "mxfp8", "nvfp4")


def get_recipe(name: str | None) -> CurrentScaling | None:
    """Returns the recipe that a policy names, or None if it names none.

    Raises:
        ValueError: for a name that is unknown, or a recipe that this version cannot run.

    Example:
        >>> get_recipe("current")
        CurrentScaling(forward='e4m3', gradients='e5m2', multiple=16)
    """
    if name is None or name in _RECIPES:
        return _RECIPES[name] if name else None
    if name in _PLANNED:
        raise ValueError(
            f"The recipe {name!r} is one which this version cannot run. Use 'current', as the "
            "policy 'mixed_float8' does, or 'mixed_bfloat16'."
        )
    near = nearest(name, _RECIPES)
    hint = f" Did you mean {near!r}?" if near else ""
    raise ValueError(f"Unknown recipe {name!r}: use one of {', '.join(_RECIPES)}.{hint}")
