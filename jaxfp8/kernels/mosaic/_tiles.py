"""Tiles in the shared memory of Hopper and Blackwell, for kernels in Pallas (Mosaic GPU).

A block of threads brings a tile of T x T to shared memory by TMA and reads it from there, by rows
or, through a transposed view, by columns. What it makes of columns is written as its transpose: the
only layout in which Hopper's tensor cores read an operand that is contracted along its first axis.

Letters: L the leading axes as one, M, K the last two; T = 128.

References:
  Pallas Mosaic GPU reference, docs.jax.dev/en/latest/pallas/gpu/reference.html.
"""

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
"""The last two axes are multiples of it.

TMA takes rows of multiples of 16 bytes, and shared memory boxes that are whole.
"""
_SWIZZLE = 128  # bytes within which shared memory is permuted so that banks do not collide, at most
# along the second and third axis of CUDA's grid (Programming Guide, "Compute capabilities")
_MOST_BLOCKS = 65535
PART = 64
"""Rows, the least that the four warps of a block load together."""


def check_jax() -> None:
    """Raise NotImplementedError for a jax whose Pallas does not have what the kernels need."""
    if jax.__version_info__ < (0, 11):
        raise NotImplementedError("jax before 0.11 cannot load a transposed tile")


def check_array(x: Array) -> None:
    """Raise NotImplementedError for what TMA or Pallas cannot bring."""
    check_jax()
    if x.dtype.itemsize > 4:
        raise NotImplementedError(f"an array of {x.dtype}")
    if x.ndim < 2 or not x.size or x.shape[-1] % RAGGED or x.shape[-2] % RAGGED:
        raise NotImplementedError(
            f"shape {list(x.shape)}, whose last two axes are no multiples of {RAGGED}"
        )


def as_matrices(x: Array) -> Array:
    """x [..., M, K] as [L, M, K]; L is 1 where whole tiles let M take the other axes in."""
    *lead, m, k = x.shape
    return x.reshape(1, -1, k) if m % T == 0 else x.reshape(math.prod(lead), m, k)


class Place(NamedTuple):
    """Which tile of an array [L, M, K] a block of threads has, counted in tiles along M and K."""

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
    """The grid of a kernel with a block of threads for each tile of [L, M, K].

    `place` says which tile a block has.
    """
    counts = _counts(shape)
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


def tiles_of(shape: Axes) -> Axes:
    """How many tiles an array [.., M, K] has along M and along K."""
    return pl.cdiv(shape[-2], T), pl.cdiv(shape[-1], T)


def _counts(shape: Axes) -> Axes:
    return shape[0], *tiles_of(shape)


def shared_tile(dtype: DType, shape: Axes) -> Any:
    """Shared memory for a tile of [.., M, K], which threads can read by rows or by columns.

    TMA writes it and `ldmatrix` reads it. TMA splits a tile into boxes whose rows are permuted. An
    array has whole boxes.
    """
    itemsize = jnp.dtype(dtype).itemsize
    inner = math.gcd(_SWIZZLE // itemsize, shape[-1])
    return plgpu.SMEM(
        (T, T),
        dtype,
        transforms=(plgpu.TilingTransform((8, inner)), plgpu.SwizzleTransform(inner * itemsize)),
    )


def parts(tile: Any, *, transposed: bool, rows: int = PART) -> Iterator[tuple[Any, Array]]:
    """The tile in parts: the index of some of its rows, and these rows [rows, T] in float32.

    In parts, because a thread would hold more values than it has registers. Of a transposed copy
    the rows are the columns of the tile.
    """
    source = tile.transpose((1, 0)) if transposed else tile
    for first in range(0, T, rows):
        index = pl.ds(first, rows)
        load: Any = plgpu.load  # before jax 0.11 it has no layout=
        loaded = load(source.at[index], layout=plgpu.Layout.WGMMA)
        yield index, loaded.astype(jnp.float32)
