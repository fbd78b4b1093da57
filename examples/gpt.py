"""A GPT on real text in float32 and in mixed precision, side by side.

The model is plain float32 Flax NNX, and knows nothing of precision; a jaxmp policy makes its
training mixed. All policies see the same initial parameters and the same batches of the Python
standard library's own sources, so the loss curves can be laid over each other.

    python examples/gpt.py                          # float32 against mixed_bfloat16, a few minutes
    python examples/gpt.py --policy mixed_float16   # watch the loss scale move
    python examples/gpt.py --policy float32,mixed_bfloat16,mixed_float16 --sample
    python examples/gpt.py --size base --steps 20000 --batch-size 64 --microbatches 8   # GPU, TPU
    python examples/gpt.py --resume out/gpt         # after Ctrl-C: continues bit for bit
    python examples/gpt.py --smoke                  # everything at once, in a minute

What the step of the largest size would run, and in how much memory, on hardware that is not here:

    python -m jaxmp audit examples.gpt:audit_case --policy mixed_bfloat16 --target cuda:h100

Needs the extra `jaxmp[examples]`.
"""

import argparse
import dataclasses
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _cli import open_run, parse_args
from _report import Progress, Result, make_result, plot_losses, print_table
from _run import Run, StopRequest, UserError, deferred_interrupt
from _sample import generate
from _text import Corpus, batch_at, load_corpus, spread_batches
from flax import nnx

import jaxmp

FETCH_EVERY = 10  # steps; looking at the results of each would make the device wait
SAVE_EVERY = 60.0  # seconds between checkpoints
VALIDATION_BATCHES, VALIDATION_BATCH_SIZE = 16, 8
PROMPT = b"def read(self, path):\n"


@dataclasses.dataclass(frozen=True)
class Size:
    """A GPT: model width, blocks, attention heads, context length in bytes, peak learning rate."""

    width: int
    depth: int
    heads: int
    length: int
    learning_rate: float


SIZES = {
    "tiny": Size(width=64, depth=2, heads=2, length=64, learning_rate=3e-3),
    "small": Size(width=128, depth=4, heads=4, length=128, learning_rate=1.5e-3),
    "base": Size(width=768, depth=12, heads=12, length=1024, learning_rate=6e-4),
}


