"""A small GPT trained with parameters stored in bf16, in each way that jaxmp.optim knows.

    python -m benchmarks.narrow_params --plot docs/narrow_params.png

Bytes of the Python standard library's own sources; every way sees the same batches and computes in
bf16. `plain` gives bf16 parameters to optax as they are.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmp
from benchmarks.autocast import _gpt
from benchmarks.autocast._recipes import NO_CASTS
from jaxmp import optim
from jaxmp._table import render

SHAPE = _gpt.Shape(width=128, heads=4, layers=2, length=128, vocabulary=256, batch=16)
SEEN = 20  # how many of the last losses are averaged
EIGHT_BITS = {"mu": "block8", "nu": "block8_square"}


def adam() -> optax.GradientTransformation:
    """Returns the optimizer that all ways share."""
    return optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 30, 300, 1e-4))


WAYS: dict[str, tuple[Any, Callable[[], optax.GradientTransformation]]] = {
    "float32": (jnp.float32, adam),
    "8-bit moments": (jnp.float32, lambda: optim.state_dtype(adam(), EIGHT_BITS)),
    "master_weights": (jnp.bfloat16, lambda: optim.master_weights(adam())),
    "kahan": (jnp.bfloat16, lambda: optim.kahan(adam())),
    "stochastic_rounding": (jnp.bfloat16, lambda: optim.stochastic_rounding(adam(), key=0)),
    "stochastic_rounding, 8-bit moments": (
        jnp.bfloat16,
        lambda: optim.stochastic_rounding(optim.state_dtype(adam(), EIGHT_BITS), key=0),
    ),
    "plain": (jnp.bfloat16, adam),
}


def batches(steps: int, shape: _gpt.Shape) -> np.ndarray:
    """Returns i32[steps, B, T + 1] windows of source code."""
    folder = Path(argparse.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    data = np.frombuffer(text, np.uint8)
    starts = np.random.default_rng(0).integers(
        0, len(data) - shape.length - 1, (steps, shape.batch)
    )
    return data[starts[..., None] + np.arange(shape.length + 1)].astype(np.int32)


def train(way: str, shape: _gpt.Shape, tokens: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns the loss of every step, and the bytes a parameter of parameters and state."""
    dtype, make = WAYS[way]
    tx = make()
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), _gpt.init(jax.random.key(0), shape))
    state = tx.init(params)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        logits = _gpt.model(params, tokens[:, :-1], shape, NO_CASTS)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    grad_fn = jaxmp.value_and_grad(loss_fn, "mixed_bfloat16")

    @jax.jit
    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = grad_fn(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for batch in tokens:
        params, state, loss = step(params, state, batch)
        losses.append(loss)
    return np.array(losses), optim.memory_account(params, state).bytes_per_parameter


def plot(losses: dict[str, np.ndarray], path: Path) -> None:
    """Draws how far the mean of the last losses of each way is from that of float32."""
    from matplotlib.figure import Figure  # noqa: PLC0415, only where a figure is wanted

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    window = np.ones(SEEN) / SEEN
    baseline = np.convolve(losses["float32"], window, "valid")
    for way, values in losses.items():
        change = 100 * (np.convolve(values, window, "valid") / baseline - 1)
        axes.plot(np.arange(SEEN, len(values) + 1), change, label=way)
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss against float32 (%), mean of {SEEN} steps")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Trains in every way and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    tokens, rows, losses = batches(args.steps, SHAPE), [], {}
    for way in WAYS:
        began = time.perf_counter()
        losses[way], size = train(way, SHAPE, tokens)
        last = losses[way][-SEEN:].mean()
        change = 100 * (last / losses["float32"][-SEEN:].mean() - 1)
        rows.append([way, f"{size:.2f}", f"{last:.4f}", f"{change:+.2f}%"])
        print(f"{way}: {time.perf_counter() - began:.0f} s", flush=True)
    header = ("way", "bytes a parameter", "loss", "against float32")
    print(render(f"{SHAPE}, JAX {jax.__version__}", header, rows, right={1, 2, 3}))
    if args.plot:
        plot(losses, args.plot)


if __name__ == "__main__":
    main()
