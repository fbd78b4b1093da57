"""CPU seconds to trace and lower a GPT's training step, by the number of its layers."""

import gc
import statistics
import time
from collections.abc import Sequence

import jax

from benchmarks.autocast import _gpt
from benchmarks.autocast._recipes import AUTOCAST, BASE
from jaxmp._table import render

RECIPES = (BASE, AUTOCAST)


PLATFORMS = ("cpu", "cuda", "tpu")


def run(
    layers: Sequence[int], rounds: int, recipe: Sequence[str] | None, platform: Sequence[str] | None
) -> None:
    """Prints a table for each platform to lower for; ratios are taken within each round."""
    for where in platform or PLATFORMS:
        rows = []
        for scan in (False, True):
            for count in layers:
                shape = _gpt.Shape(layers=count, scan=scan)
                rows += _rows(shape, _measure(shape, recipe or RECIPES, rounds, where))
        header = ("layers", "form", "recipe", "trace s", "lower s", "both s", "of f32")
        title = f"JAX {jax.__version__}, for {where}"
        print(render(title, header, rows, right={0, 3, 4, 5, 6}), flush=True)


def _measure(
    shape: _gpt.Shape, recipes: Sequence[str], rounds: int, platform: str
) -> dict[str, list[tuple[float, float]]]:
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in recipes}
    for i in range(rounds + 1):
        for name in recipes:
            pair = _seconds(shape, name, platform)
            if i:  # the first round also traces what JAX remembers of its own functions
                seconds[name].append(pair)
    return seconds


def _seconds(shape: _gpt.Shape, recipe: str, platform: str) -> tuple[float, float]:
    # A new function each time, since JAX remembers traces.
    step, arguments = _gpt.train_step(shape, recipe)
    specs = jax.eval_shape(arguments)
    gc.collect()
    # As timeit does: a collection goes through all that earlier rounds left, in JAX's caches too.
    gc.disable()
    try:
        began = time.process_time()
        traced = jax.jit(step).trace(*specs)
        middle = time.process_time()
        traced.lower(lowering_platforms=(platform,))
        return middle - began, time.process_time() - middle
    finally:
        gc.enable()


def _rows(shape: _gpt.Shape, seconds: dict[str, list[tuple[float, float]]]) -> list[list[str]]:
    rows = []
    for name, pairs in seconds.items():
        columns = (*zip(*pairs, strict=True), [sum(pair) for pair in pairs])
        medians = [f"{statistics.median(column):.2f}" for column in columns]
        base = seconds.get(BASE)
        ratio = _ratio(pairs, base) if base else "–"
        rows.append(
            [str(shape.layers), "scan" if shape.scan else "unrolled", name, *medians, ratio]
        )
    return rows


def _ratio(pairs: list[tuple[float, float]], base: list[tuple[float, float]]) -> str:
    ratios = [sum(a) / sum(b) for a, b in zip(pairs, base, strict=True)]
    return f"{statistics.median(ratios):.2f}"
