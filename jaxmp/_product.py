"""One primitive for a matmul or convolution in mixed precision, closed under differentiation.

Its operands stay as they are, f32 masters too: they are narrowed where the product is computed.
Its derivative is itself, so all three products (fprop, dgrad, wgrad) have narrow operands, and the
gradient of an operand comes out in the operand's own dtype, straight from the accumulator.

How a product is differentiated and batched is JAX's own knowledge: its rule for the plain product
is traced in float32 and replayed with this primitive in the place of the plain one.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Primitive, primitives
from jax.interpreters import ad, batching, mlir

from jaxmp._dtypes import BFLOAT16, FLOAT32, HALF_DTYPES, dtype_of, is_inexact
from jaxmp._rebind import inlined, spec_of

DOT_GENERAL = primitives.dot_general_p
CONVOLUTION = primitives.conv_general_dilated_p
_RAGGED = "ragged_dot_general"
PLAIN_PRODUCTS = frozenset({DOT_GENERAL.name, CONVOLUTION.name, _RAGGED})

# Operands: the two that are multiplied, and the sizes of groups if the product is ragged.
# Parameters: `base`, the plain primitive; `params`, its parameters as sorted pairs;
# `compute_dtype` of the multiplied operands; `accum_dtype` of the sums; `out_dtype` of the result;
# `recipe`, by which the operands are quantized, or None; `roles`, what each of them is.
# `extras`, names of further operands for a recipe: the `scales` of a state, f32[3], and
# of a weight that was quantized before the `codes` and the `code_scale`.
product_p = Primitive("mixed_product")


class Dtypes(NamedTuple):
    """Of a mixed product: of what is multiplied, of the sums, and of the result.

    Attributes:
        compute_dtype: of the operands.
        accum_dtype: of the sums.
        out_dtype: of the result.
        recipe: how the operands are quantized to fewer bits, or None: the methods `takes`, `dtypes`
            and `product` of a `jaxmp.fp8.Recipe`.
        roles: what each operand is: "x" for activations, "w" for a weight, "g" for a gradient.
        extras: the names of the operands that follow, for a recipe.
    """

    compute_dtype: np.dtype
    accum_dtype: np.dtype
    out_dtype: np.dtype
    recipe: Any = None
    roles: tuple[str, str] = ("x", "w")
    extras: tuple[str, ...] = ()

    def for_operands(self, base: Primitive, params: dict[str, Any], lhs: Any, rhs: Any) -> "Dtypes":
        """Returns these without a recipe that does not take such a product."""
        if self.recipe is None or base is not DOT_GENERAL:
            return self._replace(recipe=None)
        takes = self.recipe.takes(lhs.shape, rhs.shape, params["dimension_numbers"], self.roles)
        return self if takes else self._replace(recipe=None)


class Route(NamedTuple):
    """How a platform multiplies what a recipe has quantized.

    Attributes:
        dot: `lax.dot_general` of operands in 8 bits or bfloat16.
        takes_blocks: whether XLA has a call for operands in blocks: for NVIDIA GPUs.
    """

    dot: Callable[..., Any]
    takes_blocks: bool = False


def product(base: Primitive, params: dict[str, Any], dtypes: Dtypes, *operands: Any) -> jax.Array:
    """Binds the primitive to the parameters of a plain product, as a jaxpr has them."""
    return product_p.bind(*vary_alike(operands), **product_params(base, params, dtypes))


def product_params(base: Primitive, params: dict[str, Any], dtypes: Dtypes) -> dict[str, Any]:
    """Returns the parameters of the mixed primitive for those of a plain product."""
    return {"base": base, "params": tuple(sorted(params.items())), **dtypes._asdict()}


def traced_params(
    fun: Callable[..., Any], *operands: jax.Array
) -> tuple[Primitive, dict[str, Any]]:
    """Returns the primitive and the parameters of the product that `fun(*operands)` is."""
    jaxpr = jax.make_jaxpr(fun)(*map(_float32_spec, vary_alike(operands)))
    (eqn,) = jaxpr.jaxpr.eqns
    return eqn.primitive, dict(eqn.params)


def _varying(value: Any) -> frozenset[str]:
    """Returns the manual axes of a shard_map over which a value differs."""
    aval: Any = jax.typeof(value)
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", None) or getattr(manual, "varying", None) or ())


def vary_alike(operands: Sequence[Any]) -> tuple[Any, ...]:
    """Lets all operands vary over the axes that any does, as JAX's own operations do."""
    axes = frozenset[str]().union(*map(_varying, operands))
    missing = [tuple(sorted(axes - _varying(operand))) for operand in operands]
    return tuple(
        lax.pcast(operand, names, to="varying") if names else operand
        for operand, names in zip(operands, missing, strict=True)
    )


class _Linear(NamedTuple):
    """What is known of an operand that a gradient is for: no value."""

    aval: Any


