"""What `audit` returns: rows, a readable text, JSON, a comparison, a figure and assertions."""

import collections
import dataclasses
import json
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from jaxmp._errors import bullet_list, did_you_mean
from jaxmp.audit._format import parse_bytes, quantity
from jaxmp.audit._rows import (
    Cast,
    Collective,
    CompiledProduct,
    CompiledReport,
    Opaque,
    Product,
    Reduction,
    Trap,
)
from jaxmp.audit._traps import TRAPS

PASSES = ("fprop", "dgrad", "wgrad", "recompute")


@dataclasses.dataclass(frozen=True)
class Report:
    """What a program runs, and what a compiler makes of it.

    Attributes:
        function: name of the audited function.
        policy: the policy that the program is held against.
        policy_inferred: whether the policy was read off the program, since none was given.
        products: matmuls and convolutions, in the order of the program.
        casts: casts between float dtypes.
        reductions: sums, cumulative sums and scatter-adds in half precision.
        collectives: exchanges between devices that the program states; the compiler adds its own.
        opaque: kernels that cannot be looked into.
        traps: what costs accuracy, speed or memory without an error.
        compiled: what the compiler made of it, or None if no target was asked for.
        compiled_float32: what it made of the same program in float32, or None if there is none.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxmp.audit import audit
        >>> w, x = (jax.ShapeDtypeStruct((64, 64), jnp.bfloat16) for _ in range(2))
        >>> report = audit(lambda w, x: x @ w, w, x, target=None)
        >>> report.products[0].operand_dtypes, report.flops()
        (('bfloat16', 'bfloat16'), 524288)
        >>> report.assert_low_precision(min_fraction=0.99)
    """

    function: str
    policy: str
    policy_inferred: bool
    products: tuple[Product, ...]
    casts: tuple[Cast, ...]
    reductions: tuple[Reduction, ...]
    collectives: tuple[Collective, ...]
    opaque: tuple[Opaque, ...]
    traps: tuple[Trap, ...]
    compiled: CompiledReport | None = None
    compiled_float32: CompiledReport | None = None

    def flops(self, dtypes: tuple[str, str] | None = None, pass_name: str | None = None) -> int:
        """Returns the FLOPs of one call of the function.

        Args:
            dtypes: count only products of these operand dtypes.
            pass_name: count only one pass.
        """
        return sum(
            row.flops * row.times
            for row in self.products
            if dtypes in (None, row.operand_dtypes) and pass_name in (None, row.pass_name)
        )

    def low_precision_fraction(self) -> float:
        """Returns the share of the FLOPs whose operands are both narrower than float32.

        For a TPU or GPU it is the share of the compiled program. A CPU stands in for the hardware
        that is meant, and what it widens is not held against the program. 1 without products.
        """
        rows = self._proof()
        total = sum(row.flops * row.times for row in rows)
        narrow = sum(row.flops * row.times for row in rows if is_narrow(row))
        return narrow / total if total else 1.0

    def _proof(self) -> tuple[Product, ...] | tuple[CompiledProduct, ...]:
        compiled = self.compiled
        return self.products if compiled is None or is_cpu(compiled) else compiled.products

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain dicts, lists, text and numbers: what JSON can hold."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def to_json(self, indent: int | None = None) -> str:
        """Returns the report as JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=indent)

    def __str__(self) -> str:
        from jaxmp.audit._text import report_text  # noqa: PLC0415, it reads reports

        return report_text(self)

    def diff(self, other: "Report") -> "ReportDiff":
        """Compares this report with another, such as float32 with mixed precision.

        Example:
            >>> import jax, jax.numpy as jnp
            >>> from jaxmp.audit import audit
            >>> x = jnp.ones((8, 8))
            >>> f32 = audit(lambda x: x @ x, x, target=None)
            >>> half = audit(lambda x: x @ x, x.astype(jnp.bfloat16), target=None)
            >>> f32.diff(half).to_dict()["low_precision_fraction"]
            [0.0, 1.0]
        """
        return ReportDiff(self, other)

    def plot(self, path: Any = None) -> Any:
        """Draws the FLOPs by dtype and pass, and the memory if a target was asked for.

        Args:
            path: a file to write the figure to; nothing is written without it.

        Returns:
            The `matplotlib.figure.Figure`.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        from jaxmp.audit._plot import plot_report  # noqa: PLC0415, needs matplotlib

        return plot_report(self, path)

    def assert_low_precision(self, min_fraction: float = 0.99) -> None:
        """Checks that enough of the FLOPs are of operands narrower than float32.

        Args:
            min_fraction: the least share, from 0 to 1.

        Raises:
            AssertionError: if it is less, or there is no product at all; it lists the widest ones.
        """
        rows = self._proof()
        if not rows:
            raise AssertionError(
                f"{self.function} has no matmul or convolution to be narrow. Audit the whole "
                "training step."
            )
        fraction = self.low_precision_fraction()
        if fraction >= min_fraction:
            return
        wide = sorted((row for row in rows if not is_narrow(row)), key=lambda r: -r.flops * r.times)
        raise AssertionError(
            f"{fraction:.1%} of the FLOPs of {self.function} are in low precision, at least "
            f"{min_fraction:.1%} are asked for. In float32:\n"
            + bullet_list(map(describe_product, wide), limit=10)
        )

    def assert_no_traps(self, allow: Collection[str] = ()) -> None:
        """Checks that there are no traps but those of the kinds in `allow`.

        Raises:
            AssertionError: if there are; it lists them with cause and remedy.
            ValueError: if `allow` has an unknown kind.
        """
        for kind in allow:
            if kind not in TRAPS:
                raise ValueError(
                    f"Unknown kind of trap {kind!r}. Use one of {', '.join(TRAPS)}."
                    f"{did_you_mean(kind, TRAPS)}"
                )
        found = [trap for trap in self.traps if trap.kind not in allow]
        if found:
            raise AssertionError(
                f"{self.function} has {len(found)} traps:\n"
                + bullet_list((describe_trap(trap) for trap in found), limit=20)
            )

    def assert_fits(self, size: str | int | None = None) -> None:
        """Checks that one device has the memory for a call.

        Args:
            size: `"16GB"`, `"15.5GiB"` or bytes; the memory of the target's device if left out.

        Raises:
            AssertionError: if it has not.
            ValueError: if there is no compiled report, or no size is known.
        """
        if self.compiled is None:
            raise ValueError("Memory is known for a target only: audit with target='cpu' or more.")
        limit = self.compiled.device_memory if size is None else parse_bytes(size)
        if limit is None:
            raise ValueError(
                f"The memory of {self.compiled.target} is not known. Give a size such as '16GB'."
            )
        needed = needed_memory(self.compiled)
        if needed > limit:
            raise AssertionError(
                f"{self.function} needs {quantity(needed, 'B')} on {self.compiled.target}, "
                f"{quantity(limit, 'B')} are there. Use smaller batches, more microbatches, remat "
                "or more devices."
            )


