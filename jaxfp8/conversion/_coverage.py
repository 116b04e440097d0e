"""`Coverage`: which layers of a model run in FP8, and why the others do not."""

import dataclasses
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from rich.table import Table

from jaxfp8._table import align, rich_table
from jaxfp8.conversion._rule import UNSEEN

# Equal rows of numbered blocks as one line of the table.

_NUMBERED = re.compile(r"(.*?)(\d+)")


@dataclasses.dataclass
class _Line:
    """One line of the table.

    Attributes:
      parts: the parts of its path. Those of several rows have a range, as in `block_0..11`.
      rows: its rows, equal but for one number of their paths, or for two.
    """

    parts: list[str]
    rows: list[Any]


def _fold(rows: Iterable[tuple[str, Any]], what: Callable[[Any], Hashable]) -> list[_Line]:
    """Lines of pairs (path, row). Rows become one line if only a number of their paths counts up.

    Outer numbers come first. Then `block_0/expert_0` to `block_3/expert_7` are one line, too.
    `what` gives all of a row that has to be equal, besides its path.
    """
    lines = [_Line(path.split("/"), [row]) for path, row in rows]
    for depth in range(max((len(line.parts) for line in lines), default=0)):
        lines = _fold_at(depth, lines, what)
    return lines


def _fold_at(depth: int, lines: list[_Line], what: Callable[[Any], Hashable]) -> list[_Line]:
    """The lines, with equal ones merged whose paths differ in the number of the part at `depth`."""
    merged: list[_Line] = []
    runs: dict[Hashable, tuple[int, _Line]] = {}
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


# The table, and its rows.


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoverageRow:
    """One layer of a model, or one matmul of its own code.

    Attributes:
      path: names of modules from the model to the layer, joined by "/". A matmul of the model's own
        code has the path of its parameter, and "#2" for the second matmul of it. If several
        parameters make its weight, "+" joins them.
      type: name of its class, or of the class of the module that holds the parameter.
      shape: (M, K, N) of its matmul: tokens, features in, features out. Axes that both operands
        share are left out. () if it has none.
      recipe: name of its recipe. "" if the layer stays in high precision.
      reason: the rule that decided, or why the layer stays in high precision. "" for the recipe of
        the model.
      flops: its operations in one forward pass. Without example inputs, for one token.
      can_be_fp8: whether a rule, `keep=` or `layers=` could give it a recipe. False for embeddings
        and convolutions, for instance.
      parameters: for a matmul of the model's own code, the paths of its parameters.
      equation: for such a matmul, the traced matmul as an equation, with the weight last. Its
        letters are not those of the model's code.

    Example:
      >>> from flax import nnx
      >>> import jaxfp8 as fp8
      >>> _, coverage = fp8.convert(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), fp8.recipes.current())
      >>> coverage[""].shape
      (1, 8, 4)
    """

    path: str
    type: str
    shape: tuple[int, ...]
    recipe: str
    reason: str
    flops: int
    can_be_fp8: bool
    parameters: tuple[str, ...] = ()
    equation: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coverage:
    """Which layers of a model run in FP8. `str()` is `table()`, and rich prints one in colors.

    Attributes:
      rows: the layers with a kernel, and the matmuls of the model's own code, in the order in which
        the model calls them. Without example inputs, an nnx model has the order in which it defines
        them.
      other_flops: operations of matmuls and convolutions that belong to no row, for instance those
        of attention scores.
      counted: whether an example call gave M and the operations. Otherwise M is 1, and each layer
        counts once.

    Example:
      >>> import flax.linen as nn, jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> x, recipe = jnp.ones((2, 8)), fp8.recipes.current()
      >>> model, coverage = fp8.convert(nn.Dense(4), recipe, inputs=(x,))
      >>> print(coverage)
      layer type  shape     share recipe  reason
      .     Dense (2, 8, 4)  100% current
      100% of the FLOPs of matmuls run in FP8: 1 of 1 layers that can
    """

    rows: tuple[CoverageRow, ...]
    other_flops: int = 0
    counted: bool = True

    def __iter__(self) -> Iterator[CoverageRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, path: str) -> CoverageRow:
        """The row of a path, or of a parameter that one row has."""
        for row in self.rows:
            if row.path == path:
                return row
        found = [row for row in self.rows if path in row.parameters]
        if len(found) == 1:
            return found[0]
        raise KeyError(f"no layer has the path {path!r}. Paths: {[row.path for row in self.rows]}")

    @property
    def flops(self) -> int:
        """Operations of all matmuls and convolutions of a forward pass."""
        return self.other_flops + sum(row.flops for row in self.rows)

    @property
    def share(self) -> float:
        """The part of these operations that runs in FP8, from 0 to 1."""
        return sum(row.flops for row in self.rows if row.recipe) / max(self.flops, 1)

    def table(self, *, all: bool = False) -> str:
        """The table as text. Its last line counts the layers that can be FP8.

        Args:
          all: a line for each row. By default equal rows of numbered blocks are one line, as in
            `block_0..11/up`. `shape` is that of one of them, and `share` that of all together.
        """
        return f"{align(self._cells(all=all), _RIGHT, gap=' ')}\n{self._total}"

    def _cells(self, *, all: bool) -> list[tuple[str, ...]]:
        all_flops = max(self.flops, 1)
        rows = [(row.path, row) for row in self.rows]
        lines = [_Line([path], [row]) for path, row in rows] if all else _fold(rows, _all_but_path)
        cells: list[tuple[str, ...]] = [_HEADER]
        for line in lines:
            row, share = line.rows[0], sum(row.flops for row in line.rows) / all_flops
            path, shape = "/".join(line.parts) or ".", str(row.shape or "")
            kind = f"{row.type} {row.equation}".strip()
            cells.append((path, kind, shape, _percent(share), row.recipe or "-", row.reason))
        if self.other_flops:
            share = _percent(self.other_flops / self.flops)
            cells.append(("(no layer)", "", "", share, "-", "all other matmuls"))
        return cells

    @property
    def _total(self) -> str:
        converted = sum(bool(row.recipe and row.flops) for row in self.rows)
        able = sum(row.can_be_fp8 for row in self.rows)
        unread = sum(row.reason == UNSEEN for row in self.rows)
        also = f", {unread} not read" if unread else ""
        return (
            f"{_percent(self.share)} of the FLOPs of matmuls run in FP8: {converted} of {able} "
            f"layers that can{'' if self.counted else f', each called once{also} (no inputs)'}"
        )

    def __str__(self) -> str:
        return self.table()

    def __rich__(self) -> Table:
        cells = self._cells(all=False)
        table = rich_table(cells, _RIGHT, title="FP8 coverage", caption=self._total)
        for row, (*_, recipe, _) in zip(table.rows, cells[1:], strict=True):
            row.style = "dim" if recipe == "-" else None
        return table


def _all_but_path(row: CoverageRow) -> CoverageRow:
    return dataclasses.replace(row, path="", parameters=())


_HEADER = ("layer", "type", "shape", "share", "recipe", "reason")
_RIGHT = (_HEADER.index("share"),)


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}"
