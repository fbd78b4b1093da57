"""Where weights lie on a mesh, followed from the arguments to the products."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp._jaxpr import aval_of
from jaxmp._placement import Placement
from jaxmp._product import GATHERED, PLAIN_PRODUCTS
from jaxmp.autocast import _rules
from jaxmp.autocast._values import WEIGHTS, State, Value


def place_of(value: Value) -> Placement | None:
    """Returns the placement of a value, if it is known."""
    return None if value.state is None else value.state.place


def without_place(value: Value) -> Value:
    """Returns a value of which is not known where it is."""
    return _at(value, None)


def placed(eqn: JaxprEqn, args: Sequence[Value], results: Sequence[Value]) -> list[Value]:
    """Returns results with the placement that the operands of an equation let them have."""
    known = [place for place in map(place_of, args) if place is not None]
    if not known or eqn.primitive.name in _rules.PAIRWISE:
        return list(results)
    place = _place_of_result(eqn, args, known)
    if eqn.primitive.name == "gather" and place_of(args[0]) is not None:
        return [Value(known[0].looked_up(eqn, value.array), value.state) for value in results]
    return [
        _at(value, place if value.state is not None and value.state.kind in WEIGHTS else None)
        for value in results
    ]


def met(eqn: JaxprEqn, args: list[Value]) -> list[Value]:
    """Returns operands, of which those that meet activations are whole: biases, scales of norms.

    Else the compiler could shard the activations as these are. A table is sharded for its lookup.
    """
    known = [place for place in map(place_of, args) if place is not None]
    name = eqn.primitive.name
    if not known or name in PLAIN_PRODUCTS:
        return args
    if name == "gather":
        table = args[0]
        array = known[0].table(eqn, table.array) if place_of(table) else table.array
        return [Value(array, table.state), *args[1:]]
    others = [arg for arg in args if arg.state is not None and arg.state.place is None]
    is_met = any(np.ndim(arg.array) for arg in others)
    if not is_met or _place_of_result(eqn, args, known) is not None:
        return args
    return list(map(_whole, args))


def _whole(value: Value) -> Value:
    place = place_of(value)
    if place is None:
        return value
    return _at(Value(place.gather_exactly(value.array), value.state), None)


def _place_of_result(
    eqn: JaxprEqn, args: Sequence[Value], known: Sequence[Placement]
) -> Placement | None:
    name = eqn.primitive.name
    if name in _rules.OF_ELEMENTS and name != "convert_element_type":
        shape = aval_of(eqn.outvars[0]).shape
        like = [
            place_of(arg)
            for arg, atom in zip(args, eqn.invars, strict=True)
            if aval_of(atom).shape == shape
        ]
        return known[0] if known[0] in like and len(set(known)) == 1 else None
    return known[0].moved(eqn) if place_of(args[0]) is not None else None


def of_turn(value: Value) -> Value:
    """Returns a stacked value as a scan takes it apart."""
    place = place_of(value)
    return value if place is None else _at(value, place.of_turn())


def stacked(state: State | None) -> State | None:
    """Returns the state of a stack of values in a state."""
    if state is None or state.place is None:
        return state
    return state._replace(place=state.place.stacked())


def recomputed(value: Value, is_recomputed: bool = True) -> Value:
    """Returns a value as it enters what is recomputed, or a loop, which is not."""
    place = place_of(value)
    return value if place is None else _at(value, place.recomputed(is_recomputed))


def gathered(args: Sequence[Value], dtype: np.dtype) -> dict[str, Any]:
    """Returns operands of a product that are gathered before it, by the names of its extras."""
    return {
        name: arg.gathered(place, dtype)
        for name, arg in zip(GATHERED, args, strict=False)
        if (place := place_of(arg)) is not None and place.is_shared
    }


def _at(value: Value, place: Placement | None) -> Value:
    if value.state is None or value.state.place == place:
        return value
    return Value(value.array, value.state._replace(place=place))
