"""The f32 value of parameters that are stored narrow."""

from typing import Any

from jaxmp import _tree
from jaxmp.optim import _kahan, _master_weights
from jaxmp.optim._checks import check_kept, states_of
from jaxmp.optim._storage import full_params


def full_weights(opt_state: Any, params: Any) -> Any:
    """Returns parameters in f32 with all the digits that an optimizer state keeps of them.

    Masters of `master_weights`, parameters and compensations of `kahan`; else they are widened. For
    an evaluation, an average, or weights for others.

    Args:
        opt_state: a pytree that holds at most one such state, at any depth.
        params: the parameters.

    Raises:
        ValueError: if the state holds several, or was made for other parameters.

    Example:
        >>> import optax
        >>> tx = _master_weights.master_weights(optax.sgd(1e-4))
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> _, state = tx.update({"w": jnp.ones(2)}, tx.init(params), params)
        >>> full_weights(state, params)
        {'w': Array([0.9999, 0.9999], dtype=float32)}
    """
    masters = states_of(_master_weights.MasterWeightsState, opt_state)
    compensated = states_of(_kahan.KahanState, opt_state)
    if len(masters) + len(compensated) > 1:
        raise ValueError(
            f"The optimizer state holds {len(masters) + len(compensated)} states of master_weights "
            "and kahan. Pass the part of it that belongs to these parameters."
        )
    if masters:
        storage, kept = _master_weights.STORAGE, masters[0].masters
    elif compensated:
        storage, kept = _kahan.STORAGE, compensated[0].compensation
    else:
        return _tree.cast_to_full(params)
    check_kept(storage.what, kept, params)
    return full_params(storage, params, kept)
