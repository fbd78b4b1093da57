"""Figures of reports."""

from typing import Any

from jaxmp.audit._format import short
from jaxmp.audit._report import PASSES, Report, flops_by, needed_memory
from jaxmp.audit._rows import CompiledReport


def plot_report(report: Report, path: Any = None) -> Any:
    """Draws bars of FLOPs by dtype and pass, and of the memory; see `Report.plot`."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415, an optional dependency
    except ImportError as error:
        raise ImportError('Figures need matplotlib: pip install "jaxmp[plot]"') from error
    panels = 1 if report.compiled is None else 2
    figure = Figure(figsize=(4.5 * panels, 3.5), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _draw_flops(axes[0], report)
    if report.compiled is not None:
        _draw_memory(axes[1], report.compiled)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _draw_flops(axes: Any, report: Report) -> None:
    table = flops_by(report.products)
    bottoms = dict.fromkeys(PASSES, 0.0)
    for dtypes, by_pass in table.items():
        label = " × ".join(map(short, dtypes.split(" × ")))
        heights = [by_pass[name] / 1e9 for name in PASSES]
        axes.bar(PASSES, heights, bottom=list(bottoms.values()), label=label)
        bottoms = {name: bottoms[name] + by_pass[name] / 1e9 for name in PASSES}
    axes.set(title=f"FLOPs of {report.function}", ylabel="GFLOP")
    if table:
        axes.legend(title="operands")


def _draw_memory(axes: Any, compiled: CompiledReport) -> None:
    memory = compiled.memory
    parts = {
        "arguments": memory.arguments,
        "outputs": memory.outputs - memory.aliased,
        "temporary": memory.temporary,
        "needed": needed_memory(compiled),
    }
    axes.bar(list(parts), [size / 1e9 for size in parts.values()])
    if compiled.device_memory is not None:
        axes.axhline(compiled.device_memory / 1e9, color="black", linestyle="--", linewidth=1)
    axes.set(title=f"Memory on {compiled.target}", ylabel="GB of one device")
