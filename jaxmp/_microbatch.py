"""Splitting a batch and accumulating its gradients in f32."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp import _tree
from jaxmp._dtypes import dtype_of, has_gradient, widened


def accumulate(
    grads_of: Callable[[Any, Any, Any], tuple[Any, Any]],
    params: Any,
    batch: Any,
    model_state: Any,
    rng: Any,
    *,
    microbatches: int,
    zeros: Callable[[jax.Array, Any], jax.Array],
) -> tuple[Any, Any]:
    """Returns the loss output and the gradients of a batch, microbatch by microbatch.

    Args:
        grads_of: from a microbatch, the model state and a PRNG key (or None) to a `LossOutput`
            (whose weight is f32[]) and f32 gradients.
        params: what the gradients are taken for.
        batch: a pytree of arrays of the same leading axis.
        model_state: handed from each microbatch to the next.
        rng: a PRNG key, or None; microbatch `i` gets `fold_in(rng, i)`.
        microbatches: into how many parts to split; the batch stays whole for 1.
        zeros: returns zeros as gradients of a parameter are added to, from zeros and that.
    """
    if microbatches == 1:
        return grads_of(batch, model_state, rng)
    parts = _split(batch, microbatches)
    # Next values of statistics, such as the largest number of a tensor.
    takes_largest = [
        _tree.is_overwritten(name)
        for name, leaf in zip(_tree.leaf_names(params), jax.tree.leaves(params), strict=True)
        if has_gradient(dtype_of(leaf))
    ]

    def body(carry: Any, indexed: Any) -> Any:
        sums, total_weight, model_state = carry
        index, part = indexed
        part_rng = None if rng is None else jax.random.fold_in(rng, index)
        output, grads = grads_of(part, model_state, part_rng)
        weight = output.weight
        sums = [
            jnp.maximum(s, g) if largest else s + _weigh(weight, g)
            for s, g, largest in zip(sums, _floats(grads), takes_largest, strict=True)
        ]
        kept = dataclasses.replace(output, model_state=None)
        return (sums, total_weight + weight, output.model_state), kept

    first = [
        zeros(jnp.zeros(jnp.shape(p), widened(jnp.result_type(p))), p) for p in _floats(params)
    ]
    carry = (first, jnp.float32(0), model_state)
    indices = jnp.arange(microbatches, dtype=jnp.int32)
    (sums, total_weight, model_state), outputs = lax.scan(body, carry, (indices, parts))

    means = iter(
        s if largest else s / total_weight.astype(s.dtype)
        for s, largest in zip(sums, takes_largest, strict=True)
    )
    grads = jax.tree.map(
        lambda p: next(means) if has_gradient(dtype_of(p)) else _tree.no_gradient(p), params
    )
    output = dataclasses.replace(
        outputs,
        loss=_weighted_mean(outputs.loss, outputs.weight),
        weight=total_weight,
        metrics=_merge_metrics(outputs.metrics, outputs.weight),
        model_state=model_state,
    )
    return output, grads


def spec(batch: Any, microbatches: int) -> Any:
    """Returns the shapes and dtypes of one microbatch."""
    parts = jax.eval_shape(lambda batch: _split(batch, microbatches), batch)
    return jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape[1:], part.dtype), parts)


def _split(batch: Any, microbatches: int) -> Any:
    """Deals the examples out like cards, so that a sharded leading axis stays sharded."""
    sizes: dict[int, str] = {}

    def split(name: str, leaf: Any) -> Any:
        shape = jnp.shape(leaf)
        if not shape or shape[0] % microbatches:
            raise ValueError(
                f"Batch leaf {name!r} has shape {shape}, whose leading axis does not divide into "
                f"{microbatches} microbatches. Change the batch size or microbatches."
            )
        sizes.setdefault(shape[0], name)
        parts = jnp.reshape(leaf, (shape[0] // microbatches, microbatches, *shape[1:]))
        return jnp.swapaxes(parts, 0, 1)

    parts = _tree.map_named(split, batch)
    if len(sizes) > 1:
        leaves = " and ".join(f"{name!r} of {size}" for size, name in sizes.items())
        raise ValueError(
            f"Batch leaves have different leading axes: {leaves}. Each example needs one row in "
            "every leaf; close over what belongs to all of them."
        )
    return parts


def _floats(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if has_gradient(dtype_of(leaf))]


def _weigh(weight: jax.Array, value: jax.Array) -> jax.Array:
    """`weight * value`, where a microbatch without weight counts for nothing, NaN included."""
    weight = weight.reshape(weight.shape + (1,) * (value.ndim - weight.ndim))
    return jnp.where(weight == 0, jnp.zeros_like(value), weight.astype(value.dtype) * value)


def _weighted_mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.sum(_weigh(weights, values)) / jnp.sum(weights).astype(values.dtype)


def _merge_metrics(metrics: Any, weights: jax.Array) -> Any:
    def merge(stacked: jax.Array) -> jax.Array:
        if stacked.ndim > 1:
            return jnp.swapaxes(stacked, 0, 1).reshape(-1, *stacked.shape[2:])
        if has_gradient(dtype_of(stacked)):
            return _weighted_mean(stacked, weights)
        if stacked.dtype == jnp.bool_:
            return jnp.all(stacked)
        return jnp.sum(stacked, dtype=stacked.dtype)

    return jax.tree.map(merge, metrics)
