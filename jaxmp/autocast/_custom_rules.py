"""Functions with rules of their own for derivatives and batching: the rules are rewritten too.

A rule is known by what JAX makes of it: the original function is differentiated (or batched) by
JAX at the dtypes it was written for, and the trace of that is rewritten like any other jaxpr.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var, jaxpr_as_fun

from jaxmp._jaxpr import aval_of, dtype_of_var, function_name, inner_jaxprs, open_jaxpr
from jaxmp._rebind import evaluate, spec_of
from jaxmp.autocast._call import Call
from jaxmp.autocast._lookahead import OUTPUT, PRODUCT, Uses
from jaxmp.autocast._values import Kind, State, Value, arrays_as, values_of


def _specs(eqn: JaxprEqn) -> list[jax.ShapeDtypeStruct]:
    """Returns the inputs of an equation as the program has them."""
    return [spec_of(aval_of(atom), dtype_of_var(atom)) for atom in eqn.invars]


def _is_inexact(array: Any) -> bool:
    """Whether an array or a variable is differentiated."""
    aval: Any = aval_of(array) if isinstance(array, Var) else jax.typeof(array)
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _closed_over(eqn: JaxprEqn) -> int:
    """Returns how many of the first operands the user's function closes over."""
    return eqn.params.get("num_consts", 0)


def _differentiable(eqn: JaxprEqn) -> list[int]:
    """Returns the places of the inputs that are differentiated: floats that are arguments."""
    places = range(_closed_over(eqn), len(eqn.invars))
    return [i for i in places if jnp.issubdtype(dtype_of_var(eqn.invars[i]), jnp.inexact)]


def _merged(values: Sequence[Any], places: Sequence[int], changed: Sequence[Any]) -> list[Any]:
    merged = list(values)
    for place, value in zip(places, changed, strict=True):
        merged[place] = value
    return merged


def _no_tangent(shape: Sequence[int]) -> np.ndarray:
    return np.zeros(shape, jax.dtypes.float0)


def custom_jvp(call: Call) -> list[Value]:
    """Computes a `jax.custom_jvp` function."""
    closed, leaving = call.rewrite()
    consts, args = _split(call)
    fun = jax.custom_jvp(_function(call.eqn, closed, consts))
    fun.defjvp(_JvpRule(call, leaving).jvp)
    return values_of(fun(*args), leaving)


def _function(eqn: JaxprEqn, closed: ClosedJaxpr, consts: Sequence[Any]) -> Callable[..., Any]:
    """Returns a rewritten jaxpr as a function of the name that the original has."""

    def fun(*args: Any) -> list[Any]:
        return jaxpr_as_fun(closed)(*consts, *args)

    fun.__name__ = function_name(inner_jaxprs(eqn)[0].jaxpr) or fun.__name__
    return fun


def _split(call: Call) -> tuple[list[Any], list[Any]]:
    """Returns what a function closes over, and its arguments.

    It closes over the same again, so that differentiating that is the error it was.
    """
    count = _closed_over(call.eqn)
    return call.arrays[:count], call.arrays[count:]


