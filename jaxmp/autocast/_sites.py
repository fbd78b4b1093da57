"""The products of a program that have a recipe, and where their weights come from."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxmp._dtypes import FLOAT32
from jaxmp._errors import bullet_list
from jaxmp._jaxpr import Inner, consts_of_scan, inner_jaxprs, is_placed_call, module_path
from jaxmp._product import product_p
from jaxmp.fp8._state import ProductState, is_delayed


class Origin(NamedTuple):
    """How a weight comes of an argument.

    Attributes:
        place: which argument.
        moves: equations of one operand, and None where a scan takes one of a stack.
    """

    place: int
    moves: tuple[JaxprEqn | None, ...] = ()

    def weights(self, args: Sequence[Any]) -> Any:
        """Returns the weight; of all layers, if a scan takes one in each turn."""
        value, depth = args[self.place], 0
        for eqn in self.moves:
            if eqn is None:
                depth += 1
                continue
            move = functools.partial(eqn.primitive.bind, **eqn.params)
            for _ in range(depth):
                move = jax.vmap(move)
            value = move(value)
        return value


@dataclasses.dataclass(frozen=True)
class Site:
    """A product that has a recipe.

    Attributes:
        name: of the modules around it, and a number if there are several.
        recipe: how it is quantized.
        turns: for each scan around it how many turns have a state of their own, or None where all
            share one: where the weight is the same in every turn.
        origin: how its weight comes of an argument of the program; None if it is computed.
    """

    name: str
    recipe: Any
    turns: tuple[int | None, ...] = ()
    origin: Origin | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """How many states there are, along each scan that has several."""
        return tuple(count for count in self.turns if count is not None)


def find_sites(jaxpr: Jaxpr) -> list[Site]:
    """Returns the products that have a recipe, in the order of the program.

    Those in a while loop, in custom derivatives and kernels are not among them, nor those in a jit
    with shardings or compiler options: they are given nothing.
    """
    known = [_Known(origin=Origin(i)) for i in range(len(jaxpr.invars))]
    sites = [each.site for each in _Search(itertools.count()).find(jaxpr, "", known)]
    names = _numbered([site.name for site in sites])
    return [dataclasses.replace(site, name=name) for site, name in zip(sites, names, strict=True)]


def _numbered(names: Sequence[str]) -> list[str]:
    """Returns names, of which those that repeat have a number that makes no other name."""
    taken, numbers, found = set(names), dict.fromkeys(names, 1), []
    for name in names:
        own = name
        if numbers[name] > 1:
            own = next(
                each
                for number in itertools.count(numbers[name])
                if (each := f"{name}_{number}") not in taken
            )
            taken.add(own)
        numbers[name] += 1
        found.append(own)
    return found


def check_state(sites: Sequence[Site], state: Mapping[str, ProductState]) -> None:
    """Raises ValueError if a state is not that of the products of a program."""
    products = {site.name: site for site in sites}
    delayed = {site.name for site in sites if is_delayed(site.recipe)}
    lines = [
        f"{name}: {reason}"
        for name in sorted({*delayed, *state})
        if (reason := _misfit(products.get(name), state.get(name))) is not None
    ]
    if lines:
        raise ValueError(
            f"The fp8 state does not fit the function and its policy:\n{bullet_list(lines)}\n"
            "Make it with jaxmp.init_fp8_state for this function, this policy, and a batch of this "
            "size: of one microbatch, if there are several."
        )


def _misfit(site: Site | None, state: ProductState | None) -> str | None:
    """Says in what a product differs from its state, if it does."""
    if site is None:
        return "has a state, but no such matmul is quantized (those of odd sizes are not)"
    if state is None:
        return "has no state"
    if site.recipe != state.recipe:
        return f"has a state of the recipe {state.recipe}, but the policy says {site.recipe}"
    axes = state.history.shape[:-2]
    if axes != site.shape:
        return f"has a state for layers {axes}, but layers {site.shape} in the function"
    return None


class _Known(NamedTuple):
    """What is known of a value.

    Attributes:
        differs_in: the scans in whose turns it differs.
        origin: how it comes of an argument of the program, if by moves alone.
    """

    differs_in: frozenset[int] = frozenset()
    origin: Origin | None = None


class _Found(NamedTuple):
    """A site, and the scans in whose turns its weight differs."""

    site: Site
    differs_in: frozenset[int]


class _Search(NamedTuple):
    """Looks for sites.

    Attributes:
        scans: numbers for the scans that are entered.
    """

    scans: Iterator[int]

    def find(self, jaxpr: Jaxpr, stack: str, entering: Sequence[_Known]) -> list[_Found]:
        """Returns the sites of a jaxpr; `entering` says what is known of its inputs."""
        known = dict(zip(jaxpr.invars, entering, strict=True))
        found: list[_Found] = []
        for eqn in jaxpr.eqns:
            own = [
                _Known() if isinstance(atom, Literal) else known.get(atom, _Known())
                for atom in eqn.invars
            ]
            here = f"{stack}/{eqn.source_info.name_stack}"
            if is_site(eqn):
                weight = own[weight_side(eqn)]
                name = module_path(here).strip("/").replace("/", ".") or "product"
                site = Site(name, eqn.params["recipe"], origin=weight.origin)
                found.append(_Found(site, weight.differs_in))
            elif is_entered(eqn):
                for inner in inner_jaxprs(eqn):
                    found += self._inside(eqn, inner, here, [own[i] for i in inner.inputs])
            differs_in = frozenset().union(*(each.differs_in for each in own))
            origin = own[0].origin if _is_move(eqn) else None
            origin = origin and origin._replace(moves=(*origin.moves, eqn))
            known.update(dict.fromkeys(eqn.outvars, _Known(differs_in, origin)))
        return found

    def _inside(
        self, eqn: JaxprEqn, inner: Inner, stack: str, entering: Sequence[_Known]
    ) -> list[_Found]:
        name = eqn.primitive.name
        if name == "shard_map":
            entering = [each._replace(origin=None) for each in entering]
        if name != "scan":
            return self.find(inner.jaxpr, stack, entering)
        scan, places = next(self.scans), range(len(entering))
        first, carried = consts_of_scan(eqn, inner), len(inner.carries)
        entering = [
            each if i < first else _in_turn(each, scan, is_carry=i < first + carried)
            for i, each in zip(places, entering, strict=True)
        ]
        found = []
        for site, differs_in in self.find(inner.jaxpr, stack, entering):
            turns = (inner.times if scan in differs_in else None, *site.turns)
            found.append(_Found(dataclasses.replace(site, turns=turns), differs_in))
        return found


def _in_turn(known: _Known, scan: int, *, is_carry: bool) -> _Known:
    origin = None if is_carry else known.origin
    origin = origin and origin._replace(moves=(*origin.moves, None))
    return _Known(known.differs_in | {scan}, origin)


_MOVES = frozenset({"transpose", "reshape", "squeeze", "expand_dims"})


def _is_move(eqn: JaxprEqn) -> bool:
    """Whether an equation gives the numbers that it takes, in another shape or in f32."""
    if eqn.primitive.name == "convert_element_type":
        return eqn.params["new_dtype"] == FLOAT32
    return eqn.primitive.name in _MOVES and len(eqn.invars) == 1


def is_site(eqn: JaxprEqn) -> bool:
    """Whether an equation is a product with a recipe, and no gradient of one."""
    is_product = eqn.primitive is product_p and eqn.params["recipe"] is not None
    return is_product and "g" not in eqn.params["roles"]


def weight_side(eqn: JaxprEqn) -> int:
    """Returns which operand of a product is the weight."""
    roles = eqn.params["roles"]
    return roles.index("w") if "w" in roles else 1


_ENTERED = frozenset({"remat2", "shard_map", "cond", "scan"})


def is_entered(eqn: JaxprEqn) -> bool:
    """Whether the jaxprs inside an equation are looked into."""
    if eqn.primitive.name == "jit":
        return not is_placed_call(eqn)
    return eqn.primitive.name in _ENTERED
