"""What dynamic loss scaling and skipping cost: one table.

    python -m benchmarks.step_overhead
    python -m benchmarks.step_overhead --rounds 5 --width 128

Three jitted steps of one small transformer in f16 do the same arithmetic: with a constant scale
and no check (the base line), the loop by hand with `mixed_precision` and a dynamic scale, and
`make_train_step`. They run in turn, A B C A B C, and the ratio is taken within each round, so that
a machine whose speed drifts does not decide it.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import jaxmp

POLICY = "mixed_float16"
SCALE = 2.0**10


def init_params(key: jax.Array, width: int, layers: int, vocabulary: int) -> Any:
    """Returns the f32 parameters of a decoder without biases."""
    keys = iter(jax.random.split(key, 4 * layers + 1))

    def normal(*shape: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), shape)

    blocks = [
        {
            "qkv": normal(width, 3 * width),
            "out": normal(width, width),
            "up": normal(width, 4 * width),
            "down": normal(4 * width, width),
        }
        for _ in range(layers)
    ]
    return {"embed": normal(vocabulary, width), "blocks": blocks}


def normalize(x: jax.Array) -> jax.Array:
    """Scales each row to unit root mean square, in f32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of [B, T, H, D] arrays, with an f32 softmax."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / np.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def loss_fn(params: Any, tokens: jax.Array, heads: int = 4) -> jax.Array:
    """Returns the mean cross entropy of the next token; tokens i32[B, T + 1]."""
    x = params["embed"][tokens[:, :-1]]
    batch, length, width = x.shape
    for block in params["blocks"]:
        q, k, v = jnp.split(normalize(x) @ block["qkv"], 3, -1)
        q, k, v = (a.reshape(batch, length, heads, width // heads) for a in (q, k, v))
        attended = attention(q, k, v)
        x = x + attended.reshape(batch, length, width) @ block["out"]
        x = x + jax.nn.gelu(normalize(x) @ block["up"]) @ block["down"]
    logits = (normalize(x) @ params["embed"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def chain() -> optax.GradientTransformation:
    """Returns the optimizer that all three steps use."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))


def constant_scale(params: Any) -> tuple[Callable[..., Any], Any]:
    """The base line: a constant scale, no check, no skip."""
    tx = chain()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, tokens: jax.Array) -> Any:
        params, opt_state = state
        grad_fn = jaxmp.value_and_grad(loss_fn, POLICY, loss_scale=jaxmp.StaticLossScale(SCALE))
        loss, grads = grad_fn(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step, (params, tx.init(params))


def dynamic_scale(params: Any) -> tuple[Callable[..., Any], Any]:
    """The loop by hand with `mixed_precision`."""
    tx = jaxmp.mixed_precision(chain(), POLICY, jaxmp.DynamicLossScale(SCALE))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, tokens: jax.Array) -> Any:
        params, opt_state = state
        scale = jaxmp.get_loss_scale(opt_state)
        loss, grads = jaxmp.value_and_grad(loss_fn, POLICY, loss_scale=scale)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step, (params, tx.init(params))


def train_step(params: Any) -> tuple[Callable[..., Any], Any]:
    """`make_train_step`, which reports the gradient norm and the counters too."""
    tx = jaxmp.mixed_precision(chain(), POLICY, jaxmp.DynamicLossScale(SCALE))
    return jaxmp.make_train_step(loss_fn, tx, POLICY), jaxmp.TrainState.create(params, tx)


STEPS = {
    "constant scale, no check": constant_scale,
    "mixed_precision, dynamic": dynamic_scale,
    "make_train_step, dynamic": train_step,
}


def measure(
    params: Any, tokens: jax.Array, rounds: int
) -> tuple[dict[str, list[float]], list[str]]:
    """Returns the seconds of each step in each round, and the memory of each compiled step."""
    running, memory = {}, []
    for name, build in STEPS.items():
        step, state = build(jax.tree.map(jnp.copy, params))
        compiled = step.lower(state, tokens).compile()
        stats = compiled.memory_analysis()
        total = stats.temp_size_in_bytes + stats.argument_size_in_bytes
        memory.append(f"{total / 1e6:.1f}")
        state, _ = compiled(state, tokens)
        running[name] = compiled, jax.block_until_ready(state)
    seconds: dict[str, list[float]] = {name: [] for name in STEPS}
    for _ in range(rounds):
        for name, (step, state) in running.items():
            began = time.perf_counter()
            running[name] = step, jax.block_until_ready(step(state, tokens))[0]
            seconds[name].append(time.perf_counter() - began)
    return seconds, memory


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    params = init_params(jax.random.key(0), args.width, args.layers, 256)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 256, (args.batch, args.length + 1)), jnp.int32)

    seconds, memory = measure(params, tokens, args.rounds)
    base = seconds["constant scale, no check"]
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    device = jax.devices()[0].device_kind
    title = f"{parameters / 1e6:.1f}M parameters, {POLICY}, JAX {jax.__version__}, {device}"
    table = Table("step", "median ms", "ratio: median", "quartiles", "memory MB", title=title)
    for (name, times), megabytes in zip(seconds.items(), memory, strict=True):
        ratios = [a / b for a, b in zip(times, base, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        median = f"{statistics.median(times) * 1e3:.1f}"
        table.add_row(name, median, f"{middle:.3f}", f"{low:.3f} – {high:.3f}", megabytes)
    Console().print(table)


if __name__ == "__main__":
    main()
