"""How Hopper's matmul is divided into tiles: a dataclass, its budgets, and a table to choose from.

A block of threads has two warpgroups that multiply and one that copies. Each of the two computes a
share of R x C. The shares are above and below each other, or side by side if there are few rows.
Every choice adds in the same order: K in steps of 128, first to last.

The first table has the budgets with a result in bfloat16 (float32) and tiles of 1x128 @ 1x128, the
largest case. `wide` is for fast accumulation only, in which the tensor cores keep the sum. Its
budgets are with scales of rows and columns.

  name      product     R x C     stages   cluster   shared memory KiB of 227   registers of 168
  decode     64 x 64    64 x 32      8        1            141 (149)                  64
  few       128 x 32    64 x 32      8        1            174 (182)                  64
  small     128 x 64    64 x 64      6        1            166 (182)                 104
  large     128 x 128   64 x 128     5        2            198 (198)                 168
  wide      256 x 128  128 x 128     4        2            225 (225)                 168

Tiles of 32 take four products a step, each with its own scales. The second table is for 1x32 @ 1x32
with scales in E8M0, which come as bytes where the kernel takes bytes (in float32):

  name      shared memory KiB    registers compiled: 1x32 @ 32x32, 1x32 @ 1x32
  decode     141 (153)            102, 74 (107)
  few        174 (189)            104, 78 (106)
  small      170 (179)            157, 138 (146)
  large      205 (213)            168, 168 (168)

For products that overlap, ptxas takes as many registers as there are, up to 168. None spills. An
array that the product is added to comes to shared memory in patches, one for each warpgroup. That
takes 16 KiB ("large": 214 KiB in all).

Letters: M N K matmul; R C the share of a warpgroup; W the width of a patch; T = 128.

References:
  DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3; CUDA C++ Programming Guide, "Compute
  capability 9.0".
"""

import dataclasses
import itertools
from collections.abc import Iterator

from jaxfp8.kernels.scaled_matmul.hopper._scaling import Scaling, T

ROWS = 64
"""Rows of one `wgmma`."""
WARPGROUPS = 2
"""Warpgroups of a block that multiply."""
COPYING_REGISTERS = 40
MULTIPLYING_REGISTERS = 232
"""What a thread asks for while it runs: together less than the 64 Ki registers of 384 threads."""
_SHARED = 227 * 1024  # bytes that a block of threads can have on Hopper
# What each of 384 threads starts with. ptxas keeps to it where it links the kernel, and then
# ignores both numbers above.
_REGISTERS = 168
# addresses, counters, scales of rows: the most that compiled kernels had besides sums and products
_OTHER_REGISTERS = 24
# the largest width of a patch in bytes: that of a permuted row in shared memory
_LINE = 128
_BARRIERS = 1024  # bytes: barriers, and what it takes to align arrays
# Those of an H100 or H200 (SXM). With fewer, some blocks start later; results are the same.
_MULTIPROCESSORS = 132


