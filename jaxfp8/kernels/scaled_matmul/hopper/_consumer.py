"""The consumers: two warpgroups. Each multiplies, scales and stores its share of every tile."""

from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array
from jaxfp8.kernels.scaled_matmul.hopper._epilogue import Epilogue, wait_until_written
from jaxfp8.kernels.scaled_matmul.hopper._in_registers import sums_in_registers
from jaxfp8.kernels.scaled_matmul.hopper._in_tensor_cores import sums_in_tensor_cores
from jaxfp8.kernels.scaled_matmul.hopper._matmul import Tile
from jaxfp8.kernels.scaled_matmul.hopper._memory import Block
from jaxfp8.kernels.scaled_matmul.hopper._share import Share
from jaxfp8.kernels.scaled_matmul.hopper._tiling import MULTIPLYING_REGISTERS
from jaxfp8.kernels.scaled_matmul.hopper._turns import for_each_tile


def consume(block: Block, warpgroup: Array) -> None:
    """Compute and store this warpgroup's share of each tile of the block.

    The two consumers never wait for each other. They share only the ring, where the producer waits
    for the slower one.
    """
    matmul = block.matmul
    # It takes the registers that the producer gives back (`_producer.produce`).
    plgpu.set_max_registers(MULTIPLYING_REGISTERS, action="increase")
    row, column = _first_in_tile(block, warpgroup)

    def compute(tile: Tile, before: Array) -> None:
        share = Share(
            block=block,
            warpgroup=warpgroup,
            before=before,
            tile=tile,
            row=row,
            column=column,
            column_of_product=tile.across * matmul.tiling.tile[1] + column,
        )
        epilogue = Epilogue(share)
        # The copy of C overlaps with the matmul of the tile. Its shared memory is free: the last
        # `Epilogue._write` of the previous tile has waited for all threads to read it.
        epilogue.bring_addend(0)
        fast = matmul.scaling.fast
        epilogue.store(sums_in_tensor_cores(share) if fast else sums_in_registers(share))

    for_each_tile(block, compute)
    wait_until_written()


def _first_in_tile(block: Block, warpgroup: Array) -> tuple[Array | int, Array | int]:
    """First row and column of a warpgroup's share in each tile."""
    tiling = block.matmul.tiling
    if tiling.beside:
        return 0, warpgroup * tiling.columns
    return warpgroup * tiling.rows, 0
