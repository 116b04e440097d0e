"""Sums of the columns of an array, in Pallas (Mosaic GPU), in a kernel that casts the array.

The gradient of a bias is such a sum. XLA would read the array once more for it. The cast kernel has
the tiles of the array in shared memory already.

Letters: L the leading axes as one, M, K the last two; T = 128; S the rows that one sum covers.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array, Axes
from jaxfp8.kernels.mosaic._tiles import T, parts, place


@dataclasses.dataclass(frozen=True)
class ColumnSums:
    """How the columns of an array [L, M, K] are summed: one sum for each S rows of a tile.

    Attributes:
      shape: L, M, K.
      side: S, a divisor of T.
    """

    shape: Axes
    side: int

    @property
    def result(self) -> jax.ShapeDtypeStruct:
        """The type of the sums, [L, M/S, K] with M and K of whole tiles.

        A block writes the sums of a whole tile, without a check for the end of a row.
        """
        lead, m, k = self.shape
        return jax.ShapeDtypeStruct(
            (lead, pl.cdiv(m, T) * (T // self.side), pl.cdiv(k, T) * T), jnp.float32
        )

    @property
    def staged(self) -> Any:
        """Shared memory for the sums of a tile."""
        return plgpu.SMEM((T // self.side, T), jnp.float32)

    def take(self, staged: Any, index: Any, columns: Array) -> None:
        """Sum some columns [C, T] of a tile; `index` says which of its T columns they are."""
        for cell in range(T // self.side):
            staged[cell, index] = jnp.sum(
                columns[:, cell * self.side : (cell + 1) * self.side], axis=1
            )

    def write(self, staged: Any, result: Any, tile: Any = None) -> None:
        """Start to write the sums of this block's tile.

        Args:
          staged: shared memory for the sums.
          result: the sums in global memory.
          tile: in shared memory; None if `take` has summed its columns, and `commit_smem` followed.
        """
        if tile is not None:
            for index, columns in parts(tile, transposed=True):
                self.take(staged, index, columns)
            plgpu.commit_smem()  # all threads have stored their sums, and TMA sees them
        here = place(self.shape)
        cells = T // self.side
        where = here.matrix, pl.ds(here.row * cells, cells), pl.ds(here.column * T, T)
        plgpu.copy_smem_to_gmem(staged, result.at[where])

    def shaped(self, sums: Array, shape: Axes) -> Array:
        """[..., M/S, K], of an array [..., M, K], from what the kernel wrote."""
        *lead, m, k = shape
        sums = sums[:, : pl.cdiv(self.shape[1], self.side), :k]
        return sums.reshape(*lead, pl.cdiv(m, self.side), k)
