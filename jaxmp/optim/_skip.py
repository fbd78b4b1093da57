"""Skipping a step whose gradients are not finite, and counting such steps."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxmp import _tree
from jaxmp._dtypes import dtype_of, has_gradient, widened
from jaxmp._errors import bullet_list
from jaxmp._mapped import axes_to_agree, least_of_all
from jaxmp.optim._checks import check_shapes, check_structure, inner_update
from jaxmp.optim._gate import run_or_skip

# The square of a larger one leaves the range of f32, and stays in an optimizer's second moment.
LARGEST_GRADIENT = 2.0**60
CLEAN, ELSEWHERE = -1, -2


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class GradientNames:
    """The names of the gradients that a state looks at, for messages."""

    names: tuple[str, ...]

    def __repr__(self) -> str:
        return f"GradientNames(<{len(self.names)}>)"


class SkipNonfiniteState(NamedTuple):
    """State of `skip_nonfinite`.

    Attributes:
        inner_state: the state of the wrapped transform; as it was after the last clean step.
        nonfinite_leaf: i32[], which of `gradients` was the first to have the last step skipped;
            -1 if the step was clean, -2 if the reason lies elsewhere.
        step: i32[], steps attempted.
        skipped_steps: i32[], steps skipped.
        skip_streak: i32[], steps skipped in a row up to the last one.
        gradients: the names of the gradients; static.
    """

    inner_state: Any
    nonfinite_leaf: jax.Array
    step: jax.Array
    skipped_steps: jax.Array
    skip_streak: jax.Array
    gradients: GradientNames

    @property
    def finite(self) -> jax.Array:
        """bool[], whether the last step was clean."""
        return jnp.asarray(self.nonfinite_leaf) == CLEAN


def skip_nonfinite(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Skips a step whose gradients are not finite, and leaves everything as it was.

    The state of `tx`, its schedules and counters with it, stays bit for bit, and the updates are
    -0.0, the one number that changes no parameter when added. A gradient counts as infinite from
    2^60 on: its square would leave f32, and an optimizer would keep it for ever. A step is skipped
    too if a number in the new state of `tx` is not finite, as when prodigy divides by the norm of
    gradients that are all zero. NaN in an update of finite gradients becomes -0.0, and the step
    counts as skipped.

    `update` takes `finite`, a bool[], as an extra argument: the step is skipped unless it is true.
    Optimizers that are to skip together, such as the two of a GAN, are given the same:
    `finite=jaxmp.all_finite((generator_grads, critic_grads))`; so are devices whose gradients are
    not reduced.

    NaN never comes through, however long the streak: `raise_for_skips` ends a run that only skips.

    Args:
        tx: any optax transform or chain.

    Example:
        >>> tx, params = skip_nonfinite(optax.adam(0.1)), {"w": jnp.ones(2)}
        >>> updates, state = tx.update({"w": jnp.array([1.0, jnp.nan])}, tx.init(params), params)
        >>> updates["w"], int(state.skipped_steps), int(state.inner_state[0].count)
        (Array([-0., -0.], dtype=float32), 1, 0)
    """
    inner = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        inner_state = inner.init(inexact_only(params, params))
        return SkipNonfiniteState(_tree.strong(inner_state), **first_counters(params))

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        finite: Any = True,
        axis_name: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        outcome = checked_update(
            inner,
            updates,
            state,
            params,
            finite=finite,
            axis_name=axis_name,
            extra_args=extra_args,
        )
        return outcome.updates, state._replace(**outcome.fields)

    return optax.GradientTransformationExtraArgs(init, update)


def first_counters(params: Any) -> dict[str, Any]:
    """Returns the fields of a state that count steps, before the first one."""
    return {
        "nonfinite_leaf": jnp.int32(CLEAN),
        "step": jnp.int32(0),
        "skipped_steps": jnp.int32(0),
        "skip_streak": jnp.int32(0),
        "gradients": GradientNames(tuple(_tree.leaf_names(params))),
    }


class Outcome(NamedTuple):
    """What a checked update did.

    Attributes:
        updates: of all parameters; -0.0 if the step was skipped.
        finite: bool[], whether all gradients were finite and the step was wanted.
        fields: those of the state that change.
    """

    updates: Any
    finite: jax.Array
    fields: dict[str, Any]


