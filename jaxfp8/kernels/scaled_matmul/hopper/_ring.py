"""The ring of slots through which the producer passes steps to the consumers.

A slot is shared memory for one step. Each step of a block takes the next slot. The count of steps
continues from one tile to the next. Two barriers guard each slot.

  filled    The producer's copies have arrived. Consumers wait for it before they read the slot.
            Without it they would multiply the slot's old contents, or half of a step.
  emptied   All consumers have read the slot. The producer waits for it before it copies into the
            slot again. Without it a copy would overwrite a step that is still multiplied.

In a cluster each block copies half of a step of lhs to both blocks. So a producer must also know
that the slot of the other block is free. Consumers report an emptied slot to both blocks.

A thread must wait for every phase of a barrier exactly once, in order. It counts phases by its own
waits. If it skips a wait, its next wait returns too soon. If it waits twice, it never returns.
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
        """The barriers to allocate. `copies` fill a slot, and each consumer frees it once.

        `ClusterBarrier` counts the arrivals of each block of the cluster: four in all.
        """
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
      barriers: of each slot.
    """

    stages: int
    barriers: RingBarriers

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
        """For the producer, before it fills a slot.

        The first `stages` steps do not wait: their slots are still unused, so nobody frees them.
        """

        @pl.when(count >= self.stages)
        def _wait() -> None:
            plgpu.barrier_wait(self.barriers.emptied.at[slot])

    def drain(self, total: Array) -> None:
        """For the producer, after `total` steps: wait until the slots it filled last are emptied.

        Consumers of the other block of a cluster report to this block's barriers, too. Without this
        wait the block could end before they report. Then they would write to shared memory that
        belongs to another block by then. Without a cluster the wait is not needed.
        """

        # The last `stages` steps are those whose slots nobody has waited for yet.
        @pl.loop(jnp.maximum(total - self.stages, 0), total)
        def _slot(count: Array) -> None:
            plgpu.barrier_wait(self.barriers.emptied.at[self.slot(count)])
