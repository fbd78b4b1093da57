"""Recipes: which matmuls are computed in fp8, and how their operands get scales."""

import dataclasses
import functools
import math
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from jaxmp._errors import check_choice, check_count, did_you_mean
from jaxmp._product import Dtypes, Route
from jaxmp.fp8._formats import block_format, code_dtype
from jaxmp.fp8._products import block_product, gathered, scaled_product
from jaxmp.fp8._quantize import Quantized, quantize

# What an operand is: activations, a weight, or a gradient. A state has scales in this order.
ROLES = ("x", "w", "g")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What all recipes have in common: which matmuls gain.

    One gains if it has no batch axis when it is written (layers, not attention scores), and the
    sizes of both sides and of what is contracted are multiples of `multiple` and at least
    `min_size`. All else is computed in the policy's compute dtype.

    A recipe is named in a policy by its text, such as "delayed(history=16)".

    Attributes:
        multiple: what the sizes of a product are multiples of, as the hardware needs it.
        min_size: what they are at least. Quantizing costs as much as the sides are large, and a
            product gains as much as the smallest of the three sizes, so small ones lose.
        high_precision_wgrad: whether gradients of weights are products in the compute dtype.
        strict: whether hardware without such products is an error; else it computes in the compute
            dtype, with a warning. It is not about sizes.

    Example:
        >>> str(CurrentScaling(min_size=512)), BlockScaling().multiple
        ('current(min_size=512)', 32)
    """

    multiple: int = 16
    min_size: int = 1
    high_precision_wgrad: bool = False
    strict: bool = False

    name: ClassVar[str]
    compute_capability: ClassVar[tuple[int, int]]

    def __post_init__(self) -> None:
        check_count(self.multiple, "multiple")
        check_count(self.min_size, "min_size")

    def takes(
        self,
        lhs: Sequence[int],
        rhs: Sequence[int],
        dimension_numbers: Any,
        roles: tuple[str, str],
    ) -> bool:
        """Whether a matmul of operands of these shapes is computed in fp8."""
        _, (batch, _) = dimension_numbers
        sizes = self.sizes(lhs, rhs, dimension_numbers)
        is_wgrad = "g" in roles and "w" not in roles
        is_large = all(size >= self.min_size and size % self.multiple == 0 for size in sizes)
        return is_large and not batch and not (is_wgrad and self.high_precision_wgrad)

    def sizes(
        self, lhs: Sequence[int], rhs: Sequence[int], dimension_numbers: Any
    ) -> tuple[int, int, int]:
        """Returns how much a matmul contracts, and the sizes of its left and right side."""
        (left, right), _ = dimension_numbers
        return (
            math.prod(lhs[i] for i in left),
            math.prod(size for i, size in enumerate(lhs) if i not in left),
            math.prod(size for i, size in enumerate(rhs) if i not in right),
        )

    def __str__(self) -> str:
        options = [
            f"{field.name}={_text(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if field.name != "format" and getattr(self, field.name) != field.default
        ]
        return f"{self.name}({','.join(options)})" if options else self.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scaling(Recipe):
    """Two formats, and a scale for all of a tensor."""

    forward: str = "e4m3"
    gradients: str = "e5m2"

    compute_capability: ClassVar[tuple[int, int]] = (8, 9)

    def __post_init__(self) -> None:
        super().__post_init__()
        code_dtype(self.forward)
        code_dtype(self.gradients)

    def format_of(self, role: str) -> str:
        """Returns the format of an operand."""
        return self.gradients if role == "g" else self.forward

    def dtypes(self, roles: tuple[str, str]) -> tuple[np.dtype, np.dtype]:
        """Returns the dtypes of the operands of a product."""
        left, right = (code_dtype(self.format_of(role)) for role in roles)
        return left, right

    def product(
        self, operands: Sequence[Any], dimension_numbers: Any, dtypes: Dtypes, route: Route
    ) -> jax.Array:
        """Returns a product of two operands, and of what is given beside them."""
        given = dict(zip(dtypes.extras, operands[2:], strict=True))
        sides = zip(operands[:2], dtypes.roles, dimension_numbers[0], dtypes.places, strict=True)
        left, right = (
            gathered(
                Quantized(given["codes"], given["code_scale"])
                if role == "w" and "codes" in given
                else self.quantized(operand, role, axes, given.get("scales")),
                place,
            )
            for operand, role, axes, place in sides
        )
        return scaled_product(
            left, right, dimension_numbers, dtypes, route, exact=self._has_powers_of_two()
        )

    def _has_powers_of_two(self) -> bool:
        return True

    def shares_codes(self) -> bool:
        """Whether a weight has the same codes in all products."""
        return True

    def quantized(self, x: Any, role: str, axes: Sequence[int], scales: Any = None) -> Quantized:
        """Returns an operand as codes.

        Args:
            x: f32, bf16 or f16[...].
            role: what it is, one of `ROLES`.
            axes: those that are contracted.
            scales: f32[3], those of a state, or None.
        """
        fmt = self.format_of(role)
        if scales is not None:
            return quantize(x, fmt, scale=scales[ROLES.index(role)].reshape((1,) * x.ndim))
        return quantize(x, fmt, power_of_two=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurrentScaling(_Scaling):
    """fp8 with the scale that each tensor needs now; there is no state.

    Activations and weights are quantized as `forward`, gradients as `gradients` (Micikevicius et
    al., FP8 Formats for Deep Learning, 2022, have e4m3 and e5m2), each with one scale for all of
    it. That is the next power of two of what its largest number needs, which can be applied to a
    bf16 result without another rounding, so a GPU does that in the matmul itself.

    Attributes:
        forward: the format of activations and weights, "e4m3" or "e5m2".
        gradients: the format of gradients that are multiplied.
        scaling: "tensor", or "row" for a scale of each row of the left and each column of the right
            side: more accurate with outliers, and applied to the result in a pass of its own.
        power_of_two: False for scales that use all of a format's range. They round the result once
            more, from f32.
        multiple: see `Recipe`, as the options that follow.

    Raises:
        ValueError: for an unknown format or scaling, or a size below 1.

    Example:
        >>> import jaxmp
        >>> policy = jaxmp.Policy(recipe=CurrentScaling(scaling="row"))
        >>> str(policy)
        'params=float32,compute=bfloat16,output=float32,recipe=current(scaling=row)'
    """

    scaling: str = "tensor"
    power_of_two: bool = True

    name: ClassVar[str] = "current"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.scaling, ("tensor", "row"), "scaling")

    def _has_powers_of_two(self) -> bool:
        return self.power_of_two

    def shares_codes(self) -> bool:
        """Whether a weight has the same codes in all products."""
        return self.scaling == "tensor"

    def quantized(self, x: Any, role: str, axes: Sequence[int], scales: Any = None) -> Quantized:
        """Returns an operand as codes; see `_Scaling`."""
        fmt, own = self.format_of(role), tuple(axes) if self.scaling == "row" else None
        return quantize(x, fmt, axis=own, power_of_two=self.power_of_two)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedScaling(_Scaling):
    """fp8 with scales from the steps before, so that a tensor is read once to be quantized.

    The scale of a tensor is the power of two that the largest number of its history needs. The
    histories are a state that `jaxmp.init_fp8_state` makes and a training step carries. Without
    one, as in `autocast` alone, scales are those of `CurrentScaling`.

    Attributes:
        history: how many steps are remembered.
        margin: scales leave room for numbers 2^margin times as large as those that were seen; from
            0 to 8.
        amax: "max" of the history, or the "most_recent".
        forward: see `CurrentScaling`, as the options that follow.

    Raises:
        ValueError: for an unknown format or amax, or a size or history below 1.

    Example:
        >>> str(DelayedScaling(history=16, amax="most_recent"))
        'delayed(history=16,amax=most_recent)'
    """

    history: int = 1024
    margin: int = 0
    amax: str = "max"

    name: ClassVar[str] = "delayed"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self.history, "history")
        check_choice(self.amax, ("max", "most_recent"), "amax")
        if not isinstance(self.margin, int) or not 0 <= self.margin <= 8:
            raise ValueError(f"margin is {self.margin!r}, but must be an integer from 0 to 8.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockScaling(Recipe):
    """MXFP8 or NVFP4: neighbours along what is contracted share a scale.

    Every operand is quantized for the product that it is in, so a weight is once along its inputs
    and once along its outputs. In mxfp8 all operands are e4m3, gradients too (Mishra et al.,
    Recipes for Pre-training LLMs with MXFP8, 2025). In nvfp4 weights have squares of 16 by 16, the
    same in both directions (NVIDIA, Pretraining Large Language Models with NVFP4, 2025).

    Blackwell GPUs multiply blocks. Elsewhere the products are of the same numbers in bf16, which
    holds them.

    Attributes:
        format: "mxfp8" or "nvfp4".
        multiple: see `Recipe`, as the options that follow; here a multiple of the block.

    Raises:
        ValueError: for an unknown format, or sizes that are no multiples of its blocks.

    Example:
        >>> import jaxmp
        >>> jaxmp.get_policy("mixed_mxfp8").recipe
        'mxfp8'
    """

    format: str = dataclasses.field(default="mxfp8", kw_only=False)
    multiple: int = 32

    compute_capability: ClassVar[tuple[int, int]] = (10, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.format, ("mxfp8", "nvfp4"), "format")
        size = block_format(self.format).size
        if self.multiple % size:
            raise ValueError(
                f"multiple is {self.multiple}, but {self.format} has blocks of {size}: use a "
                "multiple of that."
            )

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name in a policy: that of the format."""
        return self.format

    def shares_codes(self) -> bool:
        """Whether a weight has the same codes in all products."""
        return False

    def dtypes(self, roles: tuple[str, str]) -> tuple[np.dtype, np.dtype]:
        """Returns the dtypes of the operands of a product."""
        codes = block_format(self.format).codes
        return codes, codes

    def product(
        self, operands: Sequence[Any], dimension_numbers: Any, dtypes: Dtypes, route: Route
    ) -> jax.Array:
        """Returns a product of two operands."""
        return block_product(self.format, operands, dimension_numbers, dtypes, route)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_RECIPES: dict[str, functools.partial[Recipe]] = {
    "current": functools.partial(CurrentScaling),
    "delayed": functools.partial(DelayedScaling),
    "mxfp8": functools.partial(BlockScaling, "mxfp8"),
    "nvfp4": functools.partial(BlockScaling, "nvfp4"),
}
_GRAMMAR = re.compile(r"(\w+)(?:\((.*)\))?")


