"""Reports as text."""

import collections
from collections.abc import Iterator
from typing import Any

from jaxmp import _table
from jaxmp.audit._format import quantity, short
from jaxmp.audit._report import (
    PASSES,
    Report,
    ReportDiff,
    compiled_summary,
    flops_by,
    needed_memory,
)
from jaxmp.audit._rows import CompiledReport
from jaxmp.audit._traps import TRAPS

_SHOWN_OF_A_KIND = 4
_WIDTH = 110


def report_text(report: Report) -> str:
    """Returns a report as a page of tables."""
    return "\n\n".join(part for part in _parts(report) if part)


def _parts(report: Report) -> Iterator[str]:
    inferred = " (read off the program)" if report.policy_inferred else ""
    yield f"Audit of {report.function}, policy {report.policy}{inferred}"
    yield _products(report)
    yield "\n".join(_facts(report))
    if report.compiled is not None:
        yield from _compiled(report.compiled)
        yield _in_float32(report.compiled, report.compiled_float32)
    yield _traps(report)


def _products(report: Report) -> str:
    if not report.products:
        return "No matmuls or convolutions."
    rows = []
    total = report.flops() or 1
    table = flops_by(report.products)
    for dtypes in sorted(table, key=lambda key: -sum(table[key].values())):
        flops = table[dtypes]
        count = sum(" × ".join(row.operand_dtypes) == dtypes for row in report.products)
        share = sum(flops.values()) / total
        cells = [quantity(flops[name], "FLOP") if flops[name] else "" for name in PASSES]
        rows.append([_short(dtypes), str(count), *cells, f"{share:.1%}"])
    header = ["operands", "count", *PASSES, "share"]
    return _table.render("Matmuls and convolutions", header, rows, right=range(1, 7))


def _short(dtypes: str) -> str:
    return " × ".join(map(short, dtypes.split(" × ")))


def _facts(report: Report) -> Iterator[str]:
    casts = sum(row.bytes * row.times for row in report.casts)
    yield f"Casts: {len(report.casts)}, {quantity(casts, 'B')} read and written."
    sums = collections.Counter((row.primitive, row.dtype) for row in report.reductions)
    names = ", ".join(f"{count} {name} in {short(dtype)}" for (name, dtype), count in sums.items())
    yield f"Half-precision sums: {names or 'none'}."
    sent = collections.Counter((row.primitive, row.dtype) for row in report.collectives)
    if sent:
        parts = (f"{count} {name} in {short(dtype)}" for (name, dtype), count in sent.items())
        yield f"Collectives in the program: {', '.join(parts)}."
    if report.opaque:
        names = collections.Counter(f"{row.primitive} {row.name}".strip() for row in report.opaque)
        parts = (f"{count} {name}" for name, count in names.items())
        yield f"Not looked into: {', '.join(parts)}."


def _compiled(compiled: CompiledReport) -> Iterator[str]:
    devices = f", {compiled.devices} devices" if compiled.devices > 1 else ""
    yield f"Compiled for {compiled.target} ({compiled.device_kind}{devices})"
    counts: collections.Counter[tuple[str, ...]] = collections.Counter()
    flops: collections.Counter[tuple[str, ...]] = collections.Counter()
    for row in compiled.products:
        key = (row.instruction, " × ".join(map(short, row.operand_dtypes)), short(row.result_dtype))
        counts[key] += 1
        flops[key] += row.flops * row.times
    if counts:
        rows = [
            [*key, str(counts[key]), quantity(amount, "FLOP")]
            for key, amount in flops.most_common()
        ]
        header = ["products", "operands", "result", "count", "FLOPs"]
        yield _table.render(None, header, rows, right=(3, 4))
    yield _collectives(compiled)
    yield "\n".join(_memory(compiled))


def _collectives(compiled: CompiledReport) -> str:
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    sent: collections.Counter[tuple[str, str]] = collections.Counter()
    for row in compiled.collectives:
        key = (row.instruction, short(row.dtype))
        counts[key] += row.times
        sent[key] += row.bytes * row.times
    if not counts:
        return ""
    rows = [[*key, str(counts[key]), quantity(size, "B")] for key, size in sent.most_common()]
    return _table.render(None, ["collectives", "dtype", "count", "bytes"], rows, right=(2, 3))


