"""Sums of the columns of an array, in a kernel in Pallas (Mosaic GPU) that has its tiles in shared memory for other reasons.

What XLA would read the array once more for: the gradient of a bias.

Letters: L the leading axes as one, M, K the last two; T = 128; S rows that one sum is of.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array, Axes
from jaxfp8.kernels._mosaic_tiles import T, parts, place


@dataclasses.dataclass(frozen=True)
class ColumnSums:
    """How the columns of an array [L, M, K] are summed, each S rows of a tile by themselves.

    Attributes:
      shape: L, M, K.
      side: S, a divisor of T.
    """

    shape: Axes
    side: int

    @property
    def result(self) -> jax.ShapeDtypeStruct:
        """[L, M/S, K] of whole tiles: a copy in one dimension does not look where a row ends."""
        lead, m, k = self.shape
        return jax.ShapeDtypeStruct((lead, pl.cdiv(m, T) * (T // self.side), pl.cdiv(k, T) * T), jnp.float32)

    @property
    def staged(self) -> Any:
        """Shared memory for those of a tile."""
        return plgpu.SMEM((T // self.side, T), jnp.float32)

    def take(self, staged: Any, taken: Any, columns: Array) -> None:
        """Those of some columns [C, T] of a tile, which lie at `taken`."""
        for cell in range(T // self.side):
            staged[cell, taken] = jnp.sum(columns[:, cell * self.side : (cell + 1) * self.side], axis=1)

    def write(self, staged: Any, result: Any, tile: Any = None) -> None:
        """Start to write those of the tile of this block of threads; `tile`, if its columns were not taken before."""
        if tile is not None:
            for taken, columns in parts(tile, turned=True):
                self.take(staged, taken, columns)
            plgpu.commit_smem()  # so that TMA sees what threads stored
        at, i, j = place(self.shape)
        cells = T // self.side
        plgpu.copy_smem_to_gmem(staged, result.at[at, pl.ds(i * cells, cells), pl.ds(j * T, T)])

    def shaped(self, sums: Array, shape: Axes) -> Array:
        """[..., M/S, K], of an array [..., M, K], from what the kernel wrote."""
        *lead, m, k = shape
        sums = sums[:, : pl.cdiv(self.shape[1], self.side), :k]
        return sums.reshape(*lead, pl.cdiv(m, self.side), k)
