"""f32 masters of parameters that are stored narrow."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmp import _tree
from jaxmp._dtypes import FLOAT32
from jaxmp._errors import bullet_list
from jaxmp._rounding import round_to
from jaxmp.optim._checks import describe, leaves_by_name, states_of
from jaxmp.optim._storage import Storage, in_float32, keeping


class MasterWeightsState(NamedTuple):
    """State of `master_weights`.

    Attributes:
        masters: a tree like the parameters: an f32 master for each narrow one, None for others.
        inner_state: the state of the wrapped transform.
    """

    masters: Any
    inner_state: Any


def master_weights(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Keeps an f32 master of every parameter that is stored in f16 or bf16.

    The wrapped transform sees f32 gradients and the masters, so an update that is too small for
    the narrow parameter is not lost. The updates that come back make `optax.apply_updates` land
    on the rounded master. They are f32: under strict dtype promotion add them with
    `jaxmp.optim.apply_updates`. Parameters that are f32 have no master and cost nothing.

    A parameter that was set from outside, by loading weights or by clipping them, replaces its
    master, element by element: it is further from it than rounding explains (two steps of its
    dtype). `replace_master_weights` sets masters to full accuracy.

    A master takes 4 bytes a parameter. `jaxmp.mixed_precision` does this by itself for narrow
    parameters.

    Args:
        tx: any optax transform or chain.

    Example:
        >>> from jaxmp.optim import apply_updates
        >>> tx, params = master_weights(optax.sgd(1e-4)), {"w": jnp.ones(2, jnp.bfloat16)}
        >>> state = tx.init(params)
        >>> for _ in range(100):
        ...     updates, state = tx.update({"w": jnp.ones(2)}, state, params)
        ...     params = apply_updates(params, updates)
        >>> round(float(state.masters["w"][0]), 3), params["w"]
        (0.99, Array([0.988281, 0.988281], dtype=bfloat16))
    """
    return keeping(tx, STORAGE, in_float32, MasterWeightsState)


def replace_master_weights(opt_state: Any, params: Any) -> Any:
    """Returns an optimizer state whose masters are the given parameters, in f32.

    For loading weights: with f32 weights the masters get all of their digits.

    Args:
        opt_state: a pytree that holds one `MasterWeightsState`, at any depth.
        params: a tree like the parameters, of any float dtype.

    Raises:
        ValueError: if there is no such state, or several, or the parameters are others.

    Example:
        >>> tx = master_weights(optax.sgd(0.1))
        >>> state = tx.init({"w": jnp.ones(2, jnp.bfloat16)})
        >>> replace_master_weights(state, {"w": jnp.full(2, 1.001)}).masters["w"]
        Array([1.001, 1.001], dtype=float32)
    """
    found = states_of(MasterWeightsState, opt_state)
    if len(found) != 1:
        raise ValueError(
            f"{len(found)} states of master_weights in an optimizer state of type "
            f"{type(opt_state).__name__}, but one is wanted. Pass the part of the state that "
            "belongs to these parameters; it has masters only if parameters are narrow."
        )
    masters, given = found[0].masters, leaves_by_name(params)
    wrong = [
        f"{name}: {describe(given.get(name))} for a master of {describe(master)}"
        for name, master in leaves_by_name(masters).items()
        if master is not None
        and (given.get(name) is None or jnp.shape(given[name]) != jnp.shape(master))
    ]
    if wrong:
        raise ValueError(
            f"These are not the parameters of the masters:\n{bullet_list(wrong)}\n"
            "Pass parameters of the same names and shapes."
        )

    def replaced(path: Any, master: Any) -> Any:
        new = jnp.array(given[_tree.path_name(path)], FLOAT32, copy=True)
        committed = isinstance(master, jax.Array) and not _tree.is_traced(master)
        return jax.device_put(new, master.sharding) if committed else new

    new = jax.tree_util.tree_map_with_path(replaced, masters)
    return jax.tree.map(
        lambda node: node._replace(masters=new) if isinstance(node, MasterWeightsState) else node,
        opt_state,
        is_leaf=lambda node: isinstance(node, MasterWeightsState),
    )


def _followed(param: Any, master: Any) -> jax.Array:
    """Returns the master, or the parameter where that was set from outside."""
    info, wide = jnp.finfo(jnp.result_type(param)), in_float32(param)
    # Two steps of the dtype, since updates may have been added in it.
    step = 2 * np.float32(info.eps) * jnp.maximum(jnp.abs(wide), jnp.abs(master))
    near = jnp.abs(wide - master) <= step + 2 * np.float32(info.smallest_subnormal)
    return jnp.where(near, master, wide)


def _rounded(target: Any, param: Any, master: Any, leaf: int) -> tuple[Any, Any]:
    del master, leaf
    return round_to(target, jnp.result_type(param)), target


STORAGE = Storage("master_weights", "masters", _followed, _rounded)
