"""How Hopper's matmul is scaled: what share of K has one scale, and the arithmetic in registers.

A tile of T values along K is scaled as it leaves the tensor cores, before it is added. What all of K shares scales the sum,
once: by the smaller of the two scales first, as XLA's backend does, so that a finite result never overflows on the way.

**Tiles of 32 are scaled four times as often, and that bounds them.** A processor of an H100 multiplies 4096 pairs of FP8 in a
cycle, or 2048 of bfloat16, and has 128 lanes for float32. A step of a product of 128 x 128 keeps its tensor cores busy for
512 cycles in FP8, 1024 in bfloat16. Meanwhile each lane scales and adds; compiled for H200 ("large"; LDS reads scales;
tests/deviceless/test_compiled_matmul.py counts):

  tiles            FFMA  FMUL  FMNMX  LDS   cycles of FFMA, FMUL and FMNMX, one at a time   next to bfloat16, at most
  1x128 @ 128x128    64     2      2    2     136                                             2.0
  1x128 @ 1x128      64    64     64   18     384                                             2.0
  1x32 @ 32x32      256    32     32   24     640                                             1.6
  1x32 @ 1x32       256   256    256   72    1536                                             0.67

The last cannot win where operations count: for large products of 1x32 @ 1x32 take XLA's backend (the default), which multiplies
in bfloat16. This one halves the bytes of a weight that is read for few rows. The same kernel does 1x32 @ 32x32 (a recipe with
w_tile_dim=2) between the rates of bfloat16 and FP8, if all overlaps. None was timed.

E8M0 travels in bytes and becomes float32 in registers, of columns with few rows of lhs only: it takes five instructions, and
there are 16 columns to a row in each thread. Of other columns and of square tiles it becomes float32 before the kernel.

Letters: K of the matmul; R C a part of the product; T = 128.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array, Axes
from jaxfp8.kernels.scaled_matmul._partitioned import Cells

_LARGEST = float(jnp.finfo(jnp.float32).max)


ALIGNED = 128
"""Bytes at multiples of which TMA writes."""
T = 128
"""Values along K that come to shared memory at once, a step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling:
    """When a product is scaled, and where the scales are.

    Attributes:
      tile: S, values along K that share a scale, 128 or 32, unless it is all of K.
      at_end: whether all of K shares its scales, one for each row of lhs and each column of rhs.
      square: whether S columns of rhs share one; not at the end.
      in_bytes: whether scales of lhs, of rhs, are E8M0 as uint8; in tiles of 32 and not square ones.
      fast: whether a sum stays in the tensor cores, which keep about 14 bits of it; at the end only.

    Example:
      >>> Scaling(square=True).bytes_of_step((128, 64)), Scaling(tile=32).parts
      (512, 4)
    """

    tile: int = T
    at_end: bool = False
    square: bool = False
    in_bytes: tuple[bool, bool] = (False, False)
    fast: bool = False

    def __post_init__(self) -> None:
        if (self.square and self.at_end) or (self.fast and not self.at_end):
            raise ValueError(f"{self!r}: square are scales of steps; only what is scaled at the end can be fast.")
        if self.tile not in (32, T) or (any(self.in_bytes) and self.tile == T) or (self.square and self.in_bytes[1]):
            raise ValueError(
                f"{self!r}: a tile is 32 or 128; bytes are scales of 1x32, for shared memory begins rows at 128."
            )

    @property
    def parts(self) -> int:
        """Of a step, each with scales of its own."""
        return T // self.tile

    @property
    def cells(self) -> Cells:
        """For several devices."""
        return Cells(step=T, parts=0 if self.at_end else self.parts, columns=self.tile if self.square else 1)

    def box(self, side: int, extent: int) -> tuple[Axes, Any] | None:
        """Shape and dtype of the scales that come with a step of `extent` rows of lhs (side 0) or columns of rhs, if any do."""
        if self.at_end or (side == 1 and self.square and self.tile == T):
            return None
        if side == 1 and self.square:
            return (extent // self.tile * self.parts,), jnp.float32
        return (self.parts, extent), jnp.uint8 if self.in_bytes[side] else jnp.float32

    def bytes_of_step(self, tile: tuple[int, int]) -> int:
        """Of the scales that go to shared memory with a step of a tile (M, N)."""
        boxes = [box for box in map(self.box, (0, 1), tile) if box is not None]
        return sum(max(math.prod(shape) * jnp.dtype(dtype).itemsize, ALIGNED) for shape, dtype in boxes)


def of_bytes(scales: Array) -> Array:
    """E8M0 bytes [...] as float32: 2^(e - 127) and, of 255, NaN.

    Byte 0 becomes a subnormal number, which Hopper multiplies exactly; a CPU, which interprets the kernel, takes it for 0.
    """
    exponent = scales.astype(jnp.int32)
    power = lax.bitcast_convert_type(jnp.maximum(exponent << 23, 1 << 22), jnp.float32)
    return jnp.where(exponent == 255, jnp.float32(jnp.nan), power)


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
