"""Running a function in a policy's compute dtype by casting at its boundary."""

import difflib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax

from jaxmp import _tree
from jaxmp._dtypes import HALF_DTYPES, dtype_of
from jaxmp.policy import Policy


def apply_policy(fun: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """Returns `fun` with its real float arguments cast to the policy's compute dtype.

    Half results are widened to the policy's output dtype where that is wider; results in f32 stay.
    """
    check_runnable(policy)

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        _warn_of_unused_rules(policy, (*args, *kwargs.values()))
        args = tuple(policy.cast_to_compute(arg) for arg in args)
        kwargs = {name: policy.cast_to_compute(arg) for name, arg in kwargs.items()}
        return _widen_half(fun(*args, **kwargs), policy)

    return wrapped


def check_runnable(policy: Policy) -> None:
    """Raises ValueError if a policy asks for what is not there yet."""
    recipes = [p.recipe for p in (policy, *(rule for _, rule in policy.rules)) if p.recipe]
    if recipes:
        raise ValueError(
            f"Policy {str(policy)!r} asks for the fp8 recipe {recipes[0]!r}, which this "
            "version cannot run. Use 'mixed_bfloat16'."
        )


def _widen_half(tree: Any, policy: Policy) -> Any:
    if policy.output_dtype in HALF_DTYPES:
        return tree
    return jax.tree.map(
        lambda leaf: (
            _tree.cast_leaf(leaf, policy.output_dtype) if dtype_of(leaf) in HALF_DTYPES else leaf
        ),
        tree,
    )


def _warn_of_unused_rules(policy: Policy, args: tuple[Any, ...]) -> None:
    if not policy.rules:
        return
    paths = sorted({name for arg in args for name in _tree.leaf_names(arg)})
    for pattern in policy.unused_rules(paths):
        near = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.3)
        nearest = f" Nearest: {', '.join(near)}." if near else ""
        warnings.warn(
            f"Policy rule {pattern!r} matched none of {len(paths)} paths.{nearest}", stacklevel=4
        )
