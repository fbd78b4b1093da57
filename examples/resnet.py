"""A ResNet with batch normalization in float16, bfloat16 and float32, side by side.

The model is plain Flax Linen without a `dtype=` in it; `jaxmp.linen.wrap` makes it mixed. In
float16 the loss is scaled dynamically, and a step that overflows changes nothing: the batch
statistics stay as they were too.

    python examples/resnet.py                            # ResNet-18 in float16, on digits
    python examples/resnet.py --policy float32,mixed_bfloat16,mixed_float16
    python examples/resnet.py --data ~/cifar --depth 50  # CIFAR-10, of torchvision or TFDS
    python examples/resnet.py --smoke                    # all policies, in a minute

What ResNet-50 on ImageNet's sizes would run on a T4, and in how much memory, without one:

    python -m jaxmp audit examples.resnet:audit_case --policy mixed_float16 --target cuda:t4

Needs the extra `jaxmp[examples]`.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _cli import split_policies
from _images import Images, Split, augmented, load_images
from _run import UserError
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table
from sklearn.metrics import ConfusionMatrixDisplay, confusion_matrix
from tqdm import tqdm

import jaxmp
import jaxmp.linen

BLOCKS = {10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}


def with_shortcut(x: jax.Array, y: jax.Array, strides: tuple[int, int], norm: Any) -> jax.Array:
    """Adds the input of a block to its output, by a 1x1 convolution if their shapes differ."""
    if x.shape != y.shape:
        x = nn.Conv(y.shape[-1], (1, 1), strides, use_bias=False, name="shortcut")(x)
        x = norm(name="shortcut_norm")(x)
    return nn.relu(x + y)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, with a shortcut around them."""

    width: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Maps [B, H, W, C] to [B, H / stride, W / stride, width]."""
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        strides = (self.stride, self.stride)
        y = nn.Conv(self.width, (3, 3), strides, use_bias=False)(x)
        y = nn.relu(norm()(y))
        y = nn.Conv(self.width, (3, 3), use_bias=False)(y)
        y = norm(scale_init=nn.initializers.zeros)(y)
        return with_shortcut(x, y, strides, norm)


class Bottleneck(nn.Module):
    """A 3x3 convolution between two of 1x1, with a shortcut around them."""

    width: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Maps [B, H, W, C] to [B, H / stride, W / stride, 4 * width]."""
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        strides = (self.stride, self.stride)
        y = nn.relu(norm()(nn.Conv(self.width, (1, 1), use_bias=False)(x)))
        y = nn.relu(norm()(nn.Conv(self.width, (3, 3), strides, use_bias=False)(y)))
        y = nn.Conv(4 * self.width, (1, 1), use_bias=False)(y)
        y = norm(scale_init=nn.initializers.zeros)(y)
        return with_shortcut(x, y, strides, norm)


class ResNet(nn.Module):
    """A ResNet (He et al. 2016, arXiv:1512.03385), for images of 32 pixels or of ImageNet's size.

    Attributes:
        depth: 10, 18 or 50.
        classes: how many.
        width: of the first stage.
    """

    depth: int = 18
    classes: int = 10
    width: int = 64

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Maps images [B, H, W, C] to logits [B, classes]."""
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        block = Bottleneck if self.depth == 50 else BasicBlock
        is_large = x.shape[1] > 64
        kernel, strides = ((7, 7), (2, 2)) if is_large else ((3, 3), (1, 1))
        x = nn.Conv(self.width, kernel, strides, use_bias=False, name="stem")(x)
        x = nn.relu(norm(name="stem_norm")(x))
        if is_large:
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, count in enumerate(BLOCKS[self.depth]):
            for i in range(count):
                stride = 2 if stage and not i else 1
                x = block(self.width * 2**stage, stride, name=f"stage_{stage}_{i}")(x, train)
        return nn.Dense(self.classes, name="head")(jnp.mean(x, axis=(1, 2)))


@dataclasses.dataclass(frozen=True)
class Result:
    """A trained policy: its name, accuracy and predictions on the test set, and the run's cost."""

    policy: str
    accuracy: float
    predictions: np.ndarray
    loss: float
    step_seconds: float
    skipped_steps: int
    loss_scale: float


