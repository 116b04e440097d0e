"""How Hopper's matmul is scaled: what share of K has one scale, and the arithmetic in registers.

A tile of T values along K is scaled as it leaves the tensor cores, before it is added. What all of K shares scales the sum,
once: by the smaller of the two scales first, as XLA's backend does, so that a finite result never overflows on the way.

Letters: K of the matmul; R C a part of the product; T = 128.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._typing import Array, Axes

_LARGEST = float(jnp.finfo(jnp.float32).max)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling:
    """When a product is scaled.

    Attributes:
      at_end: whether all of K shares its scales, one for each row of lhs and each column of rhs.
      square: whether T columns of rhs share one; not at the end.
      fast: whether a sum stays in the tensor cores, which keep about 14 bits of it; at the end only.

    Example:
      >>> Scaling(square=True).bytes_of_step((128, 64))
      512
    """

    at_end: bool = False
    square: bool = False
    fast: bool = False

    def __post_init__(self) -> None:
        if (self.square and self.at_end) or (self.fast and not self.at_end):
            raise ValueError(f"{self!r}: square are scales of steps; only what is scaled at the end can be fast.")

    def bytes_of_step(self, tile: tuple[int, int]) -> int:
        """Of the scales that go to shared memory with a step of a tile (M, N)."""
        rows, columns = tile
        return 0 if self.at_end else 4 * (rows if self.square else rows + columns)


def load(scales: Any, across: int) -> Array:
    """Scales in the registers of the threads that hold what they scale; `across`, the axis that they do not run along."""
    return plgpu.load(scales, layout=plgpu.Layout.WGMMA.reduce(across))  # type: ignore[call-arg]  # of jax before 0.11


def of_step(of_rows: Array, of_columns: Array, shape: Axes) -> Array:
    """[R, C]: the product of two scales, kept finite, for zeros times inf were NaN; `of_columns` [C], or [] for all."""
    if of_columns.ndim == 0:
        return lax.broadcast_in_dim(jnp.minimum(of_rows * of_columns, _LARGEST), shape, (0,))
    both = lax.broadcast_in_dim(of_rows, shape, (0,)) * lax.broadcast_in_dim(of_columns, shape, (1,))
    return jnp.minimum(both, _LARGEST)


def scaled_sum(sums: Array, of_rows: Array, of_columns: Array) -> Array:
    """[R, C]: sums of all of K, scaled by rows and by columns, as `_along_output.scaled` does it."""
    rows, columns = (lax.broadcast_in_dim(x, sums.shape, (axis,)) for axis, x in enumerate((of_rows, of_columns)))
    return sums * jnp.minimum(rows, columns) * jnp.maximum(rows, columns)
