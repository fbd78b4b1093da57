"""The training step, and the state that it carries."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxmp import _microbatch, _tree
from jaxmp._dtypes import dtype_of, has_gradient
from jaxmp._errors import check_count
from jaxmp._fp8_state import check_fp8_state, quantized_weights
from jaxmp._gradients import checked_value_and_grad
from jaxmp._loss import LossOutput, call_loss
from jaxmp._mapped import as_axes, varying
from jaxmp._spread import Alone, Mapped, OnMesh
from jaxmp.autocast import check_runnable
from jaxmp.fp8 import update_state
from jaxmp.fp8._state import new_meters
from jaxmp.optim import apply_updates, full_weights, get_mixed_precision_state
from jaxmp.optim._ema import check_decay, moved_average
from jaxmp.policy import Policy, get_policy
from jaxmp.sharding import Layout, check_one_of


@_tree.register_state(
    ["step", "params", "opt_state", "model_state", "rng", "ema_params", "fp8_state"]
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a training step carries; make one with `TrainState.create`.

    Attributes:
        step: i32[], steps attempted.
        params: f32 parameters, and any integers among them.
        opt_state: the optimizer's state, with the loss scale in it.
        model_state: mutable state such as batch statistics, or None.
        rng: a PRNG key that never changes, or None; step `i` uses `jax.random.fold_in(rng, i)`.
        ema_params: f32 exponential moving average of the parameters, or None.
        fp8_state: how large the operands of fp8 products were, or None.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    model_state: Any = None
    rng: Any = None
    ema_params: Any = None
    fp8_state: Any = None

    @classmethod
    def create(
        cls,
        params: Any,
        tx: optax.GradientTransformation,
        *,
        model_state: Any = None,
        rng: Any = None,
        ema: bool = False,
        fp8_state: Any = None,
    ) -> "TrainState":
        """Returns the state before the first step.

        Args:
            params: the parameters. They are copied, since a step donates its state. Where they
                are committed to devices, all of the state is.
            tx: the transform that `make_train_step` will get, for its initial state.
            model_state: mutable state that the loss function takes and returns.
            rng: a PRNG key for the loss function.
            ema: whether to keep a moving average of the parameters.
            fp8_state: what `init_fp8_state` gave, for a policy with delayed scaling.

        Raises:
            ValueError: if a leaf is no array, or `rng` is no PRNG key.

        Example:
            >>> tx = jaxmp.mixed_precision(optax.sgd(0.1), "mixed_bfloat16")
            >>> state = TrainState.create({"w": jnp.ones(2)}, tx)
            >>> int(state.step)
            0
        """
        params = _tree.fresh_arrays(params)
        if rng is not None and not (_tree.is_key(rng) or dtype_of(rng) == np.dtype(np.uint32)):
            raise ValueError(f"rng is {rng!r}, but must be a PRNG key: use jax.random.key(0).")
        state = cls(
            step=jnp.int32(0),
            params=params,
            opt_state=_tree.fresh_arrays(tx.init(params)),
            model_state=_tree.fresh_arrays(model_state),
            rng=_tree.fresh_arrays(rng),
            ema_params=_tree.fresh_arrays(_tree.cast_to_full(params)) if ema else None,
            fp8_state=_tree.fresh_arrays(fp8_state),
        )
        return _tree.commit_like(state, params)


@_tree.register_state(
    [
        "step",
        "loss",
        "grad_norm",
        "loss_scale",
        "skipped",
        "skipped_steps",
        "skip_streak",
        "metrics",
    ]
)
@dataclasses.dataclass(frozen=True)
class StepInfo:
    """What a training step reports; device arrays, so that nothing waits for them.

    Attributes:
        step: i32[], steps attempted, this one included.
        loss: f32[], the true loss.
        grad_norm: f32[], the global norm of the true gradients.
        loss_scale: f32[], the scale that this step used.
        skipped: bool[], whether the step was skipped because of infinite or NaN gradients.
        skipped_steps: i32[], steps skipped so far.
        skip_streak: i32[], steps skipped in a row up to this one.
        metrics: what the loss function reported.
    """

    step: jax.Array
    loss: jax.Array
    grad_norm: jax.Array
    loss_scale: jax.Array
    skipped: jax.Array
    skipped_steps: jax.Array
    skip_streak: jax.Array
    metrics: Any


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    policy: Policy | str,
    *,
    microbatches: int = 1,
    ema_decay: float | None = None,
    pass_value: bool = False,
    donate: bool = True,
    layout: Layout | None = None,
    axis_name: str | Sequence[str] | None = None,
) -> Callable[[TrainState, Any], tuple[TrainState, StepInfo]]:
    """Returns a jitted training step.

    A step whose gradients (after accumulation) are not finite is skipped: everything but the step
    counter, the loss scale and the skip counters stays as it was, bit for bit.

    Args:
        loss_fn: called as `loss_fn(params, batch)`, with the keyword `model_state` and the
            keyword `rng` too if the `TrainState` has them. Returns a scalar mean loss or a
            `LossOutput`. It runs in the policy's compute dtype; `model_state` reaches it uncast.
            Of parameters in a collection `_overwrite_with_gradient`, as Flax's fp8 layers have
            them, the gradient is the next value: no optimizer, norm or average sees them.
        tx: a transform wrapped in `mixed_precision` (which may itself be wrapped or chained).
        policy: a policy or the name of one.
        microbatches: into how many equal parts to split the leading axis of the batch. They run
            one after the other, gradients accumulate in f32, and one update follows.
        ema_decay: the decay of the moving average; needs `TrainState.create(..., ema=True)`.
        pass_value: whether to call `tx.update(..., value=loss)`, as
            `optax.contrib.reduce_on_plateau` needs.
        donate: whether the state's memory is reused for the new state; the old one is gone then.
        layout: how parameters and batches are spread over a mesh, for a step that XLA cuts up.
        axis_name: the axis or axes over which the step is mapped, in a `shard_map` or `pmap` of
            yours: each device computes the loss of its own part of the batch, and gradients, loss
            and metrics are averaged over the devices. `()` if there is nothing to average.

    Returns:
        `step(state, batch) -> (state, StepInfo)`, a `jax.jit` function.

    Raises:
        ValueError: for options out of range; when traced, for a batch that does not split, a
            state that does not fit, or a loss that is no scalar.

    Example:
        >>> def loss_fn(params, batch):
        ...     return jnp.mean((batch @ params["w"]) ** 2)
        >>> tx = jaxmp.mixed_precision(optax.sgd(0.1), "mixed_float16")
        >>> step = make_train_step(loss_fn, tx, "mixed_float16", microbatches=2)
        >>> state = TrainState.create({"w": jnp.full((3, 1), 0.25)}, tx)
        >>> state, info = step(state, jnp.ones((4, 3)))
        >>> float(info.loss), float(info.loss_scale), bool(info.skipped)
        (0.5625, 32768.0, False)
    """
    policy, tx = get_policy(policy), optax.with_extra_args_support(tx)
    check_runnable(policy)
    check_count(microbatches, "microbatches")
    if ema_decay is not None:
        check_decay(ema_decay, "ema_decay")
    check_one_of(layout, axis_name)
    spread = Alone()
    if layout is not None:
        spread = OnMesh(layout)
    elif axis_name is not None:
        spread = Mapped(as_axes(axis_name), policy)
    how = _Step(loss_fn, tx, policy, microbatches, ema_decay, pass_value, spread)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, StepInfo]:
        with spread.scope():
            return how.run(state, batch)

    return jax.jit(step, donate_argnums=(0,) if donate else ())


@dataclasses.dataclass(frozen=True)
class _Step:
    """The parts of a training step, see `make_train_step`."""

    loss_fn: Callable[..., Any]
    tx: optax.GradientTransformationExtraArgs
    policy: Policy
    microbatches: int
    ema_decay: float | None
    pass_value: bool
    spread: Alone

    def run(self, state: TrainState, batch: Any) -> tuple[TrainState, StepInfo]:
        """Returns the next state, and what there is to report."""
        if (self.ema_decay is None) != (state.ema_params is None):
            raise ValueError(
                f"ema_decay is {self.ema_decay}, but the state was created with "
                f"ema={state.ema_params is not None}. Use both or neither."
            )
        check_fp8_state(self.policy, state.fp8_state)
        state, batch = self.spread.enter(state, batch, self.microbatches)
        before = get_mixed_precision_state(state.opt_state)
        output, new_values, seen = self._gradients(state, batch, before.loss_scale)
        # For the optimizer, what is no gradient is zero.
        grads = _tree.map_overwritten(jnp.zeros_like, new_values)
        new_state = self.spread.leave(self._updated(state, output, grads, new_values, seen))
        after = get_mixed_precision_state(new_state.opt_state)
        return new_state, StepInfo(
            step=new_state.step,
            loss=output.loss,
            grad_norm=_global_norm(grads),
            loss_scale=jnp.asarray(before.loss_scale.loss_scale, jnp.float32),
            skipped=~after.finite,
            skipped_steps=after.skipped_steps,
            skip_streak=after.skip_streak,
            metrics=output.metrics,
        )

    def _gradients(
        self, state: TrainState, batch: Any, loss_scale: Any
    ) -> tuple[LossOutput, Any, Any]:
        """Returns the loss, its gradients, and how large the operands of fp8 products were."""
        spread = self.spread
        rng = None if state.rng is None else jax.random.fold_in(state.rng, state.step)
        rng, model_state = spread.own_rng(rng), spread.own(state.model_state)
        params = spread.own(state.params)

        def loss_of(model_state: Any, rng: Any) -> Callable[..., Any]:
            return spread.weighted(functools.partial(call_loss, self.loss_fn, model_state, rng))

        weights = {}
        if self.microbatches > 1:
            full, part = _tree.cast_to_full(params), _microbatch.spec(batch, self.microbatches)
            fun = loss_of(model_state, rng)
            weights = quantized_weights(fun, self.policy, state.fp8_state, full, part)

        def grads_of(part: Any, model_state: Any, rng: Any) -> tuple[LossOutput, Any]:
            grad_fn = checked_value_and_grad(
                loss_of(model_state, rng),
                self.policy,
                has_aux=True,
                loss_scale=loss_scale,
                fp8_state=state.fp8_state,
                weights=weights,
                layout=spread.placed,
            )
            (loss, (output, counts)), grads, *seen = grad_fn(params, part)
            grads = spread.counted(grads, counts)
            new_model_state = _tree.like(output.model_state, model_state)
            output = _tree.replace_state(output, loss=loss, model_state=new_model_state)
            return output, (grads, seen)

        # Of what was seen, the mean over microbatches has the same largest numbers.
        meters = [new_meters(state.fp8_state)] if state.fp8_state is not None else []
        output, (grads, seen) = _microbatch.accumulate(
            grads_of,
            (state.params, meters),
            batch,
            model_state,
            rng,
            microbatches=self.microbatches,
            zeros=spread.zeros,
        )
        return spread.agreed(output, grads, seen, state.params)

    def _updated(
        self, state: TrainState, output: LossOutput, grads: Any, new_values: Any, seen: Any
    ) -> TrainState:
        """Returns the next state; but for counters and loss scale, the old one if it is skipped."""
        extra_args = self.spread.update_arguments()
        if self.pass_value:
            extra_args["value"] = output.loss
        updates, opt_state = self.tx.update(grads, state.opt_state, state.params, **extra_args)
        finite = get_mixed_precision_state(opt_state).finite
        overwrite = functools.partial(_overwritten, finite)
        params = apply_updates(state.params, updates)
        params = _tree.map_overwritten(overwrite, params, state.params, new_values)
        fp8_state = state.fp8_state
        if fp8_state is not None:
            fp8_state = update_state(fp8_state, seen[0], finite)
        ema_params = None
        if self.ema_decay is not None:
            full = full_weights(opt_state, params)
            ema_params = _updated_ema(finite, self.ema_decay, state.ema_params, full)
        return TrainState(
            step=state.step + jnp.int32(1),
            params=params,
            opt_state=opt_state,
            model_state=_tree.select_tree(finite, output.model_state, state.model_state),
            rng=state.rng,
            ema_params=ema_params,
            fp8_state=fp8_state,
        )


def _global_norm(grads: Any) -> jax.Array:
    """Returns the global 2-norm of the float and complex leaves: f32[]."""
    leaves = [leaf for leaf in jax.tree.leaves(grads) if has_gradient(dtype_of(leaf))]
    squares = [_sum_of_squares(leaf) for leaf in leaves]
    return jnp.sqrt(functools.reduce(jnp.add, squares))


def _sum_of_squares(leaf: jax.Array) -> jax.Array:
    square = jnp.sum(jnp.real(leaf * jnp.conj(leaf))).astype(jnp.float32)
    # In a shard_map a gradient that differs between devices is one part of a whole.
    parts = tuple(sorted(varying(leaf)))
    return lax.psum(square, parts) if parts else square


def _updated_ema(finite: jax.Array, decay: float, ema: Any, params: Any) -> Any:
    def leaf_fn(name: str, average: Any, param: Any) -> Any:
        if _tree.is_overwritten(name) or not has_gradient(dtype_of(average)):
            return param
        return jnp.where(finite, moved_average(average, param, decay), average)

    return _tree.map_named(leaf_fn, ema, params)


def _overwritten(finite: jax.Array, updated: Any, old: Any, new: Any) -> Any:
    """Returns the next value of what an optimizer is not for; the old one in a skipped step."""
    if not has_gradient(dtype_of(old)):
        return updated
    return jnp.where(finite & jnp.isfinite(new), new, old).astype(old.dtype)
