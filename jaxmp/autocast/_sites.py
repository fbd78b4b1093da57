"""The products of a program that have a state, and the program with that state."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.sharding import PartitionSpec

from jaxmp._errors import bullet_list
from jaxmp._jaxpr import Inner, inner_jaxprs, is_plain_call, module_path, rank_differs
from jaxmp._product import product_p
from jaxmp._rebind import evaluate, in_place_of, shard_map_arguments
from jaxmp.fp8._meter import counts, metered


@dataclasses.dataclass(frozen=True)
class Site:
    """A product that has a state.

    Attributes:
        name: of the modules around it, and a number if there are several.
        recipe: how it is quantized.
        turns: for each scan around it how many turns have a state of their own, or None where all
            share one: where the weight is the same in every turn.
    """

    name: str
    recipe: Any
    turns: tuple[int | None, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """How many states there are, along each scan that has several."""
        return tuple(count for count in self.turns if count is not None)


def find_sites(jaxpr: Jaxpr, takes: Callable[[Any], bool]) -> list[Site]:
    """Returns the products whose recipe `takes` says yes to, in the order of the program.

    Those in a while loop, in custom derivatives and kernels are not among them: they compute
    without a state.
    """
    found = _Search(takes, itertools.count()).find(jaxpr, "", [frozenset()] * len(jaxpr.invars))
    seen: dict[str, int] = {}
    sites = []
    for each in found:
        seen[each.site.name] = seen.get(each.site.name, 0) + 1
        number = seen[each.site.name]
        name = each.site.name if number == 1 else f"{each.site.name}_{number}"
        sites.append(dataclasses.replace(each.site, name=name))
    return sites


def check_sites(sites: Sequence[Site], meters: Mapping[str, Any]) -> None:
    """Raises ValueError if a state is not that of the products of a program."""
    wanted = {site.name: site.shape for site in sites}
    given = {name: meter.shape[:-2] for name, meter in meters.items()}
    if wanted != given:
        differing = sorted(
            name for name in {*wanted, *given} if wanted.get(name) != given.get(name)
        )
        lines = [
            f"{name}: state {given.get(name)}, product {wanted.get(name)}" for name in differing
        ]
        raise ValueError(
            "The fp8 state is of another model. Products, and the axes of their layers, that "
            f"differ:\n{bullet_list(lines)}\nMake one with jaxmp.init_fp8_state for this function "
            "and policy."
        )


class _Found(NamedTuple):
    """A site, and the scans in whose turns its weight differs."""

    site: Site
    differs_in: frozenset[int]


class _Search(NamedTuple):
    """Looks for sites.

    Attributes:
        takes: see `find_sites`.
        scans: numbers for the scans that are entered.
    """

    takes: Callable[[Any], bool]
    scans: Iterator[int]

    def find(self, jaxpr: Jaxpr, stack: str, entering: Sequence[frozenset[int]]) -> list[_Found]:
        """Returns the sites of a jaxpr; `entering` says in which scans its inputs differ."""
        differs = dict(zip(jaxpr.invars, entering, strict=True))
        found: list[_Found] = []
        for eqn in jaxpr.eqns:
            own = [
                frozenset() if isinstance(atom, Literal) else differs.get(atom, frozenset())
                for atom in eqn.invars
            ]
            here = f"{stack}/{eqn.source_info.name_stack}"
            if _is_product(eqn, self.takes):
                roles = eqn.params["roles"]
                weight = own[roles.index("w") if "w" in roles else 1]
                name = module_path(here).strip("/").replace("/", ".") or "product"
                found.append(_Found(Site(name, eqn.params["recipe"]), weight))
            elif _is_entered(eqn):
                for inner in inner_jaxprs(eqn):
                    entered = [own[place] for place in inner.inputs]
                    if eqn.primitive.name == "scan":
                        found += self._in_scan(eqn, inner, here, entered)
                    else:
                        found += self.find(inner.jaxpr, here, entered)
            differs.update(dict.fromkeys(eqn.outvars, frozenset().union(*own)))
        return found

    def _in_scan(
        self, eqn: JaxprEqn, inner: Inner, stack: str, entering: Sequence[frozenset[int]]
    ) -> list[_Found]:
        scan, consts = next(self.scans), _consts(eqn, inner)
        entering = [each if i < consts else each | {scan} for i, each in enumerate(entering)]
        found = []
        for site, differs_in in self.find(inner.jaxpr, stack, entering):
            turns = (inner.times if scan in differs_in else None, *site.turns)
            found.append(_Found(dataclasses.replace(site, turns=turns), differs_in))
        return found


def _consts(eqn: JaxprEqn, inner: Inner) -> int:
    """Returns how many inputs of a scan are the same in every turn; they come first."""
    scanned = sum(map(rank_differs, eqn.invars, inner.jaxpr.invars))
    return len(eqn.invars) - scanned - len(inner.carries)


def _is_product(eqn: JaxprEqn, takes: Callable[[Any], bool]) -> bool:
    if eqn.primitive is not product_p or eqn.params["recipe"] is None:
        return False
    return "g" not in eqn.params["roles"] and takes(eqn.params["recipe"])


class _Running(NamedTuple):
    """The state of a site where it is computed: for one turn of the scans around, or for all.

    Attributes:
        arrays: its scales, f32[..., 3], or None for those of now; and its meter, f32[..., 3, BINS].
        turns: see `Site`, for the scans inside of which it is still.
    """

    arrays: tuple[Any, Any]
    turns: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class Metered:
    """Computes a jaxpr whose products take scales and count what they see.

    Attributes:
        takes: whether the products of a recipe have a state.
        every: whether all numbers are counted, and not just the largest.
    """

    takes: Callable[[Any], bool]
    every: bool = False

    def __call__(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        args: Sequence[Any],
        sites: Sequence[Site],
        states: Sequence[tuple[Any, Any]],
    ) -> list[Any]:
        """Returns the outputs of a jaxpr.

        Args:
            jaxpr: the program.
            consts: of it.
            args: of it.
            sites: what `find_sites` gave.
            states: for each site its scales, f32[..., 3], or None for those of now, and its meter,
                f32[..., 3, BINS].
        """
        running = [_Running(state, s.turns) for s, state in zip(sites, states, strict=True)]
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
                results = [self._product(eqn, operands, *own[0].arrays)]
            else:
                with in_place_of(eqn):
                    results = _HANDLERS[eqn.primitive.name](self, eqn, operands, own)
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _count(self, eqn: JaxprEqn) -> int:
        if _is_product(eqn, self.takes):
            return 1
        return sum(map(self._count_inside, inner_jaxprs(eqn))) if _is_entered(eqn) else 0

    def _count_inside(self, inner: Inner) -> int:
        return sum(map(self._count, inner.jaxpr.eqns))

    def _product(self, eqn: JaxprEqn, operands: list[Any], scales: Any, meter: Any) -> Any:
        kept = [] if scales is None else [scales]
        with in_place_of(eqn):
            (result,) = evaluate(eqn, [*operands, *kept])
            found = [counts(operand, every=self.every) for operand in operands]
            if eqn.params["roles"][0] == "w":
                found.reverse()
            return metered(result, meter, jnp.stack(found), every=self.every)

    def _inside(self, inner: Inner, running: Sequence[_Running]) -> Callable[..., list[Any]]:
        """Returns an inner jaxpr as a function of its arguments and of the states in it."""
        turns = [each.turns for each in running]

        def fun(args: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
            own = [_Running(*pair) for pair in zip(arrays, turns, strict=True)]
            return self._run(inner.jaxpr, inner.consts, args, own)

        return fun

    def call(self, eqn: JaxprEqn, args: list[Any], running: list[_Running]) -> list[Any]:
        (inner,) = inner_jaxprs(eqn)
        fun = self._inside(inner, running)
        fun.__name__ = eqn.params["name"]
        return jax.jit(fun)(args, _arrays(running))

    def remat(self, eqn: JaxprEqn, args: list[Any], running: list[_Running]) -> list[Any]:
        (inner,) = inner_jaxprs(eqn)
        options = {key: eqn.params[key] for key in ("prevent_cse", "policy")}
        return jax.checkpoint(self._inside(inner, running), **options)(args, _arrays(running))

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
        return sharded(args, _arrays(running))

    def cond(self, eqn: JaxprEqn, args: list[Any], running: list[_Running]) -> list[Any]:
        rest, branches, arrays = iter(running), [], []
        for place, inner in enumerate(inner_jaxprs(eqn)):
            own = list(itertools.islice(rest, self._count_inside(inner)))
            branches.append(functools.partial(_branch, self._inside(inner, own), place))
            arrays.append(_arrays(own))
        return lax.switch(args[0], branches, args[1:], arrays)

    def scan(self, eqn: JaxprEqn, args: list[Any], running: list[_Running]) -> list[Any]:
        (inner,) = inner_jaxprs(eqn)
        first, carried = _consts(eqn, inner), len(inner.carries)
        consts, carry, xs = args[:first], args[first : first + carried], args[first + carried :]
        is_own = [each.turns[0] is not None for each in running]
        inside = [each._replace(turns=each.turns[1:]) for each in running]
        fun = self._inside(inner, inside)

        def body(carry: list[Any], scanned: Any) -> tuple[list[Any], list[Any]]:
            xs, own = scanned
            of_turn = iter(own)
            arrays = [
                next(of_turn) if own else each.arrays
                for own, each in zip(is_own, running, strict=True)
            ]
            results = fun([*consts, *carry, *xs], arrays)
            return results[:carried], results[carried:]

        own = [each.arrays for own, each in zip(is_own, running, strict=True) if own]
        options = {key: eqn.params[key] for key in ("length", "reverse", "unroll")}
        carry, stacked = lax.scan(body, carry, (xs, own), **options)
        return [*carry, *stacked]


def _arrays(running: Sequence[_Running]) -> list[tuple[Any, Any]]:
    return [each.arrays for each in running]


def _branch(
    fun: Callable[..., Any], place: int, args: Sequence[Any], arrays: Sequence[Any]
) -> list[Any]:
    return fun(args, arrays[place])


_HANDLERS: dict[str, Callable[..., list[Any]]] = {
    "jit": Metered.call,
    "remat2": Metered.remat,
    "shard_map": Metered.shard_map,
    "cond": Metered.cond,
    "scan": Metered.scan,
}


def _is_entered(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    return is_plain_call(eqn) if name == "jit" else name in _HANDLERS
