"""Grouped matmuls: which rows, which matrix and how many steps each tile of the product has.

The kernel reads this from small arrays in global memory. So one compiled kernel serves groups of
all sizes. There are two kinds of grouped matmuls:

  rows     The rows of lhs are in groups, each with its own matrix of rhs. A tile of rows is inside
           one group. Missing rows of a ragged tile are not written, because they are rows of
           another tile in the result. A tile of no group has no steps, and writes zeros.
  groups   The contracted axis is in groups, each with its own product. A product has the steps of
           its group, maybe none.

Letters: T rows of the result, E groups, D tiles of rows; B batch, M N K the axes of the matmul.
"""

from typing import Any, Literal, NamedTuple, TypeAlias

Grouping: TypeAlias = Literal["rows", "groups"]


class RowTiles(NamedTuple):
    """What each tile of rows is. Arrays i32[D]; refs inside the kernel.

    Attributes:
      matrix: the matrix of rhs that multiplies the tile.
      first_row: where its first row is in the result.
      rows: how many rows it writes.
      steps: the steps along K: all, or 0 for zeros.
    """

    matrix: Any
    first_row: Any
    rows: Any
    steps: Any


class GroupSteps(NamedTuple):
    """The steps of each group along the contracted axis. Arrays i32[E]; refs inside the kernel."""

    first: Any
    count: Any
