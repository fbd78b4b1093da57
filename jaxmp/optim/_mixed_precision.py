"""The optax transform that a mixed precision program wraps its optimizer in."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmp import _tree
from jaxmp._errors import bullet_list
from jaxmp._mapped import all_of, as_axes
from jaxmp.loss_scale import as_loss_scale, default_loss_scale
from jaxmp.optim._checks import is_narrow, named_states, states_of
from jaxmp.optim._kahan import KahanState
from jaxmp.optim._master_weights import MasterWeightsState, master_weights
from jaxmp.optim._skip import (
    CLEAN,
    GradientNames,
    SkipNonfiniteState,
    checked_update,
    first_counters,
    inexact_only,
)
from jaxmp.optim._stochastic_rounding import StochasticRoundingState
from jaxmp.policy import Policy, get_policy


class MixedPrecisionState(NamedTuple):
    """State of `mixed_precision`.

    Attributes:
        inner_state: the state of the wrapped transform; as it was after the last clean step. A
            `MasterWeightsState` around it if parameters are narrow.
        loss_scale: the loss scale of the next step; one by name, if there are several losses.
        nonfinite_leaf: i32[], which of `gradients` was the first to have the last step skipped;
            -1 if the step was clean, -2 if the reason lies elsewhere.
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
        return jnp.asarray(self.nonfinite_leaf) == CLEAN


def mixed_precision(
    tx: optax.GradientTransformation, policy: Policy | str, loss_scale: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optax transform: masters, check of gradients, skipped steps, loss scale.

    `update` takes the gradients of `jaxmp.value_and_grad`, which are already unscaled. It widens
    them to f32, so that clipping, weight decay and noise work at their documented thresholds. If a
    gradient is not finite the step is skipped as by `skip_nonfinite`: `tx`'s state, its schedules
    and counters with it, and the parameters stay as they were, bit for bit, and the loss scale
    backs off. Every float and complex gradient counts, those of parameters that `tx` freezes too.
    Parameters in f16 or bf16 get f32 masters as by `master_weights`, unless `tx` holds `kahan`,
    `stochastic_rounding` or `master_weights` itself; their updates are f32.

    Wrap last, around `optax.MultiSteps` too: its accumulators, left outside, would keep a NaN for
    ever (`jaxmp.optim.accumulate` goes around this wrapper, and checks once a window). Across
    devices, reduce the gradients before `update`, so that every device decides alike.

    Several losses, each with a loss scale of its own, have a dictionary of them, and `update` an
    extra argument `finite` of the same names: which losses had finite gradients. A bool[] says it
    for all of one loss: whether another optimizer, which is to skip the same steps, goes on.

    Args:
        tx: any optax transform or chain.
        policy: a policy or the name of one.
        loss_scale: a loss scale, or a dictionary of them; if left out, `DynamicLossScale()` for a
            policy that computes in f16, else `NoOpLossScale()`.

    Returns:
        A transform whose state is a `MixedPrecisionState`. Integers, PRNG keys and other leaves
        without a gradient may stand among the parameters: `tx` does not see them.

    Raises:
        ValueError: from `init`, if `tx` holds another wrapper that skips; from `update`, if the
            gradients have another structure.

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
    with_masters = master_weights(tx)
    if loss_scale is None:
        loss_scale = default_loss_scale(policy.compute_dtypes())
    several = isinstance(loss_scale, Mapping)
    first_loss_scale = (
        {name: as_loss_scale(each) for name, each in loss_scale.items()}
        if several
        else as_loss_scale(loss_scale)
    )

    def init(params: Any) -> Any:
        floats = inexact_only(params, params)
        inner_state = inner.init(floats)
        if states_of((MixedPrecisionState, SkipNonfiniteState), inner_state):
            raise ValueError(
                "The transform holds a mixed_precision or skip_nonfinite already, which would "
                "scale and skip twice. Wrap the whole chain once."
            )
        if any(map(is_narrow, jax.tree.leaves(params))) and not _stores_narrow(inner_state):
            inner_state = with_masters.init(floats)
        return MixedPrecisionState(
            inner_state=_tree.strong(inner_state),
            loss_scale=_tree.fresh_arrays(first_loss_scale),
            **first_counters(params),
        )

    def update(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        finite: Any = True,
        axis_name: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        wanted = _all(_by_name(finite, state.loss_scale)) if several else finite
        chosen = with_masters if isinstance(state.inner_state, MasterWeightsState) else inner
        outcome = checked_update(
            chosen,
            updates,
            state,
            params,
            finite=wanted,
            axis_name=axis_name,
            extra_args=extra_args,
        )
        if several:
            loss_scale = {
                name: _adjusted(each, all_of(jnp.asarray(finite[name]), as_axes(axis_name)))
                for name, each in state.loss_scale.items()
            }
        else:
            loss_scale = _adjusted(state.loss_scale, outcome.finite)
        return outcome.updates, state._replace(loss_scale=loss_scale, **outcome.fields)

    return optax.GradientTransformationExtraArgs(init, update)


def _adjusted(loss_scale: Any, finite: Any) -> Any:
    return _tree.like(loss_scale.adjust(finite), loss_scale)


def _stores_narrow(state: Any) -> bool:
    """Whether a transform takes care of narrow parameters itself."""
    return bool(states_of((KahanState, MasterWeightsState, StochasticRoundingState), state))


def _by_name(finite: Any, loss_scales: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(finite, Mapping) and finite.keys() == loss_scales.keys():
        return finite
    raise ValueError(
        f"finite is {finite!r}, but {', '.join(loss_scales)} have a loss scale each. Say which of "
        "them have finite gradients: finite={name: jaxmp.all_finite(grads), ...}."
    )


def _all(flags: Mapping[str, Any]) -> jax.Array:
    return jnp.all(jnp.stack([jnp.asarray(flag) for flag in flags.values()]))


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
    found = named_states(MixedPrecisionState, opt_state)
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
