"""How Hopper's matmul is scaled: how much of K shares a scale, and the arithmetic in registers.

With scales of tiles along K, the product of a tile leaves the tensor cores, is scaled, and is
added. With scales that all of K shares, the sum is scaled once, by the smaller of the two scales
first. Otherwise the sum times the larger scale could overflow, although the result is finite. XLA's
backend does the same.

**Tiles of 32 are scaled four times as often as tiles of 128, and that bounds their speed.** A
multiprocessor of an H100 multiplies 4096 pairs of FP8 in a cycle, or 2048 of bfloat16, and has 128
lanes for float32. A step of a product of 128 x 128 keeps its tensor cores busy for 512 cycles in
FP8, for 1024 in bfloat16. Meanwhile the lanes scale and add.

The table has the instructions of one thread for one step. LDS reads scales. The instructions are
those of the tiling "large", compiled for H200 (tests/deviceless/test_compiled_matmul.py counts
them). Cycles and speed are estimated. Cycles are those of FFMA, FMUL and FMNMX, issued one at a
time. "Speed" is the largest possible speed, relative to bfloat16.

  tiles             FFMA   FMUL   FMNMX   LDS   cycles   speed
  1x128 @ 128x128     64      2       2     2      136    2.0
  1x128 @ 1x128       64     64      64    18      384    2.0
  1x32 @ 32x32       256     32      32    24      640    1.6
  1x32 @ 1x32        256    256     256    72     1536    0.67

An H200 measured less (jax 0.11.2, 8192 cubed): 1.41, 0.85 with its transpositions, 0.69 and 0.38.

So 1x32 @ 1x32 cannot be faster than bfloat16 if operations bound the time. For large products
take XLA's backend, `fp8.Kernels("h200", matmuls="xla")`, which multiplies in bfloat16. For few rows
of lhs the bytes of the weight bound the time, and this kernel reads half of them. The speed of
1x32 @ 32x32 (a recipe with w_tile_dim=2) is between bfloat16 and FP8, if all work overlaps.

E8M0 scales are bytes in memory. The kernel converts the scales of rows to float32. It converts
those of columns only if lhs has few rows. The conversion takes five instructions, and a thread has
16 columns for each of its rows. In other cases, and for square tiles, XLA converts them before.

Letters: K the contracted axis; S the side of a tile along K; R x C a patch of the product; T = 128.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array, Axes
from jaxfp8.kernels.scaled_matmul._partitioned import Cells

T = 128
"""The values along K of one step, which are copied to shared memory together."""
ALIGNED = 128
"""TMA writes to addresses in shared memory that are multiples of so many bytes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaling:
    """When a product is scaled, and where the scales are."""

    tile: int = T  # S, the values along K that share a scale, 128 or 32; 128 with `at_end`
    # Whether all of K shares a scale. Each row of lhs and each column of rhs has one.
    at_end: bool = False
    square: bool = False  # whether S columns of rhs share a scale, too; not with `at_end`
    # Whether scales of lhs, and of rhs, are E8M0 as uint8. Only for tiles of 32 that are not
    # square.
    in_bytes: tuple[bool, bool] = (False, False)
    # Whether a sum stays in the tensor cores, which keep about 14 bits of it. Only with `at_end`.
    fast: bool = False

    def __post_init__(self) -> None:
        if (self.square and self.at_end) or (self.fast and not self.at_end):
            raise ValueError(
                f"{self!r} is not possible. Square tiles have scales in each step, so leave at_end "
                "out. Only what is scaled at the end can be fast."
            )
        if (
            self.tile not in (32, T)
            or (any(self.in_bytes) and self.tile == T)
            or (self.square and self.in_bytes[1])
        ):
            raise ValueError(
                f"{self!r} is not possible. A tile is 32 or 128. Only tiles of 1x32 have scales in "
                "bytes. Take tile=32 or tile=128, and in_bytes=(False, False) for other tiles."
            )

    @property
    def parts(self) -> int:
        """How many tiles along K a step has. Each has scales of its own."""
        return T // self.tile

    @property
    def cells(self) -> Cells:
        """Which values must stay on one device, because they share a scale."""
        return Cells(
            step=T, parts=0 if self.at_end else self.parts, columns=self.tile if self.square else 1
        )

    def box(self, side: int, extent: int) -> tuple[Axes, Any] | None:
        """Shape and dtype of the scales that are copied to shared memory with a step.

        `extent` counts rows of lhs (side 0) or columns of rhs. None for scales in global memory.
        """
        if self.at_end or (side == 1 and self.square and self.tile == T):
            return None
        if side == 1 and self.square:
            return (extent // self.tile * self.parts,), jnp.float32
        return (self.parts, extent), jnp.uint8 if self.in_bytes[side] else jnp.float32

    def bytes_of_step(self, tile: tuple[int, int]) -> int:
        """Bytes of the scales that are copied to shared memory with a step of a tile (M, N)."""
        boxes = [box for box in map(self.box, (0, 1), tile) if box is not None]
        return sum(
            max(math.prod(shape) * jnp.dtype(dtype).itemsize, ALIGNED) for shape, dtype in boxes
        )


def float32_of_bytes(scales: Array) -> Array:
    """E8M0 bytes e [...] as float32: 2^(e - 127), and NaN for 255."""
    # `exponent << 23` is the exponent field, which for byte 0 would be the number 0. The bits of
    # 2^-127 are 1 << 22. For byte 255 the field gives inf, which becomes NaN.
    # Hopper multiplies 2^-127, a subnormal number, exactly. XLA on a CPU, where the kernel is
    # interpreted, flushes it to 0.
    exponent = scales.astype(jnp.int32)
    power = lax.bitcast_convert_type(jnp.maximum(exponent << 23, 1 << 22), jnp.float32)
    return jnp.where(exponent == 255, jnp.float32(jnp.nan), power)
