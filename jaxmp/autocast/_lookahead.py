"""Where values lead to: what decides which of them stay in f32."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxmp._dtypes import HALF_DTYPES
from jaxmp._jaxpr import Inner, aval_of, dtype_of_var, inner_jaxprs, is_cast_back, is_plain_call
from jaxmp.autocast import _rules
from jaxmp.autocast._region import Region, backward_depth, inside
from jaxmp.autocast._values import float_dtype

# A value leads, by operations that follow their inputs, to
PRODUCT = 1  # a product, or a cast to half that the user wrote
DELICATE = 2  # an operation in full precision
OUTPUT = 4  # a result of the function
ANGLE = 8  # a sine or cosine
# It is itself
MULTIPLIED = 16  # an operand of a product
GRADIENT = 32  # what leaves a backward pass

_PATHS = PRODUCT | DELICATE | OUTPUT | ANGLE

_SUMS = frozenset({"add", "add_any", "sub"})


def is_island(uses: int) -> bool:
    """Whether elementwise operations with this result run in f32."""
    return not uses & PRODUCT


def is_stored_narrow(uses: int) -> bool:
    """Whether a value computed in f32 is narrowed where it is made, as a product would do."""
    return bool(uses & MULTIPLIED) and not uses & OUTPUT


def is_float(atom: Any) -> bool:
    """Whether a variable is of f16, bf16 or f32."""
    return float_dtype(aval_of(atom)) is not None


@dataclasses.dataclass(frozen=True)
class Uses:
    """Of the values of a jaxpr.

    Attributes:
        inputs: of each input.
        of_var: of each variable that is used.
        selections: the ids of products that select entries for delicate operations, by one-hot
            vectors. Of values in full precision they do so in f32, as an index would.
        inlined: the ids of small calls whose jaxprs are called once: what they compute is computed
            in their place. JAX differentiates a jaxpr once for all its calls, so others stay.
    """

    inputs: tuple[int, ...]
    of_var: dict[Var, int]
    selections: frozenset[int]
    inlined: frozenset[int]

    def of_atom(self, atom: Any) -> int:
        """Returns the uses of a variable."""
        return 0 if isinstance(atom, Literal) else self.of_var.get(atom, 0)

    def of(self, eqn: JaxprEqn) -> int:
        """Returns all uses of the float results of an equation."""
        uses = 0
        for var in eqn.outvars:
            if is_float(var):
                uses |= self.of_var.get(var, 0)
        return uses


class Lookahead:
    """Finds the uses of values, once for each jaxpr and what its outputs are used for."""

    def __init__(self) -> None:
        # The jaxprs are kept, so that no id is used again.
        self._found: dict[Any, tuple[Jaxpr, Uses]] = {}

    def uses(
        self, jaxpr: Jaxpr, outputs: Sequence[int], region: Region, *, tangents: int = 0
    ) -> Uses:
        """Returns the uses of the values of a jaxpr.

        Args:
            jaxpr: the program.
            outputs: the uses of its outputs.
            region: where it stands.
            tangents: how many of its last inputs are tangents. What is computed of them is used
                where the program is differentiated, as the backward pass is.
        """
        key = (id(jaxpr), tuple(outputs), region, tangents)
        if key not in self._found:
            self._found[key] = (jaxpr, self._walk(jaxpr, outputs, region, tangents))
        return self._found[key][1]

    def _walk(self, jaxpr: Jaxpr, outputs: Sequence[int], region: Region, tangents: int) -> Uses:
        of_var: dict[Var, int] = {}
        later: dict[Var, int] = {}  # used where the program is differentiated
        linear = _tangents(jaxpr, tangents)
        selectors = _selectors(jaxpr)
        selections = set()
        depth_of = {v: backward_depth(eqn) for eqn in jaxpr.eqns for v in eqn.outvars}

        def use(
            atom: Any, uses: int, depth: int, *, is_linear: bool, for_later: bool = False
        ) -> None:
            if isinstance(atom, Literal) or not is_float(atom):
                return
            made = depth_of.get(atom, 0)
            if made > depth:
                uses = OUTPUT | GRADIENT
            is_later = for_later or made < depth or (is_linear and atom not in linear)
            found = later if is_later else of_var
            found[atom] = found.get(atom, 0) | uses

        for atom, uses in zip(jaxpr.outvars, outputs, strict=True):
            use(atom, uses, 0, is_linear=False)
        for eqn in reversed(jaxpr.eqns):
            # What is only used later is for that; else the backward pass takes it as it is.
            for_later = not any(of_var.get(var) for var in eqn.outvars)
            for var in eqn.outvars:
                of_var[var] = of_var.get(var, 0) or later.get(var, 0)
            results = [of_var[var] for var in eqn.outvars]
            depth, is_linear = backward_depth(eqn), not linear.isdisjoint(eqn.outvars)
            if _is_selection(eqn, selectors) and is_island(results[0]):
                selections.add(id(eqn))
                wanted: Sequence[int] = [DELICATE] * len(eqn.invars)
            else:
                wanted = self._of_inputs(eqn, results, region)
            for atom, uses in zip(eqn.invars, wanted, strict=True):
                use(atom, uses, depth, is_linear=is_linear, for_later=for_later)
        inputs = tuple(of_var.get(var, 0) or later.get(var, 0) for var in jaxpr.invars)
        return Uses(inputs, of_var, frozenset(selections), _called_once(jaxpr))

    def _of_inputs(self, eqn: JaxprEqn, results: list[int], region: Region) -> Sequence[int]:
        region = inside(eqn, region)
        inners = inner_jaxprs(eqn)
        count = len(eqn.invars)
        if region.is_written or eqn.primitive.name == "custom_linear_solve":
            return [DELICATE] * count
        if inners:
            return self._of_call(eqn, inners, results, region)
        return _of_operation(eqn, results, region)

    def _of_call(
        self, eqn: JaxprEqn, inners: Sequence[Inner], results: list[int], region: Region
    ) -> Sequence[int]:
        inputs = [0] * len(eqn.invars)
        for inner, outputs in zip(inners, self.inner_outputs(eqn, results, region), strict=True):
            found = self.uses(inner.jaxpr, outputs, region)
            for place, uses in zip(inner.inputs, found.inputs, strict=True):
                inputs[place] |= uses
        return inputs

    def inner_outputs(
        self, eqn: JaxprEqn, results: Sequence[int], region: Region
    ) -> list[tuple[int, ...]]:
        """Returns the uses of the outputs of each jaxpr inside an equation.

        What a loop carries is used by the next turn too.

        Args:
            eqn: the call, loop or branch.
            results: the uses of its results.
            region: that of what is inside.
        """
        inners = inner_jaxprs(eqn)
        outputs = [[0 if place is None else results[place] for place in i.outputs] for i in inners]
        changed = any(inner.carries for inner in inners)
        sums = [accumulators(inner) for inner in inners]
        while changed:
            changed = False
            carried = [
                self.uses(inner.jaxpr, tuple(uses), region).inputs
                for inner, uses in zip(inners, outputs, strict=True)
            ]
            for inner, uses, own in zip(inners, outputs, sums, strict=True):
                for out, into in inner.carries:
                    place = inner.inputs[into]
                    wanted = uses[out]
                    for other, found in zip(inners, carried, strict=True):
                        if place in other.inputs:
                            wanted |= found[other.inputs.index(place)]
                    wanted = OUTPUT if out in own else wanted
                    changed |= wanted != uses[out]
                    uses[out] = wanted
        return [tuple(uses) for uses in outputs]


def _is_selection(eqn: JaxprEqn, selectors: set[Var]) -> bool:
    is_product = eqn.primitive.name in _rules.PLAIN_PRODUCTS
    return is_product and any(isinstance(v, Var) and v in selectors for v in eqn.invars)


def _selectors(jaxpr: Jaxpr) -> set[Var]:
    """Returns the floats that are made of bools, as one-hot vectors and masks are."""
    found: set[Var] = set()
    for eqn in jaxpr.eqns:
        name, inners = eqn.primitive.name, inner_jaxprs(eqn)
        floats = [atom for atom in eqn.invars if is_float(atom)]
        if name == "convert_element_type":
            if np.dtype(dtype_of_var(eqn.invars[0])) == np.bool_:
                found.update(eqn.outvars)
        elif name in _rules.MOVES:
            if floats and all(isinstance(v, Var) and v in found for v in floats):
                found.update(eqn.outvars)
        elif name == "jit" and inners:
            inside = _selectors(inners[0].jaxpr)
            pairs = zip(eqn.outvars, inners[0].jaxpr.outvars, strict=True)
            found.update(var for var, own in pairs if isinstance(own, Var) and own in inside)
    return found


_SMALL = 32  # equations


def _called_once(jaxpr: Jaxpr) -> frozenset[int]:
    """Returns the ids of the small calls of jaxprs that are called once."""
    eqns = [eqn for eqn in jaxpr.eqns if is_plain_call(eqn) and any(map(is_float, eqn.invars))]
    calls = [(eqn, inner_jaxprs(eqn)[0].jaxpr) for eqn in eqns]
    times = collections.Counter(id(called) for _, called in calls)
    once = [(eqn, called) for eqn, called in calls if times[id(called)] == 1]
    return frozenset(id(eqn) for eqn, called in once if _size(called) <= _SMALL)


def _size(jaxpr: Jaxpr) -> int:
    inners = [inner for eqn in jaxpr.eqns for inner in inner_jaxprs(eqn)]
    return len(jaxpr.eqns) + sum(_size(inner.jaxpr) for inner in inners)


def _tangents(jaxpr: Jaxpr, count: int) -> set[Var]:
    """Returns the variables that are computed of the last inputs of a jaxpr."""
    linear = set(jaxpr.invars[len(jaxpr.invars) - count :])
    if not linear:
        return linear
    for eqn in jaxpr.eqns:
        if any(not isinstance(atom, Literal) and atom in linear for atom in eqn.invars):
            linear.update(eqn.outvars)
    return linear


def _of_operation(eqn: JaxprEqn, results: Sequence[int], region: Region) -> Sequence[int]:
    count = len(eqn.invars)
    name = eqn.primitive.name
    if name == "convert_element_type":
        return [_of_cast(eqn, results[0])]
    kind = _rules.class_of(eqn, region.own_policy)
    if name in _rules.PERIODIC and kind == _rules.FULL:
        return [DELICATE | ANGLE] * count
    if region.is_full or kind in (_rules.FULL, _rules.OPAQUE):
        return [DELICATE] * count
    if kind == _rules.LOW:
        return [PRODUCT | MULTIPLIED] * count
    if name in _rules.PAIRWISE:
        return results
    together = _union(uses for var, uses in zip(eqn.outvars, results, strict=True) if is_float(var))
    itself = MULTIPLIED if name in _rules.SELECTS else 0
    return [together & (_PATHS | itself)] * count


def _of_cast(eqn: JaxprEqn, result: int) -> int:
    """A cast to half that the user wrote says that half is enough; one to f32 that it is not."""
    source, target = dtype_of_var(eqn.invars[0]), eqn.params["new_dtype"]
    if source == target or not is_float(eqn.outvars[0]) or is_cast_back(eqn):
        return result
    return PRODUCT if target in HALF_DTYPES else DELICATE


def _union(uses: Iterable[int]) -> int:
    together = 0
    for use in uses:
        together |= use
    return together


def accumulators(inner: Inner) -> set[int]:
    """Returns the outputs that a loop only adds to: sums over its turns."""
    if not inner.carries:
        return set()
    used: dict[Var, int] = {}
    made: dict[Var, JaxprEqn] = {}
    for eqn in inner.jaxpr.eqns:
        made.update(dict.fromkeys(eqn.outvars, eqn))
        for atom in eqn.invars:
            if not isinstance(atom, Literal):
                used[atom] = used.get(atom, 0) + 1
    for atom in inner.jaxpr.outvars:
        if not isinstance(atom, Literal):
            used[atom] = used.get(atom, 0) + 1
    return {
        out
        for out, into in inner.carries
        if _is_sum_of(inner.jaxpr.outvars[out], inner.jaxpr.invars[into], made, used)
    }


def _is_sum_of(result: Any, carry: Var, made: dict[Var, JaxprEqn], used: dict[Var, int]) -> bool:
    if isinstance(result, Literal) or not is_float(result) or used.get(carry) != 1:
        return False
    eqn = made.get(result)
    if eqn is None or eqn.primitive.name not in _SUMS or used[result] != 1:
        return False
    return any(atom is carry for atom in eqn.invars)
