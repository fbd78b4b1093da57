"""The training step: gradients under a policy, the state that a step carries, and the step."""

import dataclasses
import functools
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmp import _microbatch, _tree
from jaxmp._dtypes import (
    FLOAT16,
    dtype_of,
    has_gradient,
)
from jaxmp._errors import check_count
from jaxmp._fp8_state import check_fp8_state, quantized_weights
from jaxmp._loss import LossOutput, call_loss, check_loss
from jaxmp.autocast import autocast_loss, check_runnable, with_given
from jaxmp.fp8 import update_state
from jaxmp.fp8._state import Given, new_meters, scales_for, seen_without
from jaxmp.loss_scale import NoOpLossScale, as_loss_scale
from jaxmp.optim import apply_updates, full_weights, get_mixed_precision_state
from jaxmp.optim._ema import check_decay, moved_average
from jaxmp.policy import Policy, get_policy


def value_and_grad(
    fun: Callable[..., Any],
    policy: Policy | str,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    loss_scale: Any = None,
    fp8_state: Any = None,
) -> Callable[..., Any]:
    """`jax.value_and_grad` under a policy: true f32 loss and gradients, whatever was computed in.

    The loss is widened to f32 before it is scaled, and what comes back is unscaled: it can be
    logged, clipped and averaged over devices as it is. An overflow shows as infinite or NaN
    gradients, while the loss stays finite if it is.

    Args:
        fun: returns a scalar loss, or `(loss, aux)` with `has_aux`. It is computed as `autocast`
            does: written for f32, and seeing f32, while its matrix multiplications and
            convolutions run in the policy's compute dtype.
        policy: a policy or the name of one.
        argnums: the argument or arguments to differentiate, as in `jax.value_and_grad`. Their
            float and complex leaves get gradients, other leaves a float0 zero.
        has_aux: whether `fun` returns a pair; `aux` has the dtypes that `fun` gives it.
        loss_scale: a loss scale, usually `get_loss_scale(opt_state)`; none if left out.
        fp8_state: what `init_fp8_state` or `fp8.update_state` gave, for delayed scaling.

    Returns:
        A function of the arguments of `fun` that returns `(loss, grads)`, or
        `((loss, aux), grads)`: loss f32[], gradients f32 (f64 and complex leaves in their dtype)
        for parameters of any width. With an `fp8_state` there is a third result, how large the
        operands of products were, f32[..., 3, 256] by their names: what `fp8.update_state` takes.

    Raises:
        ValueError: if the policy names a recipe that is not there, or one that needs an
            `fp8_state`; when called, if the loss is no real scalar, if there is nothing to
            differentiate, or if the `fp8_state` is of another function, policy or batch size.

    Warns:
        UserWarning: if anything is computed in f16 and no loss scale is given; when called, if the
            policy's recipe takes none of the matmuls.

    Example:
        >>> def loss_fn(params, x):
        ...     return jnp.mean((x @ params["w"]) ** 2)
        >>> grad_fn = value_and_grad(loss_fn, "mixed_bfloat16")
        >>> loss, grads = grad_fn({"w": jnp.ones((3, 1))}, jnp.ones((2, 3)))
        >>> loss, grads["w"].dtype
        (Array(9., dtype=float32), dtype('float32'))
    """
    policy = get_policy(policy)
    if loss_scale is None and FLOAT16 in policy.compute_dtypes():
        warnings.warn(
            "Gradients below 6e-8 vanish in float16. Give value_and_grad a loss_scale, such as "
            "jaxmp.get_loss_scale(opt_state), or jaxmp.NoOpLossScale() if none is wanted.",
            stacklevel=2,
        )
    loss_scale = NoOpLossScale() if loss_scale is None else as_loss_scale(loss_scale)
    check_fp8_state(policy, fp8_state)
    return _value_and_grad(
        fun,
        policy,
        argnums=argnums,
        has_aux=has_aux,
        loss_scale=loss_scale,
        fp8_state=fp8_state,
        weights={},
    )


def _value_and_grad(
    fun: Callable[..., Any],
    policy: Policy,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    loss_scale: Any,
    fp8_state: Any,
    weights: Mapping[str, Given],
) -> Callable[..., Any]:
    """`value_and_grad` of checked arguments, with weights that were quantized before."""
    low_fun = autocast_loss(fun, policy)
    state = fp8_state or {}
    times = loss_scale.loss_scale
    scales = {name: scales_for(product, times) for name, product in state.items()}

    @functools.wraps(fun)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        positions = _positions(argnums, len(args))
        chosen = tuple(args[position] for position in positions)
        leaves, treedef = jax.tree.flatten(chosen)
        leaf_names = _tree.leaf_names(chosen)
        # Differentiating f32 copies keeps a narrow parameter's gradient from being rounded.
        floats = [_tree.widen_leaf(leaf) for leaf in leaves if _has_gradient(leaf)]
        if not floats:
            raise ValueError(
                f"Nothing to differentiate: argument {argnums} has no float or complex leaves "
                f"among its {len(leaves)}. Choose another argument with argnums."
            )

        def scaled_loss(floats: list[Any], meters: dict[str, Any]) -> Any:
            values = iter(floats)
            merged = [next(values) if _has_gradient(leaf) else leaf for leaf in leaves]
            full_args = list(args)
            for position, arg in zip(positions, treedef.unflatten(merged), strict=True):
                full_args[position] = arg
            given = dict(weights)
            for name, meter in meters.items():
                own = given.get(name, Given())
                given[name] = own._replace(scales=scales[name], meter=meter)
            is_given = weights or fp8_state is not None
            run = with_given(low_fun, given, state) if is_given else low_fun
            loss, aux = _split_aux(run(*full_args, **kwargs), has_aux)
            loss = check_loss(loss)
            return loss_scale.scale(loss), (loss, aux)

        grad = jax.grad(scaled_loss, (0, 1), has_aux=True)
        (grads, seen), (loss, aux) = grad(floats, new_meters(state))
        if not isinstance(loss_scale, NoOpLossScale):
            seen = {name: seen_without(each, times) for name, each in seen.items()}
        # What is no gradient but a next value was not scaled.
        names = [name for name, leaf in zip(leaf_names, leaves, strict=True) if _has_gradient(leaf)]
        values = iter(
            grad if _tree.is_overwritten(name) else unscaled
            for name, grad, unscaled in zip(names, grads, loss_scale.unscale(grads), strict=True)
        )
        grads = treedef.unflatten(
            [next(values) if _has_gradient(leaf) else _tree.no_gradient(leaf) for leaf in leaves]
        )
        grads = grads if isinstance(argnums, Sequence) else grads[0]
        value = (loss, aux) if has_aux else loss
        return (value, grads) if fp8_state is None else (value, grads, seen)

    return wrapped


