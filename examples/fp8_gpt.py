"""A GPT on real text in float32, bfloat16 and three recipes of fp8, side by side.

The model is plain float32 Flax Linen, and knows nothing of precision. All policies see the same
initial parameters and the same batches of the Python standard library's own sources, so the loss
curves can be laid over each other.

    python examples/fp8_gpt.py           # five minutes on two CPU cores, which emulate fp8
    python examples/fp8_gpt.py --smoke   # a tiny model, in one or two minutes
    python examples/fp8_gpt.py --policy bfloat16,mxfp8

Needs the extra `jaxmp[examples]`.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from _cli import split_policies
from _report import Progress, Result, make_result, plot_losses, print_table
from _text import Corpus, batch_at, load_corpus, spread_batches

import jaxmp
from jaxmp import fp8

POLICIES = {
    "float32": jaxmp.get_policy("float32"),
    "bfloat16": jaxmp.get_policy("mixed_bfloat16"),
    "fp8-current": jaxmp.get_policy("mixed_float8"),
    "fp8-delayed": jaxmp.Policy(recipe=fp8.DelayedScaling()),
    "mxfp8": jaxmp.get_policy("mixed_mxfp8"),
}
CHUNKS = 10  # of a run; the host waits for the steps of each, and validates


@dataclasses.dataclass(frozen=True)
class Size:
    """A run: model width, blocks, context length in bytes, windows in a batch, steps.

    The matmuls of layers are quantized where all of their sizes are multiples of 32.
    """

    width: int = 128
    depth: int = 2
    length: int = 128
    batch: int = 8
    steps: int = 500


SMOKE = Size(width=64, depth=1, length=32, steps=100)


class GPT(nn.Module):
    """A byte-level GPT with learned positions."""

    width: int
    depth: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps bytes i32[B, T] to logits [B, T, 256]."""
        shape = (tokens.shape[1], self.width)
        positions = self.param("positions", nn.initializers.normal(0.02), shape)
        x = nn.Embed(256, self.width)(tokens) + positions
        causal = nn.make_causal_mask(tokens)
        for _ in range(self.depth):
            y = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(self.width // 32)(y, mask=causal)
            y = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
            x = x + nn.Dense(self.width)(y)
        return nn.Dense(256)(nn.LayerNorm()(x))


def make_loss(model: GPT) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns the loss: from parameters and i32[B, T + 1] to the mean nats per byte."""

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        logits: Any = model.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss_fn


def make_optimizer(policy: jaxmp.Policy, steps: int) -> optax.GradientTransformation:
    """Returns AdamW with warm-up and cosine decay, made mixed."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1.5e-3, steps // 10, steps, 1.5e-4)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    return jaxmp.mixed_precision(tx, policy)


def train(name: str, size: Size, corpus: Corpus, params: Any) -> Result:
    """Trains and validates under one policy."""
    policy, loss_fn = POLICIES[name], make_loss(GPT(size.width, size.depth))
    batch = partial(batch_at, corpus.train, seed=0, batch_size=size.batch, length=size.length)
    held_out = spread_batches(corpus.valid, count=16, batch_size=8, length=size.length)
    validate = jax.jit(jaxmp.autocast(loss_fn, policy))

    tx = make_optimizer(policy, size.steps)
    fp8_state = jaxmp.init_fp8_state(loss_fn, policy, params, batch(0))
    state = jaxmp.TrainState.create(params, tx, fp8_state=fp8_state)
    program = jaxmp.make_train_step(loss_fn, tx, policy).lower(state, batch(0)).compile()

    keys = ("loss", "valid_loss", "seconds")
    history = {key: np.full(size.steps, np.nan, np.float32) for key in keys}
    with Progress(name, 0, size.steps, size.batch * size.length) as progress:
        for steps in np.split(np.arange(size.steps), CHUNKS):
            began, infos = time.perf_counter(), []
            for step in steps:
                state, info = program(state, batch(step))
                infos.append(info)
            infos = jax.device_get(infos)
            seconds = time.perf_counter() - began
            progress.steps_done(infos, seconds)
            losses = [validate(state.params, tokens) for tokens in held_out]
            valid_loss = float(np.mean(jax.device_get(losses)))
            progress.validated(steps[-1] + 1, valid_loss)
            history["loss"][steps] = [info.loss for info in infos]
            history["seconds"][steps] = seconds / len(steps)
            history["valid_loss"][steps[-1]] = valid_loss
    return make_result(name, program, state, history)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="fp8_gpt.py", description="Trains a GPT in float32, bfloat16 and fp8."
    )
    add = parser.add_argument
    add("--policy", action="append", default=[], metavar="NAME", help=f"of {', '.join(POLICIES)}")
    add("--out", type=Path, default=Path("out/fp8_gpt"), help="for the plot")
    add("--smoke", action="store_true", help="a tiny run, in one or two minutes")
    args = parser.parse_args(argv)
    names = split_policies(args.policy) or list(POLICIES)
    if unknown := set(names) - POLICIES.keys():
        parser.error(f"--policy names {unknown.pop()!r}, but knows only {', '.join(POLICIES)}")
    try:
        corpus = load_corpus()
        size = SMOKE if args.smoke else Size()
        tokens = np.zeros((1, size.length), np.int32)
        params = jax.jit(GPT(size.width, size.depth).init)(jax.random.key(0), tokens)
        results = [train(name, size, corpus, params) for name in names]
    except OSError as error:
        print(f"fp8_gpt.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    print_table(results)
    plot_losses(results, args.out / "loss.png")
    print(f"Loss curves: {args.out / 'loss.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