def checked_update(
    inner: optax.GradientTransformationExtraArgs,
    grads: Any,
    state: Any,
    params: Any,
    *,
    finite: Any,
    axis_name: Any,
    extra_args: dict[str, Any],
) -> Outcome:
    """Runs a wrapped transform if all gradients are finite, in f32, and counts.

    Args:
        inner: the transform.
        grads: of any width.
        state: has the fields of a `SkipNonfiniteState`.
        params: the parameters, or None.
        finite: bool[], false if the step is to be skipped in any case.
        axis_name: the mapped axes over which devices skip alike.
        extra_args: for the transform.
    """
    check_structure(grads, params)
    grads = jax.tree.map(_tree.widen_leaf, grads)
    finite = _as_flag(finite)
    params_or_none = [] if params is None else _floats(params)
    axes = axes_to_agree(axis_name, [*_floats(grads), finite], params_or_none)
    nonfinite_leaf = _tree.first_nonfinite(grads, LARGEST_GRADIENT)
    leaves_like = grads if params is None else params

    def run(grads: Any, inner_state: Any, params: Any) -> tuple[Any, Any, jax.Array]:
        updates, new_state = inner_update(inner, grads, inner_state, params, extra_args)
        check_shapes(updates, grads, params)
        updates = _tree.like(updates, grads if params is None else _wide(params))
        numbers = _changed_numbers(new_state, inner_state)
        if not numbers:
            return updates, new_state, jnp.bool_(True)
        clean = _tree.all_finite(numbers)
        return updates, _tree.select_tree(clean, new_state, inner_state), clean

    def skip(grads: Any, inner_state: Any, params: Any) -> tuple[Any, Any, jax.Array]:
        # The gradients go through, so that XLA writes the updates where they are.
        target = grads if params is None else _wide(params)
        same = jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, target)
        passed = grads if same else jax.tree.map(minus_zeros, target)
        return _tree.like(passed, target), inner_state, jnp.bool_(False)

    args = (
        inexact_only(grads, leaves_like),
        state.inner_state,
        None if params is None else inexact_only(params, params),
    )
    if axes:
        # All devices run it and agree on what came of it, once.
        updates, inner_state, clean = jax.jit(run)(*args)
        verdict = _agreed(_verdict(nonfinite_leaf, finite, clean, updates), axes)
        inner_state = _tree.select_tree(verdict.passes, inner_state, state.inner_state)
    else:
        wanted = (nonfinite_leaf == CLEAN) & finite
        updates, inner_state, clean = run_or_skip(wanted, run, skip, *args)
        verdict = _verdict(nonfinite_leaf, finite, clean, updates)
    # What the transform itself made NaN of finite gradients does not come through either. Counting
    # it holds nothing up: no update waits for all others.
    updates = jax.tree.map(
        lambda u: jnp.where(verdict.passes & jnp.isfinite(u), u, minus_zeros(u)), updates
    )
    one, is_clean = jnp.int32(1), verdict.nonfinite_leaf == CLEAN
    fields = {
        "inner_state": inner_state,
        "nonfinite_leaf": verdict.nonfinite_leaf,
        "step": state.step + one,
        "skipped_steps": jnp.where(is_clean, state.skipped_steps, state.skipped_steps + one),
        "skip_streak": jnp.where(is_clean, 0, state.skip_streak + one),
    }
    return Outcome(fill_updates(updates, leaves_like), verdict.finite, fields)


class _Verdict(NamedTuple):
    """What is made of a step.

    Attributes:
        finite: bool[], whether the gradients are finite and the step is wanted.
        passes: bool[], whether the new state of the transform takes the place of the old one.
        nonfinite_leaf: i32[], see `SkipNonfiniteState`.
    """

    finite: jax.Array
    passes: jax.Array
    nonfinite_leaf: jax.Array


def _verdict(leaf: jax.Array, finite: jax.Array, clean: jax.Array, updates: Any) -> _Verdict:
    own = leaf == CLEAN
    passes = own & finite & clean
    is_clean = passes & _tree.all_finite(updates)
    reason = jnp.where(own, jnp.int32(ELSEWHERE), leaf)
    return _Verdict(own & finite, passes, jnp.where(is_clean, jnp.int32(CLEAN), reason))


def _agreed(verdict: _Verdict, axes: tuple[str, ...]) -> _Verdict:
    """Returns the worst verdict of all devices, in one number for one exchange."""
    leaf = verdict.nonfinite_leaf
    # From bad to good: the first gradient, a step not wanted, a state or an update not finite.
    elsewhere = jnp.where(verdict.finite, jnp.where(verdict.passes, 2, 1), 0)
    last = jnp.int32(np.iinfo(np.int32).max - 3)
    rank = jnp.where(leaf == CLEAN, last + 3, jnp.where(leaf == ELSEWHERE, last + elsewhere, leaf))
    rank = least_of_all(rank.astype(jnp.int32), axes)
    leaf = jnp.where(rank < last, rank, jnp.int32(ELSEWHERE))
    leaf = jnp.where(rank == last + 3, jnp.int32(CLEAN), leaf)
    return _Verdict(rank > last, rank > last + 1, leaf)


def _floats(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if has_gradient(dtype_of(leaf))]


def _as_flag(finite: Any) -> jax.Array:
    flag = jnp.asarray(finite)
    if flag.shape != () or flag.dtype != jnp.bool_:
        raise ValueError(
            f"finite is {flag.dtype}{list(flag.shape)}, but says for the whole step whether it is "
            "wanted: pass a bool[], such as jaxmp.all_finite(grads)."
        )
    return flag