def _positions(argnums: int | Sequence[int], count: int) -> tuple[int, ...]:
    given = argnums if isinstance(argnums, Sequence) else (argnums,)
    positions = tuple(operator.index(number) for number in given)
    if any(not -count <= position < count for position in positions):
        raise ValueError(
            f"argnums is {argnums}, but the function was called with {count} positional "
            "arguments. Pass what is differentiated by position."
        )
    positions = tuple(position % count for position in positions)
    if len(set(positions)) < len(positions):
        raise ValueError(f"argnums is {argnums}, which names one argument twice. Name it once.")
    return positions


def _has_gradient(leaf: Any) -> bool:
    return has_gradient(dtype_of(leaf))


def _split_aux(result: Any, has_aux: bool) -> tuple[Any, Any]:
    if not has_aux:
        return result, None
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"With has_aux=True the function must return (loss, aux), got {type(result).__name__}."
        )
    return result


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

    def step(state: TrainState, batch: Any) -> tuple[TrainState, StepInfo]:
        if (ema_decay is None) != (state.ema_params is None):
            raise ValueError(
                f"ema_decay is {ema_decay}, but the state was created with "
                f"ema={state.ema_params is not None}. Use both or neither."
            )
        check_fp8_state(policy, state.fp8_state)
        before = get_mixed_precision_state(state.opt_state)
        rng = None if state.rng is None else jax.random.fold_in(state.rng, state.step)

        weights = {}
        if microbatches > 1:
            fun = functools.partial(call_loss, loss_fn, state.model_state, rng)
            full, part = _tree.cast_to_full(state.params), _microbatch.spec(batch, microbatches)
            weights = quantized_weights(fun, policy, state.fp8_state, full, part)

        def grads_of(part: Any, model_state: Any, rng: Any) -> tuple[LossOutput, Any]:
            fun = functools.partial(call_loss, loss_fn, model_state, rng)
            grad_fn = _value_and_grad(
                fun,
                policy,
                has_aux=True,
                loss_scale=before.loss_scale,
                fp8_state=state.fp8_state,
                weights=weights,
            )
            (loss, output), grads, *seen = grad_fn(state.params, part)
            new_model_state = _tree.like(output.model_state, model_state)
            output = _tree.replace_state(output, loss=loss, model_state=new_model_state)
            return output, (grads, seen)

        # Of what was seen, the mean over microbatches has the same largest numbers.
        like = (state.params, [new_meters(state.fp8_state)] if state.fp8_state is not None else [])
        output, (grads, seen) = _microbatch.accumulate(
            grads_of, like, batch, state.model_state, rng, microbatches=microbatches
        )
        # For the optimizer, what is no gradient is zero.
        new_values = grads
        grads = _tree.map_overwritten(jnp.zeros_like, grads)
        extra_args = {"value": output.loss} if pass_value else {}
        updates, opt_state = tx.update(grads, state.opt_state, state.params, **extra_args)
        after = get_mixed_precision_state(opt_state)
        overwrite = functools.partial(_overwritten, after.finite)
        params = apply_updates(state.params, updates)
        params = _tree.map_overwritten(overwrite, params, state.params, new_values)
        fp8_state = state.fp8_state
        if fp8_state is not None:
            fp8_state = update_state(fp8_state, seen[0], after.finite)
        ema_params = None
        if ema_decay is not None:
            full = full_weights(opt_state, params)
            ema_params = _updated_ema(after.finite, ema_decay, state.ema_params, full)
        new_state = TrainState(
            step=state.step + jnp.int32(1),
            params=params,
            opt_state=opt_state,
            model_state=_tree.select_tree(after.finite, output.model_state, state.model_state),
            rng=state.rng,
            ema_params=ema_params,
            fp8_state=fp8_state,
        )
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

    return jax.jit(step, donate_argnums=(0,) if donate else ())


def _global_norm(grads: Any) -> jax.Array:
    """Returns the global 2-norm of the float and complex leaves: f32[]."""
    leaves = [leaf for leaf in jax.tree.leaves(grads) if has_gradient(dtype_of(leaf))]
    squares = [jnp.sum(jnp.real(leaf * jnp.conj(leaf))).astype(jnp.float32) for leaf in leaves]
    return jnp.sqrt(functools.reduce(jnp.add, squares))


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
