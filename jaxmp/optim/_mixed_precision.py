"""The optax transform that a mixed precision program wraps its optimizer in."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxmp import _tree
from jaxmp._dtypes import HALF_DTYPES, dtype_of, has_gradient
from jaxmp._errors import bullet_list
from jaxmp.loss_scale import as_loss_scale, default_loss_scale
from jaxmp.optim._gate import run_or_skip
from jaxmp.policy import Policy, get_policy


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class GradientNames:
    """The names of the gradients that a `MixedPrecisionState` looks at, for messages."""

    names: tuple[str, ...]

    def __repr__(self) -> str:
        return f"GradientNames(<{len(self.names)}>)"


class MixedPrecisionState(NamedTuple):
    """State of `mixed_precision`.

    Attributes:
        inner_state: the state of the wrapped transform; as it was after the last clean step.
        loss_scale: the loss scale of the next step.
        nonfinite_leaf: i32[], which of `gradients` was the first that was infinite or NaN in the
            last step; -1 if the step was clean.
        step: i32[], steps attempted.
        skipped_steps: i32[], steps skipped.
        skip_streak: i32[], steps skipped in a row up to the last one.
        gradients: the names of the gradients; static.
    """

    inner_state: Any
    loss_scale: Any
    nonfinite_leaf: jax.Array
    step: jax.Array
    skipped_steps: jax.Array
    skip_streak: jax.Array
    gradients: GradientNames

    @property
    def finite(self) -> jax.Array:
        """bool[], whether the last step was clean."""
        return jnp.asarray(self.nonfinite_leaf) < 0


def mixed_precision(
    tx: optax.GradientTransformation, policy: Policy | str, loss_scale: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optax transform: checks gradients, skips overflows, carries the loss scale.

    `update` takes the gradients of `jaxmp.value_and_grad`, which are already unscaled. It widens
    them to f32, so that clipping, weight decay and noise work at their documented thresholds. If a
    gradient is infinite or NaN the step is skipped: `tx`'s state, its schedules and counters with
    it, stays as it was, bit for bit, the updates are -0.0 (the one number that changes no
    parameter when added), and the loss scale backs off. Every float and complex gradient counts
    in the check, those of parameters that `tx` freezes too. Wrap last, around `optax.MultiSteps`
    too: its accumulators, left outside, would keep a NaN for ever. Across devices, reduce the
    gradients before `update`, so that every device decides alike.

    Args:
        tx: any optax transform or chain.
        policy: a policy or the name of one.
        loss_scale: a loss scale; if left out, `DynamicLossScale()` for a policy that computes in
            f16, else `NoOpLossScale()`.

    Returns:
        A transform whose state is a `MixedPrecisionState`. Integers, PRNG keys and other leaves
        without a gradient may stand among the parameters: `tx` does not see them.

    Raises:
        ValueError: from `init`, if parameters are narrower than f32 or `tx` holds another
            `mixed_precision`; from `update`, if the gradients have another structure.

    Example:
        >>> tx = mixed_precision(optax.sgd(0.5), "mixed_float16")
        >>> params = {"w": jnp.ones(2)}
        >>> state = tx.init(params)
        >>> updates, state = tx.update({"w": jnp.array([1.0, jnp.inf])}, state, params)
        >>> optax.apply_updates(params, updates)
        {'w': Array([1., 1.], dtype=float32)}
        >>> int(state.skipped_steps), float(get_loss_scale(state).loss_scale)
        (1, 16384.0)
    """
    policy = get_policy(policy)
    inner = optax.with_extra_args_support(tx)
    if loss_scale is None:
        loss_scale = default_loss_scale(policy.compute_dtypes())
    first_loss_scale = as_loss_scale(loss_scale)

    def init(params: Any) -> Any:
        _reject_half(params)
        inner_state = inner.init(_inexact_only(params, params))
        if find_mixed_precision_states(inner_state):
            raise ValueError(
                "The transform holds a mixed_precision already, which would scale and skip "
                "twice. Wrap the whole chain once."
            )
        return MixedPrecisionState(
            inner_state=_tree.strong(inner_state),
            loss_scale=_tree.fresh_arrays(first_loss_scale),
            nonfinite_leaf=jnp.int32(-1),
            step=jnp.int32(0),
            skipped_steps=jnp.int32(0),
            skip_streak=jnp.int32(0),
            gradients=GradientNames(tuple(_tree.leaf_names(params))),
        )

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        _check_structure(updates, params)
        grads = jax.tree.map(_tree.widen_leaf, updates)
        nonfinite_leaf = _tree.first_nonfinite(grads)
        finite = nonfinite_leaf < 0
        leaves_like = grads if params is None else params

        def run(grads: Any, inner_state: Any, params: Any) -> tuple[Any, Any]:
            # Optax's own transforms do not run under strict promotion (they mix f32 and
            # counters); all float leaves are f32 here, so nothing is narrowed or widened by it.
            with jax.numpy_dtype_promotion("standard"):
                updates, new_state = inner.update(grads, inner_state, params, **extra_args)
            _check_state(new_state, inner_state)
            target = grads if params is None else params
            return _tree.like(updates, target), _tree.like(new_state, inner_state)

        def skip(grads: Any, inner_state: Any, params: Any) -> tuple[Any, Any]:
            target = grads if params is None else params
            return jax.tree.map(_minus_zeros, target), inner_state

        inner_updates, inner_state = run_or_skip(
            finite,
            run,
            skip,
            _inexact_only(grads, leaves_like),
            state.inner_state,
            None if params is None else _inexact_only(params, params),
        )
        one = jnp.int32(1)
        return _fill_updates(inner_updates, leaves_like), MixedPrecisionState(
            inner_state=inner_state,
            loss_scale=_tree.like(state.loss_scale.adjust(finite), state.loss_scale),
            nonfinite_leaf=nonfinite_leaf,
            step=state.step + one,
            skipped_steps=jnp.where(finite, state.skipped_steps, state.skipped_steps + one),
            skip_streak=jnp.where(finite, 0, state.skip_streak + one),
            gradients=state.gradients,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def get_mixed_precision_state(opt_state: Any) -> MixedPrecisionState:
    """Returns the `MixedPrecisionState` in any nesting of optimizer states.

    Args:
        opt_state: a pytree that holds exactly one, such as an optimizer state or a `TrainState`.

    Raises:
        ValueError: if it holds none, or several.

    Example:
        >>> tx = optax.chain(mixed_precision(optax.adam(1e-3), "mixed_float16"))
        >>> int(get_mixed_precision_state(tx.init({"w": jnp.ones(2)})).step)
        0
    """
    found = find_mixed_precision_states(opt_state)
    if not found:
        raise ValueError(
            f"No loss scale in an optimizer state of type {type(opt_state).__name__}: wrap the "
            "optimizer, tx = jaxmp.mixed_precision(tx, policy), and make the state with tx.init."
        )
    if len(found) > 1:
        raise ValueError(
            f"{len(found)} loss scales in one optimizer state, at:\n"
            f"{bullet_list(path or '(root)' for path, _ in found)}\n"
            "Pass the part of the state that belongs to this loss."
        )
    return found[0][1]


def get_loss_scale(opt_state: Any) -> Any:
    """Returns the loss scale that `mixed_precision` keeps in an optimizer state.

    Args:
        opt_state: a pytree that holds exactly one `MixedPrecisionState`, at any depth.

    Raises:
        ValueError: if it holds none, or several.

    Example:
        >>> tx = mixed_precision(optax.adam(1e-3), "mixed_float16")
        >>> float(get_loss_scale(tx.init({"w": jnp.ones(2)})).loss_scale)
        32768.0
    """
    return get_mixed_precision_state(opt_state).loss_scale


def raise_for_skips(opt_state: Any, *, limit: int = 100) -> None:
    """Raises if the last `limit` steps were all skipped: loss scaling cannot help then.

    Waits for the device, so call it where the loss is logged rather than at every step.

    Args:
        opt_state: a pytree that holds exactly one `MixedPrecisionState`.
        limit: how many skipped steps in a row are too many, at least 1.

    Raises:
        FloatingPointError: names the first gradient that was infinite or NaN in the last step.

    Example:
        >>> tx, params = mixed_precision(optax.sgd(0.1), "mixed_float16"), {"w": jnp.ones(2)}
        >>> state = tx.init(params)
        >>> for _ in range(3):
        ...     _, state = tx.update({"w": jnp.array([1.0, jnp.nan])}, state, params)
        >>> raise_for_skips(state, limit=3)
        Traceback (most recent call last):
        ...
        FloatingPointError: 3 steps in a row were skipped, ...'w'...
    """
    if limit < 1:
        raise ValueError(f"limit is {limit!r}, but must be at least 1.")
    state = get_mixed_precision_state(opt_state)
    streak, index = (int(x) for x in jax.device_get((state.skip_streak, state.nonfinite_leaf)))
    if streak < limit:
        return
    raise FloatingPointError(
        f"{streak} steps in a row were skipped, and the loss scale is down to "
        f"{float(state.loss_scale.loss_scale)}. The first gradient that is infinite or NaN is "
        f"that of {state.gradients.names[index]!r}. Loss scaling cannot help against a gradient "
        "that is not finite at any scale: look for a NaN in the data, a division by zero, or an "
        "infinity times zero."
    )


def find_mixed_precision_states(tree: Any) -> list[tuple[str, MixedPrecisionState]]:
    """Returns every `MixedPrecisionState` in a pytree with its name; that of the root is empty."""
    nodes = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: isinstance(node, MixedPrecisionState)
    )
    return [
        (_tree.path_name(path), node)
        for path, node in nodes
        if isinstance(node, MixedPrecisionState)
    ]