class Attention(nnx.Module):
    """Causal self-attention."""

    def __init__(self, size: Size, *, rngs: nnx.Rngs) -> None:
        width = size.width
        self.heads = size.heads
        self.qkv = nnx.Linear(width, 3 * width, kernel_init=_normal(), rngs=rngs)
        self.out = nnx.Linear(width, width, kernel_init=_residual(size), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [B, T, D] to [B, T, D]."""
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = (qkv[:, :, i] for i in range(3))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / (width // self.heads) ** 0.5
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return self.out(mixed.reshape(batch, length, width))


class Block(nnx.Module):
    """A pre-LN transformer block."""

    def __init__(self, size: Size, *, rngs: nnx.Rngs) -> None:
        width = size.width
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = Attention(size, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, kernel_init=_normal(), rngs=rngs)
        self.down = nnx.Linear(4 * width, width, kernel_init=_residual(size), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [B, T, D] to [B, T, D]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class GPT(nnx.Module):
    """A byte-level GPT with learned positions and a tied head."""

    def __init__(self, size: Size, *, rngs: nnx.Rngs) -> None:
        # A parameter, since the head multiplies by it too.
        self.embedding = nnx.Param(_normal()(rngs.params(), (256, size.width)))
        self.positions = nnx.Param(_normal()(rngs.params(), (size.length, size.width)))
        self.blocks = nnx.List([Block(size, rngs=rngs) for _ in range(size.depth)])
        self.norm = nnx.LayerNorm(size.width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps bytes i32[B, T] to logits [B, T, 256]."""
        x = self.embedding[...][tokens] + self.positions[...][: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embedding[...].T


def _normal(stddev: float = 0.02) -> Any:
    return nnx.initializers.normal(stddev)


def _residual(size: Size) -> Any:
    """GPT-2's initialization of the layers that add to the residual stream."""
    return _normal(0.02 / (2 * size.depth) ** 0.5)


def make_model(size: Size, seed: int) -> tuple[Any, Any]:
    """Returns the graph definition and the f32 parameters of a GPT."""
    return nnx.split(GPT(size, rngs=nnx.Rngs(seed)), nnx.Param)


def make_loss(graphdef: Any) -> Callable[[Any, jax.Array], jax.Array]:
    """Returns the loss: from parameters and i32[B, T + 1] to the mean nats per byte."""

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graphdef, params)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss_fn


def make_optimizer(policy: jaxmp.Policy, size: Size, steps: int) -> optax.GradientTransformation:
    """Returns AdamW with warm-up and cosine decay, made mixed."""
    warmup = min(steps // 10 + 1, 1000)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, size.learning_rate, warmup, max(steps, warmup + 1), size.learning_rate / 10
    )
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    )
    if policy.compute_dtype != jnp.float16:
        return jaxmp.mixed_precision(tx, policy)
    # The default scale grows every 2000 steps, longer than most runs of this example. This one
    # starts too high, falls to its level by a few skipped steps, and tries the next power of two
    # ten times in a run.
    loss_scale = jaxmp.DynamicLossScale(2.0**20, period=min(max(steps // 10, 10), 2000))
    return jaxmp.mixed_precision(tx, policy, loss_scale)


@dataclasses.dataclass(frozen=True)
class Task:
    """What all policies share: the run, the text, the model, its first parameters, the loss."""

    run: Run
    corpus: Corpus
    size: Size
    graphdef: Any
    params: Any
    loss_fn: Callable[[Any, jax.Array], jax.Array]

    def batch(self, step: int) -> np.ndarray:
        """Returns the training batch of a step, i32[B, T + 1]."""
        settings = self.run.settings
        return batch_at(
            self.corpus.train,
            step,
            seed=settings.seed,
            batch_size=settings.batch_size,
            length=self.size.length,
        )

    def validation(self) -> list[np.ndarray]:
        """Returns the validation batches."""
        return spread_batches(
            self.corpus.valid,
            count=VALIDATION_BATCHES,
            batch_size=VALIDATION_BATCH_SIZE,
            length=self.size.length,
        )


@dataclasses.dataclass(frozen=True)
class Job:
    """The training of one policy: its name, the policy, the optimizer, the lowered step."""

    name: str
    policy: jaxmp.Policy
    tx: optax.GradientTransformation
    program: jax.stages.Lowered


def make_task(run: Run, corpus: Corpus) -> Task:
    """Builds the model that a run asks for."""
    size = SIZES[run.settings.size]
    graphdef, params = make_model(size, run.settings.seed)
    return Task(run, corpus, size, graphdef, params, make_loss(graphdef))


def make_job(task: Task, name: str) -> Job:
    """Traces the training step of a policy, so that one that cannot run is found out at once."""
    settings = task.run.settings
    try:
        policy = jaxmp.get_policy(name)
        tx = make_optimizer(policy, task.size, settings.steps)
        step = jaxmp.make_train_step(task.loss_fn, tx, policy, microbatches=settings.microbatches)
        state = jaxmp.TrainState.create(task.params, tx)
        return Job(name, policy, tx, step.lower(state, task.batch(0)))
    except ValueError as error:
        raise UserError(f"--policy {name}: {' '.join(str(error).split())}") from error


def train(task: Task, job: Job, stop: StopRequest) -> tuple[jaxmp.TrainState, Result]:
    """Trains from the newest checkpoint, or from the start, to the end or to Ctrl-C; saves."""
    steps = task.run.settings.steps
    validate_every = FETCH_EVERY * max(steps // (10 * FETCH_EVERY), 1)
    program, validate = job.program.compile(), make_validation(task, job.policy)
    state, history = task.run.load(job.name, jaxmp.TrainState.create(task.params, job.tx))
    first = step = int(state.step)
    tokens, saved = task.run.settings.batch_size * task.size.length, time.monotonic()
    with Progress(job.name, step, steps, tokens) as progress:
        while True:
            if step == steps or (step > first and step % validate_every == 0):
                history["valid_loss"][step - 1] = validate(state.params)
                progress.validated(step, history["valid_loss"][step - 1])
            if step == steps or stop.requested:
                break
            begin = time.perf_counter()
            state, infos = run_chunk(task, program, state, step, stop)
            seconds = time.perf_counter() - begin
            chunk = slice(step, step + len(infos))
            history["loss"][chunk] = [info.loss for info in infos]
            # The first chunk after a start warms up.
            history["seconds"][chunk] = seconds / len(infos) if step > first else np.nan
            step += len(infos)
            progress.steps_done(infos, seconds)
            if time.monotonic() - saved > SAVE_EVERY:
                task.run.save(job.name, state, history)
                saved = time.monotonic()
    task.run.save(job.name, state, history)
    return state, make_result(job.name, program, state, history)


def audit_case(policy: jaxmp.Policy) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the training step of the base size and its arguments, for `jaxmp audit`.

    Nothing is computed: the arguments are shapes and dtypes.
    """
    size, batch_size = SIZES["base"], 64
    abstract = nnx.eval_shape(lambda: GPT(size, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(abstract, nnx.Param)
    tx = make_optimizer(policy, size, steps=20_000)
    step = jaxmp.make_train_step(make_loss(graphdef), tx, policy, microbatches=8)
    state = jax.eval_shape(lambda params: jaxmp.TrainState.create(params, tx), params)
    return step, (state, jax.ShapeDtypeStruct((batch_size, size.length + 1), jnp.uint8))


def run_chunk(
    task: Task, program: jax.stages.Compiled, state: jaxmp.TrainState, step: int, stop: StopRequest
) -> tuple[jaxmp.TrainState, list[jaxmp.StepInfo]]:
    """Runs the steps up to the next fetch, or to Ctrl-C but at least one; waits for the last.

    Returns:
        The new state, and what each step reported, on the host.
    """
    last = min(step + FETCH_EVERY - step % FETCH_EVERY, task.run.settings.steps)
    infos = []
    while step < last and not (infos and stop.requested):
        state, info = program(state, task.batch(step))
        infos.append(info)
        step += 1
    return jax.block_until_ready(state), jax.device_get(infos)


def make_validation(task: Task, policy: jaxmp.Policy) -> Callable[[Any], float]:
    """Returns a function from parameters to the validation loss under a policy."""
    batches = task.validation()

    loss_of = jax.jit(jaxmp.autocast(task.loss_fn, policy))
    return lambda params: float(np.mean(jax.device_get([loss_of(params, b) for b in batches])))


def continue_prompt(task: Task, job: Job, params: Any) -> str:
    """Returns text sampled under the policy of a job."""

    def apply(params: Any, tokens: jax.Array) -> jax.Array:
        return nnx.merge(task.graphdef, params)(tokens)

    model = jaxmp.autocast(apply, job.policy)
    return generate(model, params, PROMPT, length=task.size.length, seed=task.run.settings.seed)


def train_all(args: argparse.Namespace) -> None:
    """Trains, samples, prints the table, and draws the loss curves."""
    corpus = load_corpus()
    run = open_run(args, corpus.checksum)
    task = make_task(run, corpus)
    jobs = [make_job(task, name) for name in run.policies]
    with deferred_interrupt():
        run.write()
    parameters = sum(leaf.size for leaf in jax.tree.leaves(task.params))
    print(
        f"{parameters:,} parameters; {len(corpus.train):,} bytes of text to train on, "
        f"{len(corpus.valid):,} held out; device: {jax.devices()[0].device_kind}",
        flush=True,
    )
    results = []
    for job in jobs:
        with deferred_interrupt() as stop:
            state, result = train(task, job, stop)
        results.append(result)
        if args.sample or args.smoke:
            print(f"\n--- {job.name} ---\n{continue_prompt(task, job, state.params)}\n", flush=True)
    print_table(results)
    plot_losses(results, args.out / "loss.png")
    print(f"Loss curves: {args.out / 'loss.png'}")


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    args = parse_args(argv, list(SIZES))
    directory = args.resume or args.out
    try:
        train_all(args)
    except (UserError, OSError) as error:
        print(f"gpt.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        hint = f" Continue with: python examples/gpt.py --resume {directory}"
        print(f"Interrupted.{hint if (directory / 'run.json').exists() else ''}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
