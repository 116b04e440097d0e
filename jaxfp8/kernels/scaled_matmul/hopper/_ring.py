"""The ring of slots through which the producer hands steps to the consumers.

A slot is shared memory for one step. Step after step, over all tiles of a block, takes the next
slot. Two barriers guard each slot.

  filled    The producer's copies have arrived. Consumers wait for it before they read the slot;
            without it they would multiply what the slot held before, or half of a step.
  emptied   All consumers have read the slot. The producer waits for it before it copies into the
            slot again; without it a copy would overwrite a step that is still multiplied.

In a cluster each block copies half of a step of lhs to both blocks. So a producer must know that
the neighbour's slot is free, too: consumers report an emptied slot to both blocks.

Every phase of a barrier is waited for exactly once, in order. A thread counts phases by its own
waits: one that it skipped, or waited for twice, would let it pass too soon, or never.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array
from jaxfp8.kernels.scaled_matmul.hopper._tiling import WARPGROUPS


class RingBarriers(NamedTuple):
    """Two barriers for each slot."""

    filled: Any
    emptied: Any

    @classmethod
    def allocated(cls, copies: int, stages: int, cluster: int) -> "RingBarriers":
        """What to allocate: `copies` fill a slot, each of the consumers empties it once."""
        filled = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
        if cluster == 1:
            return cls(filled, plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages))
        of_both = plgpu.ClusterBarrier(
            collective_axes=("cluster",), num_arrivals=WARPGROUPS, num_barriers=stages
        )
        return cls(filled, of_both)


@dataclasses.dataclass(frozen=True)
class Ring:
    """Slots in the order in which they are used.

    Attributes:
      stages: slots of the ring.
      steps: steps of one tile.
      barriers: of each slot.
    """

    stages: int
    steps: int
    barriers: RingBarriers

    def at(self, turn: Array, step: Array) -> tuple[Array, Array]:
        """How many steps came before this one, in all `turn` tiles of the block; its slot."""
        count = turn * self.steps + step
        return count, self.slot(count)

    def slot(self, count: Array) -> Array:
        """The slot of a step that `count` steps came before."""
        return lax.rem(count, self.stages)

    def wait_filled(self, slot: Array) -> None:
        """A consumer, before it reads a slot."""
        plgpu.barrier_wait(self.barriers.filled.at[slot])

    def free(self, slot: Array) -> None:
        """A consumer, after it has read a slot for the last time."""
        plgpu.barrier_arrive(self.barriers.emptied.at[slot])

    def wait_emptied(self, count: Array, slot: Array) -> None:
        """The producer, before it fills a slot: not the first time, when nobody has used it."""

        @pl.when(count >= self.stages)
        def _wait() -> None:
            plgpu.barrier_wait(self.barriers.emptied.at[slot])

    def drain(self, tiles: int, clusters: int) -> None:
        """The producer, at the end: wait until the slots that it filled last are emptied.

        Consumers of the neighbour in a cluster report to this block's barriers. Without the wait
        this block could end before they do, and they would write to memory that is no more its own.
        Without a cluster nothing would break.
        """
        index = lax.axis_index("clusters")
        total = (tiles // clusters + (index < tiles % clusters).astype(jnp.int32)) * self.steps

        @pl.loop(jnp.maximum(total - self.stages, 0), total)
        def _slot(count: Array) -> None:
            plgpu.barrier_wait(self.barriers.emptied.at[self.slot(count)])
