"""Running a program with a look at every value: calls, loops and branches are opened.

The order in which equations are looked at is that of `Dataflow.equations`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxmp._jaxpr import Inner, consts_of_scan, inner_jaxprs
from jaxmp._rebind import evaluate, in_place_of


class Record(NamedTuple):
    """What was seen of an equation.

    In a scan all of it is stacked along a first axis. Of a while loop, whose length is not known,
    the first turn is kept that is wanted. Of a branch that was not taken it is zeros.

    Attributes:
        value: a pytree of arrays.
        turns: for each while loop around, outermost first, the turn that was kept: i32[].
    """

    value: Any
    turns: tuple[Any, ...] = ()


@dataclasses.dataclass(frozen=True)
class Observer:
    """Computes a program anew, and records something of every equation.

    Attributes:
        look: called with the position of an equation, the equation, its operands and its results;
            returns the value of a record.
        is_wanted: whether a value, perhaps a stacked one, is worth keeping: bool[].
    """

    look: Callable[[int, JaxprEqn, Sequence[Any], Sequence[Any]], Any]
    is_wanted: Callable[[Any], jax.Array]

    def run(
        self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], first: int = 0
    ) -> tuple[list[Any], list[Any]]:
        """Returns the outputs of a jaxpr and a record of each of its equations.

        Args:
            jaxpr: a jaxpr.
            consts: its constants.
            args: its inputs.
            first: the position of its first equation.
        """
        values = dict(zip(jaxpr.constvars, consts, strict=True))
        values |= dict(zip(jaxpr.invars, args, strict=True))
        records: list[Any] = []

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        last = _last_uses(jaxpr)
        for i, eqn in enumerate(jaxpr.eqns):
            operands = list(map(read, eqn.invars))
            results, seen = self._equation(eqn, operands, first + len(records))
            values.update(zip(eqn.outvars, results, strict=True))
            records += seen
            for var in _variables(*eqn.invars, *eqn.outvars):
                if last.get(var, i) == i:
                    values.pop(var, None)
        return list(map(read, jaxpr.outvars)), records

    def _equation(self, eqn: JaxprEqn, args: list[Any], first: int) -> tuple[list[Any], list[Any]]:
        inners = inner_jaxprs(eqn)
        if not inners:
            results = evaluate(eqn, args)
            return results, [Record(self.look(first, eqn, args, results))]
        name = eqn.primitive.name
        if name == "scan":
            return self._scan(eqn, inners[0], args, first)
        if name == "while":
            return self._while(inners[0], inners[1], args, first)
        if name == "cond" and not _is_unit(eqn, inners):
            return self._cond(inners, args, first)
        if _is_unit(eqn, inners):
            return self._unit(eqn, inners, args, first)
        with in_place_of(eqn):
            return self._enter(inners[0], args, first)

    def _enter(self, inner: Inner, args: Sequence[Any], first: int) -> tuple[list[Any], list[Any]]:
        return self.run(inner.jaxpr, inner.consts, [args[i] for i in inner.inputs], first)

    def _unit(
        self, eqn: JaxprEqn, inners: Sequence[Inner], args: list[Any], first: int
    ) -> tuple[list[Any], list[Any]]:
        """Looks at an equation from outside: all of those within have its record."""
        results = evaluate(eqn, args)
        positions = range(first, first + sum(count_of(inner.jaxpr) for inner in inners))
        return results, [Record(self.look(i, eqn, args, results)) for i in positions]

    def _scan(
        self, eqn: JaxprEqn, inner: Inner, args: list[Any], first: int
    ) -> tuple[list[Any], list[Any]]:
        same, carried = consts_of_scan(eqn, inner), len(inner.carries)

        def body(carry: list[Any], parts: list[Any]) -> Any:
            results, records = self._enter(inner, [*args[:same], *carry, *parts], first)
            return results[:carried], (results[carried:], records)

        carry, (stacked, records) = lax.scan(
            body,
            args[same : same + carried],
            args[same + carried :],
            length=inner.times,
            reverse=eqn.params["reverse"],
        )
        return [*carry, *stacked], records

    def _while(
        self, condition: Inner, body: Inner, args: list[Any], first: int
    ) -> tuple[list[Any], list[Any]]:
        start = len(args) - len(body.carries)

        def test(state: Any) -> Any:
            (flag,), _ = self._enter(condition, [*args[:start], *state[0]], first)
            return flag

        def turn(carry: list[Any]) -> tuple[list[Any], list[Any]]:
            now = [*args[:start], *carry]
            _, seen = self._enter(condition, now, first)
            results, more = self._enter(body, now, first + len(seen))
            return results, [*seen, *more]

        def step(state: Any) -> Any:
            carry, number, kept = state
            results, seen = turn(carry)
            kept = [
                _select(self.is_wanted(old.value), old, Record(new.value, (number, *new.turns)))
                for old, new in zip(kept, seen, strict=True)
            ]
            return results, number + 1, kept

        _, shapes = jax.eval_shape(turn, args[start:])
        blanks = [
            Record(_blank(value), (jnp.int32(0), *map(_blank, turns))) for value, turns in shapes
        ]
        results, _, records = lax.while_loop(test, step, (args[start:], jnp.int32(0), blanks))
        return results, records

    def _cond(
        self, inners: Sequence[Inner], args: list[Any], first: int
    ) -> tuple[list[Any], list[Any]]:
        counts = [count_of(inner.jaxpr) for inner in inners]
        firsts = [first + sum(counts[:i]) for i in range(len(counts))]

        def branch_of(i: int) -> Callable[..., Any]:
            return lambda *operands: self._enter(inners[i], [None, *operands], firsts[i])

        branches = list(map(branch_of, range(len(inners))))
        shapes = [jax.eval_shape(branch, *args[1:])[1] for branch in branches]

        def full_branch(i: int) -> Callable[..., Any]:
            def branch(*operands: Any) -> Any:
                results, seen = branches[i](*operands)
                records = [*map(functools.partial(map, _blank), shapes)]
                return results, [
                    record for j, own in enumerate(records) for record in (seen if i == j else own)
                ]

            return branch

        return lax.switch(args[0], list(map(full_branch, range(len(inners)))), *args[1:])


# What runs on several devices, or only describes a function.
_UNITS = frozenset({"shard_map", "custom_linear_solve", "xla_pmap"})


def _is_unit(eqn: JaxprEqn, inners: Sequence[Inner]) -> bool:
    """Whether an equation is looked at from outside only."""
    name = eqn.primitive.name
    if name == "cond":
        return bool(eqn.params.get("branches_platforms"))
    return name in _UNITS or (name != "while" and len(inners) > 1)


def _last_uses(jaxpr: Jaxpr) -> dict[Var, int]:
    """Returns after which equation each variable is needed no more."""
    last = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in _variables(*eqn.invars)}
    return last | dict.fromkeys(_variables(*jaxpr.outvars), len(jaxpr.eqns))


def _variables(*atoms: Any) -> set[Var]:
    return {atom for atom in atoms if not isinstance(atom, Literal)}


def count_of(jaxpr: Jaxpr) -> int:
    """Returns how many equations a program has with every call, loop and branch opened."""
    return sum(
        sum(count_of(inner.jaxpr) for inner in inners) if (inners := inner_jaxprs(eqn)) else 1
        for eqn in jaxpr.eqns
    )


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop around an equation.

    Attributes:
        position: of its first equation.
        length: its turns; None for a while loop.
        is_reversed: whether the last turn runs first.
    """

    position: int
    length: int | None
    is_reversed: bool = False


class Place(NamedTuple):
    """Where an equation stands.

    Attributes:
        eqn: what is looked at: the equation, or the one around it that is looked at from outside.
        loops: those around it, outermost first.
    """

    eqn: JaxprEqn
    loops: tuple[Loop, ...]


def places_of(jaxpr: Jaxpr, around: tuple[Loop, ...] = (), first: int = 0) -> list[Place]:
    """Returns the place of each equation."""
    found: list[Place] = []
    for eqn in jaxpr.eqns:
        inners, position = inner_jaxprs(eqn), first + len(found)
        loops, name = around, eqn.primitive.name
        if name == "scan":
            loops = (*around, Loop(position, eqn.params["length"], eqn.params["reverse"]))
        elif name == "while":
            loops = (*around, Loop(position, None))
        if not inners:
            found.append(Place(eqn, around))
        for inner in inners:
            if _is_unit(eqn, inners):
                found += [Place(eqn, around)] * count_of(inner.jaxpr)
            else:
                found += places_of(inner.jaxpr, loops, first + len(found))
    return found


def _blank(record: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), record)


def _select(flag: jax.Array, one: Any, other: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(flag, a, b), one, other)
