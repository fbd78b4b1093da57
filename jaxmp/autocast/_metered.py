"""A program whose products take scales and weights from outside, and count what they see."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.sharding import PartitionSpec

from jaxmp._jaxpr import Inner, consts_of_scan, inner_jaxprs
from jaxmp._product import product_p
from jaxmp._rebind import evaluate, in_place_of, shard_map_arguments
from jaxmp.autocast._sites import Site, is_entered, is_site, weight_side
from jaxmp.fp8._meter import counts, metered
from jaxmp.fp8._state import Given


class _Running(NamedTuple):
    """A site where it is computed: in one turn of the scans around it.

    Attributes:
        given: what it is given.
        turns: see `Site`, for the scans inside of which it is still.
    """

    given: Given
    turns: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Metered:
    """Computes a jaxpr whose products take scales and count what they see.

    Attributes:
        every: whether all numbers are counted, and not just the largest.
    """

    every: bool = False

    def __call__(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        args: Sequence[Any],
        sites: Sequence[Site],
        given: Sequence[Given],
    ) -> list[Any]:
        """Returns the outputs of a jaxpr.

        Args:
            jaxpr: the program.
            consts: of it.
            args: of it.
            sites: what `find_sites` gave.
            given: what each site is given.
        """
        running = [_Running(own, site.turns) for site, own in zip(sites, given, strict=True)]
        return self._run(jaxpr, consts, args, running)

    def _run(
        self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], running: list[_Running]
    ) -> list[Any]:
        values = dict(zip(jaxpr.constvars, consts, strict=True))
        values |= dict(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        rest = iter(running)
        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            own = list(itertools.islice(rest, self._count(eqn)))
            if not own:
                results = evaluate(eqn, operands)
            elif eqn.primitive is product_p:
                results = [self._product(eqn, operands, own[0].given)]
            else:
                with in_place_of(eqn):
                    results = _HANDLERS[eqn.primitive.name](self, eqn, operands, own)
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _count(self, eqn: JaxprEqn) -> int:
        if is_site(eqn):
            return 1
        return sum(map(self._count_inside, inner_jaxprs(eqn))) if is_entered(eqn) else 0

    def _count_inside(self, inner: Inner) -> int:
        return sum(map(self._count, inner.jaxpr.eqns))

    def _product(self, eqn: JaxprEqn, operands: list[Any], given: Given) -> Any:
        extras = given.extras()
        params = eqn.params | {"extras": tuple(extras)}
        (result,) = evaluate(eqn.replace(params=params), [*operands, *extras.values()])
        if given.meter is None:
            return result
        with in_place_of(eqn):
            side = weight_side(eqn)
            seen = [counts(operands[1 - side], every=self.every), given.seen]
            if given.seen is None:
                seen[1] = counts(operands[side], every=self.every)
            return metered(result, given.meter, jnp.stack(seen), every=self.every)

    def _inside(self, inner: Inner, running: Sequence[_Running]) -> Callable[..., list[Any]]:
        """Returns an inner jaxpr as a function of its arguments and of what its sites are given."""
        turns = [each.turns for each in running]

        def fun(args: Sequence[Any], given: Sequence[Any]) -> list[Any]:
            own = [_Running(*pair) for pair in zip(given, turns, strict=True)]
            return self._run(inner.jaxpr, inner.consts, args, own)

        return fun

    def call(self, eqn: JaxprEqn, args: list[Any], running: list[_Running]) -> list[Any]:
        (inner,) = inner_jaxprs(eqn)
        fun = self._inside(inner, running)
        fun.__name__ = eqn.params["name"]
        return jax.jit(fun)(args, _given(running))

    def remat(self, eqn: JaxprEqn, args: list[Any], running: list[_Running]) -> list[Any]:
        (inner,) = inner_jaxprs(eqn)
        options = {key: eqn.params[key] for key in ("prevent_cse", "policy")}
        return jax.checkpoint(self._inside(inner, running), **options)(args, _given(running))

    def shard_map(self, eqn: JaxprEqn, args: list[Any], running: list[_Running]) -> list[Any]:
        (inner,) = inner_jaxprs(eqn)
        options = shard_map_arguments(eqn)
        specs, results = options.pop("in_specs"), options.pop("out_specs")
        sharded = jax.shard_map(
            self._inside(inner, running),
            in_specs=(list(specs), PartitionSpec()),
            out_specs=list(results),
            **options,
        )
        return sharded(args, _given(running))

    def cond(self, eqn: JaxprEqn, args: list[Any], running: list[_Running]) -> list[Any]:
        rest, branches, given = iter(running), [], []
        for place, inner in enumerate(inner_jaxprs(eqn)):
            own = list(itertools.islice(rest, self._count_inside(inner)))
            branches.append(functools.partial(_branch, self._inside(inner, own), place))
            given.append(_given(own))
        return lax.switch(args[0], branches, args[1:], given)

    def scan(self, eqn: JaxprEqn, args: list[Any], running: list[_Running]) -> list[Any]:
        (inner,) = inner_jaxprs(eqn)
        first, carried = consts_of_scan(eqn, inner), len(inner.carries)
        consts, carry, xs = args[:first], args[first : first + carried], args[first + carried :]
        is_own = [each.turns[0] is not None for each in running]
        inside = [each._replace(turns=each.turns[1:]) for each in running]
        fun = self._inside(inner, inside)

        def body(carry: list[Any], scanned: Any) -> tuple[list[Any], list[Any]]:
            xs, own = scanned
            of_turn = iter(own)
            given = [
                next(of_turn) if own else each.given
                for own, each in zip(is_own, running, strict=True)
            ]
            results = fun([*consts, *carry, *xs], given)
            return results[:carried], results[carried:]

        own = [each.given for own, each in zip(is_own, running, strict=True) if own]
        options = {key: eqn.params[key] for key in ("length", "reverse", "unroll")}
        carry, stacked = lax.scan(body, carry, (xs, own), **options)
        return [*carry, *stacked]


def _given(running: Sequence[_Running]) -> list[Given]:
    return [each.given for each in running]


def _branch(
    fun: Callable[..., Any], place: int, args: Sequence[Any], given: Sequence[Any]
) -> list[Any]:
    return fun(args, given[place])


_HANDLERS: dict[str, Callable[..., list[Any]]] = {
    "jit": Metered.call,
    "remat2": Metered.remat,
    "shard_map": Metered.shard_map,
    "cond": Metered.cond,
    "scan": Metered.scan,
}