@dataclasses.dataclass(frozen=True)
class ReportDiff:
    """Two reports side by side.

    Attributes:
        left: the first report.
        right: the second.
    """

    left: Report
    right: Report

    def to_dict(self) -> dict[str, list[Any]]:
        """Returns the figures of both, by name: `{"flops": [left, right], ...}`."""
        sides = (summary(self.left), summary(self.right))
        keys = dict.fromkeys([*sides[0], *sides[1]])
        return {key: [side.get(key) for side in sides] for key in keys}

    def __str__(self) -> str:
        from jaxmp.audit._text import diff_text  # noqa: PLC0415

        return diff_text(self)


def is_cpu(compiled: CompiledReport) -> bool:
    """Whether the target is a CPU."""
    return compiled.device_kind.lower() == "cpu"


def is_narrow(row: Product | CompiledProduct) -> bool:
    """Whether both operands of a product are narrower than float32."""
    return all(itemsize(dtype) < 4 for dtype in row.operand_dtypes)


def itemsize(dtype: str) -> int:
    """Returns the bytes of a number; 4 for a dtype that NumPy does not know."""
    try:
        return np.dtype(dtype).itemsize
    except TypeError:
        return 4


def needed_memory(compiled: CompiledReport) -> int:
    """Returns the bytes that one device needs: the compiler's peak, or the sum of all parts."""
    return max(compiled.memory.peak or 0, compiled.memory.total)


def flops_by(rows: Iterable[Product]) -> dict[str, dict[str, int]]:
    """Returns FLOPs by operand dtypes (`"bfloat16 × bfloat16"`) and pass."""
    table: dict[str, dict[str, int]] = collections.defaultdict(lambda: dict.fromkeys(PASSES, 0))
    for row in rows:
        table[" × ".join(row.operand_dtypes)][row.pass_name] += row.flops * row.times
    return dict(table)


def summary(report: Report) -> dict[str, Any]:
    """Returns the figures of a report that are worth comparing, in bytes and FLOPs."""
    figures: dict[str, Any] = {
        "flops": report.flops(),
        "low_precision_fraction": report.low_precision_fraction(),
        "products": len(report.products),
        "casts": len(report.casts),
        "cast_bytes": sum(row.bytes * row.times for row in report.casts),
        "half_reductions": len(report.reductions),
        "traps": len(report.traps),
    }
    for dtypes, by_pass in flops_by(report.products).items():
        figures[f"flops {dtypes}"] = sum(by_pass.values())
    if report.compiled is not None:
        figures |= compiled_summary(report.compiled)
    return figures


def compiled_summary(compiled: CompiledReport) -> dict[str, Any]:
    """Returns the figures of a compiled program that are worth comparing."""
    memory = compiled.memory
    counts = collections.Counter(" × ".join(row.operand_dtypes) for row in compiled.products)
    sent = collections.Counter()
    for row in compiled.collectives:
        sent[row.dtype] += row.bytes * row.times
    return {
        "target": compiled.target,
        **{f"compiled products {dtypes}": count for dtypes, count in counts.items()},
        **{f"collective bytes {dtype}": count for dtype, count in sent.items()},
        "argument_bytes": memory.arguments,
        "output_bytes": memory.outputs,
        "temporary_bytes": memory.temporary,
        "needed_bytes": needed_memory(compiled),
        "bytes_accessed": compiled.bytes_accessed,
        "estimated_cycles": compiled.estimated_cycles,
    }


def describe_product(row: Product | CompiledProduct) -> str:
    """Returns a product as a line: where, what, how much."""
    dtypes = " × ".join(row.operand_dtypes)
    name = f"{row.pass_name} " if isinstance(row, Product) else f"{row.instruction} "
    place = " ".join(filter(None, (row.path, getattr(row, "where", ""))))
    return f"{name}{dtypes}, {quantity(row.flops * row.times, 'FLOP')}, {place}".rstrip(", ")


def describe_trap(trap: Trap) -> str:
    """Returns a trap as a line."""
    place = ", ".join(filter(None, (trap.path, trap.where)))
    at = f" at {place}" if place else ""
    return (
        f"{trap.kind}{at}: {trap.cause} ({trap.cost}). {trap.remedy[:1].upper()}{trap.remedy[1:]}."
    )