def make_loss(model: Any, *, flips: bool) -> Callable[..., jaxmp.LossOutput]:
    """Returns the mean cross entropy with label smoothing, and the new batch statistics."""

    def loss_fn(params: Any, batch: Any, *, model_state: Any, rng: Any) -> jaxmp.LossOutput:
        images, labels = batch
        logits, changed = model.apply(
            {"params": params, "batch_stats": model_state},
            augmented(images, rng, flips=flips),
            train=True,
            mutable=["batch_stats"],
        )
        targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), 0.1)
        loss = optax.softmax_cross_entropy(logits, targets).mean()
        return jaxmp.LossOutput(loss, model_state=changed["batch_stats"])

    return loss_fn


def make_optimizer(policy: jaxmp.Policy, steps: int) -> optax.GradientTransformation:
    """Returns AdamW with warm-up and cosine decay, made mixed."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10 + 1, steps + 1)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=1e-2))
    if policy.compute_dtype != jnp.float16:
        return jaxmp.mixed_precision(tx, policy)
    # The default scale grows every 2000 steps, which is more than a short run has.
    loss_scale = jaxmp.DynamicLossScale(2.0**15, period=min(max(steps // 10, 10), 2000))
    return jaxmp.mixed_precision(tx, policy, loss_scale)


def batches(split: Split, size: int, epochs: int, seed: int) -> Iterator[Any]:
    """Yields shuffled batches; what is left over of an epoch is dropped."""
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = rng.permutation(len(split.labels))
        for start in range(0, len(order) - size + 1, size):
            chosen = order[start : start + size]
            yield split.images[chosen], split.labels[chosen]


def train(args: argparse.Namespace, images: Images, name: str) -> Result:
    """Trains a policy and tests it."""
    policy = jaxmp.get_policy(name)
    per_epoch = len(images.train.labels) // args.batch_size
    if not per_epoch:
        raise UserError(
            f"--batch-size {args.batch_size}: there are only {len(images.train.labels)} images."
        )
    steps = per_epoch * args.epochs
    model = jaxmp.linen.wrap(ResNet(args.depth, len(images.classes), args.width), policy)
    variables = jax.jit(model.init)(jax.random.key(args.seed), images.train.images[:1])
    tx = make_optimizer(policy, steps)
    state = jaxmp.TrainState.create(
        variables["params"],
        tx,
        model_state=variables["batch_stats"],
        rng=jax.random.key(args.seed + 1),
    )
    step = jaxmp.make_train_step(make_loss(model, flips=images.flips), tx, policy)
    losses, times = [], []
    with tqdm(desc=name, total=steps, unit="step", disable=None) as bar:
        for batch in batches(images.train, args.batch_size, args.epochs, args.seed):
            began = time.perf_counter()
            state, info = step(state, batch)
            losses.append(float(info.loss))
            times.append(time.perf_counter() - began)
            bar.set_postfix(loss=f"{losses[-1]:.3f}", scale=f"{float(info.loss_scale):g}")
            bar.update()
    predictions = predict(model, state, images.test, args.batch_size)
    mixed = jaxmp.optim.get_mixed_precision_state(state.opt_state)
    return Result(
        policy=name,
        accuracy=float(np.mean(predictions == images.test.labels)),
        predictions=predictions,
        loss=float(np.mean(losses[-per_epoch:])),
        step_seconds=float(np.median(times)),
        skipped_steps=int(mixed.skipped_steps),
        loss_scale=float(mixed.loss_scale.loss_scale),
    )


def predict(model: Any, state: jaxmp.TrainState, split: Split, size: int) -> np.ndarray:
    """Returns the label that the model gives to each image: i32[N]."""
    variables = {"params": state.params, "batch_stats": state.model_state}
    starts = range(0, len(split.labels), size)
    logits = [model.apply(variables, split.images[start : start + size]) for start in starts]
    return np.concatenate([np.argmax(each, axis=-1) for each in logits])


def audit_case(policy: jaxmp.Policy) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the training step of ResNet-50 at 224 pixels, for `jaxmp audit`: shapes alone."""
    model = jaxmp.linen.wrap(ResNet(depth=50, classes=1000), policy)
    images = jax.ShapeDtypeStruct((32, 224, 224, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((32,), jnp.int32)
    tx = make_optimizer(policy, steps=100_000)

    def create(images: jax.Array) -> jaxmp.TrainState:
        variables = model.init(jax.random.key(0), images)
        stats = variables["batch_stats"]
        return jaxmp.TrainState.create(
            variables["params"], tx, model_state=stats, rng=jax.random.key(1)
        )

    step = jaxmp.make_train_step(make_loss(model, flips=True), tx, policy)
    return step, (jax.eval_shape(create, images), (images, labels))


def print_table(results: Sequence[Result]) -> None:
    """Prints one row for each policy."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("policy", overflow="fold")
    for name in ("test accuracy", "train loss", "step (ms)", "skipped", "loss scale"):
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(
            result.policy,
            f"{result.accuracy:.2%}",
            f"{result.loss:.4f}",
            f"{result.step_seconds * 1e3:.1f}",
            str(result.skipped_steps),
            f"{result.loss_scale:g}",
        )
    # A pipe has no width of its own, and the default of 80 would wrap the numbers.
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def plot_confusion(images: Images, results: Sequence[Result], path: Path) -> None:
    """Draws which classes each policy takes for which into a PNG."""
    figure = Figure(figsize=(5 * len(results), 5), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, len(results)))
    for ax, result in zip(axes, results, strict=True):
        labels = list(range(len(images.classes)))
        counts = confusion_matrix(images.test.labels, result.predictions, labels=labels)
        shown = ConfusionMatrixDisplay(counts, display_labels=images.classes)
        shown.plot(ax=ax, colorbar=False, xticks_rotation="vertical", cmap="Blues")
        ax.set_title(f"{result.policy}: {result.accuracy:.1%}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="resnet.py", description="Trains a ResNet on images, once for each policy."
    )
    add = parser.add_argument
    is_cpu = jax.default_backend() == "cpu"
    policies = "name or text of a policy; several with commas or options (mixed_float16)"
    add("--policy", action="append", default=[], metavar="NAME", help=policies)
    add("--data", type=Path, metavar="DIR", help="folder of CIFAR-10; digits if left out")
    add("--depth", type=int, choices=BLOCKS, default=18, help="of the ResNet (18)")
    width = "of the first stage (64, on a CPU 16)"
    add("--width", type=int, default=16 if is_cpu else 64, metavar="N", help=width)
    add("--epochs", type=int, default=10, metavar="N", help="passes over the images (10)")
    add("--batch-size", type=int, default=64, metavar="N", help="images in a batch (64)")
    add("--seed", type=int, default=0, metavar="N", help="of parameters and data order (0)")
    add("--out", type=Path, default=Path("out/resnet"), metavar="DIR", help="for the plot")
    add("--smoke", action="store_true", help="a tiny run of all policies, in a minute")
    args = parser.parse_args(argv)
    for name in ("width", "epochs", "batch_size"):
        if getattr(args, name) < 1:
            option = name.replace("_", "-")
            parser.error(f"--{option} is {getattr(args, name)}, but must be at least 1")
    args.policies = split_policies(args.policy) or ["mixed_float16"]
    if args.smoke:
        args.policies = split_policies(args.policy) or [
            "float32",
            "mixed_bfloat16",
            "mixed_float16",
        ]
        args.depth, args.width, args.epochs = 10, 8, 2
    return args


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    args = parse_args(argv)
    try:
        images = load_images(args.data, limit=256 if args.smoke else None)
        print(
            f"{images.name}: {len(images.train.labels):,} images to train on, "
            f"{len(images.test.labels):,} held out; device: {jax.devices()[0].device_kind}",
            flush=True,
        )
        results = [train(args, images, name) for name in args.policies]
    except (UserError, ValueError, OSError) as error:
        print(f"resnet.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    print_table(results)
    plot_confusion(images, results, args.out / "confusion.png")
    print(f"Confusion matrix: {args.out / 'confusion.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
