"""The turns of a block of threads: the tiles that it computes, one after the other.

The producer and the consumers of a block take the same turns, and so do the blocks of a cluster.
They agree on the steps before each tile, from which they count the slots of the ring.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array
from jaxfp8.kernels.scaled_matmul.hopper._matmul import Tile
from jaxfp8.kernels.scaled_matmul.hopper._memory import Block


def for_each_tile(block: Block, work: Callable[[Tile, Array], None]) -> Array:
    """Call `work(tile, before)` for each tile of the block; `before` counts the steps before it.

    Returns:
      The number of steps of all tiles of the block.
    """
    matmul = block.matmul
    if matmul.grouping is None:  # all tiles have the same steps

        @plgpu.nd_loop((matmul.tiles,), collective_axes="clusters")
        def _tile(turn: Any) -> None:
            work(block.tile(turn.index[0]), turn.local_index * matmul.steps)

        # `nd_loop` deals out tiles in turn: clusters with an index below the remainder have one
        # tile more.
        tiles, clusters, index = matmul.tiles, matmul.clusters, lax.axis_index("clusters")
        return (tiles // clusters + (index < tiles % clusters).astype(jnp.int32)) * matmul.steps

    @plgpu.nd_loop((matmul.tiles,), collective_axes="clusters", init_carry=jnp.int32(0))
    def total(turn: Any, carry: Array) -> Array:
        tile = block.tile(turn.index[0])
        work(tile, carry)
        return carry + tile.steps

    found: Any = total  # `nd_loop` runs the function, and its name is the last carry
    return found