def _memory(compiled: CompiledReport) -> Iterator[str]:
    memory = compiled.memory
    parts = (
        ("arguments", memory.arguments),
        ("outputs", memory.outputs),
        ("of these in donated buffers", memory.aliased),
        ("temporary", memory.temporary),
    )
    text = ", ".join(f"{name} {quantity(size, 'B')}" for name, size in parts)
    needed = needed_memory(compiled)
    fits = ""
    if compiled.device_memory is not None:
        verdict = "fits in" if needed <= compiled.device_memory else "does not fit in"
        fits = f": {verdict} {quantity(compiled.device_memory, 'B')}"
    yield f"Memory of one device: {text}; needs {quantity(needed, 'B')}{fits}."
    if compiled.wide_copies:
        size = sum(row.bytes for row in compiled.wide_copies)
        yield (
            f"Float32 copies of half arrays in memory: {len(compiled.wide_copies)}, "
            f"{quantity(size, 'B')}."
        )
    if compiled.bytes_accessed is not None:
        cycles = compiled.estimated_cycles
        estimate = f", {quantity(cycles, 'cycles')} estimated" if cycles else ""
        yield f"Memory traffic of a call: {quantity(compiled.bytes_accessed, 'B')}{estimate}."


_COMPARED = ("temporary_bytes", "needed_bytes", "bytes_accessed", "estimated_cycles")


def _in_float32(compiled: CompiledReport, wide: CompiledReport | None) -> str:
    if wide is None:
        return ""
    here, there = compiled_summary(compiled), compiled_summary(wide)
    parts = [
        f"{name.replace('_', ' ')} {_cell(name, there[name])} "
        f"(here {here[name] / there[name]:.0%} of it)"
        for name in _COMPARED
        if here[name] and there[name]
    ]
    return f"The same in float32: {', '.join(parts)}."


def _traps(report: Report) -> str:
    if not report.traps:
        return "No traps."
    kinds = dict.fromkeys(trap.kind for trap in report.traps)
    return "\n".join([f"Traps: {len(report.traps)}", *(_kind(report, kind) for kind in kinds)])


def _kind(report: Report, kind: str) -> str:
    """Returns the traps of one kind, each remedy below the last trap that it is for."""
    traps = [trap for trap in report.traps if trap.kind == kind]
    lines = [f"{kind}: {TRAPS[kind]}"]
    shown = traps[:_SHOWN_OF_A_KIND]
    for trap, following in zip(shown, [*shown[1:], None], strict=True):
        place = ", ".join(filter(None, (trap.path, trap.where)))
        text = f"{place + ': ' if place else ''}{trap.cause} ({trap.cost})"
        lines.append(_table.wrapped(text, _WIDTH, "  - "))
        if following is None or following.remedy != trap.remedy:
            lines.append(_table.wrapped(trap.remedy, _WIDTH, "    -> "))
    if len(traps) > len(shown):
        lines.append(f"  - … and {len(traps) - len(shown)} more in report.traps")
    return "\n".join(lines)


_UNITS = (("flops", "FLOP"), ("bytes", "B"), ("cycles", "cycles"))


def diff_text(diff: ReportDiff) -> str:
    """Returns two reports side by side, with the ratio of each figure."""
    rows = []
    for name, (left, right) in diff.to_dict().items():
        if left is None and right is None:
            continue
        ratio = f"{right / left:.3g}×" if _numbers(left, right) and left else ""
        rows.append([name.replace("_", " "), _cell(name, left), _cell(name, right), ratio])
    header = ["", *_names(diff), "ratio"]
    return _table.render(None, header, rows, right=(1, 2, 3))


def _names(diff: ReportDiff) -> list[str]:
    names = [diff.left.function, diff.right.function]
    if names[0] == names[1]:
        names = [diff.left.policy, diff.right.policy]
    return names if names[0] != names[1] else ["left", "right"]


def _numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "low_precision_fraction":
        return f"{value:.1%}"
    for word, unit in _UNITS:
        if word in name and _numbers(value):
            return quantity(value, unit)
    return str(value)