class _JvpRule:
    """The rule of a `jax.custom_jvp` function, traced when it is first needed."""

    def __init__(self, call: Call, leaving: Sequence[State | None]) -> None:
        self.call, self.leaving = call, leaving
        self.moving = _differentiable(call.eqn)

    @functools.cached_property
    def _traced(self) -> ClosedJaxpr:
        """From primals and the tangents of floats to results and the tangents of floats."""
        eqn, moving = self.call.eqn, self.moving

        def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            def original(*floats: Any) -> list[Any]:
                return evaluate(eqn, _merged(primals, moving, floats))

            outs, moved = jax.jvp(original, [primals[i] for i in moving], list(tangents))
            return outs, [t for out, t in zip(outs, moved, strict=True) if _is_inexact(out)]

        specs = _specs(eqn)
        return jax.make_jaxpr(rule)(specs, [specs[i] for i in moving])

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the results and their tangents, in the states that the function leaves in."""
        call, moving, entering = self.call, self.moving, self.call.entering
        jaxpr = open_jaxpr(self._traced)
        pairs = zip(call.wanted, call.eqn.outvars, strict=True)
        outputs = [*call.wanted, *(uses for uses, var in pairs if _is_inexact(var))]
        lookahead = call.interpreter.lookahead
        uses = lookahead.uses(jaxpr, outputs, call.region, tangents=len(moving))
        consts, _ = _split(call)
        moved = [tangents[i - len(consts)] for i in moving]
        states = [*entering, *(entering[i] for i in moving)]
        args = values_of([*consts, *primals, *moved], states)
        results = call.interpreter.run(jaxpr, self._traced.consts, args, uses, call.region)
        outs = arrays_as(results[: len(self.leaving)], self.leaving)
        out_moved = iter(results[len(self.leaving) :])
        return outs, [
            next(out_moved).held_as(state).array
            if _is_inexact(out)
            else _no_tangent(jnp.shape(out))
            for out, state in zip(outs, self.leaving, strict=True)
        ]


def custom_vjp(call: Call) -> list[Value]:
    """Computes a `jax.custom_vjp` function."""
    closed, leaving = call.rewrite()
    consts, args = _split(call)
    fun = jax.custom_vjp(_function(call.eqn, closed, consts))
    rules = _VjpRules(call, leaving)
    fun.defvjp(rules.forward, rules.backward)
    return values_of(fun(*args), leaving)


class _VjpRules:
    """The two rules of a `jax.custom_vjp` function, traced when they are first needed."""

    def __init__(self, call: Call, leaving: Sequence[State | None]) -> None:
        self.call, self.leaving = call, leaving
        self.moving = _differentiable(call.eqn)
        self.residual_states: list[State | None] = []

    @functools.cached_property
    def _traced(self) -> tuple[ClosedJaxpr, ClosedJaxpr]:
        """The jaxprs of the forward rule, whose last outputs are residuals, and of the backward."""
        eqn, moving = self.call.eqn, self.moving
        treedefs: list[Any] = []

        def forward(args: Sequence[Any]) -> list[Any]:
            def original(*floats: Any) -> list[Any]:
                return evaluate(eqn, _merged(args, moving, floats))

            outs, pullback = jax.vjp(original, *(args[i] for i in moving))
            residuals, treedef = jax.tree.flatten(pullback)
            treedefs[:] = [treedef]
            return [*outs, *residuals]

        def backward(residuals: Sequence[Any], cotangents: Sequence[Any]) -> Any:
            given = iter(cotangents)
            full = [
                next(given) if _is_inexact(var) else _no_tangent(aval_of(var).shape)
                for var in eqn.outvars
            ]
            return treedefs[0].unflatten(residuals)(full)

        traced = jax.make_jaxpr(forward)(_specs(eqn))
        outvars = open_jaxpr(traced).outvars
        results = [spec_of(aval_of(var), dtype_of_var(var)) for var in outvars]
        count = len(eqn.outvars)
        floats = [r for r in results[:count] if jnp.issubdtype(r.dtype, jnp.inexact)]
        return traced, jax.make_jaxpr(backward)(results[count:], floats)

    @functools.cached_property
    def _uses(self) -> tuple[Uses, Uses]:
        """What the values of both rules are used for; a residual as the backward rule uses it."""
        traced, back = map(open_jaxpr, self._traced)
        call = self.call
        states = [call.entering[i] for i in self.moving]
        ends = [
            PRODUCT if state is not None and state.kind is Kind.NARROW else OUTPUT
            for state in states
        ]
        lookahead = call.interpreter.lookahead
        after = lookahead.uses(back, ends, call.region)
        residuals = len(traced.outvars) - len(self.leaving)
        outputs = [*call.wanted, *after.inputs[:residuals]]
        return lookahead.uses(traced, outputs, call.region), after

    def forward(self, *arrays: Any) -> tuple[list[Any], list[Any]]:
        """Returns the results, and what is kept for the backward pass."""
        traced, _ = self._traced
        uses, _ = self._uses
        call, count = self.call, len(self.leaving)
        consts, _ = _split(call)
        args = values_of([*consts, *arrays], call.entering)
        results = call.interpreter.run(open_jaxpr(traced), traced.consts, args, uses, call.region)
        self.residual_states = [result.state for result in results[count:]]
        return arrays_as(results[:count], self.leaving), [r.array for r in results[count:]]

    def backward(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the gradients of the operands, in the dtypes they are held in."""
        _, back = self._traced
        _, uses = self._uses
        call = self.call
        moved = [_is_inexact(var) for var in call.eqn.outvars]
        pairs = zip(cotangents, self.leaving, moved, strict=True)
        floats = [Value(cotangent, state) for cotangent, state, is_moved in pairs if is_moved]
        args = [*values_of(residuals, self.residual_states), *floats]
        results = call.interpreter.run(open_jaxpr(back), back.consts, args, uses, call.region)
        states = [call.entering[i] for i in self.moving]
        none = [None] * len(call.args)
        gradients = _merged(none, self.moving, arrays_as(results, states))
        return tuple(gradients[_closed_over(call.eqn) :])


def custom_vmap(call: Call) -> list[Value]:
    """Computes a `jax.custom_batching.custom_vmap` function."""
    closed, leaving = call.rewrite()
    fun = jax.custom_batching.custom_vmap(jaxpr_as_fun(closed))
    eqn, interpreter = call.eqn, call.interpreter

    @fun.def_vmap
    def _(axis_size: int, in_batched: Sequence[bool], *arrays: Any) -> tuple[Any, Any]:
        axes = [0 if batched else None for batched in in_batched]
        original = jax.vmap(lambda *each: evaluate(eqn, each), in_axes=axes, axis_size=axis_size)
        specs = [
            jax.ShapeDtypeStruct(jnp.shape(array), dtype_of_var(atom))
            for array, atom in zip(arrays, eqn.invars, strict=True)
        ]
        traced = jax.make_jaxpr(original)(*specs)
        uses = interpreter.lookahead.uses(open_jaxpr(traced), call.wanted, call.region)
        args = values_of(arrays, call.entering)
        results = interpreter.run(open_jaxpr(traced), traced.consts, args, uses, call.region)
        return arrays_as(results, leaving), [True] * len(leaving)

    return values_of(fun(*call.arrays), leaving)
