"""The step that all transforms for narrow parameters share: f32 arithmetic, then a narrow store."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmp import _tree
from jaxmp._dtypes import FLOAT32
from jaxmp.optim._checks import (
    check_kept,
    check_params,
    check_structure,
    inner_update,
    is_narrow,
)


def in_float32(leaf: Any) -> jax.Array:
    """Returns a narrow array in f32."""
    return lax.convert_element_type(jnp.asarray(leaf), FLOAT32)


class Storage(NamedTuple):
    """How a transform keeps narrow parameters from losing their updates.

    Attributes:
        name: of the transform.
        what: it keeps of each parameter, in the plural, for messages.
        full: the f32 value of a parameter, of the parameter and what is kept of it.
        store: of the f32 value after the update, the parameter, what is kept of it and the number
            of the leaf: the new value, in f32 but one that the parameter's dtype has, and what is
            kept of it from now on.
    """

    name: str
    what: str
    full: Callable[[Any, Any], jax.Array]
    store: Callable[[jax.Array, Any, Any, int], tuple[jax.Array, Any]]


def full_params(storage: Storage, params: Any, kept: Any) -> Any:
    """Returns the parameters as the wrapped transform sees them: narrow ones in f32."""
    leaves, kept_leaves, treedef = _aligned(params, kept)
    return treedef.unflatten(
        storage.full(param, own) if is_narrow(param) else param
        for param, own in zip(leaves, kept_leaves, strict=True)
    )


def enter(storage: Storage, grads: Any, params: Any, kept: Any) -> tuple[Any, Any]:
    """Returns gradients and parameters in f32, for the wrapped transform, once they are checked."""
    check_params(storage.name, params)
    check_structure(grads, params)
    if kept is not None:
        check_kept(storage.what, kept, params)
    return jax.tree.map(_tree.widen_leaf, grads), full_params(storage, params, kept)


def store_updates(
    storage: Storage, params: Any, kept: Any, full: Any, updates: Any
) -> tuple[Any, Any]:
    """Returns updates that make narrow parameters what is stored of them, and what is kept.

    Args:
        storage: how they are stored.
        params: the parameters.
        kept: what is kept of them so far.
        full: the parameters in f32, before the update.
        updates: those of the wrapped transform.
    """
    leaves, kept_leaves, treedef = _aligned(params, kept)
    wanted = zip(treedef.flatten_up_to(full), treedef.flatten_up_to(updates), strict=True)

    def stored(i: int, value: Any, update: Any) -> tuple[Any, Any]:
        param, own = leaves[i], kept_leaves[i]
        if not is_narrow(param) or not hasattr(update, "dtype"):
            return update, own
        # What is kept outlives a step, so nothing that is not finite gets there.
        wide = in_float32(update)
        is_finite = jnp.isfinite(wide)
        new, own = storage.store(jnp.where(is_finite, value + wide, value), param, own, i)
        return jnp.where(is_finite, new - in_float32(param), wide), own

    pairs = [stored(i, value, update) for i, (value, update) in enumerate(wanted)]
    new_kept = None if kept is None else treedef.unflatten(own for _, own in pairs)
    return treedef.unflatten(update for update, _ in pairs), new_kept


def keeping(
    tx: optax.GradientTransformation,
    storage: Storage,
    first: Callable[[Any], Any],
    state_type: Callable[[Any, Any], Any],
) -> optax.GradientTransformationExtraArgs:
    """Returns a transform that keeps something of each narrow parameter.

    Args:
        tx: the wrapped transform.
        storage: how parameters are stored.
        first: from a narrow parameter to what is kept of it at the start.
        state_type: makes the state, of what is kept and of the state of `tx`, in this order.
    """
    inner = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        check_params(storage.name, params)
        kept = jax.tree.map(lambda param: first(param) if is_narrow(param) else None, params)
        return state_type(kept, _tree.strong(inner.init(full_params(storage, params, kept))))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        kept, inner_state = state
        grads, full = enter(storage, updates, params, kept)
        updates, inner_state = inner_update(inner, grads, inner_state, full, extra_args)
        updates, kept = store_updates(storage, params, kept, full, updates)
        return updates, state_type(kept, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _aligned(params: Any, kept: Any) -> tuple[list[Any], Sequence[Any], Any]:
    """Returns parameters and what is kept of them, leaf by leaf; None counts as a leaf."""
    leaves, treedef = jax.tree.flatten(params, is_leaf=lambda leaf: leaf is None)
    return leaves, [None] * len(leaves) if kept is None else treedef.flatten_up_to(kept), treedef
