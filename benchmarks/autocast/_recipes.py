"""The recipes that are compared: float32, casts by hand, and `jaxmp.autocast` of the former."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jaxmp

BASE, BY_HAND, AUTOCAST, AUTOCAST_WIDE = "float32", "by-hand", "autocast", "autocast-f32"
RECIPES = (BASE, BY_HAND, AUTOCAST)


@dataclasses.dataclass(frozen=True)
class Casts:
    """The casts that a model by hand is full of; the identity where it is written without any.

    Attributes:
        narrow: from what products, norms and softmax take or give to what is stored.
        wide: to what norms, softmax and the loss compute in.
    """

    narrow: Callable[[Any], Any] = lambda x: x
    wide: Callable[[Any], Any] = lambda x: x


NO_CASTS = Casts()
HAND_CASTS = Casts(lambda x: x.astype(jnp.bfloat16), lambda x: x.astype(jnp.float32))


def value_and_grad(make_loss: Callable[[Casts], Any], recipe: str, **options: Any) -> Any:
    """Returns the `jax.value_and_grad` of a loss under a recipe.

    Args:
        make_loss: from casts to the loss function; with `NO_CASTS` it has none at all.
        recipe: the name of one.
        **options: of `jax.value_and_grad`.
    """
    loss = make_loss(HAND_CASTS if recipe == BY_HAND else NO_CASTS)
    if recipe == AUTOCAST:
        loss = jaxmp.autocast(loss, "mixed_bfloat16")
    elif recipe == AUTOCAST_WIDE:
        loss = jaxmp.autocast(loss, jaxmp.Policy(activation_dtype="float32"))
    return jax.value_and_grad(loss, **options)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross entropy with integer labels."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def update(
    tx: optax.GradientTransformation, params: Any, state: Any, grads: Any
) -> tuple[Any, Any]:
    """Returns the parameters and the optimizer's state after one update."""
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state