class NoRoomError(ValueError):
    """A tiling that a multiprocessor has no room for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """How the result of a matmul is divided.

    Attributes:
      rows: R, 64 or 128.
      columns: C, 32, 64 or 128, so that one scale of a square tile serves a warpgroup.
      beside: whether the two warpgroups share rows and not columns.
      stages: steps along K that are in shared memory at once.
      cluster: neighbours along N, 1 or 2, that share what they copy of lhs.
      group: tiles along M that are visited for each column before the next group, so that what is
        read stays in L2.
      blocks: of threads at most, each taking tile after tile.

    Example:
      >>> Tiling(rows=64, columns=128).tile
      (128, 128)
    """

    rows: int
    columns: int
    beside: bool = False
    stages: int = 4
    cluster: int = 1
    group: int = 8
    blocks: int = _MULTIPROCESSORS

    def __post_init__(self) -> None:
        if (
            self.rows not in (ROWS, 2 * ROWS)
            or self.columns not in (32, 64, 128)
            or self.cluster not in (1, 2)
        ):
            raise ValueError(
                f"{self!r}: rows are 64 or 128, columns 32, 64 or 128, a cluster is 1 or 2."
            )
        if min(self.stages, self.group) < 1 or self.blocks < self.cluster:
            raise ValueError(
                f"{self!r}: stages and group are at least 1, blocks at least a cluster."
            )

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of the tile of a block of threads, (M, N)."""
        if self.beside:
            return self.rows, WARPGROUPS * self.columns
        return WARPGROUPS * self.rows, self.columns

    def width(self, *, scaling: Scaling, itemsize: int, added: int = 0) -> int:
        """W: columns of a patch, the 64 rows of the result that are scaled and stored at once."""
        return min(
            self.columns, _LINE // max(itemsize, added), scaling.tile if scaling.square else _LINE
        )

    def slots(self, *, scaling: Scaling, itemsize: int, added: int = 0) -> int:
        """Patches of its result that a warpgroup has in shared memory.

        The largest number that divides the patches of a share, and that there is room for.
        """
        width = self.width(scaling=scaling, itemsize=itemsize, added=added)
        parts = (self.rows // ROWS) * (self.columns // width)
        part = WARPGROUPS * ROWS * width
        room = (_SHARED - _BARRIERS - self._steps(scaling) - part * added) // (part * itemsize)
        return max(
            count
            for count in range(1, parts + 1)
            if parts % count == 0 and (count <= room or count == 1)
        )

    def shared_bytes(self, *, scaling: Scaling, itemsize: int, added: int = 0) -> int:
        """Shared memory of a block of threads.

        `itemsize` is that of the result, `added` that of an array to which it is added, or 0.
        """
        part = WARPGROUPS * ROWS * self.width(scaling=scaling, itemsize=itemsize, added=added)
        slots = self.slots(scaling=scaling, itemsize=itemsize, added=added)
        return self._steps(scaling) + part * (slots * itemsize + added) + _BARRIERS

    def registers(self, *, scaling: Scaling, itemsize: int, added: int = 0) -> int:
        """About how many registers a multiplying thread needs.

        They hold sums, a product of 64 x C, and scales of the columns of a patch.
        """
        sums, product = (
            self.rows * self.columns // 128,
            0 if scaling.fast else ROWS * self.columns // 128,
        )
        width = self.width(scaling=scaling, itemsize=itemsize, added=added)
        of_columns = 0 if scaling.square else width // 4
        if scaling.at_end:  # scales are read when there is no product any more
            return (
                sums
                + max(product, of_columns + (ROWS * width // 128 if added else 0))
                + _OTHER_REGISTERS
            )
        return sums + product + of_columns + _OTHER_REGISTERS

    def check(self, *, scaling: Scaling, itemsize: int, added: int = 0) -> None:
        """Raise NoRoomError for what a multiprocessor has no room for."""
        if (needed := self.shared_bytes(scaling=scaling, itemsize=itemsize, added=added)) > _SHARED:
            raise NoRoomError(
                f"{self!r} needs {needed} bytes of shared memory, of {_SHARED}; take fewer stages."
            )
        if (
            registers := self.registers(scaling=scaling, itemsize=itemsize, added=added)
        ) > _REGISTERS:
            raise NoRoomError(
                f"{self!r} needs about {registers} registers a thread, of {_REGISTERS}; take a "
                "smaller tile."
            )

    def _steps(self, scaling: Scaling) -> int:
        """Bytes of values and scales of all stages."""
        down, across = self.tile
        return self.stages * ((down + across) * T + scaling.bytes_of_step(self.tile))


CHOICES = {
    # A weight is read once for few tokens: bytes in flight count, 128 KiB of them here, and not
    # operations. Half of a 128-row tile would be multiplied for nothing.
    "decode": Tiling(rows=64, columns=32, beside=True, stages=8),
    # The same with 128 rows: narrow tiles, so that every multiprocessor reads some of the weight.
    "few": Tiling(rows=64, columns=32, stages=8),
    # Too few tiles of 128 x 128 for all multiprocessors.
    "small": Tiling(rows=64, columns=64, stages=6),
    # The largest whose sums and products fit in registers. Alone a block would read 64 bytes of L2
    # a cycle while its tensor cores are busy, more than its share; in pairs that share rows it is
    # 48.
    "large": Tiling(rows=64, columns=128, stages=5, cluster=2),
    # Without a product beside the sums there are registers for twice as many of them, and a block
    # reads 32 bytes a cycle.
    "wide": Tiling(rows=128, columns=128, stages=4, cluster=2),
}
"""No GPU has timed them yet. They follow from budgets and counts of bytes."""


def choose(batch: int, m: int, n: int, scaling: Scaling, *, added: bool = False) -> Tiling:
    """The tiling from `CHOICES` for a batch of results [M, N].

    `added` is whether they are added to an array. "wide" has no registers for that.

    Example:
      >>> choose(1, 64, 4096, Scaling()) is CHOICES["decode"]
      True
      >>> choose(1, 8192, 4096, Scaling()) is CHOICES["large"]
      True
    """
    if m <= 64:
        return CHOICES["decode"]
    if batch * -(-m // 128) * -(-n // 128) < _MULTIPROCESSORS:
        return CHOICES["few" if m <= 128 else "small"]
    enough = batch * -(-m // 256) * -(-n // 128) >= _MULTIPROCESSORS
    return CHOICES["wide" if scaling.fast and enough and not added else "large"]


def search_space() -> Iterator[Tiling]:
    """What an autotuner tries: the tilings of `CHOICES`, and others with tiles of similar shape.

    Not every tiling fits every matmul.

    Example:
      >>> set(CHOICES.values()) <= set(search_space())
      True
    """
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
