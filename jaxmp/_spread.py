"""How a training step is spread over devices: on one, over a mesh by XLA, or mapped by the user."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp import _mapped, _tree
from jaxmp._dtypes import dtype_of, has_gradient
from jaxmp._loss import LossOutput
from jaxmp.optim import get_loss_scale
from jaxmp.policy import Policy
from jaxmp.sharding import Layout


@dataclasses.dataclass(frozen=True)
class Alone:
    """A step that says nothing of devices: one, or arrays that the user has sharded."""

    def update_arguments(self) -> dict[str, Any]:
        """Returns what `mixed_precision` is told."""
        return {}

    def scope(self) -> Any:
        """A context for the whole step."""
        return contextlib.nullcontext()

    def enter(self, state: Any, batch: Any, _microbatches: int) -> tuple[Any, Any]:
        """Returns state and batch as the step computes with them."""
        return state, batch

    @property
    def placed(self) -> Layout | None:
        """How XLA is to lay out parameters and gradients."""
        return None

    def own(self, tree: Any) -> Any:
        """Returns values whose gradients, or next values, are those of this device alone."""
        return tree

    def own_rng(self, rng: Any) -> Any:
        """Returns a PRNG key for this device."""
        return rng

    def weighted(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a loss whose plain mean over devices is the mean that is wanted.

        Besides its output it returns what `counted` takes.
        """

        def own(params: Any, batch: Any) -> tuple[Any, tuple[LossOutput, Any]]:
            loss, output = fun(params, batch)
            return loss, (output, None)

        return own

    def counted(self, grads: Any, _counts: Any) -> Any:
        """Returns gradients without those of a loss that has no weight."""
        return grads

    def zeros(self, zeros: jax.Array, _param: Any) -> jax.Array:
        """Returns zeros that gradients of a parameter can be added to."""
        return zeros

    def agreed(
        self, output: LossOutput, grads: Any, seen: Any, _params: Any
    ) -> tuple[LossOutput, Any, Any]:
        """Returns what is the same on all devices: of loss, gradients and numbers seen in fp8."""
        _mapped.check_axis_name(None, [output.loss], "The loss and its gradients")
        return output, grads, seen

    def leave(self, state: Any) -> Any:
        """Returns the new state as it leaves the step."""
        return state


@dataclasses.dataclass(frozen=True)
class OnMesh(Alone):
    """A step over a whole mesh, of which XLA gives each device its part."""

    layout: Layout

    def scope(self) -> Any:
        """A context for the whole step."""
        return self.layout.scope()

    def enter(self, state: Any, batch: Any, microbatches: int) -> tuple[Any, Any]:
        """Returns state and batch where the layout has them."""
        return self.layout.constrain(state), self.layout.constrain_batch(batch, microbatches)

    @property
    def placed(self) -> Layout | None:
        """How XLA is to lay out parameters and gradients."""
        return self.layout

    def leave(self, state: Any) -> Any:
        """Returns the new state where the layout has it."""
        return self.layout.constrain(state)


