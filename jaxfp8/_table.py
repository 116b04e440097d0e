"""A table as text, and for rich."""

from collections.abc import Collection, Sequence
from typing import Any

from rich.table import Table


def align(rows: Sequence[Sequence[str]], right: Collection[int], gap: str = "  ") -> str:
    """Rows of cells in columns of equal width. The columns in `right` are aligned there."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        gap.join(
            f"{cell:>{width}}" if column in right else f"{cell:{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def rich_table(rows: Sequence[Sequence[str]], right: Collection[int], **options: Any) -> Table:
    """The same for rich, with its options of a table. The first row has the titles."""
    titles, *lines = rows
    table = Table(**options)
    for column, title in enumerate(titles):
        table.add_column(title, justify="right" if column in right else "left")
    for line in lines:
        table.add_row(*line)
    return table
