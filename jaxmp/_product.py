"""One primitive for a matmul or convolution in mixed precision, closed under differentiation.

Its operands stay as they are, f32 masters too: they are narrowed where the product is computed.
Its derivative is itself, so all three products (fprop, dgrad, wgrad) have narrow operands, and the
gradient of an operand comes out in the operand's own dtype, straight from the accumulator.

How a product is differentiated and batched is JAX's own knowledge: its rule for the plain product
is traced in float32 and replayed with this primitive in the place of the plain one.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, Primitive, primitives
from jax.interpreters import ad, batching, mlir

from jaxmp._dtypes import BFLOAT16, FLOAT32, HALF_DTYPES

DOT_GENERAL = primitives.dot_general_p
CONVOLUTION = primitives.conv_general_dilated_p
_BASES = {primitive.name: primitive for primitive in (DOT_GENERAL, CONVOLUTION)}

# Parameters: `base`, the name of the plain primitive; `params`, its parameters as sorted pairs;
# `compute_dtype` of the multiplied operands; `accum_dtype` of the sums; `out_dtype` of the result.
product_p = Primitive("mixed_product")


def product(
    lhs: jax.Array,
    rhs: jax.Array,
    base: str,
    params: dict[str, Any],
    *,
    compute_dtype: np.dtype,
    accum_dtype: np.dtype,
    out_dtype: np.dtype,
) -> jax.Array:
    """Binds the primitive to the parameters of a plain product, as a jaxpr has them."""
    lhs, rhs = _vary_alike(lhs, rhs)
    return product_p.bind(
        lhs,
        rhs,
        base=base,
        params=tuple(sorted(params.items())),
        compute_dtype=compute_dtype,
        accum_dtype=accum_dtype,
        out_dtype=out_dtype,
    )


def _varying(value: Any) -> frozenset[str]:
    """Returns the manual axes of a shard_map over which a value differs."""
    aval: Any = jax.typeof(value)
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(getattr(aval, "vma", None) or getattr(manual, "varying", None) or ())


def _vary_alike(lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Lets both operands vary over the axes that either does, as JAX's own operations do."""
    axes = _varying(lhs) | _varying(rhs)
    missing = (tuple(sorted(axes - _varying(x))) for x in (lhs, rhs))
    left, right = (
        lax.pcast(x, names, to="varying") if names else x
        for x, names in zip((lhs, rhs), missing, strict=True)
    )
    return left, right


def traced_params(
    fun: Callable[..., Any], lhs: jax.Array, rhs: jax.Array
) -> tuple[str, dict[str, Any]]:
    """Returns the primitive and the parameters of the product that `fun(lhs, rhs)` is."""
    jaxpr = jax.make_jaxpr(fun)(*map(_float32_spec, _vary_alike(lhs, rhs)))
    (eqn,) = jaxpr.jaxpr.eqns
    return eqn.primitive.name, dict(eqn.params)


class _Linear(NamedTuple):
    """What is known of an operand that a gradient is for: no value."""

    aval: Any


def _float32_spec(value: Any) -> jax.ShapeDtypeStruct:
    """Returns shape, sharding and manual axes of a value, as float32."""
    aval: Any = value.aval if isinstance(value, _Linear) else jax.typeof(value)
    explicit = None if aval.sharding.mesh.empty else aval.sharding
    manual = {}
    if getattr(aval, "vma", None):
        manual["vma"] = aval.vma
    elif getattr(getattr(aval, "manual_axis_type", None), "varying", None):
        manual["manual_axis_type"] = aval.manual_axis_type
    return jax.ShapeDtypeStruct(aval.shape, FLOAT32, sharding=explicit, **manual)


def _plain(base: str, params: Sequence[tuple[str, Any]], lhs: Any, rhs: Any) -> Any:
    return _BASES[base].bind(lhs, rhs, **dict(params))