def raise_for_skips(opt_state: Any, *, limit: int = 100) -> None:
    """Raises if the last `limit` steps were all skipped: it will not get better by itself.

    Waits for the device, so call it where the loss is logged rather than at every step.

    Args:
        opt_state: a pytree that holds exactly one `MixedPrecisionState` or `SkipNonfiniteState`.
        limit: how many skipped steps in a row are too many, at least 1.

    Raises:
        FloatingPointError: names the first gradient that was infinite or NaN in the last step.

    Example:
        >>> tx, params = skip_nonfinite(optax.sgd(0.1)), {"w": jnp.ones(2)}
        >>> state = tx.init(params)
        >>> for _ in range(3):
        ...     _, state = tx.update({"w": jnp.array([1.0, jnp.nan])}, state, params)
        >>> raise_for_skips(state, limit=3)
        Traceback (most recent call last):
        ...
        FloatingPointError: 3 steps in a row were skipped. ...'w'...
    """
    if limit < 1:
        raise ValueError(f"limit is {limit!r}, but must be at least 1.")
    state = get_skip_state(opt_state)
    streak, index = (int(x) for x in jax.device_get((state.skip_streak, state.nonfinite_leaf)))
    if streak < limit:
        return
    raise FloatingPointError(f"{streak} steps in a row were skipped. {_reason(state, index)}")


def _reason(state: Any, index: int) -> str:
    if index == ELSEWHERE:
        return (
            "All gradients of this optimizer are finite: either those of another one are not, or "
            "an update or a number in the state of the transform is not, as after gradients that "
            "are all zero."
        )
    scale = getattr(getattr(state, "loss_scale", None), "loss_scale", None)
    help_of = "" if scale is None else f" The loss scale is down to {float(scale)} and cannot help."
    return (
        f"The first gradient that is infinite or NaN is that of {state.gradients.names[index]!r}."
        f"{help_of} Look for a NaN in the data, a division by zero, or an infinity times zero."
    )


def get_skip_state(opt_state: Any) -> Any:
    """Returns the state that counts skipped steps, in any nesting of optimizer states."""
    found = find_skip_states(opt_state)
    if len(found) == 1:
        return found[0][1]
    raise ValueError(
        f"{len(found)} states that count skipped steps in an optimizer state of type "
        f"{type(opt_state).__name__}:\n{bullet_list(path or '(root)' for path, _ in found)}\n"
        "Wrap the optimizer once, tx = jaxmp.mixed_precision(tx, policy), and pass its state."
    )


def find_skip_states(tree: Any) -> list[tuple[str, Any]]:
    """Returns every state that counts skipped steps with its name; that of the root is empty."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_counts_skips)
    return [(_tree.path_name(path), node) for path, node in nodes if _counts_skips(node)]


def _counts_skips(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "skip_streak")


def inexact_only(tree: Any, leaves_like: Any) -> Any:
    """Puts None, which optax passes over, in place of leaves that have no gradient."""
    return jax.tree.map(
        lambda leaf, like: leaf if has_gradient(dtype_of(like)) else None, tree, leaves_like
    )


def minus_zeros(leaf: Any) -> jax.Array:
    """Returns zeros that change no bit when added: x + -0.0 is x for every x, -0.0 too."""
    dtype = np.dtype(leaf.dtype)
    part = jnp.full(leaf.shape, -0.0, jnp.finfo(dtype).dtype)
    return lax.complex(part, part) if dtype.kind == "c" else part


def fill_updates(inner_updates: Any, leaves_like: Any) -> Any:
    """Gives leaves without a gradient an update that leaves them as they are."""

    def fill(like: Any, update: Any) -> Any:
        dtype = dtype_of(like)
        if like is None or has_gradient(dtype):
            return update
        return np.zeros((), jax.dtypes.float0) if dtype is None else jnp.zeros_like(like)

    return jax.tree.map(fill, leaves_like, inner_updates, is_leaf=lambda leaf: leaf is None)


def _wide(tree: Any) -> Any:
    """Returns what updates of parameters look like: of at least f32."""

    def leaf_fn(leaf: Any) -> Any:
        dtype = dtype_of(leaf)
        if not has_gradient(dtype):
            return leaf
        return jax.ShapeDtypeStruct(jnp.shape(leaf), widened(dtype))

    return jax.tree.map(leaf_fn, tree)


def _changed_numbers(new: Any, old: Any) -> list[jax.Array]:
    """Returns the float numbers of a new state; zero for those that were not finite before."""
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    return [
        jnp.where(jnp.isfinite(before), number, 0)
        for number, before in pairs
        if jnp.shape(number) == () and has_gradient(dtype_of(number)) and number is not before
    ]
