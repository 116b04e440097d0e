"""The kernel of the quantizer in tiles, in Pallas (Mosaic GPU).

Letters: L the leading axes as one, M, K the last two; T = 128; S the side of a tile that shares a
  scale. "Tile" alone is the T x T of a block of threads. A cell is the part of one of its rows that
  has one scale: S values.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._quantized_tensor import Cast
from jaxfp8._typing import Array
from jaxfp8.kernels.mosaic._source import Reader, Staged
from jaxfp8.kernels.mosaic._sums import ColumnSums
from jaxfp8.kernels.mosaic._tiles import PART, T, grid, parts, place
from jaxfp8.kernels.quantize._mosaic_tiling import Copy, Tiling
from jaxfp8.numerics._amax import magnitude
from jaxfp8.numerics._rounding import kernel_cast


class Written(NamedTuple):
    """What the kernel writes: types, refs inside the kernel, arrays after it.

    Attributes:
      copies: see `Tiling.written`.
      sums: `ColumnSums.result`, or None.
    """

    copies: Sequence[Copy]
    sums: Any


class _Scratch(NamedTuple):
    """Shared memory of the kernel."""

    read: Staged
    copies: Sequence[Copy]
    sums: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class TilesKernel:
    """The kernel that writes copies of x [L, M, K] in tiles with their scales, and sums of columns.

    Attributes:
      source: how x is read.
      cast: the format and the scale rule.
      tilings: the tiles of each copy.
      sums: how columns are summed; None if they are not.
    """

    source: Reader
    cast: Cast
    tilings: tuple[Tiling, ...]
    sums: ColumnSums | None

    def __call__(self, operands: Sequence[Array]) -> Written:
        format, rule = self.cast.format, self.cast.rule
        copies = [each.written(self.source.shape, format, rule) for each in self.tilings]
        staged = [each.staged(copy, rule) for each, copy in zip(self.tilings, copies, strict=True)]
        written = Written(copies, self.sums.result if self.sums else None)
        sums = self.sums.staged if self.sums else None
        (result,) = plgpu.kernel(
            self.body,
            out_type=(written,),
            scratch_types=(_Scratch(self.source.staged(), staged, sums),),
            **grid(self.source.shape),
        )(operands)
        return result

    def body(self, operands: Sequence[Any], written: Written, scratch: _Scratch) -> None:
        """The work of a block of threads. The name "body" is the kernel's name in the program."""
        self.source.start(operands, scratch.read)
        tile = self.source.tile(operands, scratch.read)
        # Columns are summed while the first transposed copy has them in registers. Without such a
        # copy, `ColumnSums.write` loads them.
        summing = next((n for n, each in enumerate(self.tilings) if each.transposed), None)
        for n, (tiling, staged, copy) in enumerate(
            zip(self.tilings, scratch.copies, written.copies, strict=True)
        ):
            at = place(self.source.shape).of_copy(transposed=tiling.transposed)
            # A square of T x T is loaded at once, because its first row is cast with the amax of
            # all rows. Smaller squares fit in a part, which needs fewer registers.
            for index, rows in parts(
                tile, transposed=tiling.transposed, rows=T if tiling.whole else PART
            ):
                staged.values[index], scales = _encode(rows, self.cast, tiling)
                if self.sums and n == summing:
                    self.sums.take(scratch.sums, index, rows)
                for cell, scale in enumerate(scales):
                    if staged.scales is None:  # one scale for the tile: it is equal in all rows
                        copy.scales[at.matrix, at.column, at.row] = jnp.max(scale)
                    else:
                        staged.scales[cell, index] = scale
            # All threads have stored values, scales and sums, and TMA sees them. Without this, TMA
            # would write what a slower warp has not stored yet.
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged.values, copy.values.at[at.window])
            if staged.scales is not None:
                cells = pl.ds(at.column * tiling.cells, tiling.cells)
                where = at.matrix, cells, pl.ds(at.row * T, T)
                plgpu.copy_smem_to_gmem(staged.scales, copy.scales.at[where])
        if self.sums:
            self.sums.write(scratch.sums, written.sums, tile if summing is None else None)
        # TMA has read all copies. Before that the block must not end: its shared memory would go to
        # another block. No copy waits for another one, because each has its own shared memory.
        plgpu.wait_smem_to_gmem(0)


def _encode(rows: Array, cast: Cast, tiling: Tiling) -> tuple[Array, list[Array]]:
    """Rows [R, T] in FP8, and T/S arrays [R] of scales, one for each cell of a row."""
    multipliers, scales = [], []
    for first in range(0, T, tiling.side):
        cell = rows[:, first : first + tiling.side]
        largest = jnp.max(magnitude(cell, kernel_language=True), axis=1)
        if tiling.square:
            largest = _largest_of_squares(largest, tiling.side)
        multiplier, scale = cast.rule.apply(largest, cast.format, kernel_language=True)
        multipliers.append(lax.broadcast_in_dim(multiplier, cell.shape, (0,)))
        # Pallas writes bytes. `Tiling.with_axes_of_x` makes E8M0 of them.
        as_bytes = cast.rule.scale_format is not None
        scales.append(lax.bitcast_convert_type(scale, jnp.uint8) if as_bytes else scale)
    return kernel_cast(rows, jnp.concatenate(multipliers, axis=1), cast.format), scales


def _largest_of_squares(largest: Array, side: int) -> Array:
    """Amaxes [R] of rows as amaxes of squares: each is the largest of its group of `side` rows."""
    if len(largest) == side:
        return lax.broadcast_in_dim(jnp.max(largest), largest.shape, ())
    square = lax.broadcasted_iota(jnp.int32, largest.shape, 0) // side
    result = jnp.zeros_like(largest)
    for index in range(len(largest) // side):
        inside = square == index
        result = jnp.where(inside, jnp.max(jnp.where(inside, largest, 0.0)), result)
    return result
