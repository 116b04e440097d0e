"""The epilogue: a consumer makes the result from its sums, one patch after the other.

For each patch: scale the sum, add C, round, store in shared memory, let TMA write it.

Letters: K the contracted axis, C the array that the product is added to, W the width of a patch.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array
from jaxfp8.kernels.scaled_matmul.hopper._memory import load_scales
from jaxfp8.kernels.scaled_matmul.hopper._scaling import scaled_sum
from jaxfp8.kernels.scaled_matmul.hopper._sums import Share
from jaxfp8.kernels.scaled_matmul.hopper._tiling import ROWS


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The last steps for the sums of a share: scale, add C, write.

    For each warpgroup, shared memory has room for one patch of C and for `Matmul.slots` patches of
    the result.
    """

    share: Share

    def bring_addend(self, patch: int) -> None:
        """Start to copy a patch of C to shared memory. After the last patch it does nothing.

        It overwrites the previous patch of C. So all threads of the warpgroup must have read that,
        and a `commit_smem` must have followed.
        """
        block, warpgroup = self.share.block, self.share.warpgroup
        outgoing, matmul = block.shared.outgoing, block.matmul
        if matmul.add_to is None or patch >= len(matmul.patches):
            return
        source = block.result if matmul.in_place else block.given.addend
        there = source.at[self.share.tile.lead, *self.share.patch(patch)]
        here, filled = outgoing.addend.at[warpgroup], outgoing.addend_filled.at[warpgroup]
        plgpu.copy_gmem_to_smem(there, here, filled)

    def store(self, sums: tuple[Array, ...]) -> None:
        """Make patches of the result from their sums [64, W], and start to write them.

        `bring_addend(0)` has started to copy the first patch of C.
        """
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
            load_scales(scales, across, shared=False)
            for scales, across in ((of_rows, 1), (of_columns, 0))
        )
        scaled = scaled_sum(sums, row_scales, column_scales)
        if matmul.grouping is None:
            return scaled
        # What was not multiplied is 0, also if a scale is NaN.
        steps = lax.broadcast_in_dim(jnp.asarray(tile.steps), scaled.shape, ())
        return jnp.where(steps > 0, scaled, jnp.zeros_like(scaled))

    def _added(self, sums: Array) -> Array:
        """The sum plus the patch of C.

        The barrier says that the patch has arrived. Before that, shared memory has an older patch.
        """
        outgoing, warpgroup = self.share.block.shared.outgoing, self.share.warpgroup
        if self.share.block.matmul.add_to is None:
            return sums
        plgpu.barrier_wait(outgoing.addend_filled.at[warpgroup])
        here, layout = outgoing.addend.at[warpgroup], plgpu.Layout.WGMMA
        addend = plgpu.load(here, layout=layout)  # type: ignore[call-arg]  # of jax before 0.11
        return sums + addend.astype(jnp.float32)

    def _write(self, patch: int, result: Array, rows: Any, columns: Any) -> None:
        """Round a patch, store it in shared memory, and let TMA write it to the result.

        There are four steps, in this order:

        1. Wait until TMA has read the old patch of this slot. That was `slots` writes ago, so the
           wait is for all writes except the latest `slots` - 1. `slots` divides the patches of a
           tile, so the count is also right from one tile to the next. Without the wait, the old
           patch would be overwritten before TMA has written it.
        2. Store the patch, then `commit_smem`: all threads have stored, and TMA sees it. Without it
           TMA would write values that a slower warp has not stored yet.
        3. Start to copy the next patch of C. It overwrites the previous patch of C. The same
           `commit_smem` guarantees that all threads have read that one.
        4. Start to write the patch. The order of 3 and 4 is free. 3 comes first because this
           warpgroup waits for C next. It waits for the write only when it uses the slot again.
        """
        block, warpgroup, matmul = self.share.block, self.share.warpgroup, self.share.block.matmul
        patches, slot = block.shared.outgoing.patches, patch % matmul.slots
        plgpu.wait_smem_to_gmem(matmul.slots - 1, wait_read_only=True)
        patches[warpgroup, slot] = result.astype(matmul.out_dtype)
        plgpu.commit_smem()
        self.bring_addend(patch + 1)
        if self.share.tile.rows is not None:
            self._write_rows(patch, patches.at[warpgroup, slot], columns)
            return
        there = block.result.at[self.share.tile.lead, rows, columns]
        plgpu.copy_smem_to_gmem(patches.at[warpgroup, slot], there)

    def _write_rows(self, patch: int, stored: Any, columns: Any) -> None:
        """Let TMA write the rows of a patch that its group has.

        TMA copies a fixed number of rows. So a ragged patch is written in parts, one for each bit
        of its number of rows. All parts are one group of copies, which may be empty: `_write`
        counts a group for each patch.
        """
        share = self.share
        assert share.tile.rows is not None
        first, count = share.tile.rows
        above = share.row + share.block.matmul.patches[patch][0]
        left = jnp.clip(count - above, 0, ROWS)
        written: Array | int = 0
        for bit in reversed(range(ROWS.bit_length())):
            rows = 1 << bit
            here, there = pl.ds(written, rows), pl.ds(first + above + written, rows)
            part, result = stored.at[here], share.block.result.at[0, there, columns]
            copy = functools.partial(plgpu.copy_smem_to_gmem, part, result, commit_group=False)
            pl.when((left & rows) != 0)(copy)
            written = written + (left & rows)
        plgpu.commit_smem_to_gmem_group()


def wait_until_written() -> None:
    """For a consumer, at the end: wait until TMA has written all of its patches.

    Without it the block could end before TMA has read them. Its shared memory would then go to
    another block.
    """
    plgpu.wait_smem_to_gmem(0)
