"""`MemoryReport`: the bytes of a train step by kind, in FP8 and in high precision."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, get_args

from rich.table import Table

MemoryKind = Literal[
    "weights", "master weights", "moments", "quantizer state", "other arguments",
    "gradients", "residuals", "temporaries", "results", "total",
]  # fmt: skip
MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)

# Powers of 1024. The table uses the largest unit that leaves the total at 1 or more.
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """One kind of memory.

    Attributes:
      kind: what the bytes hold.
      fp8: bytes of the step.
      twin: bytes of the step in high precision; None if it was not compiled.
    """

    kind: MemoryKind
    fp8: int
    twin: int | None

    @property
    def ratio(self) -> float | None:
        """`fp8 / twin`. None without bytes in the twin.

        Example:
          >>> MemoryRow("residuals", 50, 100).ratio
          0.5
        """
        return self.fp8 / self.twin if self.twin else None


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Bytes of a compiled train step on one device. `print` and `rich.print` show a table.

    Attributes:
      fp8: the bytes of each kind in the step.
      twin: those of the same step with matmuls in high precision; None if it was not compiled.

    Example:
      >>> report = MemoryReport({"weights": 2 * 2**20, "residuals": 2**20}, {"residuals": 2**21})
      >>> print(report)
      kind       FP8 (MiB)  high precision (MiB)  ratio
      weights         2.00                  0.00
      residuals       1.00                  2.00  0.50
      total           3.00                  2.00  1.50
    """

    fp8: Mapping[MemoryKind, int]
    twin: Mapping[MemoryKind, int] | None = None

    @property
    def rows(self) -> tuple[MemoryRow, ...]:
        """A row for each kind that has bytes, and the total."""
        sides = [
            None if side is None else {**side, "total": sum(side.values())}
            for side in (self.fp8, self.twin)
        ]
        fp8, twin = sides
        assert fp8 is not None
        found = [
            MemoryRow(kind, fp8.get(kind, 0), None if twin is None else twin.get(kind, 0))
            for kind in MEMORY_KINDS
        ]
        return tuple(row for row in found if row.fp8 or row.twin or row.kind == "total")

    def to_dict(self) -> dict[str, int]:
        """The bytes of all rows: `{"fp8/weights": ..., "high_precision/weights": ...}`.

        Example:
          >>> MemoryReport({"weights": 8}).to_dict()
          {'fp8/weights': 8, 'fp8/total': 8}
        """
        found = {f"fp8/{row.kind.replace(' ', '_')}": row.fp8 for row in self.rows}
        for row in self.rows:
            if row.twin is not None:
                found[f"high_precision/{row.kind.replace(' ', '_')}"] = row.twin
        return found

    def __str__(self) -> str:
        lines = self._cells()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if column else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )

    def __rich__(self) -> Table:
        """The table for rich, which calls this method."""
        titles, *lines = self._cells()
        table = Table(titles[0])
        for title in titles[1:]:
            table.add_column(title, justify="right")
        for line in lines:
            table.add_row(*line)
        return table

    def _cells(self) -> list[list[str]]:
        largest = max(self.rows[-1].fp8, self.rows[-1].twin or 0)
        power = min(max(largest.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
        unit = _UNITS[power]
        cells = [["kind", f"FP8 ({unit})", f"high precision ({unit})", "ratio"]]
        for row in self.rows:
            numbers = (row.fp8, row.twin or 0)
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
            cells.append([row.kind, *(_number(n / 1024**power, power) for n in numbers), ratio])
        return [line if self.twin is not None else line[:2] for line in cells]


def _number(value: float, power: int) -> str:
    if not power:
        return f"{value:,.0f}"
    return "<0.01" if 0 < value < 0.005 else f"{value:,.2f}"
