"""Calls, loops and branches: their jaxprs are rewritten, and what they hand on keeps one dtype."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jaxmp._jaxpr import Inner, consts_of_scan, inner_jaxprs
from jaxmp._rebind import evaluate, in_place_of, shard_map_arguments, with_jaxprs
from jaxmp.autocast import _custom_rules
from jaxmp.autocast._call import Call
from jaxmp.autocast._lookahead import DELICATE, Uses, accumulators, is_island
from jaxmp.autocast._places import of_turn, recomputed, stacked, without_place
from jaxmp.autocast._region import Region
from jaxmp.autocast._values import FULL, Kind, State, Value, as_written, join, values_of
from jaxmp.matmul import remat_policy

if TYPE_CHECKING:
    from jaxmp.autocast._interpret import Interpreter


def call(
    interpreter: "Interpreter", eqn: JaxprEqn, args: list[Value], uses: Uses, region: Region
) -> list[Value]:
    """Computes an equation that has jaxprs inside."""
    if id(eqn) in uses.inlined and not region.is_full:
        return _inline(interpreter, eqn, args, uses, region)
    wanted = [uses.of_var.get(var, 0) for var in eqn.outvars]
    handler = _HANDLERS.get(eqn.primitive.name, _call)
    return handler(Call(interpreter, eqn, args, wanted, region))


def _inline(
    interpreter: "Interpreter", eqn: JaxprEqn, args: list[Value], uses: Uses, region: Region
) -> list[Value]:
    """Computes what a call computes in its place."""
    (inner,) = inner_jaxprs(eqn)
    wanted = [uses.of_var.get(var, 0) for var in eqn.outvars]
    inside = interpreter.lookahead.uses(inner.jaxpr, wanted, region)
    with in_place_of(eqn):
        return interpreter.run(inner.jaxpr, inner.consts, args, inside, region)


def _jit(call: Call) -> list[Value]:
    """What is only used in full precision inside is widened outside, where all share it.

    Its gradient is then added up with the others in f32.
    """
    (inner,) = inner_jaxprs(call.eqn)
    uses = call.interpreter.lookahead.uses(inner.jaxpr, call.wanted, call.region).inputs
    args = [
        arg.held_as(FULL) if is_island(use) and use & DELICATE and _is_narrow(arg) else arg
        for arg, use in zip(call.args, uses, strict=True)
    ]
    return _call(dataclasses.replace(call, args=args))


def _is_narrow(value: Value) -> bool:
    return value.state is not None and value.state.kind is Kind.NARROW


def _call(call: Call) -> list[Value]:
    closed, states = call.rewrite()
    return _bind(with_jaxprs(call.eqn, [closed]), call.args, states)


def _bind(eqn: JaxprEqn, args: Sequence[Value], states: Sequence[State | None]) -> list[Value]:
    return values_of(evaluate(eqn, [arg.array for arg in args]), states)


_known_policy = functools.lru_cache(maxsize=1024)(remat_policy)


def _remat(call: Call) -> list[Value]:
    call = dataclasses.replace(call, args=list(map(recomputed, call.args)))
    policy = call.eqn.params.get("policy")
    if policy is None:
        return _call(call)
    params = {**call.eqn.params, "policy": _known_policy(policy)}
    return _call(dataclasses.replace(call, eqn=call.eqn.replace(params=params)))


def _scan(call: Call) -> list[Value]:
    (inner,) = inner_jaxprs(call.eqn)
    (outputs,) = call.inner_outputs()
    carries = len(inner.carries)
    same = consts_of_scan(call.eqn, inner) + carries
    args = [recomputed(arg, is_recomputed=False) for arg in call.args]
    turned = dataclasses.replace(call, args=[*args[:same], *map(of_turn, args[same:])])
    args, closed, states = _fixed(turned, inner, outputs)
    states = [*states[:carries], *map(stacked, states[carries:])]
    return _bind(with_jaxprs(call.eqn, [closed]), args, states)


def _while(call: Call) -> list[Value]:
    condition, body = inner_jaxprs(call.eqn)
    flag, outputs = call.inner_outputs()
    args, closed, states = _fixed(call, body, outputs)
    entering = [args[place].state for place in condition.inputs]
    closed_condition, _ = call.rewrite(condition, entering, flag)
    return _bind(with_jaxprs(call.eqn, [closed_condition, closed]), args, states)


def _fixed(
    call: Call, inner: Inner, outputs: Sequence[int]
) -> tuple[list[Value], ClosedJaxpr, list[State | None]]:
    """Finds the state that each carry of a loop enters, stays and leaves in.

    A carry starts as it is given, and is joined with what a turn makes of it until that is the
    same. States rise from given to narrow or f32, so this takes three turns at most.
    """
    args = list(call.args)
    places = {out: inner.inputs[into] for out, into in inner.carries}
    for out in accumulators(inner):
        args[places[out]] = args[places[out]].held_as(FULL)
    while True:
        entering = [args[place].state for place in inner.inputs]
        closed, states = call.rewrite(inner, entering, outputs)
        fixed = list(states)
        for out, place in places.items():
            fixed[out] = join(args[place].state, states[out])
        if all(fixed[out] == args[place].state for out, place in places.items()):
            break
        for out, place in places.items():
            args[place] = args[place].held_as(fixed[out])
    if fixed != states:
        closed, _ = call.rewrite(inner, entering, outputs, fixed)
    return args, closed, fixed


def _cond(call: Call) -> list[Value]:
    branches = inner_jaxprs(call.eqn)
    entering = call.entering[1:]
    found = [call.rewrite(branch, entering, call.wanted)[1] for branch in branches]
    states = [functools.reduce(join, each) for each in zip(*found, strict=True)]
    closed = [call.rewrite(branch, entering, call.wanted, states)[0] for branch in branches]
    return _bind(with_jaxprs(call.eqn, closed), call.args, states)


def _shard_map(call: Call) -> list[Value]:
    call = dataclasses.replace(call, args=list(map(without_place, call.args)))
    (inner,) = inner_jaxprs(call.eqn)
    uses = call.interpreter.lookahead.uses(inner.jaxpr, call.wanted, call.region)
    fun = call.interpreter.function(inner, call.entering, uses, call.region)
    states: list[State | None] = []

    def local(*arrays: Any) -> tuple[Any, ...]:
        results = fun(*arrays)
        states[:] = [result.state for result in results]
        return tuple(result.array for result in results)

    sharded = jax.shard_map(local, **shard_map_arguments(call.eqn))
    return values_of(sharded(*call.arrays), states)


def _as_written(call: Call) -> list[Value]:
    return as_written(call.eqn, call.args)


_HANDLERS = {
    "jit": _jit,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
    "remat2": _remat,
    "custom_jvp_call": _custom_rules.custom_jvp,
    "custom_vjp_call": _custom_rules.custom_vjp,
    "custom_vmap_call": _custom_rules.custom_vmap,
    # Its functions have to agree with each other, and linear algebra is f32 anyway.
    "custom_linear_solve": _as_written,
}
