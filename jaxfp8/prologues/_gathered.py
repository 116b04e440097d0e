"""Rows of an array, gathered into tiles: what a quantizer of grouped matmuls reads.

XLA fuses the gather into its own casts, but not into a kernel: the tiles would be written to memory
and read again. So kernels in Pallas read the rows where they are.

Letters: T rows, R tiles of P rows, K values of a row.
"""

import dataclasses
import functools

import jax

from jaxfp8._typing import Array, DType


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["value", "rows", "first_row", "count"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Gathered:
    """Tiles of adjacent rows, and the array that has the rows.

    Attributes:
      value: [R, P, K], the tiles. If nothing reads it, XLA does not compute it.
      rows: [T, K], the array.
      first_row: i32[R], the first row of each tile.
      count: i32[R], how many rows a tile has. Its other rows are 0.
    """

    value: Array
    rows: Array
    first_row: Array
    count: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def ndim(self) -> int:
        return self.value.ndim

    @property
    def dtype(self) -> DType:
        return self.value.dtype
