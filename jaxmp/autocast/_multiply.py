"""Matmuls and convolutions in mixed precision: what goes in narrow, and what comes out."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from jaxmp._dtypes import FLOAT32
from jaxmp._product import Dtypes
from jaxmp.autocast._lookahead import OUTPUT, is_island
from jaxmp.autocast._places import gathered, place_of
from jaxmp.autocast._rules import asks_for_float32
from jaxmp.autocast._values import FULL, WEIGHTS, Kind, State, Value, full_of, narrow
from jaxmp.fp8 import get_recipe
from jaxmp.matmul import product_of
from jaxmp.policy import Policy

_ACTIVATIONS = frozenset({Kind.FULL, Kind.DATA})


def _roles(args: Sequence[Value]) -> tuple[str, str]:
    """Returns what the operands of a product are: the right one is a weight, if not the left is."""
    left, right = (arg.state is not None and arg.state.kind in WEIGHTS for arg in args[:2])
    return ("w", "x") if left and not right else ("x", "w")


def multiply_exactly(
    eqn: JaxprEqn, args: Sequence[Value], states: Sequence[State], policy: Policy
) -> Value:
    """Computes a matmul or convolution in f32, of weights that are gathered for it."""
    extras = gathered(args, FLOAT32)
    dtypes = Dtypes(FLOAT32, FLOAT32, FLOAT32, roles=_roles(args), **_on_mesh(args, policy))
    dtypes, arrays = dtypes._replace(extras=tuple(extras)), [arg.cast(FLOAT32) for arg in args]
    return Value(product_of(eqn, dtypes, arrays, *extras.values()), full_of(states))


def _on_mesh(args: Sequence[Value], policy: Policy) -> dict[str, Any]:
    """Returns the parts of `Dtypes` that are about several devices."""
    left, right = map(place_of, args[:2])
    return {"places": (left, right), "reduce_dtype": policy.reduce_dtype}


def multiply(eqn: JaxprEqn, args: Sequence[Value], uses: int, policy: Policy) -> Value:
    """Computes a matmul or convolution with operands in the compute dtype.

    Masters, and weights that are computed of masters alone, go in as they are: the primitive
    narrows them, and their gradients come out in f32.
    """
    keeps_float32 = policy.activation_dtype == FLOAT32
    dtype = policy.compute_dtype
    arrays = [
        arg.cast(dtype)
        if arg.state is not None and arg.state.kind in _ACTIVATIONS and not keeps_float32
        else arg.array
        for arg in args
    ]
    wide = keeps_float32 or asks_for_float32(eqn) or (is_island(uses) and uses & OUTPUT)
    out_dtype = FLOAT32 if wide else dtype
    recipe = get_recipe(policy.recipe)
    extras = {} if recipe is not None else gathered(args, dtype)
    dtypes = Dtypes(
        dtype,
        policy.accum_dtype,
        out_dtype,
        recipe,
        _roles(args),
        extras=tuple(extras),
        **_on_mesh(args, policy),
    )
    product = product_of(eqn, dtypes, arrays, *extras.values())
    result = Value(product, FULL if wide else narrow(dtype))
    # An island begins here: widened once, for all that use it, whatever calls they are in.
    return result.held_as(FULL) if is_island(uses) else result
