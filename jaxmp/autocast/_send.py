"""Weights that the program itself sends between devices, narrowed before."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jaxmp._rebind import evaluate, spec_of

SENDS = frozenset({"all_gather", "all_gather_invariant", "reshard", "sharding_constraint"})


def sent(eqn: JaxprEqn, dtype: np.dtype) -> Callable[[jax.Array], jax.Array]:
    """Returns an equation that sends an f32 array, as a function that sends it in a half dtype.

    Its result is f32 again, of numbers of the half dtype; its gradient is sent back in f32.
    """

    @jax.custom_vjp
    def send(x: jax.Array) -> jax.Array:
        (whole,) = evaluate(eqn, [lax.convert_element_type(x, dtype)])
        return lax.convert_element_type(whole, x.dtype)

    def forward(x: jax.Array) -> tuple[jax.Array, Any]:
        aval: Any = jax.typeof(x)
        return send(x), _Spec(spec_of(aval, x.dtype))

    def backward(kept: "_Spec", grad: jax.Array) -> tuple[jax.Array]:
        (back,) = jax.linear_transpose(lambda x: evaluate(eqn, [x])[0], kept.spec)(grad)
        return (back,)

    send.defvjp(forward, backward)
    return send


@jax.tree_util.register_static
class _Spec:
    """What a backward pass knows of an operand, which has no value there."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec
