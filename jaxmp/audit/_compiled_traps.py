"""Traps that only the compiled program shows."""

from collections.abc import Iterable, Iterator

from jaxmp.audit import _cost
from jaxmp.audit._format import quantity, short
from jaxmp.audit._report import Report, is_cpu, itemsize
from jaxmp.audit._rows import CompiledProduct, CompiledReport, Product, Trap
from jaxmp.audit._trace import Program
from jaxmp.audit._traps import TRAPS, Intent, is_rounded_product

# Scalars and the scales of norms are exchanged in float32 at no cost.
_WORTH_REPORTING = 65536  # bytes


def with_compiled(
    program: Program, report: Report, compiled: CompiledReport, intent: Intent
) -> tuple[Trap, ...]:
    """Returns the traps of a report, without those that the compiler avoids and with its own."""
    found = [*report.traps, *_unused_donations(program, report.traps, compiled)]
    # The CPU backend widens what it has no instructions for; nothing is to be done about it.
    if not is_cpu(compiled):
        if _keeps_gradients(report.products, compiled):
            found = [trap for trap in found if not is_rounded_product(trap)]
        found += _wider(report.products, compiled)
        found += _collectives(compiled, intent)
    order = list(TRAPS)
    return tuple(sorted(found, key=lambda trap: order.index(trap.kind)))


def _keeps_gradients(products: tuple[Product, ...], compiled: CompiledReport) -> bool:
    """Whether the compiler made the cast of every half weight gradient part of its product."""
    rounded = sum(row.pass_name == "wgrad" and itemsize(row.result_dtype) < 4 for row in products)
    return rounded > 0 and _widening(compiled.products) - _widening(products) >= rounded


def _widening(rows: Iterable[Product | CompiledProduct]) -> int:
    return sum(_width(row) < 4 and itemsize(row.result_dtype) == 4 for row in rows)


def _wider(products: tuple[Product, ...], compiled: CompiledReport) -> Iterator[Trap]:
    for width, names in ((1, "8-bit"), (2, "16-bit")):
        meant = [row for row in products if _width(row) > width]
        runs = [row for row in compiled.products if _width(row) > width]
        if len(meant) == len(products) or len(runs) <= len(meant):
            continue
        flops = _flops(runs) * compiled.devices - _flops(meant)
        dtypes = sorted({" × ".join(map(short, row.operand_dtypes)) for row in runs})
        yield Trap(
            "compiled-wider",
            "",
            "",
            f"{quantity(max(flops, 0), 'FLOP')} in {len(runs) - len(meant)} products",
            f"{compiled.device_kind} runs {names} products as {', '.join(dtypes)}",
            _wider_remedy(width, runs),
        )


def _wider_remedy(width: int, runs: list[CompiledProduct]) -> str:
    if width == 1:
        return "use a half policy there: this chip has no products of the 8-bit format as written"
    remedy = (
        "use float16 and a loss scale (policy mixed_float16): NVIDIA chips before compute "
        "capability 8.0 have no bfloat16 products"
    )
    if any("conv" in row.instruction for row in runs):
        remedy += (
            ". A half convolution whose result is asked for in float32 is run in float32: ask for "
            "a half result"
        )
    return remedy


def _width(row: Product | CompiledProduct) -> int:
    return max(map(itemsize, row.operand_dtypes))


def _flops(rows: Iterable[Product | CompiledProduct]) -> int:
    return sum(row.flops * row.times for row in rows)


def _collectives(compiled: CompiledReport, intent: Intent) -> Iterator[Trap]:
    reduce_dtype = intent.policy.reduce_dtype
    for row in compiled.collectives:
        if row.bytes < _WORTH_REPORTING or row.dtype not in _FLOATS:
            continue
        size = quantity(row.bytes * row.times, "B")
        cause = f"{row.instruction} in {short(row.dtype)} over {row.group_size} devices"
        if row.instruction in ("all-reduce", "reduce-scatter"):
            if itemsize(row.dtype) == reduce_dtype.itemsize:
                continue
            narrow = itemsize(row.dtype) < reduce_dtype.itemsize
            yield Trap(
                "narrow-collective" if narrow else "wide-collective",
                row.path,
                "",
                size,
                f"{cause}, reduce_dtype is {short(reduce_dtype.name)}",
                f"make the values that are added up {reduce_dtype.name}: let the product that "
                "gives a weight gradient return it, as with a layout (jaxmp.sharding.fsdp)",
            )
        elif row.instruction == "collective-permute" and row.dtype == reduce_dtype.name:
            continue  # of a ring, in which a TPU adds up
        elif itemsize(row.dtype) > 2 and intent.is_half(row.path):
            yield Trap(
                "wide-collective",
                row.path,
                "",
                size,
                f"{cause}, compute_dtype is {short(intent.policy.compute_dtype.name)}",
                "cast the sharded value before it is used, and constrain the narrow value's "
                "sharding, as a layout does (jaxmp.sharding.fsdp)",
            )


_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


def _unused_donations(
    program: Program, traps: tuple[Trap, ...], compiled: CompiledReport
) -> Iterator[Trap]:
    reported = {trap.path for trap in traps if trap.kind == "unused-donation"}
    inputs = zip(program.inputs, program.input_names, program.donated, strict=True)
    donated = sum(
        _cost.nbytes(spec) for spec, name, given in inputs if given and name not in reported
    )
    missing = donated - compiled.memory.aliased
    # Sharded inputs are counted whole here and in part there.
    if program.mesh is None and missing > donated // 100:
        yield Trap(
            "unused-donation",
            "",
            "",
            quantity(missing, "B"),
            "the compiler put results beside donated buffers",
            "return the new state in the place of the old, of the same dtypes and layout",
        )