@dataclasses.dataclass(frozen=True)
class Mapped(Alone):
    """A step that runs once for each device, in a shard_map or pmap of the user."""

    axes: tuple[str, ...]
    policy: Policy

    def update_arguments(self) -> dict[str, Any]:
        """Returns what `mixed_precision` is told."""
        return {"axis_name": self.axes}

    def enter(self, state: Any, batch: Any, _microbatches: int) -> tuple[Any, Any]:
        """Returns state and batch; ValueError if what must be the same on all devices is not."""
        _mapped.check_axis_name(self.axes, [], "Gradients")
        shared = {
            "step": state.step,
            "loss_scale": get_loss_scale(state.opt_state),
            "model_state": state.model_state,
            "rng": state.rng,
            "fp8_state": state.fp8_state,
        }
        for name, leaf in zip(_tree.leaf_names(shared), jax.tree.leaves(shared), strict=True):
            axes = sorted(_mapped.varying(leaf) & set(self.axes))
            if axes:
                raise ValueError(
                    f"{name!r} of the training state may differ between devices along {axes[0]!r}, "
                    "but all devices scale, skip and count alike. Let it enter the shard_map with "
                    "the spec PartitionSpec(): only params, opt_state and ema_params may be cut."
                )
        return state, batch

    def own(self, tree: Any) -> Any:
        """Returns values whose gradients, or next values, are those of this device alone."""
        return _mapped.vary(tree, self.axes)

    def own_rng(self, rng: Any) -> Any:
        """Returns another PRNG key on each device."""
        if rng is None:
            return None
        return jax.random.fold_in(rng, lax.axis_index(self.axes)) if self.axes else rng

    def weighted(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a loss that is multiplied by the weight it has among those of the devices."""

        def own(params: Any, batch: Any) -> tuple[Any, tuple[LossOutput, Any]]:
            loss, output = fun(params, batch)
            _mapped.check_own_loss(loss, self.axes)
            mean = self._mean(output.weight)
            share = jnp.where(mean > 0, output.weight / mean, 1)
            metrics = jax.tree.map(functools.partial(_times, share), output.metrics)
            output = dataclasses.replace(output, weight=mean, metrics=metrics)
            return jnp.where(share > 0, loss * share, 0), (output, share > 0)

        return own

    def counted(self, grads: Any, counts: Any) -> Any:
        """Returns gradients, zero where this device's part has no weight, NaN included."""

        def leaf_fn(name: str, grad: Any) -> Any:
            if _tree.is_overwritten(name) or not has_gradient(dtype_of(grad)):
                return grad
            return jnp.where(counts, grad, jnp.zeros_like(grad))

        return _tree.map_named(leaf_fn, grads)

    def zeros(self, zeros: jax.Array, param: Any) -> jax.Array:
        """Returns zeros that gradients of a parameter can be added to."""
        return _mapped.vary(zeros, (*self.axes, *_mapped.varying(param)))

    def agreed(
        self, output: LossOutput, grads: Any, seen: Any, params: Any
    ) -> tuple[LossOutput, Any, Any]:
        """Returns the means over devices."""
        loss = self._mean(output.loss)
        _mapped.check_axis_name(self.axes, [loss], "The loss")
        return (
            dataclasses.replace(
                output,
                loss=loss,
                metrics=jax.tree.map(self._metric, output.metrics),
                model_state=jax.tree.map(self._statistic, output.model_state),
            ),
            jax.tree.map(
                functools.partial(
                    _mapped.mean_gradient, axes=self.axes, dtype=self.policy.reduce_dtype
                ),
                grads,
                params,
            ),
            jax.tree.map(self._mean, seen),
        )

    def _mean(self, value: Any) -> Any:
        return _mapped.mean_of(value, self.axes)

    def _metric(self, value: jax.Array) -> jax.Array:
        """Merges a metric as those of microbatches are."""
        if not self.axes:
            return value
        value = _mapped.vary(value, self.axes)
        if value.ndim:
            # A sum, since the type of what is gathered says that it may differ.
            size = _mapped.axis_size(self.axes)
            own = value.astype(jnp.int32) if value.dtype == jnp.bool_ else value
            parts = jnp.zeros((size, *own.shape), own.dtype)
            parts = _mapped.vary(parts, self.axes).at[lax.axis_index(self.axes)].set(own)
            merged = lax.psum(parts, self.axes).reshape(-1, *own.shape[1:])
            return merged.astype(value.dtype)
        if has_gradient(dtype_of(value)):
            return lax.pmean(value, self.axes)
        if value.dtype == jnp.bool_:
            return _mapped.all_of(value, self.axes)
        return lax.psum(value, self.axes)

    def _statistic(self, value: Any) -> Any:
        if has_gradient(dtype_of(value)):
            return self._mean(value)
        if not self.axes:
            return value
        if _tree.is_key(value):
            largest = lax.pmax(jax.random.key_data(value), self.axes)
            return jax.random.wrap_key_data(largest, impl=jax.random.key_impl(value))
        return lax.pmax(value, self.axes)


def _times(share: jax.Array, metric: jax.Array) -> jax.Array:
    is_mean = metric.ndim == 0 and has_gradient(dtype_of(metric))
    return jnp.where(share > 0, metric * share.astype(metric.dtype), 0) if is_mean else metric