def _replay(jaxpr: ClosedJaxpr, args: Sequence[Any], **dtypes: Any) -> Any:
    """Runs a traced rule of one result with the mixed product for the plain one."""
    values = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    values |= dict(zip(jaxpr.jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in _BASES:
            lhs, rhs = operands
            results = product(lhs, rhs, eqn.primitive.name, eqn.params, **dtypes)
        else:
            results = eqn.primitive.bind(*operands, **eqn.params)
        results = results if eqn.primitive.multiple_results else [results]
        values.update(zip(eqn.outvars, results, strict=True))
    (result,) = jaxpr.jaxpr.outvars
    return read(result)


@product_p.def_abstract_eval
def _abstract(lhs: Any, rhs: Any, *, base: str, params: Any, out_dtype: Any, **_: Any) -> Any:
    wide = (aval.update(dtype=FLOAT32, weak_type=False) for aval in (lhs, rhs))
    found = _BASES[base].abstract_eval(*wide, **dict(params))
    aval = found[0] if isinstance(found, tuple) else found
    return aval.update(dtype=out_dtype, weak_type=False)


def _transpose(
    side: int, cotangent: Any, lhs: Any, rhs: Any, *, base: str, params: Any, **dtypes: Any
) -> Any:
    """Returns the gradient of the operand on `side`, in the dtype of that operand."""
    linear, other = ((lhs, rhs), (rhs, lhs))[side]
    spec = _float32_spec(_Linear(linear.aval))

    def gradient(cotangent: Any, other: Any) -> Any:
        def fun(value: Any) -> Any:
            lhs, rhs = ((value, other), (other, value))[side]
            return _plain(base, params, lhs, rhs)

        (result,) = jax.linear_transpose(fun, spec)(cotangent)
        return result

    jaxpr = jax.make_jaxpr(gradient)(_float32_spec(cotangent), _float32_spec(other))
    return _replay(jaxpr, (cotangent, other), **(dtypes | {"out_dtype": linear.aval.dtype}))


ad.defbilinear(product_p, functools.partial(_transpose, 0), functools.partial(_transpose, 1))


def _batch(args: Any, dims: Any, *, base: str, params: Any, **dtypes: Any) -> tuple[Any, int]:
    axes = tuple(dim if isinstance(dim, int) else None for dim in dims)
    batched = jax.vmap(functools.partial(_plain, base, params), in_axes=axes)
    jaxpr = jax.make_jaxpr(batched)(*map(_float32_spec, args))
    return _replay(jaxpr, args, **dtypes), 0


batching.primitive_batchers[product_p] = _batch


@functools.lru_cache(maxsize=4096)
def _compiled(params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(functools.partial(product_p.bind, **dict(params)))


@product_p.def_impl
def _eager(*args: Any, **params: Any) -> Any:
    return _compiled(tuple(sorted(params.items())))(*args)


def _compute(
    lhs: Any,
    rhs: Any,
    *,
    base: str,
    params: Any,
    compute_dtype: np.dtype,
    accum_dtype: np.dtype,
    out_dtype: np.dtype,
) -> Any:
    """The product where the hardware sums narrow products in float32 by itself: TPU, GPU.

    The narrow result is asked for directly: the compiler would store a float32 one first.
    """
    narrow = accum_dtype == FLOAT32 and out_dtype in HALF_DTYPES
    asked = out_dtype if narrow else accum_dtype
    lhs, rhs = (lax.convert_element_type(x, compute_dtype) for x in (lhs, rhs))
    wanted = dict(params) | {"preferred_element_type": asked}
    result = _BASES[base].bind(lhs, rhs, **wanted)
    return lax.convert_element_type(result, out_dtype)


def _compute_on_cuda(lhs: Any, rhs: Any, *, base: str, out_dtype: np.dtype, **params: Any) -> Any:
    """As `_compute`, save that cuDNN runs a half convolution in float32 for a float32 result."""
    if base != CONVOLUTION.name or params["compute_dtype"] not in HALF_DTYPES:
        return _compute(lhs, rhs, base=base, out_dtype=out_dtype, **params)
    narrow = _compute(lhs, rhs, base=base, out_dtype=params["compute_dtype"], **params)
    return lax.convert_element_type(narrow, out_dtype)


def _compute_on_cpu(
    lhs: Any,
    rhs: Any,
    *,
    base: str,
    params: Any,
    compute_dtype: np.dtype,
    accum_dtype: np.dtype,
    out_dtype: np.dtype,
) -> Any:
    """The product in the only form that XLA:CPU has a fast path for, behind barriers.

    That is bfloat16 operands, contracted on their last axis, with a float32 result. A transpose
    that XLA folds into such a product is refused when it runs, so nothing may be moved into it.
    Other narrow dtypes have no fast path: their products are computed in float32, which holds them.
    """
    lhs, rhs = (lax.convert_element_type(x, compute_dtype) for x in (lhs, rhs))
    if base == DOT_GENERAL.name and compute_dtype == BFLOAT16:
        result = _cpu_matmul(lhs, rhs, dict(params)["dimension_numbers"])
    else:
        lhs, rhs = (lax.convert_element_type(x, FLOAT32) for x in (lhs, rhs))
        asked = dict(params) | {"preferred_element_type": FLOAT32}
        result = _BASES[base].bind(lhs, rhs, **asked)
    # A narrow accumulator rounds more often than once; here only its last rounding is kept.
    result = lax.convert_element_type(result, accum_dtype)
    return lax.convert_element_type(result, out_dtype)


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
    numbers = (((2,), (2,)), ((0,), (0,)))
    result = lax.dot_general(left, right, numbers, preferred_element_type=FLOAT32)
    return lax.optimization_barrier(result).reshape([*batch, *rows, *columns])


def _as_matrices(x: Any, batch: Sequence[int], free: Sequence[int], summed: Sequence[int]) -> Any:
    """Returns an operand as [batch, free, contracted]."""
    sizes = [int(np.prod([x.shape[i] for i in axes], dtype=int)) for axes in (batch, free, summed)]
    return lax.transpose(x, [*batch, *free, *summed]).reshape(sizes)


mlir.register_lowering(product_p, mlir.lower_fun(_compute, multiple_results=False))
mlir.register_lowering(
    product_p, mlir.lower_fun(_compute_on_cuda, multiple_results=False), platform="cuda"
)
mlir.register_lowering(
    product_p, mlir.lower_fun(_compute_on_cpu, multiple_results=False), platform="cpu"
)
