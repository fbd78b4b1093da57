"""The state of delayed scaling: how large the operands of each product were, and their scales."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp import _tree
from jaxmp._dtypes import FLOAT32
from jaxmp._errors import bullet_list
from jaxmp.fp8._meter import BINS, counts, largest_of
from jaxmp.fp8._quantize import next_power_of_two, scale_for
from jaxmp.fp8._recipes import ROLES, DelayedScaling


@_tree.register_state(["history", "scale"])
@dataclasses.dataclass(frozen=True)
class ProductState:
    """Of one product: of its activations, its weight and its gradient, in this order.

    Attributes:
        history: f32[..., 3, H], the largest numbers of the last steps, the last first, each rounded
            up to 1.75 times a power of two; 0 for none. In a scan each layer has its own.
        scale: f32[..., 3], by which codes are multiplied. That of gradients is for a loss scale of
            one.
        recipe: how they come to be.
    """

    history: jax.Array
    scale: jax.Array
    recipe: DelayedScaling


class Given(NamedTuple):
    """What a product is given from outside; each may be left out, as None.

    Attributes:
        scales: f32[..., 3], of a state.
        meter: f32[..., 3, BINS].
        codes: of its weight, of the shape of that, quantized before.
        code_scale: f32[...], theirs.
        seen: f32[..., BINS], what `counts` gives for the weight.
    """

    scales: Any = None
    meter: Any = None
    codes: Any = None
    code_scale: Any = None
    seen: Any = None

    def extras(self) -> dict[str, Any]:
        """Returns the operands that the product itself takes."""
        names = ("scales", "codes", "code_scale")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def of_weights(recipe: Any, weights: jax.Array, shape: tuple[int, ...], scales: Any) -> Given:
    """Returns weights quantized once, for all products that they are in.

    Args:
        recipe: one with a scale for all of a tensor.
        weights: f32, bf16 or f16[..., weight].
        shape: how many weights there are.
        scales: f32[..., 3] of a state, or None.
    """

    def one(weight: jax.Array, scales: Any) -> Given:
        quantized = recipe.quantized(weight, "w", (), scales)
        scale = quantized.scales.reshape(())
        return Given(codes=quantized.codes, code_scale=scale, seen=counts(weight))

    for _ in shape:
        one = jax.vmap(one)
    return one(lax.stop_gradient(weights), scales)


def is_delayed(recipe: Any) -> bool:
    """Whether a recipe has a state."""
    return isinstance(recipe, DelayedScaling)


# Up to where numbers are let through before any was seen. Small ones are the better guess: what is
# too large is seen and has its scale in the next step, but a weight that becomes zero also hides
# the gradients of what is before it.
_FIRST_LARGEST = {"x": 28.0, "w": 7.0, "g": 1.75 * 2.0**-9}


def new_state(recipe: DelayedScaling, shape: tuple[int, ...]) -> ProductState:
    """Returns the state of a product before anything was seen; `shape` is that of the layers."""
    history = jnp.zeros((*shape, len(ROLES), recipe.history), FLOAT32)
    first = [
        scale_for(_FIRST_LARGEST[role], recipe.format_of(role), power_of_two=True) for role in ROLES
    ]
    return ProductState(history, jnp.broadcast_to(jnp.stack(first), history.shape[:-1]), recipe)


def scales_for(product: ProductState, loss_scale: Any) -> jax.Array:
    """Returns the scales of a state, f32[..., 3], where gradients are of `loss_scale` losses."""
    scale = lax.stop_gradient(product.scale)
    return scale.at[..., 2].mul(next_power_of_two(jnp.float32(loss_scale)))


def seen_without(seen: jax.Array, loss_scale: Any) -> jax.Array:
    """Returns what was seen, f32[..., 3, BINS], as if gradients were of the loss itself."""
    power = lax.bitcast_convert_type(jnp.float32(loss_scale), jnp.int32) >> 23
    places = jnp.arange(BINS, dtype=jnp.int32) + (power - 127)
    # Bin 0 is for what is no number.
    is_there = (places > 0) & (places < BINS) & (jnp.arange(BINS) > 0)
    gradients = seen[..., 2, :][..., jnp.clip(places, 0, BINS - 1)]
    return seen.at[..., 2, :].set(jnp.where(is_there, gradients, 0))


def new_meters(state: dict[str, ProductState]) -> dict[str, jax.Array]:
    """Returns what takes the counts of each product."""
    return {
        name: jnp.zeros((*product.scale.shape, BINS), FLOAT32) for name, product in state.items()
    }


def update_state(
    state: dict[str, ProductState], seen: dict[str, jax.Array], finite: Any = True
) -> dict[str, ProductState]:
    """Returns the state for the next step.

    Args:
        state: that of this step.
        seen: what `jaxmp.value_and_grad` gave as third, f32[..., 3, 256] for each product: counts
            in bins of powers of two. Of several microbatches, or devices that were not summed over,
            their sum.
        finite: bool[], whether the step is not skipped; else the state stays as it is.

    Returns:
        The state, with the options (history, margin, amax) that it was made with.

    Raises:
        ValueError: if both are not of the same products.

    Example:
        >>> policy = jaxmp.Policy(recipe=DelayedScaling(history=4))
        >>> def loss_fn(w, x):
        ...     return jnp.mean((x @ w) ** 2)
        >>> w, x = jnp.ones((16, 16)), jnp.full((32, 16), 3.0)
        >>> state = jaxmp.init_fp8_state(loss_fn, policy, w, x)
        >>> loss, grads, seen = jaxmp.value_and_grad(loss_fn, policy, fp8_state=state)(w, x)
        >>> state = update_state(state, seen)
        >>> state["product"].history[0].tolist()
        [3.5, 3.5, 0.0, 0.0]
    """
    if set(state) != set(seen):
        raise ValueError(
            "What was seen is not of the products that the fp8 state is of; only in one of both:\n"
            f"{bullet_list(sorted(set(state) ^ set(seen)))}\n"
            "Give update_state what value_and_grad returned for this state."
        )
    new = {name: _updated(product, largest_of(seen[name])) for name, product in state.items()}
    return _tree.select_tree(jnp.asarray(finite), new, state)


def _updated(product: ProductState, largest: jax.Array) -> ProductState:
    recipe = product.recipe
    shifted = jnp.concatenate([largest[..., None], product.history[..., :-1]], axis=-1)
    # What did not run has no largest number.
    history = jnp.where(largest[..., None] > 0, shifted, product.history)
    known = history[..., 0] if recipe.amax == "most_recent" else jnp.max(history, axis=-1)
    scales = [
        scale_for(known[..., slot], recipe.format_of(role), power_of_two=True)
        for slot, role in enumerate(ROLES)
    ]
    scale = jnp.stack(scales, axis=-1) * 2.0**recipe.margin
    return ProductState(history, jnp.where(known > 0, scale, product.scale), recipe)
