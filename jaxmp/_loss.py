"""What a loss function returns to a training step, and the checks on it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp import _tree
from jaxmp._dtypes import FLOAT32, HALF_DTYPES, dtype_of, is_inexact
from jaxmp._errors import bullet_list


@_tree.register_state(["loss", "weight", "metrics", "model_state"])
@dataclasses.dataclass(frozen=True)
class LossOutput:
    """What a loss function may return to `make_train_step` in place of a bare loss.

    Attributes:
        loss: f32[], the mean loss of the microbatch.
        weight: f32[], what that mean divides by (tokens, examples): microbatches are averaged by
            it. 1 if left out.
        metrics: a pytree to report. Over microbatches, float scalars are averaged by weight,
            integer scalars are summed, bool scalars are and-ed, arrays are concatenated.
        model_state: the new mutable state (batch statistics), of the structure of the old.

    Example:
        >>> LossOutput(jnp.float32(0.5), metrics={"correct": jnp.int32(3)}).weight
    """

    loss: Any
    _: dataclasses.KW_ONLY
    weight: Any = None
    metrics: Any = dataclasses.field(default_factory=dict)
    model_state: Any = None


def call_loss(
    loss_fn: Callable[..., Any], model_state: Any, rng: Any, params: Any, batch: Any
) -> tuple[Any, LossOutput]:
    """Returns the loss, and the rest of a checked `LossOutput` as auxiliary output.

    Args:
        loss_fn: what the user wrote.
        model_state: passed on by keyword unless None.
        rng: passed on by keyword unless None.
        params: the parameters.
        batch: the batch or a microbatch.
    """
    # A copy of the tree: a Flax NNX state may not be changed at another trace level than its own.
    given = {"model_state": jax.tree.map(lambda leaf: leaf, model_state), "rng": rng}
    result = loss_fn(params, batch, **{k: v for k, v in given.items() if v is not None})
    output = result if isinstance(result, LossOutput) else LossOutput(result)
    if model_state is None and output.model_state is not None:
        raise ValueError(
            "The loss function returned a model_state, but the TrainState has none. Give the "
            "initial one to TrainState.create(..., model_state=...)."
        )
    kept = model_state if output.model_state is None else output.model_state
    if jax.tree.structure(kept) != jax.tree.structure(model_state):
        names = set(_tree.leaf_names(kept)) ^ set(_tree.leaf_names(model_state))
        raise ValueError(
            "The loss function returned a model_state of another structure than it was given; "
            f"leaves in only one of them:\n{bullet_list(sorted(names))}\n"
            "Return every leaf of the model_state."
        )
    metrics = _tree.map_named(_check_metric, output.metrics)
    aux = LossOutput(None, weight=_check_weight(output.weight), metrics=metrics, model_state=kept)
    return output.loss, aux


def _check_weight(weight: Any) -> jax.Array:
    weight = jnp.float32(1) if weight is None else weight
    dtype = dtype_of(weight)
    if dtype is None or dtype.kind == "c" or jnp.shape(weight) != ():
        got = type(weight).__name__ if dtype is None else f"{dtype}{list(jnp.shape(weight))}"
        raise ValueError(f"The weight is {got}, but must be a real scalar: the number of tokens.")
    if dtype in HALF_DTYPES:
        raise ValueError(
            f"The weight is {dtype}, in which a count is rounded or overflows. Count in another "
            "dtype: jnp.sum(mask, dtype=jnp.float32)."
        )
    return lax.stop_gradient(jnp.asarray(weight).astype(jnp.float32))


def _check_metric(name: str, metric: Any) -> jax.Array:
    """Widens a metric to 32 bits, in which it can be averaged or summed over microbatches."""
    dtype = dtype_of(metric)
    if dtype is None:
        raise ValueError(
            f"Metric {name!r} is of type {type(metric).__name__}, but must be an array or number."
        )
    if is_inexact(dtype):
        return _tree.widen_leaf(metric)
    narrow = {"i": jnp.int32, "u": jnp.uint32} if dtype.itemsize < FLOAT32.itemsize else {}
    return jnp.asarray(metric, narrow.get(dtype.kind, dtype))


def check_loss(loss: Any) -> jax.Array:
    """Returns a loss in f32; ValueError if it is no real scalar."""
    dtype = dtype_of(loss)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or jnp.shape(loss) != ():
        got = type(loss).__name__ if dtype is None else f"{dtype}{list(jnp.shape(loss))}"
        raise ValueError(
            f"The loss is {got}, but must be a floating-point scalar: reduce it with jnp.mean, and "
            "return other results with has_aux=True (from the loss function of a train step, as "
            "LossOutput(loss, metrics=...))."
        )
    return _tree.widen_leaf(loss)