def _reject_half(params: Any) -> None:
    half = [
        f"{name}: {dtype_of(leaf)}"
        for name, leaf in zip(_tree.leaf_names(params), jax.tree.leaves(params), strict=True)
        if dtype_of(leaf) in HALF_DTYPES
    ]
    if half:
        raise ValueError(
            f"mixed_precision updates float32 parameters, but these are narrower:\n"
            f"{bullet_list(half)}\n"
            "Small updates would round away. Store them in float32 (jaxmp.cast_to_full); a policy "
            "such as 'mixed_bfloat16' computes in half precision all the same."
        )


def _check_structure(grads: Any, params: Any) -> None:
    if params is None:
        return
    if jax.tree.structure(grads) == jax.tree.structure(params):
        _tree.map_named(_check_shape, grads, params)
        return
    have, want = set(_tree.leaf_names(grads)), set(_tree.leaf_names(params))
    lines = [f"only in params: {name}" for name in sorted(want - have)]
    lines += [f"only in gradients: {name}" for name in sorted(have - want)]
    lines = lines or [f"{jax.tree.structure(grads)} against {jax.tree.structure(params)}"]
    raise ValueError(
        "Gradients and params have different structures:\n"
        f"{bullet_list(lines)}\n"
        "Pass the params that the gradients were taken for."
    )


