"""Loss scales: the factor that keeps half precision gradients from underflow, and how it moves.

Micikevicius et al., "Mixed Precision Training", https://arxiv.org/abs/1710.03740, section 3.2.
All three classes follow jmp's protocol: `loss_scale`, `scale(tree)`, `unscale(tree)` and
`adjust(finite)`.
"""

import dataclasses
import math
import warnings
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jmp
import numpy as np
from jax import lax

from jaxmp import _tree
from jaxmp._dtypes import dtype_of, has_gradient, widened

T = TypeVar("T")

# The smallest floor and the largest cap for which both the scale and its inverse are normal f32.
_TINY = 2.0**-126
_HUGE = 2.0**126


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NoOpLossScale:
    """Scales by one: for bf16 and f32, whose gradients have the range of f32.

    Example:
        >>> NoOpLossScale().scale(3.0)
        3.0
    """

    @property
    def loss_scale(self) -> int:
        """The scale: 1."""
        return 1

    def scale(self, tree: T) -> T:
        """Returns `tree`."""
        return tree

    def unscale(self, tree: T) -> T:
        """Returns `tree`."""
        return tree

    def adjust(self, grads_finite: Any) -> "NoOpLossScale":
        """Returns itself."""
        del grads_finite
        return self


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class StaticLossScale:
    """Scales by a constant, which is part of the compiled program.

    Attributes:
        loss_scale: a positive finite number, kept as f32 (an integer with a warning). A power of
            two is exact.

    Raises:
        ValueError: if the scale is not a positive, finite scalar.

    Example:
        >>> scale = StaticLossScale(2.0**10)
        >>> scale.scale(jnp.float32(2.0)), scale.unscale(jnp.float32(2048.0))
        (Array(2048., dtype=float32), Array(2., dtype=float32))
    """

    loss_scale: Any

    def __post_init__(self) -> None:
        if _tree.is_traced(self.loss_scale):
            raise ValueError(
                "A StaticLossScale is part of the program, but its scale is a traced value. Build "
                "it outside of jit, or use DynamicLossScale."
            )
        _warn_if_not_floating(self.loss_scale, "loss_scale")
        value = _positive(self.loss_scale, "loss_scale")
        object.__setattr__(self, "loss_scale", np.float32(value))

    def scale(self, tree: T) -> T:
        """Multiplies the inexact leaves, f16 and bf16 ones as f32; see `DynamicLossScale.scale`."""
        return _scale(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Divides the inexact leaves, f16 and bf16 ones as f32."""
        return _unscale(tree, self.loss_scale)

    def adjust(self, grads_finite: Any) -> "StaticLossScale":
        """Returns itself."""
        del grads_finite
        return self


@_tree.register_state(["loss_scale", "counter", "hysteresis_left", "skip_streak"])
@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """Grows every `period` clean steps and backs off when a gradient overflows.

        if finite:
            counter += 1
            if counter == period: loss_scale = min(loss_scale * factor, max_loss_scale)
        else:
            loss_scale = max(loss_scale * backoff, min_loss_scale)

    The state is four scalars, f32 and i32 (in NumPy until it is first used in JAX), and is the same
    kind of value before and after `adjust`, so a jitted step is traced once. Options are static:
    they survive `jax.tree.flatten`, jit, scan, vmap and pickle, and a checkpoint takes them from
    the template. The first five arguments are jmp's.

    Attributes:
        loss_scale: f32[], the current scale; any positive finite number. An integer is taken as
            f32, with a warning. The default is the largest power of two in f16, so that the
            gradient of a loss with respect to itself does not overflow at once.
        counter: i32[], clean steps since the scale last changed or a step overflowed.
        period: clean steps until the scale grows.
        factor: what the scale is multiplied by when it grows, more than 1.
        min_loss_scale: the floor. 0 stands for the smallest normal f32.
        max_loss_scale: the cap. A scale that starts above it does not grow.
        backoff: what the scale is multiplied by on an overflow, between 0 and 1; `1 / factor` if
            left out.
        hysteresis: how many overflows it takes to back off; refilled when the scale grows
            (Megatron's rule).
        hysteresis_left: i32[], overflows until the scale backs off.
        skip_streak: i32[], overflows in a row.

    Raises:
        ValueError: for an option outside its range.

    Example:
        >>> scale = DynamicLossScale(2.0**4, period=2)
        >>> scale = scale.adjust(True).adjust(True)
        >>> float(scale.loss_scale)
        32.0
        >>> float(scale.adjust(False).loss_scale)
        16.0
    """

    loss_scale: Any = 2.0**15
    counter: Any = 0
    period: int = 2000
    factor: float = 2.0
    min_loss_scale: Any = 1.0
    _: dataclasses.KW_ONLY
    max_loss_scale: Any = 2.0**32
    backoff: float | None = None
    hysteresis: int = 1
    hysteresis_left: Any = None
    skip_streak: Any = 0

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        put("period", _at_least_one(self.period, "period"))
        put("hysteresis", _at_least_one(self.hysteresis, "hysteresis"))
        factor = _number(self.factor)
        if not (factor > 1 and math.isfinite(factor)):
            raise ValueError(
                f"factor is {self.factor!r}, but a loss scale grows by more than 1: use 2.0, or "
                "StaticLossScale for a constant scale."
            )
        put("factor", factor)
        backoff = 1 / factor if self.backoff is None else _number(self.backoff)
        if not 0 < backoff < 1:
            raise ValueError(f"backoff is {self.backoff!r}, but lies between 0 and 1: use 0.5.")
        put("backoff", backoff)
        _warn_if_not_floating(self.min_loss_scale, "min_loss_scale")
        floor = _positive_or_zero(self.min_loss_scale, "min_loss_scale")
        put("min_loss_scale", floor)
        cap = _positive(self.max_loss_scale, "max_loss_scale")
        if cap < floor:
            raise ValueError(
                f"max_loss_scale {cap} is below min_loss_scale {floor}: raise the cap or lower "
                "the floor."
            )
        put("max_loss_scale", cap)
        left = self.hysteresis if self.hysteresis_left is None else self.hysteresis_left
        put("loss_scale", _scale_array(self.loss_scale))
        put("counter", _int_array(self.counter))
        put("hysteresis_left", _int_array(left))
        put("skip_streak", _int_array(self.skip_streak))

    def scale(self, tree: T) -> T:
        """Multiplies by the scale.

        Args:
            tree: any pytree. f16, bf16 and f32 leaves come back as f32 (half ones are widened
                first, so nothing overflows), f64 and complex leaves in their own dtype. Integers,
                bools, fp8, PRNG keys, float0, None and opaque leaves pass through untouched.
        """
        return _scale(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Divides by the scale; treats leaves as `scale` does."""
        return _unscale(tree, self.loss_scale)

    def adjust(self, grads_finite: Any) -> "DynamicLossScale":
        """Returns the next state.

        Args:
            grads_finite: bool[], whether every gradient of this step was finite.
        """
        finite = _boolean_scalar(grads_finite)
        floor = jnp.float32(max(self.min_loss_scale, _TINY))
        cap = jnp.float32(min(max(self.max_loss_scale, _TINY), _HUGE))
        one = jnp.int32(1)

        # A scale forced to infinity or NaN from outside comes back into range here.
        scale = jnp.where(jnp.isfinite(self.loss_scale), self.loss_scale, cap)
        counter = jnp.where(finite, self.counter + one, 0)
        grow = counter >= self.period
        left = jnp.where(finite, self.hysteresis_left, jnp.maximum(self.hysteresis_left - one, 0))
        back_off = ~finite & (left == 0)

        grown = jnp.maximum(scale, jnp.minimum(scale * jnp.float32(self.factor), cap))
        backed_off = jnp.maximum(scale * jnp.float32(self.backoff), floor)
        return _tree.replace_state(
            self,
            loss_scale=jnp.where(back_off, backed_off, jnp.where(grow, grown, scale)),
            counter=jnp.where(grow, 0, counter),
            hysteresis_left=jnp.where(grow, self.hysteresis, left),
            skip_streak=jnp.where(finite, 0, self.skip_streak + one),
        )


LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale


def as_loss_scale(loss_scale: Any) -> Any:
    """Returns jmp's loss scales as ours, and any other object with jmp's protocol as it is.

    Raises:
        TypeError: if the object has not jmp's protocol.
    """
    if isinstance(loss_scale, jmp.NoOpLossScale):
        return NoOpLossScale()
    if isinstance(loss_scale, jmp.StaticLossScale):
        return StaticLossScale(loss_scale.loss_scale)
    if isinstance(loss_scale, jmp.DynamicLossScale):
        fields = ("loss_scale", "counter", "period", "factor", "min_loss_scale")
        return DynamicLossScale(*(getattr(loss_scale, name) for name in fields))
    protocol = ("loss_scale", "scale", "unscale", "adjust")
    missing = [name for name in protocol if not hasattr(loss_scale, name)]
    if missing or isinstance(loss_scale, type):
        raise TypeError(
            f"loss_scale is {loss_scale!r}, but must be a loss scale object. Use "
            "jaxmp.DynamicLossScale(), jaxmp.StaticLossScale(2.0**15) or jaxmp.NoOpLossScale()."
        )
    return loss_scale


def default_loss_scale(compute_dtypes: Any) -> LossScale:
    """Returns dynamic scaling if anything is computed in f16, whose range is narrow, else none."""
    return DynamicLossScale() if np.dtype(np.float16) in compute_dtypes else NoOpLossScale()


def _scale(tree: T, factor: Any) -> T:
    def leaf_fn(leaf: Any) -> Any:
        wide = _wide_or_none(leaf)
        return leaf if wide is None else _cast(leaf, wide) * _cast(factor, wide)

    return jax.tree.map(leaf_fn, tree)


def _unscale(tree: T, factor: Any) -> T:
    def leaf_fn(leaf: Any) -> Any:
        wide = _wide_or_none(leaf)
        return leaf if wide is None else _cast(leaf, wide) / _cast(factor, wide)

    return jax.tree.map(leaf_fn, tree)


def _wide_or_none(leaf: Any) -> np.dtype | None:
    dtype = dtype_of(leaf)
    return widened(dtype) if has_gradient(dtype) else None


def _cast(x: Any, dtype: np.dtype) -> jax.Array:
    return lax.convert_element_type(jnp.asarray(x), dtype)


def _boolean_scalar(value: Any) -> jax.Array:
    if jnp.shape(value) != () or dtype_of(value) != np.dtype(bool):
        raise ValueError(
            f"grads_finite is {dtype_of(value)}{list(jnp.shape(value))}, expected boolean scalar: "
            "use jaxmp.all_finite(grads)."
        )
    return jnp.asarray(value)


def _scale_array(value: Any) -> Any:
    if _tree.is_traced(value):
        return value.astype(jnp.float32)
    _warn_if_not_floating(value, "loss_scale")
    return np.asarray(_positive(value, "loss_scale"), np.float32)


def _int_array(value: Any) -> Any:
    return value.astype(jnp.int32) if _tree.is_traced(value) else np.asarray(value, np.int32)


def _warn_if_not_floating(value: Any, name: str) -> None:
    dtype = dtype_of(value)
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
        warnings.warn(f"Expected floating type for {name}, got {dtype}", stacklevel=5)


def _positive_or_zero(value: Any, name: str) -> float:
    return 0.0 if _number(value) == 0.0 else _positive(value, name)


def _number(value: Any) -> float:
    """Returns a scalar as f32 would hold it, or NaN for anything else."""
    dtype = dtype_of(value)
    if dtype is None or dtype.kind == "c" or jnp.shape(value) != ():
        return math.nan
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _positive(value: Any, name: str) -> float:
    number = _number(value)
    if not (number > 0 and math.isfinite(number)):
        raise ValueError(
            f"{name} is {value!r}, but must be a positive finite number. Use a power of two such "
            "as 2.0**15."
        )
    return number


def _at_least_one(value: Any, name: str) -> int:
    number = _number(value)
    if isinstance(value, bool) or not number.is_integer() or not 1 <= number < 2**31:
        raise ValueError(f"{name} is {value!r}, but must be an integer from 1 to 2**31 - 1.")
    return int(value)
