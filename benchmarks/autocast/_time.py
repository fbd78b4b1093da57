"""Time of a GPT's training step on this machine, in interleaved rounds."""

import statistics
import time
from collections.abc import Sequence

import jax

from benchmarks.autocast import _gpt
from benchmarks.autocast._recipes import BASE, BY_HAND, RECIPES
from jaxmp._table import render


def run(rounds: int, recipe: Sequence[str] | None) -> None:
    """Prints the table; ratios are taken within each round, so that drift does not decide."""
    seconds = _measure(recipe or RECIPES, rounds)
    header = ("recipe", "median ms", "quartiles", "of f32", "of by hand")
    rows = [
        [name, *_spread(times), _ratio(seconds, name, BASE), _ratio(seconds, name, BY_HAND)]
        for name, times in seconds.items()
    ]
    shape, device = _gpt.SMALL, jax.devices()[0].device_kind
    sizes = f"GPT of {shape.layers} layers, width {shape.width}, {shape.length} tokens"
    title = f"{sizes}, batch {shape.batch}, JAX {jax.__version__}, {device}"
    print(render(title, header, rows, right=range(1, 5)))


def _measure(recipes: Sequence[str], rounds: int) -> dict[str, list[float]]:
    calls = {}
    for name in recipes:
        step, arguments = _gpt.train_step(_gpt.SMALL, name)
        calls[name] = jax.jit(step), arguments()
        jax.block_until_ready(calls[name][0](*calls[name][1]))  # compiles
    seconds: dict[str, list[float]] = {name: [] for name in recipes}
    for _ in range(rounds):
        for name, (step, arguments) in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(step(*arguments))
            seconds[name].append(time.perf_counter() - began)
    return seconds


def _spread(times: list[float]) -> tuple[str, str]:
    low, _, high = statistics.quantiles(times, n=4)
    return f"{statistics.median(times) * 1e3:.0f}", f"{low * 1e3:.0f} – {high * 1e3:.0f}"


def _ratio(seconds: dict[str, list[float]], name: str, base: str) -> str:
    if base not in seconds:
        return "–"
    pairs = zip(seconds[name], seconds[base], strict=True)
    return f"{statistics.median(a / b for a, b in pairs):.3f}"
