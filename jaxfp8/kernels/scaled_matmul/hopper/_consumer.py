"""The consumers: two warpgroups. Each multiplies, scales and stores its share of every tile.

Letters: M N K the axes of the matmul, R x C the share of a warpgroup, W the width of a patch, S the
  side of a tile along K; T = 128.

References:
  DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3.2.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array, Axes
from jaxfp8.kernels._mosaic_tiles import load
from jaxfp8.kernels.scaled_matmul.hopper._matmul import Tile
from jaxfp8.kernels.scaled_matmul.hopper._memory import (
    Block,
    for_each_tile,
)
from jaxfp8.kernels.scaled_matmul.hopper._scaling import T, float32_of_bytes
from jaxfp8.kernels.scaled_matmul.hopper._tiling import ROWS

# The share of a tile: the part that one consumer computes.
#
# The two shares of a tile are one above the other, or side by side (`Tiling.beside`).


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Share:
    """One consumer's share of one tile."""

    block: Block
    warpgroup: Array  # which consumer, 0 or 1
    before: Array  # the number of steps of the tiles that the block has computed before this one
    tile: Tile  # of the product
    row: Array | int  # the share's first row in the tile
    column: Array | int  # its first column in the tile
    column_of_product: Array  # its first column in the product

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


def _load_scales(scales: Any, across: int, *, shared: bool = True) -> Array:
    """Scales of rows (`across` 1) or columns (0) in float32, for the values of each thread."""
    # For global memory jax 0.11 has only plain loads.
    found = load(scales, plgpu.Layout.WGMMA.reduce(across), optimized=shared)
    return float32_of_bytes(found) if found.dtype == jnp.uint8 else found


# Sums in float32 registers: the product of each tile along K is scaled, and then added.
#
# It is not scaled if all of K shares its scales (`Scaling.at_end`). The tensor cores of Hopper keep
# about 14 bits of a sum. So `wgmma` multiplies only one tile along K, and the product is added in
# float32. A step has `Scaling.parts` tiles along K, each with scales of its own.

_LARGEST = float(jnp.finfo(jnp.float32).max)


def _sums_in_registers(share: _Share) -> tuple[Array, ...]:
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
    """A step that has arrived, as one consumer reads it."""

    share: _Share
    index: Array  # of the step in its tile
    slot: Array  # in the ring

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
                patch = matmul.patches.index((above, left))
                if of_rows is None or of_columns is None:
                    summed[patch] += more
                else:
                    scales = _of_step(of_rows, of_columns, more.shape)
                    summed[patch] = _plus_scaled(summed[patch], more, scales)
        return tuple(summed)

    def _multiplied(self, part: int, above: int) -> tuple[Array | None, Array | None, Array]:
        """Scales of 64 rows, the scale of a square of 128, and the product [64, C] of a tile."""
        share, tile = self.share, self.share.block.matmul.scaling.tile
        staged = share.block.shared.staged
        rows, along = share.rows(above), pl.ds(part * tile, tile)
        # Scales are read before the wait for the tensor cores, so that the two overlap.
        of_square = self._scale_of_square()
        of_rows = None
        if staged.lhs_scale is not None:
            of_rows = _load_scales(staged.lhs_scale.at[self.slot, part, rows], 1)
        lhs = staged.lhs.at[self.slot, rows, along]
        rhs = staged.rhs.at[self.slot, share.columns, along]
        return of_rows, of_square, _product(lhs, rhs)

    def _scale_of_square(self) -> Array | None:
        """The scale of a square of T columns and T values along K; None for other scales."""
        share = self.share
        matmul, given, tile = share.block.matmul, share.block.given, share.tile
        if matmul.scaling.at_end or matmul.boxes[1] is not None:
            return None
        # It is read from global memory: a warpgroup needs only one of them in a step. The columns
        # of a share are inside one square, because C divides T.
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
        return _load_scales(scales.at[self.slot, part, columns], 0)

    def _free(self) -> None:
        """Let the producer fill the slot again: this warpgroup has read its values and scales."""
        block = self.share.block
        # In a cluster one thread reports for the whole warpgroup. Values are read by the tensor
        # cores, and `_product` has waited for these. Scales are read by each thread. `commit_smem`
        # waits for all threads, and orders their reads before writes of TMA. Without it TMA could
        # overwrite a scale that a slower warp has not read yet.
        if block.shared.staged.lhs_scale is not None:
            plgpu.commit_smem()
        block.ring.free(self.slot)


