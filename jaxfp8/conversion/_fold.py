"""Equal rows of numbered blocks as one line of the table."""

import dataclasses
import re
from collections.abc import Callable, Hashable, Iterable
from typing import Any

_NUMBERED = re.compile(r"(.*?)(\d+)")


@dataclasses.dataclass
class Line:
    """One line of the table.

    Attributes:
      parts: the parts of its path. Those of several rows have a range, as in `block_0..11`.
      rows: its rows, equal but for one number of their paths, or for two.
    """

    parts: list[str]
    rows: list[Any]


def fold(rows: Iterable[tuple[str, Any]], what: Callable[[Any], Hashable]) -> list[Line]:
    """Lines of rows. Rows become one line if a number of their paths counts up, and nothing else.

    Outer numbers come first. Then `block_0/expert_0` to `block_3/expert_7` are one line, too.

    Args:
      rows: pairs of a path and a row.
      what: all of a row that has to be equal, besides its path.

    Example:
      >>> rows = [("h_0/up", 1), ("h_0/down", 2), ("h_1/up", 1), ("h_1/down", 3)]
      >>> ["/".join(line.parts) for line in fold(rows, lambda row: row)]
      ['h_0..1/up', 'h_0/down', 'h_1/down']
    """
    lines = [Line(path.split("/"), [row]) for path, row in rows]
    for depth in range(max((len(line.parts) for line in lines), default=0)):
        lines = _fold_at(depth, lines, what)
    return lines


def _fold_at(depth: int, lines: list[Line], what: Callable[[Any], Hashable]) -> list[Line]:
    """The lines, with equal ones merged whose paths differ in the number of the part at `depth`."""
    merged: list[Line] = []
    runs: dict[Hashable, tuple[int, Line]] = {}
    for line in lines:
        found = _NUMBERED.fullmatch(line.parts[depth]) if depth < len(line.parts) else None
        if found is None:
            merged.append(line)
            continue
        before, after = tuple(line.parts[:depth]), tuple(line.parts[depth + 1 :])
        key = before, found[1], after, len(line.rows), what(line.rows[0])
        number, (last, run) = int(found[2]), runs.get(key, (-1, line))
        if run is not line and last == number - 1:
            run.rows += line.rows
            run.parts[depth] = f"{run.parts[depth].split('..')[0]}..{found[2]}"
        else:
            run = line
            merged.append(line)
        runs[key] = number, run
    return merged
