"""Products by dtype, memory, memory traffic and traps of whole training steps, compiled."""

import collections
import functools
from collections.abc import Sequence

import jax

import jaxmp
from benchmarks.autocast import _gpt, _vision
from benchmarks.autocast._recipes import BASE, BY_HAND, RECIPES
from jaxmp._table import render
from jaxmp.audit import CompiledProduct, Report

TARGETS = ("cuda:h100", "tpu:v5e")
CASES = {
    "gpt": functools.partial(_gpt.train_step, _gpt.Shape()),
    "gpt-scan": functools.partial(_gpt.train_step, _gpt.Shape(scan=True)),
    "gpt-remat": functools.partial(_gpt.train_step, _gpt.Shape(remat=True)),
    "gpt-scan-remat": functools.partial(_gpt.train_step, _gpt.Shape(scan=True, remat=True)),
    "resnet50": _vision.resnet_step,
    "vit-b16": _vision.vit_step,
}
_SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def run(
    case: Sequence[str] | None, target: Sequence[str] | None, recipe: Sequence[str] | None
) -> None:
    """Prints a table for each case and target."""
    for name in case or CASES:
        for where in target or TARGETS:
            reports = {}
            for each in recipe or RECIPES:
                step, arguments = CASES[name](each)
                specs = jax.eval_shape(arguments)
                reports[each] = jaxmp.audit(step, *specs, target=where, float32=False)
            print(_table(f"{name}, {where}, JAX {jax.__version__}", reports), "\n", flush=True)


def _table(title: str, reports: dict[str, Report]) -> str:
    header = ("recipe", "temp MB", "of f32", "of by hand", "accessed GB", "of by hand")
    rows = [_row(name, reports) for name in reports]
    text = [render(title, header, rows, right=range(1, 6))]
    for name, report in reports.items():
        traps = collections.Counter(trap.kind for trap in report.traps)
        text.append(f"{name}: {_counts(_products(report))}; traps: {_counts(traps)}")
    return "\n".join(text)


def _row(name: str, reports: dict[str, Report]) -> list[str]:
    memory = {key: report.compiled.memory.temporary for key, report in reports.items()}
    traffic = {key: report.compiled.bytes_accessed for key, report in reports.items()}
    accessed = f"{traffic[name] / 1e9:.2f}" if traffic[name] else "–"
    return [
        name,
        f"{memory[name] / 1e6:.0f}",
        _ratio(memory, name, BASE),
        _ratio(memory, name, BY_HAND),
        accessed,
        _ratio(traffic, name, BY_HAND),
    ]


def _ratio(figures: dict[str, int | None], name: str, base: str) -> str:
    above, below = figures[name], figures.get(base)
    return f"{above / below:.3f}" if above and below else "–"


def _products(report: Report) -> collections.Counter[str]:
    def kind(row: CompiledProduct) -> str:
        names = [_SHORT.get(dtype, dtype) for dtype in (*row.operand_dtypes, row.result_dtype)]
        return "{}×{}→{}".format(*names)

    return collections.Counter(kind(row) for row in report.compiled.products)


def _counts(counter: collections.Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counter.most_common()) or "none"
