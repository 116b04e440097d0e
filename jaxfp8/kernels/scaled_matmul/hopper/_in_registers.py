"""Sums in float32 registers: each step is scaled, if steps have scales, and then added.

The tensor cores of Hopper keep about 14 bits of a sum. So `wgmma` multiplies one tile of K, and
the product is added in float32. A step has `Scaling.parts` tiles of K, each with scales of its own.

Letters: M N K matmul, R C the share of a warpgroup, W the width of a patch, S the tile along K;
T = 128.

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
from jaxfp8.kernels.scaled_matmul.hopper._memory import load_scales
from jaxfp8.kernels.scaled_matmul.hopper._scaling import T, of_step
from jaxfp8.kernels.scaled_matmul.hopper._share import Share
from jaxfp8.kernels.scaled_matmul.hopper._tiling import ROWS


def sums_in_registers(share: Share) -> tuple[Array, ...]:
    """The patches [64, W] of a share, summed over all steps of its tile."""
    matmul, ring = share.block.matmul, share.block.ring

    def add(index: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        _, slot = ring.at(share.turn, index)
        ring.wait_filled(slot)
        return _Step(share, index, slot).added_to(sums)

    zeros = jnp.zeros((ROWS, matmul.width), jnp.float32)
    zero = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
    return lax.fori_loop(0, matmul.steps, add, (zero,) * len(matmul.patches))


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
        """The sums with the products of this step. It frees the slot as soon as all is read."""
        matmul, summed = self.share.block.matmul, list(sums)
        parts = range(matmul.scaling.parts)
        last = (parts[-1], *matmul.patches[-1])
        for part, above in itertools.product(parts, matmul.bands):
            of_rows, of_square, product = self._multiplied(part, above)
            for left in matmul.lefts:
                # Not sooner: there are registers for the scales of a patch's columns, not of all.
                of_columns = self._scales_of_columns(part, left, of_square)
                if (part, above, left) == last:
                    self._free()
                more = product[:, left : left + matmul.width]
                if of_rows is not None and of_columns is not None:
                    more *= of_step(of_rows, of_columns, more.shape)
                summed[matmul.patches.index((above, left))] += more
        return tuple(summed)

    def _multiplied(self, part: int, above: int) -> tuple[Array | None, Array | None, Array]:
        """Scales of 64 rows, the one of a square of 128, and the product [64, C] of a tile of K.

        Scales are read before the tensor cores are waited for, so that the two overlap.
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
        """The one scale of T columns by T of K, read from global memory; None for other scales.

        No share crosses a square: C divides T.
        """
        share = self.share
        matmul, given = share.block.matmul, share.block.given
        if matmul.scaling.at_end or matmul.boxes[1] is not None:
            return None
        return given.rhs_scale[share.tile.lead, lax.div(share.column_of_product, T), self.index]

    def _scales_of_columns(self, part: int, left: int, of_square: Array | None) -> Array | None:
        """Scales [W] of a patch's columns, or [] where they share one; None at the end."""
        share, matmul = self.share, self.share.block.matmul
        scaling, scales = matmul.scaling, share.block.shared.staged.rhs_scale
        if scales is None:
            return of_square
        if scaling.square:  # of 32: a patch is no wider, so that it has one
            cell = lax.div(share.column + left, scaling.tile)
            return scales[self.slot, cell * scaling.parts + part]
        columns = pl.ds(share.column + left, matmul.width)
        return load_scales(scales.at[self.slot, part, columns], 0)

    def _free(self) -> None:
        """Let the producer fill the slot again: values and scales are in registers now.

        One thread reports for the warpgroup. The tensor cores read values, and `_product` has
        waited for them: a `wgmma` is one operation of the whole warpgroup. Scales are read by each
        thread: `commit_smem` waits for all threads, and orders their reads before writes of TMA.
        Without it TMA could overwrite a scale that a slower warp has yet to read.
        """
        block = self.share.block
        if block.shared.staged.lhs_scale is not None:
            plgpu.commit_smem()
        block.ring.free(self.slot)


def _product(lhs: Any, rhs: Any) -> Array:
    """[64, C] float32 of lhs [64, S] and rhs [C, S] in shared memory.

    To read the accumulator is to wait for the tensor cores.
    """

    def product(accumulator: Any) -> Array:
        plgpu.wgmma(accumulator, lhs, rhs.transpose((1, 0)))
        return accumulator[...]

    shape = lhs.shape[0], rhs.shape[0]
    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
