"""The state of delayed fp8 scaling, for a loss function."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxmp import _tree
from jaxmp._loss import LossOutput, check_loss
from jaxmp.autocast import autocast, sites_of, with_meters
from jaxmp.fp8 import ProductState, get_recipe, update_state
from jaxmp.fp8._state import is_delayed, new_meters, new_state
from jaxmp.policy import Policy, get_policy


def check_fp8_state(policy: Policy, fp8_state: Any) -> None:
    """Raises ValueError if a policy needs a state and there is none."""
    delayed = _delayed(policy)
    if delayed and fp8_state is None:
        raise ValueError(
            f"The recipe {delayed[0]!r} has a state: give value_and_grad the fp8_state, or "
            "TrainState.create, that jaxmp.init_fp8_state makes. The recipe 'current' needs none."
        )


def _delayed(policy: Policy) -> list[str]:
    """Returns the recipes of a policy that have a state."""
    texts = {each.recipe for each in (policy, *(rule for _, rule in policy.rules))}
    return [text for text in texts if is_delayed(get_recipe(text))]


def init_fp8_state(
    fun: Callable[..., Any],
    policy: Policy | str,
    *args: Any,
    **kwargs: Any,
) -> dict[str, ProductState] | None:
    """Returns the state of delayed fp8 scaling, for `TrainState.create` or `value_and_grad`.

    It has a history of the largest numbers for each matmul of layers. Given arrays, the gradients
    are computed once, with the scales of now, so that the first step has scales; given
    `jax.ShapeDtypeStruct`s, all scales are one.

    Args:
        fun: the loss function. It returns a scalar loss, a `LossOutput`, or a pair of which the
            first is the loss.
        policy: a policy or the name of one.
        *args: its arguments: parameters and a batch, of the sizes of one microbatch.
        **kwargs: its other arguments.

    Returns:
        For each matmul, by the names of its modules, its state; None if the policy has no recipe
        with a state.

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
    low_fun = autocast(fun, policy)
    sites = sites_of(low_fun, *args, **kwargs)
    state = {site.name: new_state(site.recipe, site.shape) for site in sites}
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((args, kwargs))):
        return state
    scales = dict.fromkeys(state)
    return update_state(state, counted(low_fun, scales, new_meters(state), args, kwargs))


def counted(
    low_fun: Callable[..., Any],
    scales: Mapping[str, Any],
    meters: Mapping[str, Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    **options: Any,
) -> dict[str, jax.Array]:
    """Returns what the products of a loss function see, its gradients included.

    Args:
        low_fun: what `autocast` returned for the loss function.
        scales: see `with_meters`, as `meters` and `options`.
        meters: zeros.
        args: of the function.
        kwargs: of the function.
        **options: of `with_meters`.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    arrays = [leaf if _tree.is_array(leaf) else None for leaf in leaves]

    def loss(meters: Mapping[str, Any], arrays: list[Any]) -> jax.Array:
        merged = [
            leaf if array is None else array for leaf, array in zip(leaves, arrays, strict=True)
        ]
        args, kwargs = treedef.unflatten(merged)
        return _loss_of(with_meters(low_fun, scales, meters, **options)(*args, **kwargs))

    return jax.jit(jax.grad(loss))(meters, arrays)


def _loss_of(result: Any) -> jax.Array:
    if isinstance(result, LossOutput):
        return check_loss(result.loss)
    return check_loss(result[0] if isinstance(result, tuple) else result)