def _float32_spec(value: Any) -> jax.ShapeDtypeStruct:
    """Returns shape, sharding and manual axes of a value, as float32 if it is a float."""
    aval: Any = value.aval if isinstance(value, _Linear) else jax.typeof(value)
    return spec_of(aval, FLOAT32 if is_inexact(np.dtype(aval.dtype)) else aval.dtype)


def _plain(base: Primitive, params: Sequence[tuple[str, Any]], *operands: Any) -> Any:
    return base.bind(*operands, **dict(params))


def _replay(
    jaxpr: ClosedJaxpr,
    args: Sequence[Any],
    dtypes: Dtypes,
    extras: Mapping[str, Any] = MappingProxyType({}),
    *,
    of_gradient: bool = False,
) -> Any:
    """Runs a traced rule of one result with the mixed product for the plain one.

    Args:
        jaxpr: the rule.
        args: its arguments.
        dtypes: of the product, and what its operands are.
        extras: what the product is given for its recipe, by name.
        of_gradient: whether the first argument is the gradient of a result. The role of the other
            one is then the first of `dtypes`.
    """
    gradients = set(jaxpr.jaxpr.invars[:1]) if of_gradient else set()
    values = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    values |= dict(zip(jaxpr.jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in PLAIN_PRODUCTS:
            own = dtypes
            if of_gradient:
                role = dtypes.roles[0]
                is_left = _is_among(eqn.invars[0], gradients)
                own = dtypes._replace(roles=("g", role) if is_left else (role, "g"))
                own = own.for_operands(eqn.primitive, eqn.params, *operands[:2])
            results = _with_extras(eqn, own, operands, extras)
        else:
            if any(_is_among(atom, gradients) for atom in eqn.invars):
                gradients.update(eqn.outvars)
            results = eqn.primitive.bind(*operands, **eqn.params)
        results = results if eqn.primitive.multiple_results else [results]
        values.update(zip(eqn.outvars, results, strict=True))
    (result,) = jaxpr.jaxpr.outvars
    return read(result)


def _with_extras(
    eqn: JaxprEqn, dtypes: Dtypes, operands: Sequence[Any], extras: Mapping[str, Any]
) -> Any:
    """Binds a product to those of the extras that are for it."""
    is_weight = dtypes.recipe is not None and "w" in dtypes.roles
    kept = {
        name: extra
        for name, extra in extras.items()
        if is_weight or (name == "scales" and dtypes.recipe is not None)
    }
    dtypes = dtypes._replace(extras=tuple(kept))
    return product(eqn.primitive, eqn.params, dtypes, *operands, *kept.values())


def _is_among(atom: Any, variables: set[Any]) -> bool:
    return not isinstance(atom, Literal) and atom in variables


def _arity(base: Primitive) -> int:
    """Returns how many operands the plain product has; scales come after them."""
    return 3 if base.name == _RAGGED else 2


@product_p.def_abstract_eval
def _abstract(*operands: Any, base: Primitive, params: Any, out_dtype: Any, **_: Any) -> Any:
    wide = [
        aval.update(dtype=FLOAT32, weak_type=False) if is_inexact(np.dtype(aval.dtype)) else aval
        for aval in operands[: _arity(base)]
    ]
    found = base.abstract_eval(*wide, **dict(params))
    aval = found[0] if isinstance(found, tuple) else found
    return aval.update(dtype=out_dtype, weak_type=False)


def _without_codes(operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Binds a product whose weight is another than the one that was quantized."""
    arity, extras = _arity(params["base"]), params["extras"]
    kept = [x for name, x in zip(extras, operands[arity:], strict=True) if name == "scales"]
    params = params | {"extras": ("scales",) * len(kept)}
    return product_p.bind(*operands[:arity], *kept, **params)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    def bind(operands: Sequence[Any]) -> Any:
        return product_p.bind(*operands, **params)

    terms = []
    for side in (0, 1):
        if not isinstance(tangents[side], ad.Zero):
            operands = [*primals[:side], tangents[side], *primals[side + 1 :]]
            is_weight = params["roles"][side] == "w"
            terms.append(_without_codes(operands, params) if is_weight else bind(operands))
    result = product_p.bind(*primals, **params)
    if not terms:
        return result, ad.Zero(jax.typeof(result))
    return result, functools.reduce(lax.add, terms)


ad.primitive_jvps[product_p] = _jvp


def _transpose(cotangent: Any, *operands: Any, **params: Any) -> list[Any]:
    """Returns the gradient of the operand that is linear, in the dtype of that operand."""
    (side,) = (i for i, operand in enumerate(operands) if ad.is_undefined_primal(operand))
    gradients: list[Any] = [None] * len(operands)
    aval = operands[side].aval
    if isinstance(cotangent, ad.Zero):
        gradients[side] = ad.Zero(aval)
        return gradients
    base, plain, dtypes = params.pop("base"), params.pop("params"), Dtypes(**params)
    arity = _arity(base)
    operands, extras = operands[:arity], dict(zip(dtypes.extras, operands[arity:], strict=True))
    others = [operand for i, operand in enumerate(operands) if i != side]
    specs = tuple(map(_float32_spec, (cotangent, *others)))
    jaxpr = _traced_gradient(base, plain, side, _float32_spec(_Linear(aval)), specs)
    role = dtypes.roles[1 - side]
    own = dtypes._replace(out_dtype=aval.dtype, roles=(role, role))
    gradients[side] = _replay(jaxpr, (cotangent, *others), own, extras, of_gradient=True)
    return gradients


@functools.lru_cache(maxsize=4096)
def _traced_gradient(base: Primitive, plain: Any, side: int, spec: Any, specs: Any) -> ClosedJaxpr:
    """Traces the gradient of one operand from the cotangent and the other operands."""

    def gradient(cotangent: Any, *others: Any) -> Any:
        def fun(value: Any) -> Any:
            return _plain(base, plain, *others[:side], value, *others[side:])

        (result,) = jax.linear_transpose(fun, spec)(cotangent)
        return result

    return jax.make_jaxpr(gradient)(*specs)


ad.primitive_transposes[product_p] = _transpose


def _batch(args: Any, dims: Any, *, base: Primitive, params: Any, **dtypes: Any) -> tuple[Any, Any]:
    axes = tuple(dim if isinstance(dim, int) else None for dim in dims)
    arity = _arity(base)
    extras = dict(zip(dtypes["extras"], zip(args[arity:], axes[arity:], strict=True), strict=True))
    if any(axis is not None for name, (_, axis) in extras.items() if name != "scales"):
        extras = {name: extra for name, extra in extras.items() if name == "scales"}
    # One scale for all, as where it is of what the arrays have.
    extras = {
        name: x if axis is None else lax.reduce_max(x, (axis,))
        for name, (x, axis) in extras.items()
    }
    args, axes = args[:arity], axes[:arity]
    own = Dtypes(**dtypes)._replace(extras=tuple(extras))
    if all(axis is None for axis in axes):
        params = product_params(base, dict(params), own)
        return product_p.bind(*args, *extras.values(), **params), None
    batched = jax.vmap(functools.partial(_plain, base, params), in_axes=axes)
    jaxpr = jax.make_jaxpr(batched)(*map(_float32_spec, args))
    return _replay(jaxpr, args, own, extras), 0


batching.primitive_batchers[product_p] = _batch


@functools.lru_cache(maxsize=4096)
def _compiled(params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(functools.partial(product_p.bind, **dict(params)))


@product_p.def_impl
def _eager(*args: Any, **params: Any) -> Any:
    # It is compiled like any primitive, also where jit is disabled to look into functions.
    with jax.disable_jit(False):
        return _compiled(tuple(sorted(params.items())))(*args)


def _narrowed(operands: Sequence[Any], dtype: np.dtype) -> list[Any]:
    """Casts the operands that are floats."""
    return [
        lax.convert_element_type(operand, dtype) if is_inexact(dtype_of(operand)) else operand
        for operand in operands
    ]


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
    result = base.bind(*_narrowed(operands, dtypes.compute_dtype), **wanted)
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
    if named["recipe"] is not None:
        route = Route(lax.dot_general, takes_blocks)
        return _quantized(route, operands, params, Dtypes(out_dtype=out_dtype, **named))
    dtype = named["compute_dtype"]
    compute = functools.partial(_compute, base=base, params=params, **named)
    if base is not CONVOLUTION or dtype not in HALF_DTYPES or out_dtype in HALF_DTYPES:
        return compute(*operands, out_dtype=out_dtype)
    matmul = _as_matmul(dict(params), *operands)
    if matmul is None:
        return lax.convert_element_type(compute(*operands, out_dtype=dtype), out_dtype)
    dot = functools.partial(lax.dot_general, preferred_element_type=named["accum_dtype"])
    return lax.convert_element_type(matmul.compute(dot, *_narrowed(operands, dtype)), out_dtype)


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
    narrowed = _narrowed(operands, dtypes.compute_dtype)
    is_fast = dtypes.compute_dtype == BFLOAT16 and _has_fast_path(*narrowed[:2])
    matmul = _as_matmul(dict(params), *narrowed) if base is CONVOLUTION else None
    if is_fast and base is DOT_GENERAL:
        lhs, rhs = narrowed
        return _rounded(_cpu_matmul(lhs, rhs, dict(params)["dimension_numbers"]), dtypes)
    if is_fast and matmul is not None:
        lhs, rhs = narrowed
        return _rounded(matmul.compute(_cpu_matmul, lhs, rhs), dtypes)
    asked = dict(params) | {"preferred_element_type": FLOAT32}
    result = base.bind(*_narrowed(_kept(base, narrowed), FLOAT32), **asked)
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


mlir.register_lowering(product_p, _lowering(_compute))
mlir.register_lowering(product_p, _lower_on_cuda, platform="cuda")
mlir.register_lowering(product_p, _lowering(_compute_on_cpu), platform="cpu")