def _of_step(of_rows: Array, of_columns: Array, shape: Axes) -> Array:
    """[R, C]: the products of two scales. `of_columns` is [C], or [] if all columns share one."""
    # Without the limit, an infinite product of scales times a zero would be NaN.
    if of_columns.ndim == 0:
        return lax.broadcast_in_dim(jnp.minimum(of_rows * of_columns, _LARGEST), shape, (0,))
    both = lax.broadcast_in_dim(of_rows, shape, (0,)) * lax.broadcast_in_dim(
        of_columns, shape, (1,)
    )
    return jnp.minimum(both, _LARGEST)


def _plus_scaled(sums: Array, product: Array, scales: Array) -> Array:
    """`sums + product * scales` [R, C], rounded once: the compiler fuses it (FFMA)."""
    return sums + product * scales


def _product(lhs: Any, rhs: Any) -> Array:
    """[64, C] float32 of lhs [64, S] and rhs [C, S] in shared memory."""

    def product(accumulator: Any) -> Array:
        plgpu.wgmma(accumulator, lhs, rhs.transpose((1, 0)))
        return accumulator[...]  # waits for the tensor cores

    shape = lhs.shape[0], rhs.shape[0]
    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


# Sums in the tensor cores: fast accumulation, which keeps about 14 bits of a sum.
#
# All of K shares its scales, and the sum is scaled at the end. So `wgmma` adds one step after the
# other to the same accumulators. No step has a product of its own in registers.


def _sums_in_tensor_cores(share: _Share) -> tuple[Array, ...]:
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


def _accumulate(share: _Share, accumulators: tuple[Any, ...]) -> None:
    """Add all steps to the accumulators [64, C], one for each 64 rows of the share."""
    # Each step is started before the wait for the previous step. Otherwise the tensor cores would
    # idle between two steps. So after the wait, the `wgmma` of this step may still read their slot,
    # but those of the previous step have read theirs. Only the slot of the previous step is freed.
    # If the slot of this step were freed, the producer could overwrite it while it is multiplied.
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


def _begin(share: _Share, slot: Array, accumulators: tuple[Any, ...]) -> None:
    """Start to multiply a step. The tensor cores run asynchronously."""
    staged = share.block.shared.staged
    for above, into in zip(share.block.matmul.bands, accumulators, strict=True):
        lhs, rhs = staged.lhs.at[slot, share.rows(above)], staged.rhs.at[slot, share.columns]
        plgpu.wgmma(into, lhs, rhs.transpose((1, 0)))


# The epilogue: a consumer makes the result from its sums, one patch after the other.
#
# For each patch: scale the sum, add C, round, store in shared memory, let TMA write it. Here C is
# the array that the product is added to.


