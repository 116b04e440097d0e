"""Shared memory: which barrier guards which buffer, and whose turn it is.

`Block` has all of it. `shared_memory` has the types to allocate.

  in shared memory   written by                  read by                guarded by
  staged, a slot     TMA, for the producer       the two consumers      ring: filled, emptied
  outgoing.patches   their consumer              TMA, to the result     wait_smem_to_gmem
  outgoing.addend    TMA, for the same consumer  that consumer          outgoing.addend_filled

A patch and an addend belong to one warpgroup. So no barrier between warpgroups guards them.

Letters: B batch, M N K the axes of the matmul, C the array that the product is added to, W the
  width of a patch; T = 128.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array, Axes, DType
from jaxfp8.kernels.scaled_matmul.hopper._matmul import Matmul, Tile
from jaxfp8.kernels.scaled_matmul.hopper._scaling import ALIGNED, T
from jaxfp8.kernels.scaled_matmul.hopper._tiling import ROWS, WARPGROUPS, GroupSteps, RowTiles

# The ring of slots through which the producer passes steps to the consumers.
#
# A slot is shared memory for one step. Each step of a block takes the next slot. The count of steps
# continues from one tile to the next. Two barriers guard each slot.
#
#     filled    The producer's copies have arrived. Consumers wait for it before they read the slot.
#               Without it they would multiply the slot's old contents, or half of a step.
#     emptied   All consumers have read the slot. The producer waits for it before it copies into
#               the slot again. Without it a copy would overwrite a step that is still multiplied.
#
# In a cluster each block copies half of a step of lhs to both blocks. So a producer must also know
# that the slot of the other block is free. Consumers report an emptied slot to both blocks.
#
# A thread must wait for every phase of a barrier exactly once, in order. It counts phases by its
# own waits. If it skips a wait, its next wait returns too soon. If it waits twice, it never
# returns.


class _RingBarriers(NamedTuple):
    """Two barriers for each slot."""

    filled: Any
    emptied: Any

    @classmethod
    def allocated(cls, copies: int, stages: int, cluster: int) -> "_RingBarriers":
        """The barriers to allocate. `copies` fill a slot, and each consumer frees it once."""
        filled = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
        if cluster == 1:
            return cls(filled, plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages))
        # It counts the arrivals of each block of the cluster: four in all.
        of_both = plgpu.ClusterBarrier(
            collective_axes=("cluster",), num_arrivals=WARPGROUPS, num_barriers=stages
        )
        return cls(filled, of_both)


@dataclasses.dataclass(frozen=True)
class _Ring:
    """Slots in the order in which they are used."""

    stages: int
    barriers: _RingBarriers

    def at(self, before: Array, step: Array) -> tuple[Array, Array]:
        """The number of steps before this one, `before` of other tiles included, and its slot."""
        count = before + step
        return count, self.slot(count)

    def slot(self, count: Array) -> Array:
        """The slot of a step, which `count` steps come before."""
        return lax.rem(count, self.stages)

    def wait_filled(self, slot: Array) -> None:
        """For a consumer, before it reads a slot."""
        plgpu.barrier_wait(self.barriers.filled.at[slot])

    def free(self, slot: Array) -> None:
        """For a consumer, after its last read of a slot."""
        plgpu.barrier_arrive(self.barriers.emptied.at[slot])

    def wait_emptied(self, count: Array, slot: Array) -> None:
        """For the producer, before it fills a slot."""

        # The first `stages` steps do not wait: their slots are still unused, so nobody frees them.
        @pl.when(count >= self.stages)
        def _wait() -> None:
            plgpu.barrier_wait(self.barriers.emptied.at[slot])

    def drain(self, total: Array) -> None:
        """For the producer, after `total` steps: wait until its last slots are emptied."""

        # Consumers of the other block of a cluster report to this block's barriers, too. Without
        # this wait the block could end before they report. Then they would write to shared memory
        # that belongs to another block by then. Without a cluster the wait is not needed.
        #
        # The last `stages` steps are those whose slots nobody has waited for yet.
        @pl.loop(jnp.maximum(total - self.stages, 0), total)
        def _slot(count: Array) -> None:
            plgpu.barrier_wait(self.barriers.emptied.at[self.slot(count)])


# The memory of the kernel: operands in global memory, and a block's shared memory.

_LEAST = 32  # bytes of the narrowest swizzle: rows of shared memory are multiples of it


class Given(NamedTuple):
    """The arrays in global memory that the kernel reads; see `_kernel.launch` for the shapes."""

    lhs: Any
    rhs: Any
    lhs_scale: Any
    rhs_scale: Any
    addend: Any = None  # C; None without C, and if the result is written over C
    groups: RowTiles | GroupSteps | None = None  # of grouped matmuls


class _Staged(NamedTuple):
    """The slots of the ring: steps of both operands in shared memory. Axis 0 is the slot."""

    lhs: Any  # [stages, tile's M, T]
    rhs: Any  # [stages, tile's N, T]
    lhs_scale: Any  # [stages, *box]; None if scales of lhs do not come with a step
    rhs_scale: Any  # [stages, *box]; None if scales of rhs do not come with a step


class _Outgoing(NamedTuple):
    """Shared memory of the epilogue. The first axis is the warpgroup."""

    patches: Any  # [2, slots, 64, W]
    addend: Any  # [2, 64, W] of C, for the patch that is stored next; None without C
    addend_filled: Any  # a barrier for each warpgroup: its addend has arrived


class Shared(NamedTuple):
    """The shared memory of a block of threads."""

    staged: _Staged
    outgoing: _Outgoing
    barriers: _RingBarriers


@dataclasses.dataclass(frozen=True)
class Block:
    """The matmul, and the global and shared memory of a block of threads."""

    matmul: Matmul
    given: Given
    result: Any  # [B, M, N] in global memory; C before it is written, if the matmul is in place
    shared: Shared

    @property
    def ring(self) -> _Ring:
        """The slots of `shared.staged`, in the order in which they are used."""
        return _Ring(self.matmul.tiling.stages, self.shared.barriers)

    def tile(self, index: Array) -> Tile:
        """The tile of this block, if its cluster computes the tile number `index`."""
        tile, groups = self.matmul.tile(index), self.given.groups
        if isinstance(groups, RowTiles):
            return tile._replace(
                of_rhs=groups.matrix[tile.down],
                steps=groups.steps[tile.down],
                rows=(groups.first_row[tile.down], groups.rows[tile.down]),
            )
        if isinstance(groups, GroupSteps):
            # Steps of all groups follow each other in one matrix.
            one = jnp.zeros_like(tile.lead)
            first, count = groups.first[tile.lead], groups.count[tile.lead]
            return tile._replace(of_lhs=one, of_rhs=one, first_step=first, steps=count)
        return tile


def shared_memory(matmul: Matmul) -> Shared:
    """The types to allocate for a block of threads."""
    tiling, scaling, boxes = matmul.tiling, matmul.scaling, matmul.boxes
    values = (
        _permuted((tiling.stages, extent, T), format, scaling.tile)
        for extent, format in zip(tiling.tile, matmul.formats, strict=True)
    )
    scales = (None if box is None else _scales(tiling.stages, *box) for box in boxes)
    # Each copy of a step arrives once at `filled`: two of values, and one for each box of scales.
    copies = 2 + sum(box is not None for box in boxes)
    return Shared(
        _Staged(*values, *scales),
        _outgoing(matmul),
        _RingBarriers.allocated(copies, tiling.stages, tiling.cluster),
    )


def _outgoing(matmul: Matmul) -> _Outgoing:
    out_dtype, add_to, patch = matmul.out_dtype, matmul.add_to, (ROWS, matmul.width)
    row = round_up_row(matmul.n, out_dtype.itemsize)
    shape = WARPGROUPS, matmul.slots, *patch
    # Rows of groups begin anywhere in the result, and TMA writes boxes of 8 rows to multiples of 8
    # only. So these patches are not permuted.
    rows = matmul.grouping == "rows"
    patches = plgpu.SMEM(shape, out_dtype) if rows else _permuted(shape, out_dtype, row)
    if add_to is None:
        return _Outgoing(patches, None, None)
    addend = _permuted((WARPGROUPS, *patch), add_to, round_up_row(matmul.n, add_to.itemsize))
    return _Outgoing(patches, addend, plgpu.Barrier(num_barriers=WARPGROUPS))


def _permuted(shape: Axes, dtype: DType, row: int) -> Any:
    """An array in shared memory, permuted as TMA writes it and the tensor cores read it."""
    itemsize = jnp.dtype(dtype).itemsize
    # TMA copies boxes of 8 rows. `row` is the length of a row in global memory, or the tile along K
    # that one `wgmma` reads. A box is no wider than that, so that no box is cut.
    inner = math.gcd(128 // itemsize, shape[-1], row)
    transforms = (plgpu.TilingTransform((8, inner)), plgpu.SwizzleTransform(inner * itemsize))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _scales(stages: int, shape: Axes, dtype: Any) -> Any:
    """Scales of the steps. Each step begins at a multiple of `ALIGNED` bytes, as TMA needs."""
    *lead, last = shape
    # Only the box of square tiles of 32 is smaller than `ALIGNED`. It has one axis of float32.
    return plgpu.SMEM((stages, *lead, max(last, ALIGNED // 4) if not lead else last), dtype)


def round_up_row(n: int, itemsize: int) -> int:
    """N rounded up, so that a row of global memory is a multiple of 32 bytes."""
    return n + -n % (_LEAST // itemsize)


# The turns of a block of threads: the tiles that it computes, one after the other.
#
# The producer and the consumers of a block take the same turns, and so do the blocks of a cluster.
# They agree on the steps before each tile, from which they count the slots of the ring.


def for_each_tile(block: Block, work: Callable[[Tile, Array], None]) -> Array:
    """Call `work(tile, steps before it)` for each tile of the block; return the steps of all."""
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
