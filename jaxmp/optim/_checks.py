"""What every wrapper checks of the gradients and parameters that it is given."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmp import _tree
from jaxmp._dtypes import HALF_DTYPES, dtype_of, has_gradient
from jaxmp._errors import bullet_list


def is_narrow(leaf: Any) -> bool:
    """Whether a parameter is a float narrower than f32."""
    return dtype_of(leaf) in HALF_DTYPES


def inner_update(
    inner: optax.GradientTransformationExtraArgs,
    grads: Any,
    state: Any,
    params: Any,
    extra_args: dict[str, Any],
) -> tuple[Any, Any]:
    """Runs a wrapped transform whose gradients and parameters are f32; its state keeps its dtypes.

    Optax's own transforms do not run under strict promotion (they mix f32 and counters); with all
    float leaves in f32 nothing is narrowed or widened by the standard one.
    """
    with jax.numpy_dtype_promotion("standard"):
        updates, new_state = inner.update(grads, state, params, **extra_args)
    if jax.tree.structure(new_state) != jax.tree.structure(state):
        raise ValueError(
            "The wrapped transform returned a state of another structure than it was given: "
            f"{jax.tree.structure(new_state)} against {jax.tree.structure(state)}. A jitted step "
            "needs one structure; restore the state that tx.init gives for these params."
        )
    return updates, _tree.like(new_state, state)


def check_params(name: str, params: Any) -> None:
    """Raises ValueError if a transform that stores parameters was given none."""
    if params is None:
        raise ValueError(
            f"{name} updates the parameters itself, but params is None. Pass them: "
            "tx.update(grads, state, params)."
        )


def check_structure(grads: Any, params: Any) -> None:
    """Raises ValueError if gradients have another structure, or other shapes, than parameters.

    One axis more is right: of the examples, for differentially private training.
    """
    if params is None:
        return
    if jax.tree.structure(grads) == jax.tree.structure(params):
        _tree.map_named(_check_shape, grads, params)
        return
    lines = other_names(_tree.leaf_names(grads), "gradients", _tree.leaf_names(params)) or [
        f"{jax.tree.structure(grads)} against {jax.tree.structure(params)}"
    ]
    raise ValueError(
        "Gradients and params have different structures:\n"
        f"{bullet_list(lines)}\n"
        "Pass the params that the gradients were taken for."
    )


def check_shapes(updates: Any, grads: Any, params: Any) -> None:
    """Raises ValueError if updates do not fit the parameters, because of the gradients."""
    if params is None:
        return

    def check(name: str, update: Any, grad: Any, param: Any) -> None:
        if jnp.shape(update) != jnp.shape(param):
            raise ValueError(_other_shape(name, grad, param))

    _tree.map_named(check, updates, grads, params)


def _other_shape(name: str, grad: Any, param: Any) -> str:
    return (
        f"The gradient of {name!r} has shape {jnp.shape(grad)}, the parameter has "
        f"{jnp.shape(param)}. Pass the params that the gradients were taken for."
    )


def _check_shape(name: str, grad: Any, param: Any) -> None:
    if not has_gradient(dtype_of(param)):
        return
    shape = jnp.shape(grad)
    is_per_example = len(shape) > jnp.ndim(param) and shape[1:] == jnp.shape(param)
    if shape != jnp.shape(param) and not is_per_example:
        raise ValueError(_other_shape(name, grad, param))


def check_kept(what: str, kept: Any, params: Any) -> None:
    """Raises ValueError if what a state keeps of each narrow parameter is not of these parameters.

    Args:
        what: its name, in the plural.
        kept: a tree like the parameters, of arrays, and None for parameters that are not narrow.
        params: the parameters.
    """
    have, want = leaves_by_name(kept), leaves_by_name(params)
    lines = other_names(have, "the state", want) or [
        f"{name}: {describe(have[name])} for a parameter of {describe(param)}"
        for name, param in want.items()
        if (have[name] is not None) != is_narrow(param)
        or (is_narrow(param) and jnp.shape(have[name]) != jnp.shape(param))
    ]
    if lines:
        raise ValueError(
            f"The state keeps {what} for other parameters than it was given:\n"
            f"{bullet_list(lines)}\n"
            "Pass the params that the state was made for, or make a new state with tx.init."
        )


def other_names(have: Iterable[str], where: str, params: Iterable[str]) -> list[str]:
    """Returns a line for each name that only the parameters, or only something else, has."""
    have, params = set(have), set(params)
    lines = [f"only in params: {name}" for name in sorted(params - have)]
    return lines + [f"only in {where}: {name}" for name in sorted(have - params)]


def leaves_by_name(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by name; None counts as one."""
    pairs = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: leaf is None)
    return {_tree.path_name(path): leaf for path, leaf in pairs}


def named_states(kind: type | tuple[type, ...], opt_state: Any) -> list[tuple[str, Any]]:
    """Returns the states of some kinds in any nesting of optimizer states, each with its name.

    That of the root is empty.
    """
    pairs = jax.tree_util.tree_leaves_with_path(
        opt_state, is_leaf=lambda node: isinstance(node, kind)
    )
    return [(_tree.path_name(path), node) for path, node in pairs if isinstance(node, kind)]


def states_of(kind: type | tuple[type, ...], opt_state: Any) -> list[Any]:
    """Returns the states of some kinds in any nesting of optimizer states."""
    return [state for _, state in named_states(kind, opt_state)]


def describe(leaf: Any) -> str:
    """Returns dtype and shape of a leaf as text."""
    return "nothing" if leaf is None else f"{dtype_of(leaf)}{list(jnp.shape(leaf))}"
