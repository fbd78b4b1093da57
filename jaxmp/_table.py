"""Text for a terminal: tables, by rich where it is installed, else plain; wrapped lines."""

import io
import textwrap
from collections.abc import Collection, Sequence


def render(
    title: str | None,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[int] = (),
) -> str:
    """Returns a table as text, without a final newline.

    Args:
        title: a line above the table, or None.
        header: the name of each column.
        rows: the cells, as many in each row as in the header.
        right: columns to align to the right: those of numbers.

    Example:
        >>> "fprop" in render("Products", ["pass", "count"], [["fprop", "25"]], right={1})
        True
    """
    try:
        return _rich(title, header, rows, right)
    except ImportError:
        return _plain(title, header, rows, right)


def _rich(
    title: str | None,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Collection[int],
) -> str:
    from rich import box  # noqa: PLC0415, an optional dependency
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", title=title)
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i in right else "left", overflow="fold")
    for row in rows:
        # A Text is not searched for markup such as the brackets of a shape.
        table.add_row(*(Text(cell) for cell in row))
    console = Console(file=io.StringIO(), width=110, force_terminal=False, color_system=None)
    console.print(table)
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


def _plain(
    title: str | None,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Collection[int],
) -> str:
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    lines = [line(header), rule, *map(line, rows)]
    return "\n".join([title, *lines] if title else lines)


def wrapped(text: str, width: int, prefix: str = "") -> str:
    """Returns a paragraph of lines up to `width`, indented below its prefix.

    Example:
        >>> print(wrapped("one two three", 10, "- "))
        - one two
          three
    """
    return textwrap.fill(
        text,
        width,
        initial_indent=prefix,
        subsequent_indent=" " * len(prefix),
        break_long_words=False,
        break_on_hyphens=False,
    )
