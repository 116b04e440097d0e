"""Tiles in the shared memory of Hopper and Blackwell, and their sums, in Pallas (Mosaic GPU).

A block of threads copies a tile of T x T to shared memory by TMA. It reads the tile from there by
rows, or by columns through a transposed view. A copy that is made of columns is written transposed.
Hopper's tensor cores read FP8 only with the contracted axis last in memory.

Letters: L the leading axes as one, M, K the last two; T = 128; S the rows that one sum covers.

References:
  Pallas Mosaic GPU reference, docs.jax.dev/en/latest/pallas/gpu/reference.html.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array, Axes, DType

T = 128
RAGGED = 32
"""The last two axes must be multiples of it.

The narrowest swizzle that Pallas has is 32 bytes: a row of 32 FP8 values. An array has whole
boxes of such rows. TMA itself takes rows of multiples of 16 bytes.
"""
# The widest swizzle in bytes. TMA permutes shared memory within it, so that banks do not conflict.
_SWIZZLE = 128
# CUDA's limit for the second and third axis of a grid (Programming Guide, "Compute capabilities").
_MOST_BLOCKS = 65535
PART = 64
"""Rows of a part of a tile: the four warps of a block load 16 each (`plgpu.Layout.WGMMA`)."""


def check_jax() -> None:
    """Raise NotImplementedError for a jax whose Pallas does not have what the kernels need."""
    if jax.__version_info__ < (0, 11):
        raise NotImplementedError(
            f"This is jax {jax.__version__}. Pallas of jax before 0.11 cannot load a transposed "
            "tile. Install jax 0.11 or later."
        )


class Place(NamedTuple):
    """Which tile of [L, M, K] a block of threads works on. `row` and `column` count tiles."""

    matrix: Array
    row: Array
    column: Array

    def of_copy(self, *, transposed: bool) -> "Place":
        """The place of the same tile in a copy of the array, which may be transposed."""
        return Place(self.matrix, self.column, self.row) if transposed else self

    @property
    def window(self) -> tuple[Any, Any, Any]:
        """The index of the tile in the array."""
        return self.matrix, pl.ds(self.row * T, T), pl.ds(self.column * T, T)


def grid(shape: Axes) -> dict[str, Any]:
    """The grid of a kernel with a block of threads for each tile of [L, M, K]; see `place`."""
    counts = _counts(shape)
    # Pallas makes the last axis the first one of CUDA, whose limit is 2^31 - 1.
    if max(counts[:2]) > _MOST_BLOCKS:
        return {"grid": (math.prod(counts),), "grid_names": ("lmk",)}
    return {"grid": counts, "grid_names": ("l", "m", "k")}


def place(shape: Axes) -> Place:
    """The tile of this block of threads, inside a kernel with `grid(shape)`."""
    lead, down, across = _counts(shape)
    if max(lead, down) > _MOST_BLOCKS:
        tile = lax.axis_index("lmk")
        rows = lax.div(tile, across)
        return Place(lax.div(rows, down), lax.rem(rows, down), lax.rem(tile, across))
    return Place(lax.axis_index("l"), lax.axis_index("m"), lax.axis_index("k"))


def count_tiles(shape: Axes) -> Axes:
    """How many tiles an array [.., M, K] has along M and along K."""
    return pl.cdiv(shape[-2], T), pl.cdiv(shape[-1], T)


def _counts(shape: Axes) -> Axes:
    return shape[0], *count_tiles(shape)


def shared_tile(dtype: DType, shape: Axes) -> Any:
    """Shared memory for a tile of [.., M, K], which threads can read by rows or by columns."""
    itemsize = jnp.dtype(dtype).itemsize
    # TMA splits a tile into boxes and permutes their rows. A box is as wide as the widest swizzle
    # that divides the rows of the array, so that no box is cut.
    inner = math.gcd(_SWIZZLE // itemsize, shape[-1])
    return plgpu.SMEM(
        (T, T),
        dtype,
        transforms=(plgpu.TilingTransform((8, inner)), plgpu.SwizzleTransform(inner * itemsize)),
    )


def load(source: Any, layout: Any = plgpu.Layout.WGMMA, *, optimized: bool = True) -> Array:
    """The array of a ref in registers, in a layout that says which thread holds which value."""
    loads: Any = plgpu.load  # before jax 0.11 it has no layout=
    loaded: Array = loads(source, layout=layout, optimized=optimized)
    return loaded


def load_parts(tile: Any, *, transposed: bool, rows: int = PART) -> Iterator[tuple[Any, Array]]:
    """The tile, or its transpose, in parts: their index, and their rows [rows, T] in float32."""
    source = tile.transpose((1, 0)) if transposed else tile
    # A whole tile would be 128 values for each of the 128 threads, half of a thread's registers.
    for first in range(0, T, rows):
        index = pl.ds(first, rows)
        yield index, load(source.at[index]).astype(jnp.float32)


# Sums of the columns of an array, in a kernel that casts the array.
#
# The gradient of a bias is such a sum. XLA would read the array once more for it. The cast kernel
# has the tiles of the array in shared memory already.


@dataclasses.dataclass(frozen=True)
class ColumnSums:
    """How the columns of an array [L, M, K] are summed: one sum for each S rows of a tile."""

    shape: Axes  # L, M, K
    side: int  # S, a divisor of T

    @property
    def result(self) -> jax.ShapeDtypeStruct:
        """The type of the sums, [L, M/S, K] with M and K of whole tiles."""
        lead, m, k = self.shape
        # A block writes the sums of a whole tile, without a check for the end of a row.
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
        """Start to write the sums of a tile. Without `tile`, `take` has summed its columns."""
        if tile is not None:
            for index, columns in load_parts(tile, transposed=True):
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
