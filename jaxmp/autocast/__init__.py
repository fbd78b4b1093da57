"""Any JAX function in mixed precision, unchanged: its jaxpr is rewritten under a policy."""

import difflib
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from jaxmp import _tree
from jaxmp._dtypes import HALF_DTYPES, dtype_name
from jaxmp._jaxpr import open_jaxpr
from jaxmp._placement import Placement
from jaxmp.autocast._interpret import Interpreter, given
from jaxmp.autocast._lookahead import OUTPUT
from jaxmp.autocast._metered import Metered
from jaxmp.autocast._region import Region, autocast_scope, full_precision
from jaxmp.autocast._rules import check_primitives
from jaxmp.autocast._sites import Site, check_state, find_sites
from jaxmp.autocast._values import GIVEN, Value, float_dtype, written_state
from jaxmp.fp8 import get_recipe, runnable
from jaxmp.fp8._state import Given, ProductState
from jaxmp.policy import Policy, get_policy

__all__ = ["autocast", "full_precision"]


def autocast(
    fun: Callable[..., Any], policy: Policy | str = "mixed_bfloat16"
) -> Callable[..., Any]:
    """Returns a function that computes what `fun` does in mixed precision.

    Matrix multiplications and convolutions take operands of the policy's compute dtype, in the
    forward pass and in both gradients; sums, norms, softmax, losses and the like are f32. Results
    have the dtypes that `fun` gives them. docs/autocast.md says what runs in which dtype, and why.

    Args:
        fun: any JAX function of any pytrees, written for f32. It is traced at each call. Python
            numbers and all that is no array stay what they are.
        policy: a policy or the name of one. Its rules are looked for in the paths of modules
            (Flax Linen, `jax.named_scope`) and of leaves of the arguments.

    Raises:
        ValueError: if the policy names a recipe that is not there, or one without a half compute
            dtype, or, when called, gives a class to a primitive that nobody knows.

    Warns:
        UserWarning: when called, if a rule of the policy matches nothing.

    Example:
        >>> import jax.numpy as jnp
        >>> x, w = jnp.full((1, 2), 1.001), jnp.ones((2, 2))
        >>> result = autocast(jnp.matmul, "mixed_bfloat16")(x, w)
        >>> result.dtype, result.tolist()  # 1.001 is 1 in bf16
        (dtype('float32'), [[2.0, 2.0]])
    """
    policy = get_policy(policy)
    check_runnable(policy)
    if not policy.compute_dtypes() & HALF_DTYPES:
        return _as_it_is(fun)
    return rewritten(fun, policy)


def autocast_loss(
    fun: Callable[..., Any], policy: Policy, places: Sequence[Placement | None] = ()
) -> Callable[..., Any]:
    """`autocast` for what is trained: with a warning if a recipe takes no matmul of it.

    Where a model is initialized, or run with a batch of one, that is as it should be.

    Args:
        fun: see `autocast`.
        policy: a policy.
        places: where the first leaves among the arguments lie on a mesh.
    """
    check_runnable(policy)
    if not policy.compute_dtypes() & HALF_DTYPES and not any(places):
        return _as_it_is(fun)
    return _computed_by(functools.partial(_run, policy, is_trained=True, places=places), fun)


def rewritten(fun: Callable[..., Any], policy: Policy) -> Callable[..., Any]:
    """`autocast` for a function that may have policies of its own inside.

    Args:
        fun: see `autocast`.
        policy: which has a half dtype.
    """
    return _computed_by(functools.partial(_run, policy, is_trained=False, places=()), fun)


def with_given(
    fun: Callable[..., Any],
    given: Mapping[str, Given],
    state: Mapping[str, ProductState] | None = None,
    *,
    every: bool = False,
) -> Callable[..., Any]:
    """Returns an autocast function whose products are given scales, meters or weights.

    Args:
        fun: what `autocast` returned.
        given: for the products of `sites_of`, by name.
        state: what scales and meters are of, if they are of a state.
        every: whether meters count all numbers, and not just the largest.
    """

    def run(traced: Any, arrays: Sequence[Any], _leaves: Any) -> list[Any]:
        jaxpr = open_jaxpr(traced)
        sites = find_sites(jaxpr)
        if state is not None:
            check_state(sites, state)
        own = [given.get(site.name, Given()) for site in sites]
        return Metered(every)(jaxpr, traced.consts, arrays, sites, own)

    return _computed_by(run, fun)