def _check_shape(name: str, grad: Any, param: Any) -> None:
    if has_gradient(dtype_of(param)) and jnp.shape(grad) != jnp.shape(param):
        raise ValueError(
            f"The gradient of {name!r} has shape {jnp.shape(grad)}, the parameter has "
            f"{jnp.shape(param)}. Pass the params that the gradients were taken for."
        )


def _inexact_only(tree: Any, leaves_like: Any) -> Any:
    """Puts None, which optax passes over, in place of leaves that have no gradient."""
    return jax.tree.map(
        lambda leaf, like: leaf if has_gradient(dtype_of(like)) else None, tree, leaves_like
    )


def _minus_zeros(leaf: Any) -> jax.Array:
    """Returns zeros that change no bit when added: x + -0.0 is x for every x, -0.0 too."""
    leaf = jnp.asarray(leaf)
    part = jnp.full(leaf.shape, -0.0, jnp.finfo(leaf.dtype).dtype)
    return lax.complex(part, part) if leaf.dtype.kind == "c" else part


def _fill_updates(inner_updates: Any, leaves_like: Any) -> Any:
    """Gives leaves without a gradient an update that leaves them as they are."""

    def fill(like: Any, update: Any) -> Any:
        dtype = dtype_of(like)
        if like is None or has_gradient(dtype):
            return update
        return np.zeros((), jax.dtypes.float0) if dtype is None else jnp.zeros_like(like)

    return jax.tree.map(fill, leaves_like, inner_updates, is_leaf=lambda leaf: leaf is None)


def _check_state(new: Any, old: Any) -> None:
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise ValueError(
            "The wrapped transform returned a state of another structure than it was given: "
            f"{jax.tree.structure(new)} against {jax.tree.structure(old)}. A jitted step needs "
            "one structure; restore the state that tx.init gives for these params."
        )
