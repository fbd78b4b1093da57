"""Which primitive runs in which precision.

The classes follow torch.autocast and TensorFlow's automatic mixed precision where they agree, see
docs/autocast.md.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from jaxmp._dataflow import SHAPE_PRIMITIVES
from jaxmp._dtypes import FLOAT16, HALF_DTYPES, is_real_float
from jaxmp._errors import did_you_mean
from jaxmp._jaxpr import dtype_of_var, is_linear_algebra
from jaxmp._product import PLAIN_PRODUCTS
from jaxmp.policy import Policy

LOW, FULL, FOLLOW, OPAQUE = "low", "full", "follow", "opaque"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Steep or cancelling functions, and sums: their errors grow with the values or with their number.
_FULL = _names(
    """
    exp exp2 expm1 log log1p pow rsqrt sin cos tan asin acos atan sinh cosh asinh acosh atanh
    erf_inv lgamma digamma polygamma igamma igammac igamma_grad_a random_gamma_grad
    regularized_incomplete_beta zeta bessel_i0e bessel_i1e
    reduce_sum reduce_prod reduce_window_sum select_and_scatter_add cumsum cumprod cumlogsumexp
    scatter-add scatter_add scatter-sub scatter_sub scatter-mul scatter_mul
    psum psum2 psum_invariant reduce_scatter
    """
)

# They move numbers, or choose among them, and keep every one as it is.
MOVES = SHAPE_PRIMITIVES | _names(
    """
    concatenate pad dynamic_update_slice select_n tile real_dynamic_slice
    all_gather all_gather_invariant all_to_all ppermute pbroadcast pgather psend precv
    """
)

# They give one of their operands, or its negative: rounded before or after is the same.
SELECTS = MOVES | _names(
    """
    max min clamp neg abs reduce_max reduce_min cummax cummin sort
    reduce_window_max reduce_window_min pmax pmin
    """
)

_FOLLOW = SELECTS | _names(
    """
    add sub mul div rem atan2 add_any sign floor ceil round square sqrt cbrt
    tanh logistic erf erfc eq ne lt le gt ge eq_to lt_to le_to is_finite
    scatter scatter-min scatter_min scatter-max scatter_max
    argmax argmin top_k approx_top_k
    """
)

# Of a large angle, rounded, nothing is left.
PERIODIC = frozenset({"sin", "cos", "tan"})
# They take operands of one shape, or broadcast those whose axes have size one.
ELEMENTWISE = _names("add sub mul div rem max min atan2")
# Each element of the result is made of those in the same place.
OF_ELEMENTS = ELEMENTWISE | _names(
    """
    neg abs clamp select_n add_any sign square sqrt rsqrt cbrt integer_pow pow tanh logistic
    erf erfc exp exp2 expm1 log log1p eq ne lt le gt ge convert_element_type
    """
)
# What JAX keeps for their derivatives is computed of the operand or the result, one array for each.
CURVED = _names("tanh logistic erf erfc exp exp2 expm1 log1p integer_pow square")
# Their derivatives can leave the range of f16 where the functions do not.
STEEP = _names("div sqrt rsqrt cbrt pow exp exp2 expm1 log log1p")
# They use an element several times.
REPEATS = frozenset({"broadcast_in_dim", "gather"})

# Each result is made of the operand in the same place.
PAIRWISE = frozenset({"optimization_barrier", "sort"})


def class_of(eqn: JaxprEqn, policy: Policy) -> str:
    """Returns the class of an equation without inner jaxprs: low, full, follow or opaque."""
    name = eqn.primitive.name
    if not _is_of_real_floats(eqn):
        return OPAQUE
    named = policy.primitive_class(name)
    if named is not None:
        return named
    if name in PLAIN_PRODUCTS:
        return FULL if is_linear_algebra(eqn) else LOW
    if name == "integer_pow":
        # GELU has a cube, whose derivative overflows in f16 at 148.
        largest = 2 if policy.compute_dtype == FLOAT16 else 3
        return FOLLOW if 0 <= eqn.params["y"] <= largest else FULL
    if name in _FOLLOW:
        return FOLLOW
    return FULL if name in _FULL else OPAQUE


def _is_of_real_floats(eqn: JaxprEqn) -> bool:
    """Whether all floats that an equation takes or gives are f16, bf16 or f32, and any is."""
    operands = _wide_numbers(eqn.invars)
    return bool(operands) and all(map(is_real_float, operands + _wide_numbers(eqn.outvars)))


def _wide_numbers(atoms: Sequence[Any]) -> list[np.dtype]:
    """Returns the dtypes of floats and complex numbers."""
    dtypes = map(dtype_of_var, atoms)
    return [d for d in dtypes if isinstance(d, np.dtype) and d.kind in "fcV"]


def asks_for_float32(eqn: JaxprEqn) -> bool:
    """Whether a product was written to give float32 for narrower operands."""
    operands = [dtype_of_var(atom) for atom in eqn.invars[:2]]
    return (
        all(d in HALF_DTYPES for d in operands) and dtype_of_var(eqn.outvars[0]) not in HALF_DTYPES
    )


def check_primitives(policy: Policy, found: Iterable[str]) -> None:
    """Raises ValueError if a policy gives a class to a primitive that nobody knows.

    Args:
        policy: with its rules.
        found: the primitives of the program.
    """
    known = _FULL | _FOLLOW | PLAIN_PRODUCTS | {"integer_pow", *found}
    for each in (policy, *(rule for _, rule in policy.rules)):
        for name, _ in each.primitives:
            if name not in known:
                raise ValueError(
                    f"The policy gives a class to {name!r}, which is no primitive of JAX that "
                    "autocast knows, nor one of this program (jax.make_jaxpr prints those)."
                    f"{did_you_mean(name, sorted(known))}"
                )
