"""Where a weight lies on a mesh: sharded where it is stored, gathered where it is multiplied."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from jaxmp._jaxpr import aval_of
from jaxmp._mapped import Axes


@dataclasses.dataclass(frozen=True)
class Placement:
    """How one array is sharded, and over which axes it is gathered before a product.

    Attributes:
        mesh: with automatic axes.
        spec: for each dimension the mesh axes that it is sharded over.
        batch_axes: the mesh axes that the batch is sharded over: a product has all of the weight
            along these, and its own part along the others.
        regather: whether a backward pass gathers again, so that nothing is kept for it.
        is_recomputed: whether it is multiplied in what `jax.checkpoint` recomputes anyway.
        rows: how many the batch has; None if that is not known.
        by_axis: whether it is sent along one mesh axis after the other.
    """

    mesh: Any
    spec: tuple[Axes, ...]
    batch_axes: Axes
    regather: bool = True
    is_recomputed: bool = False
    rows: int | None = None
    by_axis: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether both passes multiply by one gathered array."""
        return self.is_recomputed or not self.regather

    def with_spec(self, spec: Sequence[Axes]) -> "Placement":
        """Returns the placement of an array that is made of this one."""
        return dataclasses.replace(self, spec=tuple(spec))

    def gather(self, x: jax.Array) -> jax.Array:
        """Returns an array with all of it along the batch axes, sent as it is.

        Both ends are constraints: with one, the partitioner may gather what it was computed of.
        """
        for spec in self._steps():
            x = self._constrained(x, spec)
        return x

    def gather_exactly(self, x: jax.Array) -> jax.Array:
        """`gather`, whose gradient is added up into the part that each device has."""
        return _gather_exactly(x, self)

    def table(self, eqn: JaxprEqn, x: jax.Array) -> jax.Array:
        """Returns a table that a batch looks up by indices, sharded over what is looked up.

        Each device then finds its part of every entry, and sends that to whom it belongs. Of one
        that is sharded over its entries, all devices would have to add up what they found.
        """
        kept = self._kept_by(eqn)
        sharded = [i for i, axes in enumerate(self.spec) if axes and i not in kept]
        parts = self.parts(self.spec[sharded[0]]) if sharded else 1
        free = [i for i in kept if not self.spec[i] and x.shape[i] % parts == 0]
        if not self._is_for_batch(eqn) or len(sharded) != 1 or not free:
            return x
        spec = list(self.spec)
        spec[free[-1]], spec[sharded[0]] = spec[sharded[0]], ()
        return self.with_spec(spec).scatter(x)

    def looked_up(self, eqn: JaxprEqn, x: jax.Array) -> jax.Array:
        """Returns what a batch looked up, spread as the batch is.

        Else what is computed of it would be sharded as the table is, and gathered in each layer.
        """
        if not self._is_for_batch(eqn):
            return x
        spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
        spec[0] = self.batch_axes
        offsets = eqn.params["dimension_numbers"].offset_dims
        for i, into in zip(self._kept_by(eqn), offsets, strict=True):
            spec[into] = self._whole()[i] or None
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*spec)))

    def _kept_by(self, eqn: JaxprEqn) -> list[int]:
        """Returns the dimensions of a table that are those of an entry."""
        numbers = eqn.params["dimension_numbers"]
        gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
        return [i for i in range(len(self.spec)) if i not in gone]

    def _is_for_batch(self, eqn: JaxprEqn) -> bool:
        shape = aval_of(eqn.outvars[0]).shape
        offsets = eqn.params["dimension_numbers"].offset_dims
        return bool(shape) and 0 not in offsets and shape[0] == self.rows

    def _whole(self) -> tuple[Axes, ...]:
        return tuple(tuple(a for a in axes if a not in self.batch_axes) for axes in self.spec)

    def scatter(self, x: jax.Array) -> jax.Array:
        """Returns an array as it is stored: sums over devices end in their own part of it."""
        for spec in reversed(self._steps()[:-1]):
            x = self._constrained(x, spec)
        return x

    def _steps(self) -> list[Sequence[Axes]]:
        """Returns how an array is sharded from where it is stored to where all of it is."""
        steps: list[Sequence[Axes]] = [self.spec]
        longest = max(map(len, self.spec), default=0) if self.by_axis else 0
        # The last of the axes first: what it leaves is one piece.
        for i in reversed(range(1, longest)):
            fewer = [
                tuple(a for j, a in enumerate(axes) if j != i or a not in self.batch_axes)
                for axes in steps[-1]
            ]
            steps.append(fewer)
        return [*steps, self._whole()]

    def for_grouped_sum(self, eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
        """Returns the operands of a convolution in groups that sums over the rows of a batch.

        Rows are spread over all axes: where one is left over, XLA adds up what devices along it
        have alike, so that the gradient of a grouped convolution is too large.
        """
        idle = [
            a for a in self.mesh.axis_names if a not in self.batch_axes and self.parts((a,)) > 1
        ]
        if not idle or eqn.params.get("batch_group_count", 1) == 1:
            return list(operands)
        numbers, axes = eqn.params["dimension_numbers"], (*self.batch_axes, *idle)
        result = []
        for x, dim in zip(operands, (numbers.lhs_spec[1], numbers.rhs_spec[1]), strict=True):
            is_even = x.shape[dim] % self.parts(axes) == 0
            spec = [axes if is_even and i == dim else () for i in range(x.ndim)]
            result.append(self._constrained(x, spec))
        return result

    def _constrained(self, x: jax.Array, spec: Sequence[Axes]) -> jax.Array:
        places = PartitionSpec(*(axes or None for axes in spec))
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, places))

    def moved(self, eqn: JaxprEqn) -> "Placement | None":
        """Returns the placement of what a shape operation makes of an array; None if none fits."""
        rule = _RULES.get(eqn.primitive.name)
        if rule is None or len(eqn.outvars) != 1:
            return None
        before, after = aval_of(eqn.invars[0]).shape, aval_of(eqn.outvars[0]).shape
        spec = rule(self, eqn.params, before, after)
        return None if spec is None else self.with_spec(spec)

    def transposed(self, permutation: Sequence[int]) -> "Placement":
        """Returns the placement of a transposed array."""
        return self.with_spec([self.spec[i] for i in permutation])

    def reshaped(self, before: Sequence[int], after: Sequence[int]) -> "Placement | None":
        """Returns the placement of a reshaped array; None if none fits."""
        spec = _reshaped(self, {}, before, after)
        return None if spec is None else self.with_spec(spec)

    def recomputed(self, is_recomputed: bool = True) -> "Placement":
        """Returns the placement within what is recomputed, or within a loop, which is not."""
        return dataclasses.replace(self, is_recomputed=is_recomputed)

    def of_turn(self) -> "Placement | None":
        """Returns the placement of what a scan takes of a stacked array in each turn."""
        return None if not self.spec or self.spec[0] else self.with_spec(self.spec[1:])

    def stacked(self) -> "Placement":
        """Returns the placement of a stack of arrays like this one."""
        return self.with_spec(((), *self.spec))

    def parts(self, axes: Axes) -> int:
        """Returns into how many parts a dimension is cut that is sharded over mesh axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _gather_exactly(x: jax.Array, place: Placement) -> jax.Array:
    return place.gather(x)


@_gather_exactly.defjvp
def _(place: Placement, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return place.gather(*primals), place.scatter(*tangents)


_Spec = Sequence[Axes] | None


def _same(place: Placement, _params: Any, _before: Any, _after: Any) -> _Spec:
    return place.spec


def _transposed(place: Placement, params: Any, _before: Any, _after: Any) -> _Spec:
    return place.transposed(params["permutation"]).spec


def _squeezed(place: Placement, params: Any, before: Sequence[int], _after: Any) -> _Spec:
    gone = {i % len(before) for i in params["dimensions"]}
    return [axes for i, axes in enumerate(place.spec) if i not in gone]


def _broadcast(place: Placement, params: Any, before: Sequence[int], after: Sequence[int]) -> _Spec:
    spec: list[Axes] = [()] * len(after)
    for i, into in enumerate(params["broadcast_dimensions"]):
        spec[into] = place.spec[i] if before[i] == after[into] else ()
    return spec


def _cut(place: Placement, _params: Any, before: Sequence[int], after: Sequence[int]) -> _Spec:
    """Of slices: what is sharded must stay whole."""
    is_whole = all(a == b or not axes for a, b, axes in zip(before, after, place.spec, strict=True))
    return place.spec if is_whole else None


def _reversed(place: Placement, params: Any, _before: Any, _after: Any) -> _Spec:
    return None if any(place.spec[i] for i in params["dimensions"]) else place.spec


def _reshaped(place: Placement, params: Any, before: Sequence[int], after: Sequence[int]) -> _Spec:
    """Dimensions that are split or merged: what is sharded must be the first of its group."""
    if params.get("dimensions") is not None:
        return None
    spec: list[Axes] = [()] * len(after)
    for old, new in _groups(before, after):
        sharded = [i for i in old if place.spec[i]]
        if not sharded:
            continue
        large = [i for i in old if before[i] > 1]
        targets = [i for i in new if after[i] > 1]
        parts = place.parts(place.spec[sharded[0]])
        if sharded != large[:1] or not targets or after[targets[0]] % parts:
            return None
        spec[targets[0]] = place.spec[sharded[0]]
    return spec


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Returns the smallest runs of dimensions of two shapes that hold equally many elements."""
    groups, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        old, new = [], []
        left = right = 1
        while True:
            if i < len(before) and (left <= right or j == len(after)):
                old.append(i)
                left *= before[i]
                i += 1
            elif j < len(after):
                new.append(j)
                right *= after[j]
                j += 1
            else:
                break
            if left == right and (old and new):
                break
        groups.append((old, new))
    return groups


_Rule = Callable[[Placement, Any, Sequence[int], Sequence[int]], _Spec]

_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("convert_element_type", "copy", "copy_p", "name"), _same),
    "transpose": _transposed,
    "squeeze": _squeezed,
    "broadcast_in_dim": _broadcast,
    **dict.fromkeys(("slice", "dynamic_slice"), _cut),
    "rev": _reversed,
    "reshape": _reshaped,
}