def sites_of(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Site]:
    """Returns the products of an autocast function that have a recipe.

    The origins of their weights count the arrays among the arguments.
    """
    found: list[Site] = []

    def run(traced: Any, arrays: Sequence[Any], _leaves: Any) -> list[Any]:
        jaxpr = open_jaxpr(traced)
        found.extend(find_sites(jaxpr))
        return list(jaxpr_as_fun(traced)(*arrays))

    leaves, treedef = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if _tree.is_array(leaf) or _is_spec(leaf)]

    def call(arrays: Sequence[Any]) -> Any:
        merged = dict(enumerate(leaves)) | dict(zip(places, arrays, strict=True))
        args, kwargs = treedef.unflatten(merged.values())
        return jax.tree.leaves(_computed_by(run, fun)(*args, **kwargs))

    jax.eval_shape(lambda arrays: _only_arrays(call(arrays)), [leaves[i] for i in places])
    return found


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _only_arrays(results: Sequence[Any]) -> list[Any]:
    return [result for result in results if _tree.is_array(result)]


def _computed_by(compute: Callable[..., list[Any]], fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that is traced, and computed of the trace.

    Args:
        compute: of the trace, the arrays among the arguments, and their positions among the leaves
            and names.
        fun: what is traced. What is no array, among arguments and results, stays what it is.
    """

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if _tree.is_array(leaf)]
        arrays = [leaves[i] for i in places]
        kept: list[Any] = []

        def flat(*arrays: Any) -> list[Any]:
            merged = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                merged[place] = array
            args, kwargs = treedef.unflatten(merged)
            results, out_tree = jax.tree.flatten(fun(*args, **kwargs))
            kept[:] = [out_tree, [None if _tree.is_array(r) else r for r in results]]
            return [result for result in results if _tree.is_array(result)]

        traced = jax.make_jaxpr(flat)(*arrays)
        trees = (*args, *kwargs.values())
        leaf_names = [name for tree in trees for name in _tree.leaf_names(tree)]
        results = iter(compute(traced, arrays, [(i, leaf_names[i]) for i in places]))
        out_tree, others = kept
        return out_tree.unflatten([next(results) if other is None else other for other in others])

    return wrapped


def _as_it_is(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fun`, marked for an autocast around it, which is not to change it."""

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with autocast_scope():
            return fun(*args, **kwargs)

    return wrapped


def check_runnable(policy: Policy) -> None:
    """Raises ValueError if a policy names a recipe that is not there, or that nothing computes."""
    for own in (policy, *(rule for _, rule in policy.rules)):
        if get_recipe(own.recipe) is not None and own.compute_dtype not in HALF_DTYPES:
            raise ValueError(
                f"The recipe {own.recipe!r} is of a policy that computes in "
                f"{dtype_name(own.compute_dtype)}, but what it leaves is for a half dtype: use "
                f"'compute=bfloat16,output=float32,recipe={own.recipe}'."
            )


def _run(
    policy: Policy,
    traced: Any,
    arrays: Sequence[Any],
    leaves: Sequence[tuple[int, str]],
    *,
    is_trained: bool,
    places: Sequence[Placement | None],
) -> list[Any]:
    """Computes a trace in mixed precision, with results in the dtypes that it has."""
    known, names = dict(enumerate(places)), [name for _, name in leaves]
    interpreter, region = Interpreter(), Region(runnable(policy))
    jaxpr = open_jaxpr(traced)
    uses = interpreter.lookahead.uses(jaxpr, [OUTPUT] * len(jaxpr.outvars), region)
    args = [
        _argument(array, name, policy, known.get(position))
        for array, (position, name) in zip(arrays, leaves, strict=True)
    ]
    with autocast_scope():
        results = interpreter.run(jaxpr, traced.consts, args, uses, region)
        outputs = [
            result.held_as(written_state(float_dtype(atom.aval))).array
            for result, atom in zip(results, jaxpr.outvars, strict=True)
        ]
    check_primitives(policy, interpreter.primitives)
    _warn_of_unused_rules(policy, {*names, *interpreter.paths})
    if is_trained:
        interpreter.recipes.warn_of_none()
    return outputs


def _argument(array: Any, name: str, policy: Policy, place: Placement | None) -> Value:
    value = given(array)
    if value.state != GIVEN:
        return value
    own = policy.for_path(name) if policy.rules else None
    is_ruled = own is not None and own != policy.for_path("")
    return Value(array, GIVEN._replace(policy=own if is_ruled else None, place=place))


def _warn_of_unused_rules(policy: Policy, paths: set[str]) -> None:
    for pattern in policy.unused_rules(paths):
        near = difflib.get_close_matches(pattern, sorted(paths), n=3, cutoff=0.3)
        some = f"{'Nearest' if near else 'Some'}: {', '.join(near or sorted(paths)[:3])}."
        warnings.warn(
            f"Policy rule {pattern!r} matched none of {len(paths)} paths. {some if paths else ''}",
            stacklevel=5,
        )
