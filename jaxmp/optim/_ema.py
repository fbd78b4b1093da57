"""A moving average of the parameters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmp import _tree
from jaxmp._dtypes import dtype_of, has_gradient, widened
from jaxmp._errors import bullet_list
from jaxmp.optim._checks import check_params, leaves_by_name, other_names, states_of


class EmaState(NamedTuple):
    """State of `ema`.

    Attributes:
        average: a tree like the parameters, floats in at least f32; other leaves are copies.
    """

    average: Any


def ema(decay: float) -> optax.GradientTransformationExtraArgs:
    """Keeps an exponential moving average of the parameters, in f32 whatever they are stored in.

    The last transform of a chain: it averages what the parameters are after the update, and hands
    the update on. In a half dtype a step of a thousandth of the value would round away. Inside of
    `jaxmp.mixed_precision` it averages the masters, and skipped steps leave it as it was. Integers
    and other leaves without a gradient are copied.

    Args:
        decay: in [0, 1); the average becomes `decay * average + (1 - decay) * parameter`. It starts
            at the parameters.

    Raises:
        ValueError: if `decay` lies elsewhere.

    Example:
        >>> tx = optax.chain(optax.sgd(1.0), ema(0.9))
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> _, state = tx.update({"w": jnp.full(2, -0.01)}, tx.init(params), params)
        >>> get_ema(state)["w"]
        Array([1.001, 1.001], dtype=float32)
    """
    check_decay(decay)

    def init(params: Any) -> EmaState:
        check_params("ema", params)
        return EmaState(_tree.strong(jax.tree.map(_tree.widen_leaf, params)))

    def update(updates: Any, state: Any, params: Any = None, **_: Any) -> tuple[Any, Any]:
        check_params("ema", params)
        after = jax.tree.map(_added, params, updates, is_leaf=lambda leaf: leaf is None)
        _check_same(state.average, after)
        moved = jax.tree.map(lambda a, p: moved_average(a, p, decay), state.average, after)
        return updates, EmaState(moved)

    return optax.GradientTransformationExtraArgs(init, update)


def get_ema(opt_state: Any) -> Any:
    """Returns the average that `ema` keeps in an optimizer state.

    Args:
        opt_state: a pytree that holds exactly one `EmaState`, at any depth.

    Raises:
        ValueError: if it holds none, or several.
    """
    found = states_of(EmaState, opt_state)
    if len(found) != 1:
        raise ValueError(
            f"{len(found)} averages in an optimizer state of type {type(opt_state).__name__}: put "
            "jaxmp.optim.ema(decay) at the end of the chain once, and pass the state of that."
        )
    return found[0].average


def check_decay(decay: Any, name: str = "decay") -> None:
    """Raises ValueError unless `decay` is a number in [0, 1)."""
    is_number = isinstance(decay, int | float) and not isinstance(decay, bool)
    if not is_number or not 0 <= decay < 1:
        raise ValueError(f"{name} is {decay!r}, but lies in [0, 1): use 0.999.")


def moved_average(average: Any, param: Any, decay: float) -> Any:
    """Returns `decay * average + (1 - decay) * param` in the dtype of the average."""
    dtype = dtype_of(average)
    if not has_gradient(dtype):
        return param
    step = jnp.asarray(1 - decay, jnp.float32).astype(dtype)
    return average + step * (lax.convert_element_type(param, dtype) - average)


def _added(param: Any, update: Any) -> Any:
    dtype = dtype_of(param)
    if not has_gradient(dtype) or not has_gradient(dtype_of(update)):
        return param
    wide = widened(dtype)
    return lax.convert_element_type(param, wide) + lax.convert_element_type(update, wide)


def _check_same(average: Any, params: Any) -> None:
    lines = other_names(leaves_by_name(average), "the average", leaves_by_name(params))
    if lines:
        raise ValueError(
            f"The average is one of other parameters:\n{bullet_list(lines)}\n"
            "Pass the params that the state was made for, or make a new state with tx.init."
        )
