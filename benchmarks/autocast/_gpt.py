"""A decoder-only GPT: functional, tied head, no biases; unrolled or scanned, with remat or not."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from benchmarks.autocast._recipes import Casts, cross_entropy, update, value_and_grad


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a GPT, and how its layers are written.

    Attributes:
        width: of the residual stream.
        heads: of the attention.
        layers: how many blocks.
        length: tokens of a sequence.
        vocabulary: kinds of tokens.
        batch: sequences.
        scan: whether the blocks are one `lax.scan` over stacked parameters.
        remat: whether each block is a `jax.checkpoint`.
    """

    width: int = 1024
    heads: int = 16
    layers: int = 4
    length: int = 1024
    vocabulary: int = 32768
    batch: int = 8
    scan: bool = False
    remat: bool = False


SMALL = Shape(width=256, heads=4, length=256, vocabulary=256)


def init(key: jax.Array, shape: Shape) -> dict[str, Any]:
    """Returns f32 parameters; the blocks are stacked for a scan."""
    *keys, embedding, position = jax.random.split(key, shape.layers + 2)
    blocks = [_init_block(key, shape.width) for key in keys]
    return {
        "embedding": 0.02 * jax.random.normal(embedding, (shape.vocabulary, shape.width)),
        "position": 0.02 * jax.random.normal(position, (shape.length, shape.width)),
        "norm": jnp.ones(shape.width),
        "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
        if shape.scan
        else blocks,
    }


def _init_block(key: jax.Array, d: int) -> dict[str, jax.Array]:
    sizes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    products = {
        name: 0.02 * jax.random.normal(key, size)
        for key, (name, size) in zip(jax.random.split(key, 4), sizes.items(), strict=True)
    }
    return {"norm_1": jnp.ones(d), "norm_2": jnp.ones(d), **products}


def tokens(shape: Shape, seed: int = 0) -> jax.Array:
    """Returns random tokens, one more of a sequence than the model sees at once."""
    size = (shape.batch, shape.length + 1)
    return jnp.asarray(np.random.default_rng(seed).integers(0, shape.vocabulary, size), jnp.int32)


def model(params: Any, tokens: jax.Array, shape: Shape, casts: Casts) -> jax.Array:
    """Returns the logits of i32[B, T] tokens."""
    block = functools.partial(_block, heads=shape.heads, casts=casts)
    if shape.remat:
        block = jax.checkpoint(block)
    x = casts.narrow(params["embedding"][tokens] + params["position"])
    if shape.scan:
        x, _ = lax.scan(lambda x, weights: (block(x, weights), None), x, params["blocks"])
    else:
        for weights in params["blocks"]:
            x = block(x, weights)
    x = _norm(x, params["norm"], casts)
    return casts.wide(x @ casts.narrow(params["embedding"].T))


def _block(x: jax.Array, weights: Any, *, heads: int, casts: Casts) -> jax.Array:
    x = x + _attend(_norm(x, weights["norm_1"], casts), weights, heads, casts)
    hidden = _norm(x, weights["norm_2"], casts) @ casts.narrow(weights["up"])
    return x + jax.nn.gelu(hidden) @ casts.narrow(weights["down"])


def _norm(x: jax.Array, scale: jax.Array, casts: Casts) -> jax.Array:
    x = casts.wide(x)
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return casts.narrow((x - mean) * lax.rsqrt(variance + 1e-5) * scale)


def _attend(x: jax.Array, weights: Any, heads: int, casts: Casts) -> jax.Array:
    length, width = x.shape[-2:]
    split = (*x.shape[:-1], heads, 3 * width // heads)
    q, k, v = jnp.split((x @ casts.narrow(weights["qkv"])).reshape(split), 3, axis=-1)
    scores = casts.wide(jnp.einsum("bqhd,bkhd->bhqk", q, k)) / math.sqrt(width // heads)
    causal = jnp.tril(jnp.ones((length, length), bool))
    attention = casts.narrow(jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", attention, v).reshape(x.shape)
    return mixed @ casts.narrow(weights["out"])


def gradient(shape: Shape, recipe: str) -> Callable[..., Any]:
    """Returns a function from parameters and tokens to the loss and its gradients."""

    def make_loss(casts: Casts) -> Callable[..., jax.Array]:
        def loss(params: Any, tokens: jax.Array) -> jax.Array:
            return cross_entropy(model(params, tokens[:, :-1], shape, casts), tokens[:, 1:])

        return loss

    return value_and_grad(make_loss, recipe)


def train_step(shape: Shape, recipe: str) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """Returns a step (nothing donated) and a function that makes its arguments."""
    tx = optax.adamw(3e-4)
    grad = gradient(shape, recipe)

    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, grads = grad(params, tokens)
        return *update(tx, params, state, grads), value

    def arguments() -> tuple[Any, Any, jax.Array]:
        params = init(jax.random.key(0), shape)
        return params, tx.init(params), tokens(shape)

    return step, arguments
