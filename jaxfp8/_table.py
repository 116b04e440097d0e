"""A table as text."""

from collections.abc import Collection, Sequence


def align(rows: Sequence[Sequence[str]], right: Collection[int]) -> str:
    """Rows of cells in columns of equal width. The columns in `right` are aligned there."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell:>{width}}" if column in right else f"{cell:{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
