"""What the recipes of fp8 gain and cost, against mixed bfloat16, on training steps of a GPT.

    python -m benchmarks.fp8 time      # of a step, on this machine: a GPU of 80 GB
    python -m benchmarks.fp8 loss      # after 500 steps on real text, in each recipe
    python -m benchmarks.fp8 cycles    # compiled for a TPU, none needed
    python -m benchmarks.fp8 cycles --target cuda:h100

`cycles` needs the extra of its target: pip install "jaxmp[audit-tpu]". A recipe that this device
has no matmuls for is left out, with a line that says so. `--smoke` runs a tiny model.
"""

import argparse
import collections
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

import jaxmp
from benchmarks.autocast import _gpt
from benchmarks.autocast._recipes import NO_CASTS, cross_entropy
from benchmarks.narrow_params import SEEN, batches
from jaxmp import fp8
from jaxmp._table import render

BASE = "mixed_bfloat16"
# Strict, since a recipe that fell back to bf16 would be compared with itself.
POLICIES = {
    "float32": jaxmp.get_policy("float32"),
    BASE: jaxmp.get_policy(BASE),
    "current": jaxmp.Policy(recipe=fp8.CurrentScaling(strict=True)),
    "delayed": jaxmp.Policy(recipe=fp8.DelayedScaling(strict=True)),
    "mxfp8": jaxmp.Policy(recipe=fp8.BlockScaling("mxfp8", strict=True)),
    "nvfp4": jaxmp.Policy(recipe=fp8.BlockScaling("nvfp4", strict=True)),
}
TIMED = (BASE, "current", "delayed", "mxfp8")
AUDITED = (BASE, "current")

LARGE = _gpt.Shape(width=4096, heads=32, layers=4, length=2048, batch=4)
# All sizes are multiples of 32, so that every matmul of a layer is quantized in every recipe.
SMALL = _gpt.Shape(width=128, heads=4, layers=2, length=128, vocabulary=256, batch=16)
TINY = _gpt.Shape(width=64, heads=2, layers=1, length=32, vocabulary=256, batch=4)


