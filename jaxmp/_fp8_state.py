"""The state of delayed fp8 scaling, for a loss function."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmp import _tree
from jaxmp._errors import bullet_list
from jaxmp._loss import LossOutput, check_loss
from jaxmp.autocast import autocast, autocast_loss, sites_of, with_given
from jaxmp.fp8 import ProductState, get_recipe, update_state
from jaxmp.fp8._state import Given, is_delayed, new_meters, new_state, of_weights
from jaxmp.policy import Policy, get_policy


def check_fp8_state(policy: Policy, fp8_state: Any) -> None:
    """Raises ValueError if a policy needs a state and there is none, or the other way round."""
    delayed = _delayed(policy)
    if fp8_state and not delayed:
        raise ValueError(
            f"An fp8_state was given, but the policy {policy} has no recipe with a state: use one "
            "with 'delayed', or leave the state out."
        )
    if delayed and fp8_state is None:
        raise ValueError(
            f"The recipe {delayed[0]!r} has a state: give value_and_grad the fp8_state, or "
            "TrainState.create, that jaxmp.init_fp8_state makes. The recipe 'current' needs none."
        )


def _delayed(policy: Policy) -> list[str]:
    """Returns the recipes of a policy that have a state."""
    return [recipe for recipe in policy.recipes() if is_delayed(get_recipe(recipe))]


def init_fp8_state(
    fun: Callable[..., Any],
    policy: Policy | str,
    *args: Any,
    **kwargs: Any,
) -> dict[str, ProductState] | None:
    """Returns the state of delayed fp8 scaling, for `TrainState.create` or `value_and_grad`.

    It has a history of the largest numbers for each matmul of layers. Given arrays, the gradients
    are computed once, with the scales of now, so that the first step has scales; given
    `jax.ShapeDtypeStruct`s, the first step has scales for numbers of usual size.

    Args:
        fun: the loss function. It returns a scalar loss, a `LossOutput`, or a pair of which the
            first is the loss.
        policy: a policy or the name of one.
        *args: its arguments: parameters and a batch; of several microbatches one, since sizes
            decide what is quantized, and the mean over a batch how large gradients are.
        **kwargs: its other arguments.

    Returns:
        For each matmul, by the names of the modules or `jax.named_scope`s around it, its state:
        "product" where there are none, with a number from the second on. None if the policy has no
        recipe with a state.

    Raises:
        ValueError: if the loss is no real scalar, or no matmul is quantized.

    Warns:
        UserWarning: of matmuls of which nothing was seen.

    Example:
        >>> def loss_fn(params, x):
        ...     with jax.named_scope("head"):
        ...         return jnp.mean((x @ params["w"]) ** 2)
        >>> policy = jaxmp.Policy(recipe=jaxmp.fp8.DelayedScaling(history=16))
        >>> state = init_fp8_state(loss_fn, policy, {"w": jnp.ones((32, 16))}, jnp.ones((64, 32)))
        >>> state["head"].history.shape, state["head"].scale.tolist()[:2]
        ((3, 16), [0.00390625, 0.00390625])
    """
    policy = get_policy(policy)
    if not _delayed(policy):
        return None
    low_fun = autocast_loss(fun, policy)
    sites = [site for site in sites_of(low_fun, *args, **kwargs) if is_delayed(site.recipe)]
    state = {site.name: new_state(site.recipe, site.shape) for site in sites}
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((args, kwargs))):
        return state
    state = update_state(state, counted(low_fun, {}, new_meters(state), args, kwargs))
    _warn_of_unseen(state)
    return state


def _warn_of_unseen(state: Mapping[str, ProductState]) -> None:
    """Warns of products that saw nothing, if values are known."""
    unseen = [
        name
        for name, product in state.items()
        if not _tree.is_traced(product.history) and not jnp.any(product.history)
    ]
    if unseen:
        warnings.warn(
            f"Of these matmuls nothing was seen:\n{bullet_list(unseen)}\nThey are in a branch that "
            "was not taken, or the loss has no gradient for them (a teacher, auxiliary outputs). "
            "As long as that is so, they keep the scales that they begin with. A rule of the "
            "policy can give them the recipe 'current'.",
            stacklevel=3,
        )


def counted(
    low_fun: Callable[..., Any],
    scales: Mapping[str, Any],
    meters: Mapping[str, Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    every: bool = False,
) -> dict[str, jax.Array]:
    """Returns what the products of a loss function see, its gradients included.

    Args:
        low_fun: what `autocast` returned for the loss function.
        scales: f32[..., 3], by the names of products; those of now for others.
        meters: zeros, by the names of products.
        args: of the function.
        kwargs: of the function.
        every: whether all numbers are counted, and not just the largest.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    arrays = [leaf if _tree.is_array(leaf) else None for leaf in leaves]

    def loss(meters: Mapping[str, Any], arrays: list[Any]) -> jax.Array:
        merged = [
            leaf if array is None else array for leaf, array in zip(leaves, arrays, strict=True)
        ]
        args, kwargs = treedef.unflatten(merged)
        given = {name: Given(scales.get(name), meter) for name, meter in meters.items()}
        return _loss_of(with_given(low_fun, given, every=every)(*args, **kwargs))

    return jax.jit(jax.grad(loss))(meters, arrays)


def quantized_weights(
    fun: Callable[..., Any], policy: Policy, fp8_state: Mapping[str, Any] | None, *args: Any
) -> dict[str, Given]:
    """Returns the weights of a function in 8 bits, for products that are computed several times.

    Args:
        fun: of parameters and more.
        policy: by whose recipes they are quantized.
        fp8_state: for their scales, if there is one.
        *args: the arguments of `fun`; weights are those that come of the first by moves alone.
    """
    if not policy.recipes():
        return {}
    arrays = [leaf for leaf in jax.tree.leaves(args[0]) if _tree.is_array(leaf)]
    given = {}
    for site in sites_of(autocast(fun, policy), *args):
        origin = site.origin
        if origin is None or origin.place >= len(arrays) or not site.recipe.shares_codes():
            continue
        product = (fp8_state or {}).get(site.name)
        scales = None if product is None else product.scale
        given[site.name] = of_weights(site.recipe, origin.weights(arrays), site.shape, scales)
    return given


def _loss_of(result: Any) -> jax.Array:
    if isinstance(result, LossOutput):
        return check_loss(result.loss)
    return check_loss(result[0] if isinstance(result, tuple) else result)
