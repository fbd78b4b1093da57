"""Narrow parameters whose updates are rounded up or down by chance."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmp import _tree
from jaxmp._rounding import round_stochastically
from jaxmp.optim._checks import check_params, inner_update
from jaxmp.optim._storage import Storage, enter, full_params, in_float32, store_updates


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`.

    Attributes:
        key: the PRNG key of the next step.
        inner_state: the state of the wrapped transform.
    """

    key: jax.Array
    inner_state: Any


def stochastic_rounding(
    tx: optax.GradientTransformation, key: Any
) -> optax.GradientTransformationExtraArgs:
    """Rounds new values of narrow parameters up or down by chance: right on average, in no memory.

    An update of a hundredth of the distance to the next value moves the parameter by the whole
    distance once in a hundred steps, where rounding to nearest would never move it. The wrapped
    transform sees f32 gradients and parameters. Parameters that are f32 are left alone.

    Args:
        tx: any optax transform or chain.
        key: a seed, or a PRNG key. The same key gives the same bits, on any number of devices.

    Raises:
        ValueError: if `key` is neither.

    Example:
        >>> from jaxmp.optim import apply_updates
        >>> tx = stochastic_rounding(optax.sgd(1e-4), key=0)
        >>> params = {"w": jnp.ones(64, jnp.bfloat16)}
        >>> state = tx.init(params)
        >>> for _ in range(100):
        ...     updates, state = tx.update({"w": jnp.ones(64)}, state, params)
        ...     params = apply_updates(params, updates)
        >>> round(float(params["w"].astype(jnp.float32).mean()), 2)
        0.99
    """
    inner = optax.with_extra_args_support(tx)
    first_key = as_key(key)

    def init(params: Any) -> StochasticRoundingState:
        check_params("stochastic_rounding", params)
        full = full_params(_storage(None), params, None)
        return StochasticRoundingState(jnp.copy(first_key), _tree.strong(inner.init(full)))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        next_key, key = jax.random.split(state.key)
        storage = _storage(key)
        grads, full = enter(storage, updates, params, None)
        updates, inner_state = inner_update(inner, grads, state.inner_state, full, extra_args)
        updates, _ = store_updates(storage, params, None, full, updates)
        return updates, StochasticRoundingState(next_key, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def as_key(key: Any) -> jax.Array:
    """Returns a seed or a PRNG key of any kind as a key."""
    if isinstance(key, int) and not isinstance(key, bool):
        return jax.random.key(key)
    if isinstance(key, jax.Array) and _tree.is_key(key) and jnp.shape(key) == ():
        return key
    if isinstance(key, jax.Array | np.ndarray) and key.dtype == jnp.uint32 and key.ndim == 1:
        return jax.random.wrap_key_data(jnp.asarray(key))
    raise ValueError(
        f"key is {key!r}, but stochastic rounding draws random bits from it: give a seed or a PRNG "
        "key, stochastic_rounding(tx, key=0)."
    )


def _storage(key: Any) -> Storage:
    def full(param: Any, kept: Any) -> jax.Array:
        del kept
        return in_float32(param)

    def store(target: Any, param: Any, kept: Any, leaf: int) -> tuple[Any, Any]:
        bits = jax.random.bits(jax.random.fold_in(key, leaf), target.shape, jnp.uint32)
        return round_stochastically(target, jnp.result_type(param), bits), kept

    return Storage("stochastic_rounding", "nothing", full, store)
