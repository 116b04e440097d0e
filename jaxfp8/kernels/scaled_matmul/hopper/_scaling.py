"""How Hopper's matmul is scaled: how much of K shares a scale, and the arithmetic in registers.

With scales of tiles along K, the product of a tile leaves the tensor cores, is scaled, and is
added. With scales that all of K shares, the sum is scaled once, by the smaller of the two scales
first. XLA's backend does the same: a finite result never overflows on the way.

**Tiles of 32 are scaled four times as often as tiles of 128, and that bounds their speed.** A
multiprocessor of an H100 multiplies 4096 pairs of FP8 in a cycle, or 2048 of bfloat16, and has 128
lanes for float32. A step of a product of 128 x 128 keeps its tensor cores busy for 512 cycles in
FP8, for 1024 in bfloat16. Meanwhile the lanes scale and add. The table has instructions of one
thread for one step, and their cycles, if FFMA, FMUL and FMNMX are issued one at a time. LDS reads
scales. "Speed" is the most that is possible, relative to bfloat16. Instructions are of the tiling
"large", compiled for H200 (tests/deviceless/test_compiled_matmul.py counts them); cycles and speed
are estimated.

  tiles             FFMA   FMUL   FMNMX   LDS   cycles   speed
  1x128 @ 128x128     64      2       2     2      136    2.0
  1x128 @ 1x128       64     64      64    18      384    2.0
  1x32 @ 32x32       256     32      32    24      640    1.6
  1x32 @ 1x32        256    256     256    72     1536    0.67

So 1x32 @ 1x32 cannot be faster than bfloat16 where operations bound the time. For large products
take XLA's backend, `fp8.Kernels("h200", matmuls="xla")`, which multiplies in bfloat16. For few rows
of lhs the bytes of the weight bound the time, and this kernel reads half of them. 1x32 @ 32x32 (a
recipe with w_tile_dim=2) is between bfloat16 and FP8, if all overlaps.

Scales in E8M0 are bytes in memory. The kernel makes float32 of those of rows. It does so for those
of columns only if lhs has few rows: the conversion takes five instructions, and each thread has 16
columns to a row. In other cases, and for square tiles, they become float32 before the kernel.

Letters: K of the matmul; S the tile along K, R C a patch of the product; T = 128.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array, Axes
from jaxfp8.kernels.scaled_matmul._partitioned import Cells

T = 128
"""Values along K that come to shared memory at once, a step."""
ALIGNED = 128
"""TMA writes to shared memory at multiples of so many bytes."""
_LARGEST = float(jnp.finfo(jnp.float32).max)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling:
    """When a product is scaled, and where the scales are.

    Attributes:
      tile: S, 128 or 32: values along K that share a scale. 128 if all of K shares it.
      at_end: whether all of K shares its scales. Each row of lhs and column of rhs has one.
      square: whether S columns of rhs share a scale, too. Not if `at_end`.
      in_bytes: whether scales of lhs, and of rhs, are E8M0 as uint8. Tiles of 32 only, and not
        square ones.
      fast: whether a sum stays in the tensor cores, which keep about 14 bits of it. Only if
        `at_end`.

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
            raise ValueError(
                f"{self!r}: square are scales of steps; only what is scaled at the end can be fast."
            )
        if (
            self.tile not in (32, T)
            or (any(self.in_bytes) and self.tile == T)
            or (self.square and self.in_bytes[1])
        ):
            raise ValueError(
                f"{self!r}: a tile is 32 or 128; bytes are scales of 1x32, for shared memory "
                "begins rows at 128."
            )

    @property
    def parts(self) -> int:
        """Tiles of S in a step. Each has scales of its own."""
        return T // self.tile

    @property
    def cells(self) -> Cells:
        """How arrays of scales are split on several devices."""
        return Cells(
            step=T, parts=0 if self.at_end else self.parts, columns=self.tile if self.square else 1
        )

    def box(self, side: int, extent: int) -> tuple[Axes, Any] | None:
        """Shape and dtype of the scales that come to shared memory with a step.

        `extent`, rows of lhs (side 0) or columns of rhs (side 1) of the step. None for scales that
        are read from global memory.
        """
        if self.at_end or (side == 1 and self.square and self.tile == T):
            return None
        if side == 1 and self.square:
            return (extent // self.tile * self.parts,), jnp.float32
        return (self.parts, extent), jnp.uint8 if self.in_bytes[side] else jnp.float32

    def bytes_of_step(self, tile: tuple[int, int]) -> int:
        """Bytes of the scales that come to shared memory with a step of a tile (M, N)."""
        boxes = [box for box in map(self.box, (0, 1), tile) if box is not None]
        return sum(
            max(math.prod(shape) * jnp.dtype(dtype).itemsize, ALIGNED) for shape, dtype in boxes
        )


def of_bytes(scales: Array) -> Array:
    """E8M0 bytes e [...] as float32: 2^(e - 127), and NaN for 255.

    Byte 0 is 2^-127, a subnormal number. Hopper multiplies it exactly. XLA on a CPU, where the
    kernel is interpreted, flushes it to 0.
    """
    exponent = scales.astype(jnp.int32)
    power = lax.bitcast_convert_type(jnp.maximum(exponent << 23, 1 << 22), jnp.float32)
    return jnp.where(exponent == 255, jnp.float32(jnp.nan), power)


def of_step(of_rows: Array, of_columns: Array, shape: Axes) -> Array:
    """[R, C]: the products of two scales, at most the largest finite number.

    An infinite product times a zero would be NaN. `of_columns` is [C], or [] for all columns.
    """
    if of_columns.ndim == 0:
        return lax.broadcast_in_dim(jnp.minimum(of_rows * of_columns, _LARGEST), shape, (0,))
    both = lax.broadcast_in_dim(of_rows, shape, (0,)) * lax.broadcast_in_dim(
        of_columns, shape, (1,)
    )
    return jnp.minimum(both, _LARGEST)


def scaled_sum(sums: Array, of_rows: Array, of_columns: Array) -> Array:
    """[R, C]: sums of all of K, scaled by rows and columns: the bits of `_along_output.scaled`."""
    rows, columns = (
        lax.broadcast_in_dim(x, sums.shape, (axis,)) for axis, x in enumerate((of_rows, of_columns))
    )
    return sums * jnp.minimum(rows, columns) * jnp.maximum(rows, columns)
