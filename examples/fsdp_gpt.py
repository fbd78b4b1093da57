"""A GPT on a mesh of devices: sharded data parallel, tensor parallel, or both.

The model is plain float32 JAX, and knows nothing of precision or devices. A layout says where its
parameters lie; the training step gathers each layer's weights in half, in the loop over the layers,
and adds gradients up in float32.

    python examples/fsdp_gpt.py --devices 8              # virtual devices, on any CPU
    python examples/fsdp_gpt.py --devices 8 --processes 2   # two processes of four devices each
    python examples/fsdp_gpt.py --layout fsdp+tp --policy mixed_float16
    python examples/fsdp_gpt.py --checkpoint out/fsdp    # saves there, and continues from there
    python examples/fsdp_gpt.py --audit --size 1b        # what moves on 8 TPU v5e and 8 H100
    python examples/fsdp_gpt.py                          # on the devices that are there

With several machines, start it on each of them: `--coordinator HOST:PORT --processes N
--process-id I`. Needs the extra `jaxmp[examples]`, and `--audit` the extras `audit-tpu` and
`audit-cuda`, though no TPU or GPU.
"""

import argparse
import collections
import dataclasses
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _text import batch_at, load_corpus
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import sharding

TARGETS = ("tpu:v5e:2x4", "cuda:h100:1x1x8")
LAYOUTS = ("fsdp", "dp", "tp", "fsdp+tp")
DRAWN = 0.02  # standard deviation of weights


@dataclasses.dataclass(frozen=True)
class Size:
    """A GPT: model width, blocks, attention heads, context length, vocabulary, rows of a batch."""

    width: int
    depth: int
    heads: int
    length: int
    vocabulary: int = 256
    batch: int = 32


SIZES = {
    "tiny": Size(width=64, depth=2, heads=2, length=32, batch=16),
    "small": Size(width=128, depth=4, heads=4, length=128),
    "1b": Size(width=2048, depth=24, heads=16, length=2048, vocabulary=32768, batch=8),
    "7b": Size(width=4096, depth=32, heads=32, length=2048, vocabulary=32768, batch=8),
}


def init_params(size: Size) -> Any:
    """Returns f32 parameters, with the blocks stacked."""
    keys = iter(jax.random.split(jax.random.key(0), 7))

    def normal(*shape: int) -> jax.Array:
        return DRAWN * jax.random.normal(next(keys), shape)

    depth, width = size.depth, size.width
    return {
        "embedding": normal(size.vocabulary, width),
        "positions": normal(size.length, width),
        "blocks": {
            "attention_norm": jnp.ones((depth, width)),
            "qkv": normal(depth, width, 3, width),
            "out": normal(depth, width, width),
            "mlp_norm": jnp.ones((depth, width)),
            "up": normal(depth, width, 4 * width),
            "down": normal(depth, 4 * width, width),
        },
        "norm": jnp.ones(width),
        "head": normal(width, size.vocabulary),
    }


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Normalizes [..., D] by its root mean square."""
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * scale


def block(x: jax.Array, layer: Any, heads: int) -> jax.Array:
    """A pre-norm transformer block, [B, T, D]."""
    batch, length, width = x.shape
    qkv = jnp.einsum("btd,dce->btce", norm(x, layer["attention_norm"]), layer["qkv"])
    query, key, value = jnp.moveaxis(qkv.reshape(batch, length, 3, heads, width // heads), 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / (width // heads) ** 0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape)
    x = x + mixed @ layer["out"]
    return x + jax.nn.gelu(norm(x, layer["mlp_norm"]) @ layer["up"]) @ layer["down"]


def make_loss(size: Size) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns the loss: from parameters and i32[B, T + 1] to the mean nats per token."""

    @jax.checkpoint
    def step(x: jax.Array, layer: Any) -> jax.Array:
        return block(x, layer, size.heads)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embedding"][tokens[:, :-1]] + params["positions"]
        x, _ = lax.scan(lambda x, layer: (step(x, layer), None), x, params["blocks"])
        logits = norm(x, params["norm"]) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss_fn


def make_layout(kind: str, devices: int, size: Size, *, abstract: bool = False) -> sharding.Layout:
    """Returns where parameters and batches lie: over all devices, or two of them for each layer."""
    model = {"fsdp": 1, "dp": 1, "tp": min(devices, size.heads), "fsdp+tp": min(2, devices)}[kind]
    shape, names = (devices // model, model), ("data", "model")
    types = (AxisType.Auto, AxisType.Auto)
    mesh = (
        AbstractMesh(shape, names, axis_types=types)
        if abstract
        else jax.make_mesh(shape, names, axis_types=types)
    )
    columns, rows = P(None, None, "model"), P(None, "model")
    split = {"qkv": P(None, None, None, "model"), "out": rows, "up": columns, "down": rows}
    params = jax.eval_shape(lambda: init_params(size))
    specs = jax.tree.map(lambda _: P(), params)
    if "tp" in kind:
        specs["blocks"] |= split
    if "fsdp" not in kind:
        return sharding.Layout(mesh, specs, batch_axes="data")
    return sharding.fsdp(params, mesh, batch_axes="data", specs=specs, min_size=2**10)


@dataclasses.dataclass(frozen=True)
class Training:
    """What a run and an audit share."""

    size: Size
    policy: str
    layout: sharding.Layout
    tx: optax.GradientTransformation

    def first_state(self) -> jaxmp.TrainState:
        """Returns the state before the first step."""
        return jaxmp.TrainState.create(init_params(self.size), self.tx)

    def step(self) -> Any:
        """Returns the jitted step."""
        return jaxmp.make_train_step(make_loss(self.size), self.tx, self.policy, layout=self.layout)


def make_training(args: argparse.Namespace, devices: int, *, abstract: bool = False) -> Training:
    """Returns the training that the command line asks for."""
    size = SIZES[args.size]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, weight_decay=0.1))
    tx = jaxmp.mixed_precision(tx, args.policy)
    layout = make_layout(args.layout, devices, size, abstract=abstract)
    return Training(size, args.policy, layout, tx)


