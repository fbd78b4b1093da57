"""How a mixed product is computed: on TPUs and GPUs, on CUDA, on CPUs."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxmp._dtypes import BFLOAT16, FLOAT32, HALF_DTYPES, dtype_of, is_inexact
from jaxmp._placement import Placement
from jaxmp._product import CONVOLUTION, DOT_GENERAL, GATHERED, Dtypes, Route
from jaxmp._rebind import inlined


def _narrowed(operands: Sequence[Any], dtypes: Dtypes) -> list[Any]:
    """Casts the operands that are floats, and gathers those that have a place."""
    arity = len(operands) - len(dtypes.extras)
    extras = dict(zip(dtypes.extras, operands[arity:], strict=True))
    ready = [
        extras[name] if name in extras else _ready(operand, dtypes.compute_dtype, place)
        for name, operand, place in zip(GATHERED, operands, dtypes.places, strict=False)
    ]
    return [*ready, *operands[2:arity]]


def _ready(operand: Any, dtype: np.dtype, place: Placement | None) -> Any:
    if not is_inexact(dtype_of(operand)):
        return operand
    narrow = lax.convert_element_type(operand, dtype)
    return narrow if place is None else place.gather(narrow)


def _compute(*operands: Any, base: Primitive, params: Any, **named: Any) -> Any:
    """The product where the hardware sums narrow products in float32 by itself: TPU, GPU.

    The narrow result is asked for directly: the compiler would store a float32 one first.
    """
    dtypes = Dtypes(**named)
    if dtypes.recipe is not None:
        return _quantized(Route(lax.dot_general), operands, params, dtypes)
    narrow = dtypes.accum_dtype == FLOAT32 and dtypes.out_dtype in HALF_DTYPES
    asked = dtypes.out_dtype if narrow else dtypes.accum_dtype
    wanted = dict(params) | {"preferred_element_type": asked}
    result = base.bind(*_narrowed(operands, dtypes), **wanted)
    return lax.convert_element_type(result, dtypes.out_dtype)


def _compute_on_cuda(
    *operands: Any,
    base: Primitive,
    params: Any,
    out_dtype: np.dtype,
    takes_blocks: bool,
    **named: Any,
) -> Any:
    """As `_compute`, save that cuDNN runs a half convolution in float32 for a float32 result."""
    dtypes = Dtypes(out_dtype=out_dtype, **named)
    if dtypes.recipe is not None:
        return _quantized(Route(lax.dot_general, takes_blocks), operands, params, dtypes)
    dtype = dtypes.compute_dtype
    compute = functools.partial(_compute, base=base, params=params, **named)
    if base is not CONVOLUTION or dtype not in HALF_DTYPES or out_dtype in HALF_DTYPES:
        return compute(*operands, out_dtype=out_dtype)
    matmul = _as_matmul(dict(params), *operands)
    if matmul is None:
        return lax.convert_element_type(compute(*operands, out_dtype=dtype), out_dtype)
    dot = functools.partial(lax.dot_general, preferred_element_type=dtypes.accum_dtype)
    return lax.convert_element_type(matmul.compute(dot, *_narrowed(operands, dtypes)), out_dtype)


class _Matmul(NamedTuple):
    """A convolution as a matmul: what is contracted, and how the result is laid out.

    Attributes:
        squeezed: axes of size one that the kernel loses before.
        dims: the dimension numbers of the matmul.
        added: how many axes of size one follow those of its result.
        order: the axes of that in the order of the convolution's result.
    """

    squeezed: tuple[int, ...]
    dims: Any
    added: int
    order: tuple[int, ...]

    def compute(self, matmul: Callable[..., Any], lhs: Any, rhs: Any) -> Any:
        """Returns what the convolution does, by a matmul of given dimension numbers."""
        result = matmul(lhs, lax.squeeze(rhs, self.squeezed), self.dims)
        added = range(result.ndim, result.ndim + self.added)
        return lax.transpose(lax.expand_dims(result, tuple(added)), self.order)


def _as_matmul(params: dict[str, Any], lhs: Any, rhs: Any) -> _Matmul | None:
    """Returns the matmul that a convolution is, if it is one.

    Such is a kernel of one position, and one of the input's size: the weight gradient of the first.
    """
    numbers = params["dimension_numbers"]
    groups = params["feature_group_count"] * params["batch_group_count"]
    dilations = (*params["lhs_dilation"], *params["rhs_dilation"])
    if groups != 1 or np.any(np.asarray(params["padding"])) or set(dilations) - {1}:
        return None
    sizes, window = (
        [x.shape[i] for i in spec[2:]]
        for x, spec in ((lhs, numbers.lhs_spec), (rhs, numbers.rhs_spec))
    )
    if all(size == 1 for size in (*window, *params["window_strides"])):
        return _pointwise(numbers, lhs.ndim)
    return _whole(numbers, lhs.ndim) if sizes == window else None


def _pointwise(numbers: Any, ndim: int) -> _Matmul:
    features, (outputs, inputs) = numbers.lhs_spec[1], numbers.rhs_spec[:2]
    dims = (((features,), (0 if inputs < outputs else 1,)), ((), ()))
    # The matmul has the input's axes without the features, and the kernel's outputs last.
    kept = [axis for axis in range(ndim) if axis != features]
    place = {axis: i for i, axis in enumerate(kept)}
    order = [0] * ndim
    order[numbers.out_spec[1]] = ndim - 1
    order[numbers.out_spec[0]] = place[numbers.lhs_spec[0]]
    for out_axis, in_axis in zip(numbers.out_spec[2:], numbers.lhs_spec[2:], strict=True):
        order[out_axis] = place[in_axis]
    return _Matmul(tuple(numbers.rhs_spec[2:]), dims, 0, tuple(order))


def _whole(numbers: Any, ndim: int) -> _Matmul:
    dims = ((numbers.lhs_spec[1:], numbers.rhs_spec[1:]), ((), ()))
    order = [0] * ndim
    for place, out_axis in enumerate(numbers.out_spec):
        order[out_axis] = place
    return _Matmul((), dims, ndim - 2, tuple(order))


def _compute_on_cpu(*operands: Any, base: Primitive, params: Any, **named: Any) -> Any:
    """The product in the only form that XLA:CPU has a fast path for, behind barriers.

    That is bfloat16 operands, contracted on their last axis, with a float32 result. A transpose
    that XLA folds into such a product is refused when it runs, so nothing may be moved into it.
    Other narrow dtypes have no fast path: their products are computed in float32, which holds them.
    Barriers keep the roundings there too.
    """
    dtypes = Dtypes(**named)
    if dtypes.recipe is not None:
        return _quantized(Route(_cpu_dot_of_codes), operands, params, dtypes)
    narrowed = _narrowed(operands, dtypes)
    is_fast = dtypes.compute_dtype == BFLOAT16 and _has_fast_path(*narrowed[:2])
    matmul = _as_matmul(dict(params), *narrowed) if base is CONVOLUTION else None
    if is_fast and base is DOT_GENERAL:
        lhs, rhs = narrowed
        return _rounded(_cpu_matmul(lhs, rhs, dict(params)["dimension_numbers"]), dtypes)
    if is_fast and matmul is not None:
        lhs, rhs = narrowed
        return _rounded(matmul.compute(_cpu_matmul, lhs, rhs), dtypes)
    asked = dict(params) | {"preferred_element_type": FLOAT32}
    wide = [
        lax.convert_element_type(x, FLOAT32) if is_inexact(dtype_of(x)) else x
        for x in _kept(base, narrowed)
    ]
    result = base.bind(*wide, **asked)
    (result,) = _kept(base, [_rounded(result, dtypes)])
    return result


def _quantized(route: Route, operands: Sequence[Any], params: Any, dtypes: Dtypes) -> Any:
    plain = dict(params)
    route = route._replace(dot=functools.partial(route.dot, out_sharding=plain["out_sharding"]))
    return dtypes.recipe.product(operands, plain["dimension_numbers"], dtypes, route)


def _cpu_dot_of_codes(
    left: Any, right: Any, numbers: Any, *, preferred_element_type: Any, out_sharding: Any
) -> Any:
    """The product of bfloat16, or of codes of 8 bits, as bfloat16 or float32, which hold them."""
    lhs, rhs = (lax.convert_element_type(codes, BFLOAT16) for codes in (left, right))
    if _has_fast_path(lhs, rhs):
        result = _cpu_matmul(lhs, rhs, numbers)
    else:
        lhs, rhs = (lax.convert_element_type(codes, FLOAT32) for codes in (left, right))
        result = lax.dot_general(
            lhs, rhs, numbers, preferred_element_type=FLOAT32, out_sharding=out_sharding
        )
    return lax.convert_element_type(result, preferred_element_type)


def _rounded(result: Any, dtypes: Dtypes) -> Any:
    # A narrow accumulator rounds more often than once; here only its last rounding is kept.
    result = lax.convert_element_type(result, dtypes.accum_dtype)
    return lax.convert_element_type(result, dtypes.out_dtype)


def _kept(base: Primitive, arrays: Sequence[Any]) -> Sequence[Any]:
    """Returns arrays as they are rounded: the compiler might compute on with what was not."""
    return lax.optimization_barrier(list(arrays)) if base is DOT_GENERAL else arrays


# Some releases cannot run narrow products in loops that touch less than this: they compile such
# loops as one kernel. Nothing is lost, since products so small gain nothing.
_SMALL = 4096  # bytes


def _has_fast_path(lhs: Any, rhs: Any) -> bool:
    sizes = [math.prod(operand.shape) * operand.dtype.itemsize for operand in (lhs, rhs)]
    is_small = all(isinstance(size, int) and size < _SMALL for size in sizes)
    return not is_small and not _is_sharded(lhs) and not _is_sharded(rhs)


def _is_sharded(operand: Any) -> bool:
    """Whether axes of an operand are sharded by its type, which says where a product may go."""
    sharding = getattr(jax.typeof(operand), "sharding", None)
    return any(axes is not None for axes in getattr(sharding, "spec", ()))


def _cpu_matmul(lhs: Any, rhs: Any, dimension_numbers: Any) -> Any:
    (left_sum, right_sum), (left_batch, right_batch) = dimension_numbers
    left_free = [i for i in range(lhs.ndim) if i not in {*left_sum, *left_batch}]
    right_free = [i for i in range(rhs.ndim) if i not in {*right_sum, *right_batch}]
    batch = [lhs.shape[i] for i in left_batch]
    rows, columns = (
        [x.shape[i] for i in free] for x, free in ((lhs, left_free), (rhs, right_free))
    )
    left = _as_matrices(lhs, left_batch, left_free, left_sum)
    right = _as_matrices(rhs, right_batch, right_free, right_sum)
    left, right = lax.optimization_barrier((left, right))
    # With a batch axis, even of one: without it XLA:CPU computes some of them in f32.
    numbers = (((2,), (2,)), ((0,), (0,)))
    result = lax.dot_general(left, right, numbers, preferred_element_type=FLOAT32)
    return lax.reshape(lax.optimization_barrier(result), [*batch, *rows, *columns])


def _as_matrices(x: Any, batch: Sequence[int], free: Sequence[int], summed: Sequence[int]) -> Any:
    """Returns an operand as [batch, free, contracted]."""
    sizes = [math.prod(x.shape[i] for i in axes) for axes in (batch, free, summed)]
    return lax.reshape(lax.transpose(x, [*batch, *free, *summed]), sizes)


def _lowering(compute: Callable[..., Any]) -> Any:
    """Returns the rule that lowers as a function computes, which is traced once for like calls."""

    @functools.lru_cache(maxsize=4096)
    def traced(params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
        return inlined(functools.partial(compute, **dict(params)))

    def lowered(*operands: Any, **params: Any) -> Any:
        return traced(tuple(sorted(params.items())))(*operands)

    return mlir.lower_fun(lowered, multiple_results=False)


_lower_alone, _lower_partitioned = (
    _lowering(functools.partial(_compute_on_cuda, takes_blocks=takes)) for takes in (True, False)
)


def _lower_on_cuda(ctx: Any, *operands: Any, **params: Any) -> Any:
    return (_lower_partitioned if _is_partitioned(ctx) else _lower_alone)(ctx, *operands, **params)


def _is_partitioned(ctx: Any) -> bool:
    """Whether XLA will cut what is lowered into parts for several devices.

    It cannot do that to the call for blocks. In a shard_map over all axes of a mesh nothing is left
    to cut.
    """
    axes = ctx.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    if mesh is None:
        return getattr(axes, "num_devices", 1) > 1
    return set(getattr(axes, "manual_axes", ())) != set(mesh.axis_names)


# The rule of each platform; None: of those that have none of their own.
LOWERINGS = {None: _lowering(_compute), "cuda": _lower_on_cuda, "cpu": _lowering(_compute_on_cpu)}