@dataclasses.dataclass(frozen=True)
class _Epilogue:
    """The last steps for the sums of a share: scale, add C, write."""

    share: _Share

    def bring_addend(self, patch: int) -> None:
        """Start to copy a patch of C to shared memory. After the last patch it does nothing."""
        block, warpgroup = self.share.block, self.share.warpgroup
        outgoing, matmul = block.shared.outgoing, block.matmul
        if matmul.add_to is None or patch >= len(matmul.patches):
            return
        source = block.result if matmul.in_place else block.given.addend
        there = source.at[self.share.tile.lead, *self.share.patch(patch)]
        here, filled = outgoing.addend.at[warpgroup], outgoing.addend_filled.at[warpgroup]
        # It overwrites the previous patch of C. So all threads of the warpgroup must have read
        # that, and a `commit_smem` must have followed.
        plgpu.copy_gmem_to_smem(there, here, filled)

    def store(self, sums: tuple[Array, ...]) -> None:
        """Make patches of the result from their sums [64, W], and start to write them."""
        for patch, result in enumerate(sums):
            rows, columns = self.share.patch(patch)
            result = self._scaled(result, rows, columns)
            self._write(patch, self._added(result), rows, columns)

    def _scaled(self, sums: Array, rows: Any, columns: Any) -> Array:
        """A sum over all of K, scaled unless it was scaled step by step."""
        given, tile, matmul = self.share.block.given, self.share.tile, self.share.block.matmul
        if not matmul.scaling.at_end:
            return sums
        # A matrix of rows, or a group, has one scale for all steps.
        of_group = matmul.grouping == "groups"
        leads = (tile.lead, tile.lead) if of_group else (tile.of_lhs, tile.of_rhs)
        of_rows = given.lhs_scale.at[leads[0], 0, rows]
        of_columns = given.rhs_scale.at[leads[1], 0, columns]
        row_scales, column_scales = (
            _load_scales(scales, across, shared=False)
            for scales, across in ((of_rows, 1), (of_columns, 0))
        )
        scaled = _scaled_sum(sums, row_scales, column_scales)
        if matmul.grouping is None:
            return scaled
        # What was not multiplied is 0, also if a scale is NaN.
        steps = lax.broadcast_in_dim(jnp.asarray(tile.steps), scaled.shape, ())
        return jnp.where(steps > 0, scaled, jnp.zeros_like(scaled))

    def _added(self, sums: Array) -> Array:
        """The sum plus the patch of C."""
        outgoing, warpgroup = self.share.block.shared.outgoing, self.share.warpgroup
        if self.share.block.matmul.add_to is None:
            return sums
        # The patch has arrived. Before that, shared memory has an older patch.
        plgpu.barrier_wait(outgoing.addend_filled.at[warpgroup])
        return sums + load(outgoing.addend.at[warpgroup]).astype(jnp.float32)

    def _write(self, patch: int, result: Array, rows: Any, columns: Any) -> None:
        """Round a patch, store it in shared memory, and let TMA write it to the result."""
        block, warpgroup, matmul = self.share.block, self.share.warpgroup, self.share.block.matmul
        patches, slot = block.shared.outgoing.patches, patch % matmul.slots
        # TMA has read the old patch of this slot. That was `slots` writes ago, so the wait is for
        # all writes but the latest `slots` - 1. `slots` divides the patches of a tile, so the count
        # is right from one tile to the next. Else the old patch would be overwritten before it is
        # written.
        plgpu.wait_smem_to_gmem(matmul.slots - 1, wait_read_only=True)
        patches[warpgroup, slot] = result.astype(matmul.out_dtype)
        # All threads have stored, and TMA sees it. Without it TMA would write values that a slower
        # warp has not stored yet. All threads have also read the previous patch of C.
        plgpu.commit_smem()
        # Before the write of the patch: this warpgroup waits for C next, and for the write only
        # when it uses the slot again.
        self.bring_addend(patch + 1)
        if self.share.tile.rows is not None:
            self._write_rows(patch, patches.at[warpgroup, slot], columns)
            return
        there = block.result.at[self.share.tile.lead, rows, columns]
        plgpu.copy_smem_to_gmem(patches.at[warpgroup, slot], there)

    def _write_rows(self, patch: int, stored: Any, columns: Any) -> None:
        """Let TMA write the rows of a patch that its group has."""
        share = self.share
        assert share.tile.rows is not None
        first, count = share.tile.rows
        above = share.row + share.block.matmul.patches[patch][0]
        left = jnp.clip(count - above, 0, ROWS)
        # TMA copies a fixed number of rows. So a ragged patch is written in parts, one for each bit
        # of its number of rows. All parts are one group of copies, which may be empty: `_write`
        # counts a group for each patch.
        written: Array | int = 0
        for bit in reversed(range(ROWS.bit_length())):
            rows = 1 << bit
            here, there = pl.ds(written, rows), pl.ds(first + above + written, rows)
            part, result = stored.at[here], share.block.result.at[0, there, columns]
            copy = functools.partial(plgpu.copy_smem_to_gmem, part, result, commit_group=False)
            pl.when((left & rows) != 0)(copy)
            written = written + (left & rows)
        plgpu.commit_smem_to_gmem_group()


def _scaled_sum(sums: Array, of_rows: Array, of_columns: Array) -> Array:
    """[R, C]: sums over all of K, scaled by rows and columns."""
    rows, columns = (
        lax.broadcast_in_dim(x, sums.shape, (axis,)) for axis, x in enumerate((of_rows, of_columns))
    )
    # The order of `scaled_matmul._xla.scale_product`, so that results have the same bits.
    return sums * jnp.minimum(rows, columns) * jnp.maximum(rows, columns)


# A consumer: its share of every tile, one after the other.


def consume(block: Block, warpgroup: Array) -> None:
    """Compute and store a warpgroup's share of each tile.

    The consumers never wait for each other. They share only the ring, where the producer waits for
    the slower one.
    """
    matmul, tiling = block.matmul, block.matmul.tiling
    row = 0 if tiling.beside else warpgroup * tiling.rows
    column = warpgroup * tiling.columns if tiling.beside else 0

    def compute(tile: Tile, before: Array) -> None:
        share = _Share(
            block=block,
            warpgroup=warpgroup,
            before=before,
            tile=tile,
            row=row,
            column=column,
            column_of_product=tile.across * tiling.tile[1] + column,
        )
        epilogue = _Epilogue(share)
        # The copy of C overlaps with the matmul of the tile. Its shared memory is free: the last
        # `_Epilogue._write` of the previous tile has waited for all threads to read it.
        epilogue.bring_addend(0)
        fast = matmul.scaling.fast
        epilogue.store(_sums_in_tensor_cores(share) if fast else _sums_in_registers(share))

    for_each_tile(block, compute)
    # TMA has read all patches. Before that the block must not end: its shared memory would go to
    # another block.
    plgpu.wait_smem_to_gmem(0)
