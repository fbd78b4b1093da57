"""One entry of each row, as that of the label among the logits, and its gradient as a selection.

JAX's gradient of such a gather is a scatter into zeros as large as the logits, in f32, which no
compiler fuses with what it is added to. A selection of the same numbers is elementwise.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from jaxmp._jaxpr import aval_of
from jaxmp._rebind import in_front


class _Rows(NamedTuple):
    """How a gather, or a scatter-add, meets one entry of each row.

    Attributes:
        axis: along which the rows lie.
        shape: of the other axes.
        clips: whether an index that is out of bounds stands for the nearest that is not.
    """

    axis: int
    shape: tuple[int, ...]
    clips: bool

    def places(self, indices: jax.Array, size: int) -> jax.Array:
        """Returns the index of each row of this size, in a dtype that holds the size."""
        dtype = indices.dtype if indices.dtype.itemsize >= 4 else np.dtype(np.int32)
        places = lax.reshape(indices, self.shape).astype(dtype)
        return jnp.clip(places, 0, size - 1) if self.clips else places


def gather_of(eqn: JaxprEqn) -> Callable[..., jax.Array] | None:
    """Returns what computes a gather of one entry of each row; None if it is none."""
    numbers = eqn.params["dimension_numbers"]
    rows = _rows(eqn, numbers.start_index_map, numbers.start_indices_batching_dims)
    if rows is None or any(size != 1 for size in eqn.params["slice_sizes"]):
        return None
    fill = eqn.params["fill_value"]
    if fill is None and eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
        fill = math.nan

    def gather(array: jax.Array, indices: jax.Array) -> jax.Array:
        places = rows.places(indices, array.shape[rows.axis])
        entries = pick_p.bind(array, places, axis=rows.axis, fill=fill)
        return lax.reshape(entries, aval_of(eqn.outvars[0]).shape)

    return gather


def scatter_of(eqn: JaxprEqn) -> Callable[..., jax.Array] | None:
    """Returns what computes a scatter-add to one entry of each row; None if it is none."""
    numbers = eqn.params["dimension_numbers"]
    along = numbers.scatter_dims_to_operand_dims
    rows = _rows(eqn, along, numbers.scatter_indices_batching_dims)
    if rows is None or aval_of(eqn.invars[2]).size != math.prod(rows.shape):
        return None

    def scatter(array: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
        places = rows.places(indices, array.shape[rows.axis])
        return array + _put(lax.reshape(updates, rows.shape), places, rows.axis, array.shape)

    return scatter


def _rows(eqn: JaxprEqn, along: Sequence[int], batching_dims: Sequence[int]) -> _Rows | None:
    array, indices = map(aval_of, eqn.invars[:2])
    if len(along) != 1 or not array.size or any(array.sharding.spec):
        return None
    axis = int(along[0])
    others = tuple(i for i in range(array.ndim) if i != axis)
    shape = tuple(array.shape[i] for i in others)
    is_in_order = tuple(batching_dims) == tuple(sorted(batching_dims))
    is_of_all = tuple(eqn.params["dimension_numbers"].operand_batching_dims) == others
    if not (is_in_order and is_of_all) or indices.size != math.prod(shape):
        return None
    return _Rows(axis, shape, eqn.params["mode"] == lax.GatherScatterMode.CLIP)


def _put(entries: jax.Array, places: jax.Array, axis: int, shape: Sequence[int]) -> jax.Array:
    """Returns rows of zeros with one entry each; none where its place is out of bounds."""
    others = tuple(i for i in range(len(shape)) if i != axis)
    along = lax.broadcasted_iota(places.dtype, shape, axis)
    entries, places = (lax.broadcast_in_dim(x, shape, others) for x in (entries, places))
    return lax.select(along == places, entries, jnp.zeros_like(entries))


def _pick(array: jax.Array, places: jax.Array, *, axis: int, fill: float | None) -> jax.Array:
    rows = tuple(range(places.ndim))
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(axis,),
        start_index_map=(axis,),
        operand_batching_dims=tuple(i for i in range(array.ndim) if i != axis),
        start_indices_batching_dims=rows,
    )
    mode = "promise_in_bounds" if fill is None else "fill"
    indices, sizes = jnp.expand_dims(places, -1), (1,) * array.ndim
    return lax.gather(array, indices, numbers, sizes, mode=mode, fill_value=fill)


# (f[..., N, ...], i[...]) -> f[...]: linear in the array, so it is its own derivative.
pick_p = Primitive("pick")


@pick_p.def_abstract_eval
def _(array: Any, places: Any, *, axis: int, fill: float | None) -> Any:
    del axis, fill
    return places.update(dtype=array.dtype, weak_type=False)


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, axis: int, fill: float | None
) -> tuple[Any, Any]:
    result = pick_p.bind(*primals, axis=axis, fill=fill)
    if isinstance(tangents[0], ad.Zero):
        return result, ad.Zero(jax.typeof(result).to_tangent_aval())
    none = None if fill is None else 0.0
    return result, pick_p.bind(tangents[0], primals[1], axis=axis, fill=none)


def _transpose(
    cotangent: Any, array: Any, places: Any, *, axis: int, fill: float | None
) -> list[Any]:
    del fill
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(array.aval), None]
    return [_put(cotangent, places, axis, array.aval.shape), None]


def _batch(
    args: Sequence[Any], dims: Sequence[Any], *, axis: int, fill: float | None
) -> tuple[Any, int]:
    return pick_p.bind(*in_front(args, dims), axis=axis + 1, fill=fill), 0


pick_p.def_impl(jax.jit(_pick, static_argnames=("axis", "fill")))
ad.primitive_jvps[pick_p] = _jvp
ad.primitive_transposes[pick_p] = _transpose
batching.primitive_batchers[pick_p] = _batch
mlir.register_lowering(pick_p, mlir.lower_fun(_pick, multiple_results=False))
