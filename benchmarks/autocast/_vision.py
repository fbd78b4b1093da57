"""A ResNet-50 with batch norm in training mode and a ViT-B/16, functional, for 224² images."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from benchmarks.autocast._recipes import Casts, cross_entropy, update, value_and_grad

IMAGE, CLASSES = 224, 1000
STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))  # blocks and width of each of the ResNet's
WIDTH, HEADS, LAYERS, PATCH = 768, 12, 12, 16  # of the ViT
MOMENTUM = 0.9


def _normal(key: jax.Array, *size: int) -> jax.Array:
    return jax.random.normal(key, size) / math.sqrt(math.prod(size[:-1]))


def _convolve(x: jax.Array, w: jax.Array, stride: int, casts: Casts) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    strides = (stride, stride)
    x, w = casts.narrow(x), casts.narrow(w)
    return lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=numbers)


def _linear(x: jax.Array, layer: Any, casts: Casts) -> jax.Array:
    return x @ casts.narrow(layer["kernel"]) + casts.narrow(layer["bias"])


def _init_linear(key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
    return {"kernel": _normal(key, inputs, outputs), "bias": jnp.zeros(outputs)}


def init_resnet(key: jax.Array) -> tuple[Any, Any]:
    """Returns the f32 parameters and the running statistics."""
    keys = iter(jax.random.split(key, 64))
    params: dict[str, Any] = {"stem": _init_convolution(next(keys), 7, 3, 64), "blocks": []}
    inputs = 64
    for count, width in STAGES:
        for i in range(count):
            params["blocks"].append(_init_bottleneck(keys, inputs, width, project=i == 0))
            inputs = 4 * width
    statistics = jax.tree.map(_init_statistics, params, is_leaf=lambda x: "kernel" in x)
    params["head"] = _init_linear(next(keys), inputs, CLASSES)
    return params, statistics


def _init_convolution(key: jax.Array, size: int, inputs: int, outputs: int) -> Any:
    kernel = _normal(key, size, size, inputs, outputs)
    return {"kernel": kernel, "scale": jnp.ones(outputs), "bias": jnp.zeros(outputs)}


def _init_bottleneck(keys: Any, inputs: int, width: int, *, project: bool) -> Any:
    block = {
        "reduce": _init_convolution(next(keys), 1, inputs, width),
        "spatial": _init_convolution(next(keys), 3, width, width),
        "expand": _init_convolution(next(keys), 1, width, 4 * width),
    }
    if project:
        block["project"] = _init_convolution(next(keys), 1, inputs, 4 * width)
    return block


def _init_statistics(layer: Any) -> Any:
    channels = layer["scale"].shape
    return {"mean": jnp.zeros(channels), "variance": jnp.ones(channels)}


def resnet(params: Any, statistics: Any, images: jax.Array, casts: Casts) -> tuple[Any, Any]:
    """Returns the logits and the new running statistics."""
    layer = functools.partial(_normed_convolution, casts=casts)
    x, stem = layer(images, params["stem"], statistics["stem"], 2)
    x = lax.reduce_window(jax.nn.relu(x), -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    moved = []
    for i, (block, old) in enumerate(zip(params["blocks"], statistics["blocks"], strict=True)):
        downsample = "project" in block and i > 0
        x, new = _bottleneck(x, block, old, 2 if downsample else 1, layer)
        moved.append(new)
    x = casts.narrow(casts.wide(x).mean((1, 2)))
    logits = casts.wide(_linear(x, params["head"], casts))
    return logits, {"stem": stem, "blocks": moved}


def _bottleneck(x: jax.Array, block: Any, old: Any, stride: int, layer: Any) -> tuple[Any, Any]:
    new = {}
    y, new["reduce"] = layer(x, block["reduce"], old["reduce"], 1)
    y, new["spatial"] = layer(jax.nn.relu(y), block["spatial"], old["spatial"], stride)
    y, new["expand"] = layer(jax.nn.relu(y), block["expand"], old["expand"], 1)
    if "project" in block:
        x, new["project"] = layer(x, block["project"], old["project"], stride)
    return jax.nn.relu(x + y), new


def _normed_convolution(
    x: jax.Array, layer: Any, old: Any, stride: int, *, casts: Casts
) -> tuple[jax.Array, Any]:
    """A convolution and the norm over the batch, with the variance in one pass as Flax has it."""
    x = casts.wide(_convolve(x, layer["kernel"], stride, casts))
    mean, square = x.mean((0, 1, 2)), (x * x).mean((0, 1, 2))
    variance = jnp.maximum(square - mean * mean, 0.0)
    y = (x - mean) * (lax.rsqrt(variance + 1e-5) * layer["scale"]) + layer["bias"]
    new = {"mean": mean, "variance": variance}
    moved = jax.tree.map(lambda a, b: MOMENTUM * a + (1 - MOMENTUM) * b, old, new)
    return casts.narrow(y), moved


def init_vit(key: jax.Array) -> Any:
    """Returns the f32 parameters."""
    patches, head, *keys = jax.random.split(key, LAYERS + 2)
    tokens = (IMAGE // PATCH) ** 2 + 1
    return {
        "patches": {
            "kernel": _normal(patches, PATCH, PATCH, 3, WIDTH),
            "bias": jnp.zeros(WIDTH),
        },
        "class": jnp.zeros((1, 1, WIDTH)),
        "position": jnp.zeros((tokens, WIDTH)),
        "blocks": [_init_layer(key) for key in keys],
        "norm": _init_norm(),
        "head": _init_linear(head, WIDTH, CLASSES),
    }


def _init_norm() -> dict[str, jax.Array]:
    return {"scale": jnp.ones(WIDTH), "bias": jnp.zeros(WIDTH)}


def _init_layer(key: jax.Array) -> dict[str, Any]:
    qkv, out, up, down = jax.random.split(key, 4)
    return {
        "norm_1": _init_norm(),
        "norm_2": _init_norm(),
        "qkv": _init_linear(qkv, WIDTH, 3 * WIDTH),
        "out": _init_linear(out, WIDTH, WIDTH),
        "up": _init_linear(up, WIDTH, 4 * WIDTH),
        "down": _init_linear(down, 4 * WIDTH, WIDTH),
    }


def vit(params: Any, images: jax.Array, casts: Casts) -> jax.Array:
    """Returns the logits."""
    x = _convolve(images, params["patches"]["kernel"], PATCH, casts)
    x = (x + casts.narrow(params["patches"]["bias"])).reshape(x.shape[0], -1, WIDTH)
    first = jnp.broadcast_to(casts.narrow(params["class"]), (x.shape[0], 1, WIDTH))
    x = jnp.concatenate([first, x], axis=1) + casts.narrow(params["position"])
    for layer in params["blocks"]:
        x = x + _attend(_norm(x, layer["norm_1"], casts), layer, casts)
        hidden = jax.nn.gelu(_linear(_norm(x, layer["norm_2"], casts), layer["up"], casts))
        x = x + _linear(hidden, layer["down"], casts)
    x = _norm(x[:, 0], params["norm"], casts)
    return casts.wide(_linear(x, params["head"], casts))


def _norm(x: jax.Array, layer: Any, casts: Casts) -> jax.Array:
    x = casts.wide(x)
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return casts.narrow((x - mean) * lax.rsqrt(variance + 1e-6) * layer["scale"] + layer["bias"])


def _attend(x: jax.Array, layer: Any, casts: Casts) -> jax.Array:
    heads = _linear(x, layer["qkv"], casts).reshape(*x.shape[:-1], HEADS, 3 * WIDTH // HEADS)
    q, k, v = jnp.split(heads, 3, axis=-1)
    scores = casts.wide(jnp.einsum("bqhd,bkhd->bhqk", q, k)) / math.sqrt(WIDTH // HEADS)
    attention = casts.narrow(jax.nn.softmax(scores, axis=-1))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", attention, v).reshape(x.shape)
    return _linear(mixed, layer["out"], casts)


def _batch(size: int) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros((size, IMAGE, IMAGE, 3)), jnp.zeros(size, jnp.int32)


def resnet_step(recipe: str, batch_size: int = 64) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """Returns a step (nothing donated) and a function that makes its arguments."""
    tx = optax.sgd(0.1, momentum=0.9)

    def make_loss(casts: Casts) -> Callable[..., Any]:
        def loss(params: Any, statistics: Any, batch: Any) -> tuple[jax.Array, Any]:
            images, labels = batch
            logits, statistics = resnet(params, statistics, images, casts)
            return cross_entropy(logits, labels), statistics

        return loss

    grad = value_and_grad(make_loss, recipe, has_aux=True)

    def step(params: Any, statistics: Any, state: Any, batch: Any) -> tuple[Any, ...]:
        (value, statistics), grads = grad(params, statistics, batch)
        params, state = update(tx, params, state, grads)
        return params, statistics, state, value

    def arguments() -> tuple[Any, ...]:
        params, statistics = init_resnet(jax.random.key(0))
        return params, statistics, tx.init(params), _batch(batch_size)

    return step, arguments


def vit_step(recipe: str, batch_size: int = 64) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """Returns a step (nothing donated) and a function that makes its arguments."""
    tx = optax.adamw(3e-4)

    def make_loss(casts: Casts) -> Callable[..., Any]:
        def loss(params: Any, batch: Any) -> jax.Array:
            images, labels = batch
            return cross_entropy(vit(params, images, casts), labels)

        return loss

    grad = value_and_grad(make_loss, recipe)

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        value, grads = grad(params, batch)
        return *update(tx, params, state, grads), value

    def arguments() -> tuple[Any, Any, Any]:
        params = init_vit(jax.random.key(0))
        return params, tx.init(params), _batch(batch_size)

    return step, arguments
