"""A decoder-only GPT whose recipes differ only in how it multiplies and stores activations.

Functional, tied head, no biases. `RECIPES` are those of the documentation's memory table.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax


@dataclasses.dataclass(frozen=True)
class Shape:
    width: int = 1024
    heads: int = 16
    layers: int = 4
    length: int = 1024
    vocabulary: int = 32768
    batch: int = 8


def _multiply(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def _multiply_half(x: jax.Array, w: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)


def _multiply_preferred(x: jax.Array, w: jax.Array) -> jax.Array:
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    return jnp.matmul(x, w, preferred_element_type=jnp.float32)


RECIPES: dict[str, tuple[Callable[..., jax.Array], Any]] = {
    "float32": (_multiply, jnp.float32),
    "textbook": (_multiply_preferred, jnp.float32),
    "textbook, half activations": (_multiply_preferred, jnp.bfloat16),
    "by hand": (_multiply_half, jnp.bfloat16),
}


def init(key: jax.Array, shape: Shape) -> dict[str, Any]:
    keys = iter(jax.random.split(key, 2 + 4 * shape.layers))

    def normal(*size: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), size)

    d = shape.width
    block_sizes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    return {
        "embedding": normal(shape.vocabulary, d),
        "position": normal(shape.length, d),
        "norm": jnp.ones(d),
        "blocks": [
            {
                "norm_1": jnp.ones(d),
                "norm_2": jnp.ones(d),
                **{name: normal(*size) for name, size in block_sizes.items()},
            }
            for _ in range(shape.layers)
        ],
    }


def model(params: Any, tokens: jax.Array, shape: Shape, recipe: str) -> jax.Array:
    multiply, dtype = RECIPES[recipe]

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32)
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return ((x - mean) * lax.rsqrt(variance + 1e-5) * scale).astype(dtype)

    def attend(x: jax.Array, block: Any) -> jax.Array:
        split = (*x.shape[:-1], shape.heads, 3 * shape.width // shape.heads)
        heads = multiply(x, block["qkv"]).astype(dtype).reshape(split)
        q, k, v = jnp.split(heads, 3, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
        scores = scores / np.float32(np.sqrt(shape.width // shape.heads))
        causal = jnp.tril(jnp.ones((shape.length, shape.length), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1).astype(dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        return multiply(mixed, block["out"]).astype(dtype)

    def expand(x: jax.Array, block: Any) -> jax.Array:
        hidden = jax.nn.gelu(multiply(x, block["up"]).astype(dtype))
        return multiply(hidden, block["down"]).astype(dtype)

    x = (params["embedding"][tokens] + params["position"]).astype(dtype)
    for block in params["blocks"]:
        x = x + attend(norm(x, block["norm_1"]), block)
        x = x + expand(norm(x, block["norm_2"]), block)
    x = norm(x, params["norm"])
    return multiply(x, params["embedding"].T).astype(jnp.float32)


def train_step(shape: Shape, recipe: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a step (nothing donated) and the shapes of its arguments."""
    tx = optax.adamw(3e-4)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = model(params, tokens[:, :-1], shape, recipe)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to an int32 power
            updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params = jax.eval_shape(lambda: init(jax.random.key(0), shape))
    state = jax.eval_shape(tx.init, params)
    tokens = jax.ShapeDtypeStruct((shape.batch, shape.length + 1), jnp.int32)
    return step, (params, state, tokens)
