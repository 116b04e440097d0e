"""Sums in the tensor cores: fast accumulation, which keeps about 14 bits of a sum.

All of K shares its scales, and the sum is scaled at the end. So `wgmma` adds one step after the
other to the same accumulators. No step has a product of its own in registers.

Letters: M N K the axes of the matmul, R x C the share of a warpgroup, W the width of a patch;
  T = 128.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array
from jaxfp8.kernels.scaled_matmul.hopper._share import Share
from jaxfp8.kernels.scaled_matmul.hopper._tiling import ROWS


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
