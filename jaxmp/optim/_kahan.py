"""Narrow parameters whose rounding errors are kept and added in the next step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmp._rounding import narrow, round_to
from jaxmp.optim._storage import Storage, in_float32, keeping


class KahanState(NamedTuple):
    """State of `kahan`.

    Attributes:
        compensation: a tree like the parameters: of each narrow one what it lacks of its true
            value, in its own dtype; None for others.
        inner_state: the state of the wrapped transform.
    """

    compensation: Any
    inner_state: Any


def kahan(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Keeps what each update loses to rounding, and adds it to the next: no f32 master is needed.

    A bf16 parameter and its compensation hold 16 bits of its value together, in 4 bytes a
    parameter. The wrapped transform sees f32 gradients and the sum of both, in f32 (Kahan
    summation; Zamirai et al., Revisiting BFloat16 Training, 2020). Parameters that are f32 are
    left alone.

    Args:
        tx: any optax transform or chain.

    Example:
        >>> from jaxmp.optim import apply_updates, full_weights
        >>> tx, params = kahan(optax.sgd(1e-4)), {"w": jnp.ones(2, jnp.bfloat16)}
        >>> state = tx.init(params)
        >>> for _ in range(100):
        ...     updates, state = tx.update({"w": jnp.ones(2)}, state, params)
        ...     params = apply_updates(params, updates)
        >>> round(float(full_weights(state, params)["w"][0]), 3), params["w"]
        (0.99, Array([0.988281, 0.988281], dtype=bfloat16))
    """
    return keeping(tx, STORAGE, jnp.zeros_like, KahanState)


def _compensated(param: Any, compensation: Any) -> jax.Array:
    return in_float32(param) + in_float32(compensation)


def _split(target: Any, param: Any, compensation: Any, leaf: int) -> tuple[Any, Any]:
    del compensation, leaf
    dtype = jnp.result_type(param)
    stored = round_to(target, dtype)
    lost = jnp.where(jnp.isfinite(stored), target - stored, 0)
    return stored, narrow(lost, dtype)


STORAGE = Storage("kahan", "compensations", _compensated, _split)