@functools.lru_cache(maxsize=256)
def get_recipe(text: str | Recipe | None) -> Any:
    """Returns the recipe that a policy names, or None if it names none.

    Args:
        text: a name ("current", "delayed", "mxfp8", "nvfp4"), options in brackets: what
            `str(recipe)` gives. A recipe is returned as it is.

    Raises:
        ValueError: for a name or option that is unknown, or a value out of range.

    Example:
        >>> get_recipe("delayed(history=16,margin=1)").history
        16
    """
    if text is None or isinstance(text, Recipe):
        return text
    found = _GRAMMAR.fullmatch(text)
    name, options = found.groups() if found else (text, None)
    if name not in _RECIPES:
        raise ValueError(
            f"Unknown recipe {name!r}: use one of {', '.join(_RECIPES)}."
            f"{did_you_mean(name, _RECIPES)}"
        )
    make = _RECIPES[name]
    known = {field.name: field for field in dataclasses.fields(make.func)}  # type: ignore[arg-type]
    values = {}
    for part in filter(None, (options or "").split(",")):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in known or key == "format":
            raise ValueError(
                f"Unknown option {key!r} of recipe {text!r}: {name} has "
                f"{', '.join(key for key in known if key != 'format')}."
                f"{did_you_mean(key, known)}"
            )
        values[key] = _parsed(value, key, type(known[key].default), text)
    return make(**values)


def _parsed(value: str, key: str, kind: type, text: str) -> Any:
    if kind is bool and value in ("true", "false"):
        return value == "true"
    if kind is int and re.fullmatch(r"-?\d+", value):
        return int(value)
    if kind is str:
        return value
    wanted = "true or false" if kind is bool else "an integer"
    raise ValueError(f"Option {key} of recipe {text!r} is {value!r}, but must be {wanted}.")
