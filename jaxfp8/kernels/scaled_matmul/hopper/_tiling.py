"""How the result is divided between blocks of threads, and which tiles belong to which group.

A block of threads has two warpgroups that multiply and one that copies. Each of the two computes a
share of R x C. The shares are one above the other, or side by side if there are few rows. Every
choice adds in the same order, K in steps of 128 from first to last. So all of them give the same
bits.

The first table has the budgets of 1x128 @ 1x128, the largest case with tiles of 128. The result is
bfloat16 (float32). `wide` is for fast accumulation only, where the tensor cores keep the sum. Its
budgets are for scales of rows and columns.

  name      product     R x C     stages   cluster   shared memory KiB of 227   registers of 168
  decode     64 x 64    64 x 32      8        1            141 (149)                  64
  few       128 x 32    64 x 32      8        1            174 (182)                  64
  small     128 x 64    64 x 64      6        1            166 (182)                 104
  large     128 x 128   64 x 128     5        2            198 (198)                 168
  wide      256 x 128  128 x 128     4        2            225 (225)                 168

With tiles of 32, a step has four products, each with its own scales. In the second table, shared
memory is that of 1x32 @ 1x32. E8M0 scales are copied as bytes, except those of columns if lhs has
many rows. Numbers in parentheses are for float32 scales.

  name      shared memory KiB    registers compiled: 1x32 @ 32x32, 1x32 @ 1x32
  decode     141 (153)            102, 74 (107)
  few        174 (189)            104, 78 (106)
  small      170 (179)            157, 138 (146)
  large      205 (213)            168, 168 (168)

If products can overlap, ptxas takes as many registers as it can, up to 168. No choice spills. An
array that the product is added to is copied to shared memory in patches, one for each warpgroup.
That takes 16 KiB ("large": 214 KiB in all).

Letters: M N K the axes of the matmul; R x C the share of a warpgroup; W the width of a patch;
  T = 128.

References:
  DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3; CUDA C++ Programming Guide, "Compute
  capability 9.0".
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

# Tilings: a dataclass, and a table to choose from. `Matmul` counts the budgets.

ROWS = 64
"""Rows of one `wgmma`."""
WARPGROUPS = 2
"""Warpgroups of a block that multiply."""
# Those of an H100 or H200 (SXM). On a GPU with fewer, some blocks start later, but results are the
# same.
MULTIPROCESSORS = 132


class NoRoomError(ValueError):
    """A tiling needs more shared memory or registers than a multiprocessor has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """How the result of a matmul is divided."""

    rows: int  # R, 64 or 128
    columns: int  # C, 32, 64 or 128. It divides T, so a warpgroup needs one scale of a square.
    beside: bool = False  # whether the two shares are side by side, not one above the other
    stages: int = 4  # how many steps along K fit in shared memory at once
    # How many blocks share what they copy of lhs, 1 or 2. Their tiles are adjacent along N.
    cluster: int = 1
    # How many tiles along M are computed for each column of tiles, before the next column. So their
    # rows stay in L2.
    group: int = 8
    blocks: int = MULTIPROCESSORS  # at most; each computes one tile after the other

    def __post_init__(self) -> None:
        if (
            self.rows not in (ROWS, 2 * ROWS)
            or self.columns not in (32, 64, 128)
            or self.cluster not in (1, 2)
        ):
            raise ValueError(
                f"{self!r} is no tiling. Its rows are 64 or 128, its columns 32, 64 or 128, its "
                "cluster is 1 or 2. Take such values."
            )
        if min(self.stages, self.group) < 1 or self.blocks < self.cluster:
            raise ValueError(
                f"{self!r} is no tiling. Its stages and group are at least 1, and its blocks at "
                "least a cluster. Take larger values."
            )

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of the tile of a block of threads, (M, N)."""
        if self.beside:
            return self.rows, WARPGROUPS * self.columns
        return WARPGROUPS * self.rows, self.columns


CHOICES = {
    # The matmul reads a weight once, for few tokens. So the bytes in flight bound the time (here
    # 128 KiB), not operations. In a tile of 128 rows, half of the rows would be wasted.
    "decode": Tiling(rows=64, columns=32, beside=True, stages=8),
    # As "decode", but with 128 rows. Tiles are narrow, so that every multiprocessor reads a part of
    # the weight.
    "few": Tiling(rows=64, columns=32, stages=8),
    # For products with fewer tiles of 128 x 128 than multiprocessors.
    "small": Tiling(rows=64, columns=64, stages=6),
    # The largest tile whose sums and products fit in registers. A step is 32 KiB and keeps the
    # tensor cores busy for 512 cycles. So a block by itself reads 64 bytes of L2 a cycle, which is
    # more than its share. In a cluster each block copies half of lhs, and reads 48 bytes a cycle.
    "large": Tiling(rows=64, columns=128, stages=5, cluster=2),
    # With fast accumulation no product needs registers, so there is room for twice as many sums.
    # Each block of a cluster reads 32 bytes of L2 a cycle.
    "wide": Tiling(rows=128, columns=128, stages=4, cluster=2),
}
"""These tilings are estimated from budgets and counts of bytes.

An H200 has timed those that `_door._choose` takes for large matmuls. Other tilings were not
compared.
"""


def search_space() -> Iterator[Tiling]:
    """The tilings that an autotuner tries: `CHOICES` and similar ones. Some do not fit a matmul."""
    yield from CHOICES.values()
    shapes = (
        (64, 32, True),
        (64, 32, False),
        (64, 64, True),
        (64, 64, False),
        (64, 128, False),
        (128, 64, False),
    )
    for (rows, columns, beside), stages, cluster in itertools.product(shapes, (4, 5, 6, 8), (1, 2)):
        tiling = Tiling(rows=rows, columns=columns, beside=beside, stages=stages, cluster=cluster)
        if tiling not in CHOICES.values() and (columns > 32 or stages == 8):
            yield tiling


# Grouped matmuls: which rows, which matrix and how many steps each tile of the product has.
#
# The kernel reads this from small arrays in global memory. So one compiled kernel serves groups of
# all sizes. There are two kinds of grouped matmuls:
#
#     rows     The rows of lhs are in groups, each with its own matrix of rhs. A tile of rows is
#              inside one group. Missing rows of a ragged tile are not written, because they are
#              rows of another tile in the result. A tile of no group has no steps, and writes
#              zeros.
#     groups   The contracted axis is in groups, each with its own product. A product has the steps
#              of its group, maybe none.
#
# Letters: T rows of the result, E groups, D tiles of rows; B batch, M N K the axes of the matmul.


class RowTiles(NamedTuple):
    """What each tile of rows is. Arrays i32[D]; refs inside the kernel."""

    matrix: Any  # the matrix of rhs that multiplies the tile
    first_row: Any  # where its first row is in the result
    rows: Any  # how many rows it writes
    steps: Any  # the steps along K: all, or 0 for zeros


class GroupSteps(NamedTuple):
    """The steps of each group along the contracted axis. Arrays i32[E]; refs inside the kernel."""

    first: Any
    count: Any
