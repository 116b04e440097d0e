"""The producer: one warpgroup that copies steps to shared memory by TMA.

It runs ahead of the consumers, as far as the ring has free slots, and from one tile of the product
into the next. So copies of the next tile are under way while the last one is stored.

Letters: B batch, M N K matmul; T = 128.
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


def produce(block: Block) -> None:
    """Fill slot after slot with the steps of all tiles of the block."""
    matmul, ring = block.matmul, block.ring
    plgpu.set_max_registers(COPYING_REGISTERS, action="decrease")  # consumers take what it returns

    @plgpu.nd_loop((matmul.tiles,), collective_axes="clusters")
    def _tile(turn: Any) -> None:
        tile = matmul.tile(turn.index[0])

        @pl.loop(0, matmul.steps)
        def _step(step: Array) -> None:
            count, slot = ring.at(turn.local_index, step)
            ring.wait_emptied(count, slot)
            _copy_values(block, tile, step, slot)
            _copy_scales(block, tile, step, slot)

    ring.drain(matmul.tiles, matmul.clusters)


def _copy_values(block: Block, tile: Tile, step: Array, slot: Array) -> None:
    """Start to copy the values of a step. Each copy arrives once at `filled`.

    Neighbours in a cluster share rows of lhs. Each reads half of them, and TMA writes it to both.
    """
    given, staged, tiling = block.given, block.shared.staged, block.matmul.tiling
    filled = block.shared.barriers.filled.at[slot]
    shared: dict[str, Any] = {"collective_axes": "cluster"} if tiling.cluster == 2 else {}
    tile_m, tile_n = tiling.tile
    rows, columns = pl.ds(tile.down * tile_m, tile_m), pl.ds(tile.across * tile_n, tile_n)
    along = pl.ds(step * T, T)
    lhs, rhs = given.lhs.at[tile.lead, rows, along], given.rhs.at[tile.lead, columns, along]
    plgpu.copy_gmem_to_smem(lhs, staged.lhs.at[slot], filled, **shared)
    plgpu.copy_gmem_to_smem(rhs, staged.rhs.at[slot], filled)


def _copy_scales(block: Block, tile: Tile, step: Array, slot: Array) -> None:
    """Start to copy the scales of a step, of the operands whose scales come with it."""
    given, staged, matmul = block.given, block.shared.staged, block.matmul
    filled = block.shared.barriers.filled.at[slot]
    tile_m, tile_n = matmul.tiling.tile
    firsts = tile.down * tile_m, tile.across * tile_n
    sources, slots = (given.lhs_scale, given.rhs_scale), (staged.lhs_scale, staged.rhs_scale)
    for box, first, source, to in zip(matmul.boxes, firsts, sources, slots, strict=True):
        if box is not None:
            there, here = _of_step(box[0], matmul.scaling, step, first)
            plgpu.copy_gmem_to_smem(source.at[tile.lead, *there], to.at[slot, *here], filled)


def _of_step(
    box: Axes, scaling: Scaling, step: Array, first: Array
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Indices of a step's scales: in global memory behind B, and in a slot.

    `first`, the tile's first row of lhs or column of rhs.
    """
    if len(box) == 1:  # square tiles of 32, those of a step beside each other
        cells = pl.ds(lax.div(first, scaling.tile) * scaling.parts, box[0])
        return (step, cells), (pl.ds(0, box[0]),)
    return (pl.ds(step * scaling.parts, box[0]), pl.ds(first, box[1])), ()