def train(args: argparse.Namespace) -> None:
    """Trains on the devices of all processes; the first one prints."""
    training = make_training(args, jax.device_count())
    size, layout, first = training.size, training.layout, jax.process_index() == 0
    state = layout.create(training.first_state)
    if args.checkpoint is not None and jaxmp.checkpoint.latest_step(args.checkpoint) is not None:
        state = jaxmp.checkpoint.restore(args.checkpoint, state)
    if first:
        print(f"{jax.device_count()} devices in {jax.process_count()} processes: {layout.mesh}")
    # Each process reads its own rows of the batch.
    rows = size.batch // jax.process_count()
    own = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)
    text, step = load_corpus().train, training.step()
    began, start = time.perf_counter(), int(state.step)
    for number in range(start, start + args.steps):
        tokens = batch_at(text, number, seed=0, batch_size=size.batch, length=size.length)
        state, info = step(state, layout.place_batch(tokens[own]))
        if first and (number == start or (number + 1) % 10 == 0):
            print(f"step {number + 1}: loss={float(info.loss):.4f}", flush=True)
    jax.block_until_ready(state)
    if args.checkpoint is not None:
        jaxmp.checkpoint.save(args.checkpoint, state)
    if first:
        seconds = (time.perf_counter() - began) / args.steps
        print(f"{seconds:.2f} seconds a step, compiling included")


def show_audit(args: argparse.Namespace) -> None:
    """Prints what the step moves between devices on hardware that is not here."""
    training = make_training(args, 8, abstract=True)
    state = jax.eval_shape(training.first_state)
    places = training.layout.shardings(state)
    state = jax.tree.map(lambda leaf, place: leaf.update(sharding=place), state, places)
    shape = (training.size.batch, training.size.length + 1)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=training.layout.batch_sharding())
    for target in TARGETS:
        report = jaxmp.audit(training.step(), state, tokens, target=target).compiled
        moved: dict[tuple[str, str], int] = collections.Counter()
        for row in report.collectives:
            moved[row.instruction, row.dtype] += row.bytes * row.times
        print(f"{target}: {report.memory.peak / 1e9:.2f} GB at most on each device, which gets")
        for (instruction, dtype), size in sorted(moved.items(), key=lambda item: -item[1]):
            print(f"  {size / 1e6:10.2f} MB of {dtype} by {instruction}")


def launch(args: argparse.Namespace, argv: list[str]) -> int:
    """Starts this script once for each process, on this machine, and waits for all of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, __file__, *argv, "--coordinator", coordinator, "--process-id"]
    children = [subprocess.Popen([*command, str(i)]) for i in range(args.processes)]
    try:
        while (codes := [child.poll() for child in children]).count(None):
            # One that failed would be waited for by the others.
            if any(codes):
                break
            time.sleep(0.1)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
    return max(abs(child.wait()) for child in children)


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="fsdp_gpt.py", description="Trains a GPT on a mesh.")
    add = parser.add_argument
    add("--devices", type=int, metavar="N", help="make N virtual CPU devices, of all processes")
    add("--processes", type=int, default=1, metavar="N", help="how many processes (1)")
    add("--coordinator", metavar="HOST:PORT", help="of the first of several processes")
    add("--process-id", type=int, metavar="I", help="which of them this is, from 0")
    add("--layout", choices=LAYOUTS, default="fsdp", help="what is sharded over devices (fsdp)")
    add("--policy", default="mixed_bfloat16", metavar="NAME", help="(mixed_bfloat16)")
    add("--size", choices=SIZES, default="small", help="of the model (small)")
    add("--steps", type=int, metavar="N", help="training steps (100)")
    add("--checkpoint", type=Path, metavar="DIR", help="continue from there, and save there")
    add("--audit", action="store_true", help="print what a step moves on 8 TPUs and 8 GPUs")
    add("--smoke", action="store_true", help="a tiny run, in less than a minute")
    args = parser.parse_args(argv)
    if args.smoke:
        args.size, args.devices = "tiny", args.devices or 8
    args.steps = args.steps or (20 if args.smoke else 100)
    if args.processes < 1 or args.steps < 1 or (args.devices or args.processes) % args.processes:
        parser.error("--steps and --processes are at least 1, and --devices a multiple of them")
    return args


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    if args.audit:
        show_audit(args)
        return 0
    if args.processes > 1 and args.coordinator is None:
        return launch(args, argv)
    if args.devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices // args.processes)
    if args.coordinator is None:
        train(args)
        return 0
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(args.coordinator, args.processes, args.process_id)
    try:
        train(args)
    except BaseException:
        # Leaving in order waits for the other processes, which may be waiting for this one.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
