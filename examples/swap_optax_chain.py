"""Three lines that put a plain `jax.jit` training script into mixed precision.

`train_before` is an ordinary script: a function, an optax chain, a jitted step. `train_after` is
the same script; the lines that differ are marked. Both train on scikit-learn's handwritten digits,
from the same start and in the same order, and end in one table.

    python examples/swap_optax_chain.py
    python examples/swap_optax_chain.py --policy mixed_bfloat16
"""

import argparse
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jaxmp


def init_params(key: jax.Array, sizes: tuple[int, ...] = (64, 256, 256, 10)) -> Any:
    """Returns the f32 weights and biases of an MLP."""
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"w": jax.random.normal(k, (m, n)) * np.sqrt(2 / m).astype(np.float32), "b": jnp.zeros(n)}
        for k, m, n in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def logits_of(params: Any, images: jax.Array) -> jax.Array:
    """Returns f32[B, 10] scores of images f32[B, 64]."""
    *hidden, last = params
    for layer in hidden:
        images = jax.nn.relu(images @ layer["w"] + layer["b"])
    return images @ last["w"] + last["b"]


def loss_fn(params: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns the mean cross entropy."""
    images, labels = batch
    logits = logits_of(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def batches(data: Any, steps: int, size: int = 128) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the same random batches in every run."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        chosen = rng.integers(0, len(data[0]), size)
        yield data[0][chosen], data[1][chosen]


def train_before(params: Any, data: Any, steps: int) -> tuple[Any, Any, float]:
    """The script as it was: float32, and an optax chain."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    opt_state = tx.init(params)

    @jax.jit
    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    loss = np.inf
    for batch in batches(data, steps):
        params, opt_state, loss = train_step(params, opt_state, batch)
    return params, opt_state, float(loss)


def train_after(params: Any, data: Any, steps: int, policy: str) -> tuple[Any, Any, float]:
    """The same script in mixed precision."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    tx = jaxmp.mixed_precision(tx, policy)  # 1: wrap the chain
    opt_state = tx.init(params)

    @jax.jit
    def train_step(params, opt_state, batch):
        scale = jaxmp.get_loss_scale(opt_state)  # 2: find the loss scale
        grad_fn = jaxmp.value_and_grad(loss_fn, policy, loss_scale=scale)  # 3: instead of jax's
        loss, grads = grad_fn(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    loss = np.inf
    for batch in batches(data, steps):
        params, opt_state, loss = train_step(params, opt_state, batch)
    return params, opt_state, float(loss)


def accuracy(params: Any, images: np.ndarray, labels: np.ndarray) -> float:
    """Returns the share of images whose highest score is the label's."""
    return float(jnp.mean(jnp.argmax(logits_of(params, images), -1) == labels))


def main() -> None:
    """Trains before and after, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", default="mixed_float16")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--smoke", action="store_true", help="a few steps only")
    args = parser.parse_args()
    steps = 60 if args.smoke else args.steps
    try:
        jaxmp.get_policy(args.policy)
    except ValueError as error:
        parser.error(str(error))

    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=0.25, random_state=0, stratify=labels)
    train_x, test_x = (part.astype(np.float32) for part in split[:2])
    train_y, test_y = (part.astype(np.int32) for part in split[2:])
    params = init_params(jax.random.key(0))

    table = Table("script", "loss", "test accuracy", "loss scale", "skipped steps")
    trained, _, loss = train_before(params, (train_x, train_y), steps)
    table.add_row("before", f"{loss:.4f}", f"{accuracy(trained, test_x, test_y):.2%}", "–", "–")
    trained, opt_state, loss = train_after(params, (train_x, train_y), steps, args.policy)
    table.add_row(
        f"after ({args.policy})",
        f"{loss:.4f}",
        f"{accuracy(trained, test_x, test_y):.2%}",
        f"{float(jaxmp.get_loss_scale(opt_state).loss_scale):g}",
        f"{int(opt_state.skipped_steps)}",
    )
    Console().print(table)


if __name__ == "__main__":
    main()
