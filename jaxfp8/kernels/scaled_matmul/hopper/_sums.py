"""Where a warpgroup keeps the sums of its share of a tile.

It is not scaled if all of K shares its scales (`Scaling.at_end`). The tensor cores of Hopper keep
about 14 bits of a sum. So `wgmma` multiplies only one tile along K, and the product is added in
float32. A step has `Scaling.parts` tiles along K, each with scales of its own.

Letters: M N K the axes of the matmul, R x C the share of a warpgroup, W the width of a patch, S the
  side of a tile along K; T = 128.

References:
  DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3.2.
"""

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array
from jaxfp8.kernels.scaled_matmul.hopper._matmul import Tile
from jaxfp8.kernels.scaled_matmul.hopper._memory import Block, load_scales
from jaxfp8.kernels.scaled_matmul.hopper._scaling import T, of_step
from jaxfp8.kernels.scaled_matmul.hopper._tiling import ROWS

# The share of a tile: the part that one consumer computes.
#
# The two shares of a tile are one above the other, or side by side (`Tiling.beside`).


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """One consumer's share of one tile.

    Attributes:
      block: the matmul, and the memory of the block of threads.
      warpgroup: which consumer, 0 or 1.
      before: the number of steps of the tiles that the block has computed before this one.
      tile: which tile of the product.
      row: the share's first row in the tile.
      column: its first column in the tile.
      column_of_product: its first column in the product.
    """

    block: Block
    warpgroup: Array
    before: Array
    tile: Tile
    row: Array | int
    column: Array | int
    column_of_product: Array

    def patch(self, index: int) -> tuple[Any, Any]:
        """Rows and columns of the product that a patch covers, with all rows of ragged tiles."""
        matmul = self.block.matmul
        above, left = matmul.patches[index]
        rows = pl.ds(self.tile.down * matmul.tiling.tile[0] + self.row + above, ROWS)
        return rows, pl.ds(self.column_of_product + left, matmul.width)

    def rows(self, above: int) -> Any:
        """ROWS rows of the share, as rows of the tile."""
        return pl.ds(self.row + above, ROWS)

    @property
    def columns(self) -> Any:
        """All columns of the share, as columns of the tile."""
        return pl.ds(self.column, self.block.matmul.tiling.columns)


# Sums in float32 registers: the product of each tile along K is scaled, and then added.