def loss_of(shape: _gpt.Shape) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns the loss of a GPT, from parameters and i32[B, T + 1]."""

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        return cross_entropy(_gpt.model(params, tokens[:, :-1], shape, NO_CASTS), tokens[:, 1:])

    return loss_fn


def run_time(*, smoke: bool, rounds: int) -> None:
    """Prints the time of a step; ratios are taken within each round, so drift does not decide."""
    shape = TINY if smoke else LARGE
    seconds = _measure(shape, rounds)
    rows = []
    for name, times in seconds.items():
        ratios = [a / b for a, b in zip(times, seconds[BASE], strict=True)]
        low, _, high = (1e3 * value for value in statistics.quantiles(times, n=4))
        median = f"{1e3 * statistics.median(times):.1f}"
        quartiles = f"{low:.1f} – {high:.1f}"
        rows.append([name, median, quartiles, f"{statistics.median(ratios):.3f}"])
    header = ("policy", "median ms", "quartiles", "of bf16")
    print(_title(shape), render(None, header, rows, right=range(1, 4)), sep="\n")


def _measure(shape: _gpt.Shape, rounds: int) -> dict[str, list[float]]:
    loss_fn, tokens = loss_of(shape), _gpt.tokens(shape)
    tx = jaxmp.mixed_precision(optax.adamw(3e-4), BASE)
    state = jaxmp.TrainState.create(_gpt.init(jax.random.key(0), shape), tx)
    programs, fp8_states = {}, {}
    for name in TIMED:
        try:
            step = jaxmp.make_train_step(loss_fn, tx, POLICIES[name])
        except ValueError as error:
            print(error)
            continue
        fp8_states[name] = jaxmp.init_fp8_state(loss_fn, POLICIES[name], state.params, tokens)
        state = dataclasses.replace(state, fp8_state=fp8_states[name])
        programs[name] = step.lower(state, tokens).compile()
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    # Parameters and moments go from one policy to the next, as there is no room for them all. The
    # first round warms up.
    for turn in range(rounds + 1):
        for name, program in programs.items():
            state = dataclasses.replace(state, fp8_state=fp8_states[name])
            began = time.perf_counter()
            state, _ = jax.block_until_ready(program(state, tokens))
            if turn:
                seconds[name].append(time.perf_counter() - began)
            fp8_states[name] = state.fp8_state
    return seconds


def run_loss(*, smoke: bool, steps: int) -> None:
    """Prints the loss at the end of training, all policies with the same batches."""
    shape = TINY if smoke else SMALL
    tokens, losses = batches(steps, shape), {}
    for name, policy in POLICIES.items():
        began = time.perf_counter()
        try:
            losses[name] = float(_train(shape, policy, tokens)[-SEEN:].mean())
        except ValueError as error:
            print(error)
            continue
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
    rows = [
        [name, f"{loss:.4f}", f"{100 * (loss / losses[BASE] - 1):+.2f}%"]
        for name, loss in losses.items()
    ]
    header = ("policy", f"mean of last {SEEN}", "against bf16")
    print(f"{_title(shape)}, {steps} steps", render(None, header, rows, right={1, 2}), sep="\n")


def _train(shape: _gpt.Shape, policy: jaxmp.Policy, tokens: np.ndarray) -> np.ndarray:
    """Returns the loss of every step: f32[steps]."""
    steps = len(tokens)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-3, steps // 10, steps, 1e-4)
    loss_fn, tx = loss_of(shape), jaxmp.mixed_precision(optax.adamw(schedule), policy)
    params = _gpt.init(jax.random.key(0), shape)
    step = jaxmp.make_train_step(loss_fn, tx, policy)
    fp8_state = jaxmp.init_fp8_state(loss_fn, policy, params, tokens[0])
    state = jaxmp.TrainState.create(params, tx, fp8_state=fp8_state)
    losses = []
    for batch in tokens:
        state, info = step(state, batch)
        losses.append(info.loss)
    return np.array(jax.device_get(losses))


def run_cycles(*, smoke: bool, target: str, batch: int, policy: Sequence[str] | None) -> None:
    """Prints what a compiler makes of the loss and its gradients."""
    shape = dataclasses.replace(TINY if smoke else LARGE, layers=2, batch=batch)
    params = jax.eval_shape(lambda: _gpt.init(jax.random.key(0), shape))
    tokens = jax.eval_shape(lambda: _gpt.tokens(shape))
    compiled = {}
    for name in policy or AUDITED:
        grad_fn = jaxmp.value_and_grad(loss_of(shape), POLICIES[name])
        report = jaxmp.audit(grad_fn, params, tokens, target=target, float32=False)
        compiled[name] = report.compiled
    cycles = {name: each.estimated_cycles for name, each in compiled.items()}
    rows = [
        [
            name,
            f"{cycles[name]:,}" if cycles[name] else "–",
            f"{cycles[name] / cycles[BASE]:.3f}" if cycles[name] and BASE in cycles else "–",
            f"{each.memory.temporary / 1e6:,.0f}",
            str(each.fusions),
        ]
        for name, each in compiled.items()
    ]
    header = ("policy", "estimated cycles", "of bf16", "temporary MB", "fusions")
    print(_title(shape, target), render(None, header, rows, right=range(1, 5)), sep="\n")
    for name, each in compiled.items():
        kinds = collections.Counter(
            f"{row.instruction} {' × '.join(row.operand_dtypes)}" for row in each.products
        )
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        print(f"{name}: {counts}")


def _title(shape: _gpt.Shape, device: str | None = None) -> str:
    sizes = f"GPT of {shape.layers} layers, width {shape.width}, {shape.length} tokens"
    device = device or jax.devices()[0].device_kind
    return f"{sizes}, batch {shape.batch}, JAX {jax.__version__}, {device}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table of one subcommand."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    timed = _command(commands, "time", "time of a step on this machine", run_time)
    timed.add_argument("--rounds", type=int, default=20, help="times each is run (20)")
    loss = _command(commands, "loss", "loss at the end of training", run_loss)
    loss.add_argument("--steps", type=int, default=500, help="of training (500)")
    cycles = _command(commands, "cycles", "a TPU's cycles, as its compiler estimates", run_cycles)
    cycles.add_argument("--target", default="tpu:tpu7x", help="of the audit (tpu:tpu7x)")
    # Not 4: of codes that just fit on a tpu7x (8192 by 4096), libtpu 0.0.42 estimates that some
    # matmuls take 35 times as long as those of other sizes.
    cycles.add_argument("--batch", type=int, default=8, help="sequences of 2048 tokens (8)")
    text = f"may be repeated; default: {', '.join(AUDITED)}"
    cycles.add_argument("--policy", action="append", choices=tuple(POLICIES), help=text)
    args = vars(parser.parse_args(arguments))
    args.pop("run")(**args)


def _command(
    commands: Any, name: str, text: str, run: Callable[..., None]
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text)
    command.add_argument("--smoke", action="store_true", help="a tiny model")
    command.set_defaults(run=run)
    return command


if __name__ == "__main__":
    main()
