"""Max pooling: which entry was the largest is all that its gradient needs.

JAX keeps the whole array for the backward pass, and looks for the largest entries again; on GPUs it
then scatters into zeros, and sums what overlapping windows give an entry in the dtype it has. The
place of the largest, a byte for each window, is enough, and says without a scatter what every entry
gets, summed in f32. A TPU has an instruction for what JAX does, and keeps to it.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from jaxmp._dtypes import FLOAT32
from jaxmp._jaxpr import aval_of
from jaxmp._rebind import evaluate, in_front

# Every entry of a window is an operation.
_LARGEST_WINDOW = 32


class Window(NamedTuple):
    """The window of a pooling over all axes of an array.

    Attributes:
        sizes: in entries.
        strides: from one window to the next.
        padding: before and after each axis.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]

    @property
    def offsets(self) -> Iterator[tuple[int, ...]]:
        """The places in a window, in the order in which the first of equals is the largest."""
        return itertools.product(*map(range, self.sizes))

    def batched(self) -> "Window":
        """Returns the window for one axis more in front."""
        return Window((1, *self.sizes), (1, *self.strides), ((0, 0), *self.padding))


def pool_of(eqn: JaxprEqn) -> Callable[[jax.Array], jax.Array] | None:
    """Returns what computes a max pooling over small windows; None if it is none of those."""
    window = _window_of(eqn)
    if window is None:
        return None

    @jax.custom_jvp
    def pool(array: jax.Array) -> jax.Array:
        return evaluate(eqn, [array])[0]

    @pool.defjvp
    def _(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        (array,) = primals
        largest, places = pool_p.bind(array, window=window)
        return largest, pooled_p.bind(*tangents, array, places, window=window)

    return pool


def _window_of(eqn: JaxprEqn) -> Window | None:
    params, array = eqn.params, aval_of(eqn.invars[0])
    window = Window(
        tuple(params["window_dimensions"]),
        tuple(params["window_strides"]),
        tuple((int(low), int(high)) for low, high in params["padding"]),
    )
    is_dilated = any(d != 1 for d in (*params["base_dilation"], *params["window_dilation"]))
    is_cut = any(edge < 0 for edges in window.padding for edge in edges)
    is_small = math.prod(window.sizes) <= _LARGEST_WINDOW
    is_plain = is_small and not is_dilated and not is_cut and not any(array.sharding.spec)
    return window if is_plain and aval_of(eqn.outvars[0]).size else None


def _shape(shape: Sequence[int], window: Window) -> tuple[int, ...]:
    """Returns how many windows there are along each axis."""
    return tuple(
        (low + size + high - width) // stride + 1
        for size, width, stride, (low, high) in zip(shape, *window, strict=True)
    )


def _entries(array: jax.Array, fill: float, window: Window) -> Iterator[jax.Array]:
    """Yields the entry at each place of all windows."""
    padding = [(low, high, 0) for low, high in window.padding]
    counts = _shape(array.shape, window)
    padded = lax.pad(array, jnp.asarray(fill, array.dtype), padding)
    for offset in window.offsets:
        ends = [o + (n - 1) * s + 1 for o, n, s in zip(offset, counts, window.strides, strict=True)]
        yield lax.slice(padded, offset, ends, window.strides)


def _pool(array: jax.Array, *, window: Window) -> list[jax.Array]:
    """Returns the largest of each window, and its place in it."""
    entries = _entries(array, -math.inf, window)
    largest = next(entries)
    places = jnp.zeros(largest.shape, np.int8)
    for place, entry in enumerate(entries, start=1):
        places = jnp.where(entry > largest, np.int8(place), places)
        largest = lax.max(largest, entry)
    return [largest, places]


def _pooled(tangent: jax.Array, array: Any, places: jax.Array, *, window: Window) -> jax.Array:
    """Returns the entry of a tangent at the place of each window."""
    del array
    entries = _entries(tangent, 0.0, window)
    chosen = next(entries)
    for place, entry in enumerate(entries, start=1):
        chosen = jnp.where(places == np.int8(place), entry, chosen)
    return chosen


def _unpooled(cotangent: jax.Array, array: jax.Array, places: jax.Array, *, window: Window) -> Any:
    """Returns the sum of what each entry of the array gets: the transpose of `_pooled`."""
    wide = cotangent.astype(FLOAT32)
    terms = []
    for place, offset in enumerate(window.offsets):
        given = jnp.where(places == np.int8(place), wide, 0.0)
        padding = [
            (o - low, size - (o - low + (n - 1) * stride + 1), stride - 1)
            for o, size, n, stride, (low, _) in zip(
                offset, array.shape, places.shape, window.strides, window.padding, strict=True
            )
        ]
        terms.append(lax.pad(given, np.float32(0), padding))
    return sum(terms[1:], start=terms[0]).astype(cotangent.dtype)


def _plain(array: jax.Array, *, window: Window) -> jax.Array:
    low = np.asarray(-math.inf, array.dtype)  # an array of JAX would be one of any reduction
    return lax.reduce_window(array, low, lax.max, *window)


def _pool_on_tpu(array: jax.Array, *, window: Window) -> list[jax.Array]:
    largest = _plain(array, window=window)
    return [largest, jnp.zeros(largest.shape, np.int8)]


def _unpooled_on_tpu(cotangent: jax.Array, array: jax.Array, places: Any, *, window: Window) -> Any:
    del places
    return jax.vjp(lambda x: _plain(x, window=window), array)[1](cotangent)[0]


def _pooled_on_tpu(tangent: jax.Array, array: jax.Array, places: Any, *, window: Window) -> Any:
    del places
    return jax.jvp(lambda x: _plain(x, window=window), (array,), (tangent,))[1]


def _batched(primitive: Primitive) -> Callable[..., Any]:
    def batch(args: Sequence[Any], dims: Sequence[Any], *, window: Window) -> tuple[Any, Any]:
        results = primitive.bind(*in_front(args, dims), window=window.batched())
        return results, [0] * len(results) if primitive.multiple_results else 0

    return batch


# f[...] -> (f[...], i8[...]): the largest of each window, and its place.
pool_p = Primitive("pool")
pool_p.multiple_results = True
# (tangent of the array, the array, places) -> tangent of the largest, and its transpose.
pooled_p = Primitive("pooled")
unpooled_p = Primitive("unpooled")


@pool_p.def_abstract_eval
def _(array: Any, *, window: Window) -> list[Any]:
    largest = array.update(shape=_shape(array.shape, window), weak_type=False)
    return [largest, largest.update(dtype=np.dtype(np.int8))]


@pooled_p.def_abstract_eval
def _(tangent: Any, array: Any, places: Any, *, window: Window) -> Any:
    del array, window
    return places.update(dtype=tangent.dtype)


@unpooled_p.def_abstract_eval
def _(cotangent: Any, array: Any, places: Any, *, window: Window) -> Any:
    del places, window
    return array.update(dtype=cotangent.dtype, weak_type=False)


def _jvp_of_pool(primals: Sequence[Any], tangents: Sequence[Any], *, window: Window) -> Any:
    largest, places = pool_p.bind(*primals, window=window)
    moved = pooled_p.bind(ad.instantiate_zeros(tangents[0]), *primals, places, window=window)
    return [largest, places], [moved, ad.Zero(jax.typeof(places).to_tangent_aval())]


def _linear(primitive: Primitive, transposed: Primitive) -> None:
    """Makes a primitive linear in its first operand, with another as the transpose."""

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], *, window: Window) -> Any:
        result, tangent = primitive.bind(*primals, window=window), tangents[0]
        if isinstance(tangent, ad.Zero):
            return result, ad.Zero(jax.typeof(result).to_tangent_aval())
        return result, primitive.bind(tangent, *primals[1:], window=window)

    def transpose(
        cotangent: Any, operand: Any, array: Any, places: Any, *, window: Window
    ) -> list[Any]:
        if isinstance(cotangent, ad.Zero):
            return [ad.Zero(operand.aval), None, None]
        return [transposed.bind(cotangent, array, places, window=window), None, None]

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose


def _computed(primitive: Primitive, fun: Callable[..., Any], on_tpu: Callable[..., Any]) -> None:
    several = primitive.multiple_results
    primitive.def_impl(jax.jit(primitive.bind, static_argnames="window"))
    batching.primitive_batchers[primitive] = _batched(primitive)
    mlir.register_lowering(primitive, mlir.lower_fun(fun, multiple_results=several))
    mlir.register_lowering(
        primitive, mlir.lower_fun(on_tpu, multiple_results=several), platform="tpu"
    )


ad.primitive_jvps[pool_p] = _jvp_of_pool
_linear(pooled_p, unpooled_p)
_linear(unpooled_p, pooled_p)
_computed(pool_p, _pool, _pool_on_tpu)
_computed(pooled_p, _pooled, _pooled_on_tpu)
_computed(unpooled_p, _unpooled, _unpooled_on_tpu)
