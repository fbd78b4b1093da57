"""Matmuls and convolutions whose forward product and both gradients run in the compute dtype.

The operands can be whatever they are, such as f32 master weights and bf16 activations: they are
narrowed where they are multiplied. Products are summed in `accum_dtype`. The gradient of each
operand has the operand's dtype, and that of an f32 weight comes straight from the accumulator: it
is never rounded to the compute dtype.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal
from jax.interpreters import mlir

from jaxmp._dataflow import dataflow, unmoved
from jaxmp._dtypes import FLOAT32, dtype_of, is_real_float, parse_dtype
from jaxmp._jaxpr import inner_jaxprs
from jaxmp._product import (
    DOT_GENERAL,
    Dtypes,
    product,
    product_p,
    product_params,
    traced_params,
    vary_alike,
)
from jaxmp._product_lowering import LOWERINGS
from jaxmp._rebind import evaluate
from jaxmp.fp8 import get_recipe, runnable
from jaxmp.policy import Policy, get_policy

for _platform, _rule in LOWERINGS.items():
    mlir.register_lowering(product_p, _rule, platform=_platform)

__all__ = [
    "conv_general_dilated",
    "dot_general",
    "einsum",
    "matmul",
    "ragged_dot",
    "remat_policy",
]


def dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    *,
    policy: Any = "mixed_bfloat16",
    output_dtype: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """`jax.lax.dot_general` under a policy; see the module.

    Args:
        lhs: f16, bf16 or f32 array; other dtypes are multiplied as they are.
        rhs: like `lhs`, of any of these dtypes.
        dimension_numbers: as `jax.lax.dot_general` takes them.
        policy: gives `compute_dtype` and `accum_dtype`.
        output_dtype: of the result; the compute dtype if left out.
        out_sharding: of the result, on a mesh with explicit axes.

    Example:
        >>> w, x = jnp.ones((8, 4), jnp.float32), jnp.ones((2, 8), jnp.bfloat16)
        >>> numbers = (((1,), (0,)), ((), ()))
        >>> def loss(w):
        ...     return dot_general(x, w, numbers, output_dtype="float32").sum()
        >>> loss(w).dtype, jax.grad(loss)(w).dtype
        (dtype('float32'), dtype('float32'))
    """
    plain = functools.partial(
        lax.dot_general, dimension_numbers=dimension_numbers, out_sharding=out_sharding
    )
    return _mixed(plain, (lhs, rhs), get_policy(policy), output_dtype)


def _mixed(fun: Any, operands: Sequence[Any], policy: Policy, output_dtype: Any) -> jax.Array:
    """Computes the product that `fun(*operands)` is, under a policy."""
    operands = [jnp.asarray(operand) for operand in operands]
    dtypes = _dtypes(policy, output_dtype)
    if _is_plain(operands[:2], dtypes):
        return fun(*operands)
    base, params = traced_params(fun, *operands)
    return product(base, params, dtypes.for_operands(base, params, *operands[:2]), *operands)


def _dtypes(policy: Policy, output_dtype: Any) -> Dtypes:
    out_dtype = policy.compute_dtype if output_dtype is None else parse_dtype(output_dtype)
    recipe = get_recipe(runnable(policy).recipe)
    return Dtypes(policy.compute_dtype, policy.accum_dtype, out_dtype, recipe)


def _is_plain(operands: Sequence[jax.Array], dtypes: Dtypes) -> bool:
    """Whether a policy says nothing about operands: they are no floats, or all is float32."""
    have = {dtype_of(operand) for operand in operands}
    wide = have | {dtypes.compute_dtype, dtypes.out_dtype} == {FLOAT32}
    return wide or not all(map(is_real_float, have))


def matmul(
    lhs: Any, rhs: Any, *, policy: Any = "mixed_bfloat16", output_dtype: Any = None
) -> jax.Array:
    """`jax.numpy.matmul` under a policy: vectors, matrices, and stacks that broadcast.

    Args:
        lhs: `[..., M, K]` or `[K]`.
        rhs: `[..., K, N]` or `[K]`.
        policy: gives `compute_dtype` and `accum_dtype`.
        output_dtype: of the result; the compute dtype if left out.

    Raises:
        ValueError: if an operand is a scalar, or the contracted sizes differ.

    Example:
        >>> matmul(jnp.ones((5, 2, 8)), jnp.ones((8, 4))).shape
        (5, 2, 4)
    """
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    if not (lhs.ndim and rhs.ndim):
        raise ValueError(
            f"matmul takes arrays of at least one axis, got shapes {lhs.shape} and {rhs.shape}. "
            "Multiply by a scalar with *."
        )
    if lhs.shape[-1] != rhs.shape[-2 if rhs.ndim > 1 else 0]:
        raise ValueError(
            f"matmul contracts the last axis of {lhs.shape} with the last but one (or only) of "
            f"{rhs.shape}: they must be of one size. Transpose one of both, or use einsum."
        )
    left, right = ("k" if x.ndim == 1 else letters for x, letters in ((lhs, "mk"), (rhs, "kn")))
    result = "".join(letter for letter in "mn" if letter in left + right)
    subscripts = f"...{left},...{right}->...{result}"
    return einsum(subscripts, lhs, rhs, policy=policy, output_dtype=output_dtype)


def einsum(
    subscripts: str,
    *operands: Any,
    policy: Any = "mixed_bfloat16",
    output_dtype: Any = None,
    optimize: Any = "optimal",
) -> jax.Array:
    """`jax.numpy.einsum` under a policy.

    Args:
        subscripts: as `jax.numpy.einsum` takes them.
        *operands: f16, bf16 or f32 arrays, of any of these dtypes each.
        policy: gives `compute_dtype` and `accum_dtype`.
        output_dtype: of the result; the compute dtype if left out.
        optimize: how the order of several products is chosen, see `jax.numpy.einsum`.

    Example:
        >>> q, k = jnp.ones((2, 5, 3, 8)), jnp.ones((2, 7, 3, 8), jnp.bfloat16)
        >>> einsum("bqhd,bkhd->bhqk", q, k).shape
        (2, 3, 5, 7)
    """
    arrays = [jnp.asarray(operand) for operand in operands]
    plain = functools.partial(jnp.einsum, subscripts, optimize=optimize)
    dtypes = _dtypes(get_policy(policy), output_dtype)
    if _is_plain(arrays, dtypes):
        return plain(*arrays)
    # What einsum does besides products (sums, diagonals, transposes) is read off its own trace.
    specs = [jax.ShapeDtypeStruct(array.shape, FLOAT32) for array in arrays]
    jaxpr = jax.make_jaxpr(plain)(*specs)
    last = unmoved(dataflow(jaxpr).outputs[0]).eqn
    (result,) = _Replay(dtypes, last).run(jaxpr.jaxpr, jaxpr.consts, arrays)
    return lax.convert_element_type(result, dtypes.out_dtype)


@dataclasses.dataclass(frozen=True)
class _Replay:
    """Runs the trace of an einsum with mixed products for the plain ones.

    The product that is the result is given in its dtype; others stay in float32, as sums do.
    """

    dtypes: Dtypes
    last: JaxprEqn | None

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            inners = inner_jaxprs(eqn)
            if eqn.primitive is DOT_GENERAL:
                results = [self.contract(eqn, operands)]
            elif inners:
                results = self.run(inners[0].jaxpr, (), operands)
            else:
                results = [_other(eqn, operands)]
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def contract(self, eqn: JaxprEqn, operands: Sequence[Any]) -> Any:
        dtypes = self.dtypes if eqn is self.last else self.dtypes._replace(out_dtype=FLOAT32)
        dtypes = dtypes.for_operands(eqn.primitive, eqn.params, *operands[:2])
        return product(eqn.primitive, eqn.params, dtypes, *operands)


def _other(eqn: Any, operands: Sequence[Any]) -> Any:
    """Moves values in their own dtype, and computes with them in float32."""
    moves = len(operands) == 1 and eqn.primitive.name in ("transpose", "reshape", "squeeze")
    if not moves:
        operands = [_in_float32(operand) for operand in operands]
    return eqn.primitive.bind(*operands, **eqn.params)


def _in_float32(value: Any) -> Any:
    return lax.convert_element_type(value, FLOAT32) if is_real_float(dtype_of(value)) else value


def conv_general_dilated(
    lhs: Any,
    rhs: Any,
    window_strides: Sequence[int],
    padding: Any,
    lhs_dilation: Sequence[int] | None = None,
    *,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    policy: Any = "mixed_bfloat16",
    output_dtype: Any = None,
) -> jax.Array:
    """`jax.lax.conv_general_dilated` under a policy; see the module.

    cuDNN runs a half convolution in f32 if its result is asked for in f32. So on NVIDIA GPUs the
    weight gradient is rounded to the compute dtype once, save where a 1×1 kernel makes the
    convolution a matmul. TPUs and CPUs give it unrounded.

    Args:
        lhs: the input: f16, bf16 or f32; other dtypes are convolved as they are.
        rhs: the kernel, of any of these dtypes.
        window_strides: and the arguments that follow as `jax.lax.conv_general_dilated` takes them.
        padding: `"SAME"`, `"VALID"` or pairs.
        lhs_dilation: of the input.
        rhs_dilation: of the kernel.
        dimension_numbers: such as `("NHWC", "HWIO", "NHWC")`.
        feature_group_count: groups of features.
        batch_group_count: groups of the batch.
        policy: gives `compute_dtype` and `accum_dtype`.
        output_dtype: of the result; the compute dtype if left out.

    Example:
        >>> x, w = jnp.ones((2, 3, 9, 9)), jnp.ones((8, 3, 3, 3))
        >>> conv_general_dilated(x, w, (2, 2), "SAME").shape
        (2, 8, 5, 5)
    """
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    plain = functools.partial(
        lax.conv_general_dilated,
        window_strides=window_strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=dimension_numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
    )
    return _mixed(plain, (lhs, rhs), get_policy(policy), output_dtype)


def product_of(eqn: JaxprEqn, dtypes: Dtypes, operands: Sequence[Any], *extras: Any) -> Any:
    """Computes the product that an equation is, of its line, with other operands and dtypes."""
    operands = vary_alike(operands)
    dtypes = dtypes.for_operands(eqn.primitive, eqn.params, *operands[:2])
    params = product_params(eqn.primitive, eqn.params, dtypes)
    (result,) = evaluate(eqn.replace(primitive=product_p, params=params), [*operands, *extras])
    return result


def ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    *,
    policy: Any = "mixed_bfloat16",
    output_dtype: Any = None,
) -> jax.Array:
    """`jax.lax.ragged_dot` under a policy: each group of rows by a matrix of its own.

    Args:
        lhs: `[M, K]`: f16, bf16 or f32; other dtypes are multiplied as they are.
        rhs: `[G, K, N]`, of any of these dtypes.
        group_sizes: `i32[G]`, how many rows each matrix is for.
        policy: gives `compute_dtype` and `accum_dtype`.
        output_dtype: of the result; the compute dtype if left out.

    Example:
        >>> tokens, experts = jnp.ones((6, 8)), jnp.ones((2, 8, 4))
        >>> ragged_dot(tokens, experts, jnp.array([2, 4])).shape
        (6, 4)
    """
    return _mixed(lax.ragged_dot, (lhs, rhs, group_sizes), get_policy(policy), output_dtype)


def remat_policy(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a policy of `jax.checkpoint` that knows the products of this module.

    JAX's policies look for the primitives that they know: `dots_saveable` would recompute these
    products.

    Args:
        policy: one of `jax.checkpoint_policies`, or your own.

    Example:
        >>> saveable = remat_policy(jax.checkpoint_policies.dots_saveable)
        >>> layer = jax.checkpoint(lambda w, x: jnp.tanh(matmul(x, w)), policy=saveable)
        >>> layer(jnp.ones((4, 4)), jnp.ones((2, 4))).dtype
        dtype(bfloat16)
    """

    def knowing(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive is not product_p:
            return policy(primitive, *avals, **params)
        return policy(params["base"], *avals, **dict(params["params"]))

    return knowing
