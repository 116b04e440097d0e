"""The producer: one warpgroup that copies steps to shared memory by TMA.

It runs ahead of the consumers while the ring has free slots, also into the next tile of the
product. So copies for the next tile are under way while the consumers store the previous one.

Letters: B batch, M N K the axes of the matmul; T = 128.
"""

from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array, Axes
from jaxfp8.kernels.scaled_matmul.hopper._matmul import Tile
from jaxfp8.kernels.scaled_matmul.hopper._memory import Block
from jaxfp8.kernels.scaled_matmul.hopper._scaling import Scaling, T
from jaxfp8.kernels.scaled_matmul.hopper._tiling import COPYING_REGISTERS
from jaxfp8.kernels.scaled_matmul.hopper._turns import for_each_tile


def produce(block: Block) -> None:
    """Fill slot after slot with the steps of all tiles of the block."""
    ring = block.ring
    # It needs few registers. The consumers' request waits until it has given back the rest.
    plgpu.set_max_registers(COPYING_REGISTERS, action="decrease")

    def fill(tile: Tile, before: Array) -> None:
        @pl.loop(0, tile.steps)
        def _step(step: Array) -> None:
            count, slot = ring.at(before, step)
            # Consumers have read the step that was in this slot. In a cluster those of both blocks
            # have: `_copy_values` writes to both.
            ring.wait_emptied(count, slot)
            _copy_values(block, tile, tile.first_step + step, slot)
            _copy_scales(block, tile, tile.first_step + step, slot)

    ring.drain(for_each_tile(block, fill))


def _copy_values(block: Block, tile: Tile, step: Array, slot: Array) -> None:
    """Start to copy the values of a step. Each copy arrives once at `filled`.

    The two blocks of a cluster need the same rows of lhs. Each block reads half of them, and TMA
    writes this half to both blocks.
    """
    given, staged, tiling = block.given, block.shared.staged, block.matmul.tiling
    filled = block.shared.barriers.filled.at[slot]
    shared: dict[str, Any] = {"collective_axes": "cluster"} if tiling.cluster == 2 else {}
    tile_m, tile_n = tiling.tile
    rows, columns = pl.ds(tile.down * tile_m, tile_m), pl.ds(tile.across * tile_n, tile_n)
    along = pl.ds(step * T, T)
    lhs, rhs = given.lhs.at[tile.of_lhs, rows, along], given.rhs.at[tile.of_rhs, columns, along]
    plgpu.copy_gmem_to_smem(lhs, staged.lhs.at[slot], filled, **shared)
    plgpu.copy_gmem_to_smem(rhs, staged.rhs.at[slot], filled)


def _copy_scales(block: Block, tile: Tile, step: Array, slot: Array) -> None:
    """Start to copy the scales of a step, for operands that have a box in `Matmul.boxes`.

    Each copy arrives once at `filled`, like those of values. So one wait covers them all.
    """
    given, staged, matmul = block.given, block.shared.staged, block.matmul
    filled = block.shared.barriers.filled.at[slot]
    tile_m, tile_n = matmul.tiling.tile
    firsts = tile.down * tile_m, tile.across * tile_n
    sources, slots = (given.lhs_scale, given.rhs_scale), (staged.lhs_scale, staged.rhs_scale)
    leads = tile.of_lhs, tile.of_rhs
    for box, lead, first, source, to in zip(
        matmul.boxes, leads, firsts, sources, slots, strict=True
    ):
        if box is not None:
            there, here = _of_step(box[0], matmul.scaling, step, first)
            plgpu.copy_gmem_to_smem(source.at[lead, *there], to.at[slot, *here], filled)


def _of_step(
    box: Axes, scaling: Scaling, step: Array, first: Array
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Indices of a step's scales: in global memory (without B), and in a slot.

    `first` is the tile's first row of lhs or column of rhs.
    """
    # Square tiles of 32: `_scales.laid` makes the scales of a step adjacent. A slot may be longer
    # than the box, because it is rounded up to whole units of TMA.
    if len(box) == 1:
        cells = pl.ds(lax.div(first, scaling.tile) * scaling.parts, box[0])
        return (step, cells), (pl.ds(0, box[0]),)
    return (pl.ds(step * scaling.parts, box[0]), pl.ds(first, box[1])), ()