def sums_in_registers(share: Share) -> tuple[Array, ...]:
    """The patches [64, W] of a share, summed over all steps of its tile."""
    matmul, ring = share.block.matmul, share.block.ring

    def add(index: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        _, slot = ring.at(share.before, index)
        ring.wait_filled(slot)  # the step's values and scales have arrived
        return _Step(share, index, slot).added_to(sums)

    zeros = jnp.zeros((ROWS, matmul.width), jnp.float32)
    zero = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
    return lax.fori_loop(0, share.tile.steps, add, (zero,) * len(matmul.patches))


@dataclasses.dataclass(frozen=True)
class _Step:
    """A step that has arrived, as one consumer reads it.

    Attributes:
      share: of the consumer.
      index: of the step in its tile.
      slot: its slot in the ring.
    """

    share: Share
    index: Array
    slot: Array

    def added_to(self, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        """The sums with the products of this step. The slot is freed once all of it is read."""
        matmul, summed = self.share.block.matmul, list(sums)
        parts = range(matmul.scaling.parts)
        last = (parts[-1], *matmul.patches[-1])
        for part, above in itertools.product(parts, matmul.bands):
            of_rows, of_square, product = self._multiplied(part, above)
            for left in matmul.lefts:
                # These scales are read patch by patch. There are registers for the scales of one
                # patch's columns, but not for those of all columns.
                of_columns = self._scales_of_columns(part, left, of_square)
                # The last read of the slot is done, before the last products are scaled and added.
                # So the producer refills the slot meanwhile.
                if (part, above, left) == last:
                    self._free()
                more = product[:, left : left + matmul.width]
                if of_rows is not None and of_columns is not None:
                    more *= of_step(of_rows, of_columns, more.shape)
                summed[matmul.patches.index((above, left))] += more
        return tuple(summed)

    def _multiplied(self, part: int, above: int) -> tuple[Array | None, Array | None, Array]:
        """Scales of 64 rows, the scale of a square of 128, and the product [64, C] of a tile.

        Scales are read before the wait for the tensor cores, so that the two overlap.
        """
        share, tile = self.share, self.share.block.matmul.scaling.tile
        staged = share.block.shared.staged
        rows, along = share.rows(above), pl.ds(part * tile, tile)
        of_square = self._scale_of_square()
        of_rows = None
        if staged.lhs_scale is not None:
            of_rows = load_scales(staged.lhs_scale.at[self.slot, part, rows], 1)
        lhs = staged.lhs.at[self.slot, rows, along]
        rhs = staged.rhs.at[self.slot, share.columns, along]
        return of_rows, of_square, _product(lhs, rhs)

    def _scale_of_square(self) -> Array | None:
        """The scale of a square of T columns and T values along K; None for other scales.

        It is read from global memory: a warpgroup needs only one of them in a step. The columns of
        a share are inside one square, because C divides T.
        """
        share = self.share
        matmul, given, tile = share.block.matmul, share.block.given, share.tile
        if matmul.scaling.at_end or matmul.boxes[1] is not None:
            return None
        step = tile.first_step + self.index
        return given.rhs_scale[tile.of_rhs, lax.div(share.column_of_product, T), step]

    def _scales_of_columns(self, part: int, left: int, of_square: Array | None) -> Array | None:
        """Scales [W] of a patch's columns, or [] if they share one; None if `at_end`."""
        share, matmul = self.share, self.share.block.matmul
        scaling, scales = matmul.scaling, share.block.shared.staged.rhs_scale
        if scales is None:
            return of_square
        if scaling.square:  # of 32: `Tiling.width` makes patches no wider, so a patch has one
            cell = lax.div(share.column + left, scaling.tile)
            return scales[self.slot, cell * scaling.parts + part]
        columns = pl.ds(share.column + left, matmul.width)
        return load_scales(scales.at[self.slot, part, columns], 0)

    def _free(self) -> None:
        """Let the producer fill the slot again: this warpgroup has read its values and scales.

        In a cluster one thread reports for the whole warpgroup. Values are read by the tensor
        cores, and `_product` has waited for these: a `wgmma` is one operation of the warpgroup.
        Scales are read by each thread. `commit_smem` waits for all threads, and orders their reads
        before writes of TMA. Without it TMA could overwrite a scale that a slower warp has not
        read yet.
        """
        block = self.share.block
        if block.shared.staged.lhs_scale is not None:
            plgpu.commit_smem()
        block.ring.free(self.slot)


def _product(lhs: Any, rhs: Any) -> Array:
    """[64, C] float32 of lhs [64, S] and rhs [C, S] in shared memory.

    Reading the accumulator waits for the tensor cores.
    """

    def product(accumulator: Any) -> Array:
        plgpu.wgmma(accumulator, lhs, rhs.transpose((1, 0)))
        return accumulator[...]

    shape = lhs.shape[0], rhs.shape[0]
    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


# Sums in the tensor cores: fast accumulation, which keeps about 14 bits of a sum.
#
# All of K shares its scales, and the sum is scaled at the end. So `wgmma` adds one step after the
# other to the same accumulators. No step has a product of its own in registers.
#
# Letters: M N K the axes of the matmul, R x C the share of a warpgroup, W the width of a patch;
#     T = 128.


def sums_in_tensor_cores(share: Share) -> tuple[Array, ...]:
    """The patches [64, W] of a share, summed over all steps of its tile."""
    matmul = share.block.matmul

    def summed(*accumulators: Any) -> tuple[Array, ...]:
        _accumulate(share, accumulators)
        whole = [accumulator[...] for accumulator in accumulators]
        return tuple(
            whole[above // ROWS][:, left : left + matmul.width] for above, left in matmul.patches
        )

    accumulator = plgpu.WGMMAAccumulatorRef((ROWS, matmul.tiling.columns), jnp.float32)
    return pl.run_scoped(summed, *[accumulator] * len(matmul.bands))


def _accumulate(share: Share, accumulators: tuple[Any, ...]) -> None:
    """Add all steps to the accumulators [64, C], one for each 64 rows of the share.

    Each step is started before the wait for the previous step. Otherwise the tensor cores would
    idle between two steps. So after the wait, the `wgmma` of this step may still read their slot,
    but those of the previous step have read theirs. Only the slot of the previous step is freed.
    If the slot of this step were freed, the producer could overwrite it while it is multiplied.
    """
    ring, steps = share.block.ring, share.tile.steps

    @pl.loop(0, steps)
    def _step(step: Array) -> None:
        count, slot = ring.at(share.before, step)
        ring.wait_filled(slot)
        _begin(share, slot, accumulators)
        # Wait until at most so many `wgmma` are under way. Each accumulator has one in this step,
        # and they finish in order. So those of the previous step are done.
        plgpu.wgmma_wait(len(accumulators))

        # Step 0 has no previous step in this tile: the last slot of a tile is freed below.
        @pl.when(step > 0)
        def _free_the_last() -> None:
            ring.free(ring.slot(count - 1))

    # All `wgmma` are done: the sums are complete, and the slot of the last step is free.
    plgpu.wgmma_wait(0)
    _, slot = ring.at(share.before, jnp.int32(steps - 1))
    if share.block.matmul.grouping is None:
        ring.free(slot)
    else:  # a tile may have no steps
        pl.when(steps > 0)(lambda: ring.free(slot))


def _begin(share: Share, slot: Array, accumulators: tuple[Any, ...]) -> None:
    """Start to multiply a step. The tensor cores run asynchronously."""
    staged = share.block.shared.staged
    for above, into in zip(share.block.matmul.bands, accumulators, strict=True):
        lhs, rhs = staged.lhs.at[slot, share.rows(above)], staged.rhs.at[slot, share.columns]
        plgpu.wgmma(into, lhs, rhs.transpose((1, 0)))
