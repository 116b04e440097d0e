"""Tiles in the shared memory of Hopper and Blackwell, for kernels in Pallas (Mosaic GPU).

A block of threads brings a tile of T x T to shared memory by TMA and reads it from there, by rows or, through a transposed
view, by columns. What it makes of columns is written as its transpose: the only way in which Hopper's tensor cores read an
operand that is contracted along its first axis.

Letters: L the leading axes as one, M, K the last two; T = 128.

References:
  Pallas Mosaic GPU reference, docs.jax.dev/en/latest/pallas/gpu/reference.html.
"""

import inspect
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array, Axes, DType

T = 128
RAGGED = 32
"""The last two axes are multiples of it: TMA takes rows of multiples of 16 bytes, and shared memory boxes that are whole."""
_SWIZZLE = 128  # bytes within which shared memory is permuted so that banks do not collide, at most
_MOST_BLOCKS = 65535  # along the second and third axis of CUDA's grid (Programming Guide, "Compute capabilities")
PART = 64
"""Rows, the least that the four warps of a block load together."""


def check_array(x: Array) -> None:
    """Raise NotImplementedError for what TMA or Pallas cannot bring."""
    if "idx" in inspect.signature(plgpu.load).parameters:
        raise NotImplementedError("jax before 0.11 cannot load a transposed tile")
    if x.dtype.itemsize > 4:
        raise NotImplementedError(f"an array of {x.dtype}")
    if x.ndim < 2 or not x.size or x.shape[-1] % RAGGED or x.shape[-2] % RAGGED:
        raise NotImplementedError(f"shape {list(x.shape)}, whose last two axes are no multiples of {RAGGED}")


def as_matrices(x: Array) -> Array:
    """x [..., M, K] as [L, M, K]; L is 1 where whole tiles let M take the other axes in."""
    *lead, m, k = x.shape
    return x.reshape(1, -1, k) if m % T == 0 else x.reshape(math.prod(lead), m, k)


def grid(shape: Axes) -> dict[str, Any]:
    """Of a kernel with a block of threads for each tile of [L, M, K]; `place` tells a block which is its own."""
    counts = _counts(shape)
    if max(counts[:2]) > _MOST_BLOCKS:
        return {"grid": (math.prod(counts),), "grid_names": ("lmk",)}
    return {"grid": counts, "grid_names": ("l", "m", "k")}


def place(shape: Axes) -> tuple[Array, Array, Array]:
    """In a kernel with this grid: where the tile of a block of threads lies along L, M and K."""
    lead, down, across = _counts(shape)
    if max(lead, down) > _MOST_BLOCKS:
        tile = lax.axis_index("lmk")
        rows = lax.div(tile, across)
        return lax.div(rows, down), lax.rem(rows, down), lax.rem(tile, across)
    return lax.axis_index("l"), lax.axis_index("m"), lax.axis_index("k")


def _counts(shape: Axes) -> Axes:
    lead, m, k = shape
    return lead, pl.cdiv(m, T), pl.cdiv(k, T)


def shared_tile(dtype: DType, shape: Axes) -> Any:
    """A tile of an array [.., M, K] as TMA writes it and `ldmatrix` reads it, by rows or by columns.

    TMA takes a tile apart into boxes whose rows are permuted; an array has whole boxes.
    """
    itemsize = jnp.dtype(dtype).itemsize
    inner = math.gcd(_SWIZZLE // itemsize, shape[-1])
    return plgpu.SMEM(
        (T, T), dtype, transforms=(plgpu.TilingTransform((8, inner)), plgpu.SwizzleTransform(inner * itemsize))
    )


def parts(tile: Any, *, turned: bool, rows: int = PART) -> Iterator[tuple[Any, Array]]:
    """Where they lie, and rows (columns, `turned`) [rows, T] of a tile in float32 registers.

    In parts, or a thread would hold more values than it has registers.
    """
    source = tile.transpose((1, 0)) if turned else tile
    for first in range(0, T, rows):
        taken = pl.ds(first, rows)
        loaded = plgpu.load(source.at[taken], layout=plgpu.Layout.WGMMA)  # type: ignore[call-arg]  # of jax before 0.11
        yield taken, loaded.astype(jnp.float32)
