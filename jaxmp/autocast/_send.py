"""Weights that the program itself sends between devices, narrowed before."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._rebind import evaluate

SENDS = frozenset({"all_gather", "all_gather_invariant", "reshard", "sharding_constraint"})


def sent(eqn: JaxprEqn, dtype: np.dtype) -> Callable[[jax.Array], jax.Array]:
    """Returns an equation that sends an f32 array, as a function that sends it in a half dtype.

    Its result is f32 again, of numbers of the half dtype; its gradient is sent back in f32.
    """

    @jax.custom_jvp
    def send(x: jax.Array) -> jax.Array:
        (whole,) = evaluate(eqn, [lax.convert_element_type(x, dtype)])
        return lax.convert_element_type(whole, x.dtype)

    @send.defjvp
    def _jvp(
        primals: Sequence[jax.Array], tangents: Sequence[jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        return send(*primals), evaluate(eqn, list(tangents))[0]

    return send
