"""A softmax whose narrow result is all that its gradient needs.

Written out as exp(z) / sum(exp(z)), as JAX and its users write it, a softmax keeps its f32
exponentials for the backward pass, or what they are computed of. Attention weights are as many as
the scores, so of both, scores and weights, one is enough.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.interpreters import ad, batching, mlir

from jaxmp._dataflow import SHAPE_PRIMITIVES
from jaxmp._dtypes import FLOAT32
from jaxmp._rebind import in_front

# The derivative of a softmax as a linear map: (tangent, weights, exponentials, sums) -> tangent of
# the weights. It is its own transpose, so the backward pass is one of these too. What it is
# computed of is the compiler's business, see the lowerings.
derivative_p = Primitive("softmax_derivative")


@derivative_p.def_abstract_eval
def _(tangent: Any, weights: Any, exponentials: Any, sums: Any, *, axes: Any, dtype: Any) -> Any:
    del weights, sums, axes
    return exponentials.update(dtype=dtype, weak_type=False, sharding=tangent.sharding)


def _of_weights(
    tangent: Any, weights: Any, exponentials: Any, sums: Any, *, axes: Any, dtype: Any
) -> Any:
    """Widens the narrow weights, so that neither exponentials nor scores have to be kept.

    Behind a barrier, or GPU compilers would skip the rounding, and compute them anew from scores.
    """
    del exponentials, sums
    wide = _widened(lax.optimization_barrier(weights))
    weighted = wide * _widened(tangent)
    return lax.convert_element_type(weighted - wide * weighted.sum(axes, keepdims=True), dtype)


def _of_exponentials(
    tangent: Any, weights: Any, exponentials: Any, sums: Any, *, axes: Any, dtype: Any
) -> Any:
    """Makes them from the scores: TPUs store no weights, but make them as they multiply them."""
    del weights
    tangent = _widened(tangent)
    total = (tangent * lax.integer_pow(sums, -2) * exponentials).sum(axes, keepdims=True)
    return lax.convert_element_type((tangent / sums + (-total)) * exponentials, dtype)


def _widened(array: Any) -> Any:
    return lax.convert_element_type(array, FLOAT32)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    tangent, weights, *rest = primals
    moved, weights_moved, *_ = tangents  # the others are functions of what the weights are
    result = derivative_p.bind(*primals, **params)
    terms = []
    if not isinstance(moved, ad.Zero):
        terms.append(derivative_p.bind(moved, weights, *rest, **params))
    if not isinstance(weights_moved, ad.Zero):
        wide, change, dt = map(_widened, (weights, weights_moved, tangent))
        total = (wide * dt).sum(params["axes"], keepdims=True)
        change_of_total = (change * dt).sum(params["axes"], keepdims=True)
        term = change * (dt - total) - wide * change_of_total
        terms.append(lax.convert_element_type(term, params["dtype"]))
    out = functools.reduce(lax.add, terms) if terms else ad.Zero(jax.typeof(result))
    return result, out


def _transpose(cotangent: Any, tangent: Any, *kept: Any, axes: Any, dtype: Any) -> list[Any]:
    del dtype
    aval = tangent.aval
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(aval), None, None, None]
    gradient = derivative_p.bind(cotangent, *kept, axes=axes, dtype=aval.dtype)
    return [gradient, None, None, None]


def _batch(args: Sequence[Any], dims: Sequence[Any], *, axes: Any, dtype: Any) -> tuple[Any, int]:
    axes = tuple(axis + 1 for axis in axes)
    return derivative_p.bind(*in_front(args, dims), axes=axes, dtype=dtype), 0


derivative_p.def_impl(jax.jit(_of_weights, static_argnames=("axes", "dtype")))
ad.primitive_jvps[derivative_p] = _jvp
ad.primitive_transposes[derivative_p] = _transpose
batching.primitive_batchers[derivative_p] = _batch
mlir.register_lowering(derivative_p, mlir.lower_fun(_of_weights, multiple_results=False))
mlir.register_lowering(
    derivative_p, mlir.lower_fun(_of_exponentials, multiple_results=False), platform="tpu"
)


class Softmax(NamedTuple):
    """The operands of a division that normalizes exponentials.

    Attributes:
        exponents: what the exponentials are of.
        axes: over which they are summed.
    """

    exponents: Var
    axes: tuple[int, ...]


def find_softmaxes(jaxpr: Jaxpr) -> dict[int, Softmax]:
    """Returns the divisions of a jaxpr that are the last step of a softmax, by the id of each."""
    divisions = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "div"]
    if not divisions:
        return {}
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    found = {id(eqn): _softmax(eqn, made) for eqn in divisions}
    return {key: softmax for key, softmax in found.items() if softmax is not None}


def _softmax(division: JaxprEqn, made: dict[Var, JaxprEqn]) -> Softmax | None:
    numerator, denominator = division.invars
    total = _moved_from(denominator, made)
    exponential = _exponential(numerator, made)
    if total is None or exponential is None or total.primitive.name != "reduce_sum":
        return None
    if total.invars[0] is not numerator or isinstance(exponential.invars[0], Literal):
        return None
    return Softmax(exponential.invars[0], tuple(total.params["axes"]))


def _moved_from(atom: Any, made: dict[Var, JaxprEqn]) -> JaxprEqn | None:
    eqn = None if isinstance(atom, Literal) else made.get(atom)
    while eqn is not None and eqn.primitive.name in SHAPE_PRIMITIVES:
        atom = eqn.invars[0]
        eqn = None if isinstance(atom, Literal) else made.get(atom)
    return eqn


def _exponential(atom: Any, made: dict[Var, JaxprEqn]) -> JaxprEqn | None:
    eqn = None if isinstance(atom, Literal) else made.get(atom)
    return eqn if eqn is not None and eqn.primitive.name == "exp" else None


def normalize(operands: Sequence[Any], axes: Sequence[int], dtype: np.dtype) -> Any:
    """Returns the second operand over the third in a half dtype, a softmax of the first.

    Args:
        operands: in f32, the exponents, their exponentials, and the sums of those, of a shape that
            broadcasts.
        axes: over which they are summed.
        dtype: of the result.

    The derivative is y * (dz - sum(y * dz)) for exponents z and the softmax y.
    """

    @jax.custom_jvp
    def softmax(exponents: Any, exponentials: Any, sums: Any) -> Any:
        del exponents
        return lax.convert_element_type(exponentials / sums, dtype)

    @softmax.defjvp
    def _(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        weights = softmax(*primals)
        # The exponentials and sums are functions of the exponents, whose tangent says it all.
        kept = map(lax.stop_gradient, primals[1:])
        return weights, derivative_p.bind(
            tangents[0], weights, *kept, axes=tuple(axes), dtype=dtype
        )

    return softmax(*operands)
