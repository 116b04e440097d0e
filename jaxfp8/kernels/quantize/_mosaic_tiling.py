"""The layout in which the quantizer in Pallas (Mosaic GPU) writes a copy in tiles.

A block of threads has T rows, and T/S scales for each. TMA writes T scales that are adjacent in
memory. So the kernel writes scales with the rows as last axis. XLA then gives them the axes of x.

Letters: L the leading axes as one, M, K the last two; T = 128; S the side of a tile that shares a
  scale.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxfp8._quantized_tensor import Direction
from jaxfp8._typing import Axes, DType
from jaxfp8.kernels._mosaic_tiles import T, shared_tile
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.numerics._scale import ScaleRule

_SIDES = (128, 32)


class Copy(NamedTuple):
    """Values and scales of a copy: types, refs inside the kernel, arrays after it."""

    values: Any
    scales: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """The tiles of one copy: 1 x S, S x 1 or S x S.

    Attributes:
      side: S.
      transposed: whether the copy is written transposed. A copy in tiles of S x 1 always is.
      square: whether tiles are S x S.
    """

    side: int
    transposed: bool
    square: bool

    @property
    def whole(self) -> bool:
        """Whether the tile of a block of threads has one scale."""
        return self.square and self.side == T

    @property
    def tile(self) -> tuple[int, int]:
        if self.square:
            return self.side, self.side
        return (self.side, 1) if self.transposed else (1, self.side)

    @property
    def cells(self) -> int:
        """The number of scales in a row of the tile of a block of threads."""
        return T // self.side

    def written(self, shape: Axes, format: Format, rule: ScaleRule) -> Copy:
        """The arrays that the kernel writes: values [L, M, K] and scales [L, K/S, M].

        Of a transposed copy they are [L, K, M] and [L, M/S, K]. There are scales for whole tiles of
        T, because Pallas copies one dimension without a check for the end of a row. For squares
        smaller than T, each scale is written for every row.
        """
        lead, m, k = shape
        rows, columns = (k, m) if self.transposed else (m, k)
        across = pl.cdiv(rows, T) * (1 if self.whole else T)
        return Copy(
            jax.ShapeDtypeStruct((lead, rows, columns), format.dtype),
            jax.ShapeDtypeStruct((lead, pl.cdiv(columns, T) * self.cells, across), _dtype(rule)),
        )

    def staged(self, written: Copy, rule: ScaleRule) -> Copy:
        """Shared memory for the tile of a block of threads. A single scale is stored directly."""
        scales = None if self.whole else plgpu.SMEM((self.cells, T), _dtype(rule))
        return Copy(shared_tile(written.values.dtype, written.values.shape), scales)

    def with_axes_of_x(self, copy: Copy, shape: Axes, rule: ScaleRule) -> Copy:
        """The arrays that the kernel wrote, with the axes of x.

        The transpositions here need not cost anything. If the reader transposes back, XLA drops
        both.
        """
        *lead, m, k = shape
        values, scale = copy
        if self.square and self.side < T:
            scale = scale[..., :: self.side]
        if self.transposed:
            values = values.swapaxes(1, 2)
        else:
            scale = scale.swapaxes(1, 2)
        if rule.scale_format is not None:
            scale = lax.bitcast_convert_type(scale, rule.scale_format.dtype)
        down, across = self.tile
        scale = scale[:, : pl.cdiv(values.shape[1], down), : pl.cdiv(k, across)]
        return Copy(
            values.reshape(shape), scale.reshape(*lead, pl.cdiv(m, down), pl.cdiv(k, across))
        )


def tiling_of(direction: Direction, ndim: int) -> Tiling:
    """The tiling of an array of `ndim` axes.

    Raises:
      NotImplementedError: for other granularities than tiles of 1 x S, S x 1, S x S.
    """
    granularity = direction.granularity
    check_sides(granularity, ndim)
    *lead, m, k = granularity.along(ndim)
    if any(side > 1 for side in lead):
        raise _cannot(granularity, ndim)
    transposed = direction.transposed if m == k else k == 1
    return Tiling(side=max(m, k), transposed=transposed, square=m == k)


def check_sides(granularity: AbstractGranularity, ndim: int) -> None:
    """Raises NotImplementedError unless a tile has one side S, along one axis or two.

    Axes may be merged only after this check, so that its error names the tile that the user wrote.
    """
    sides = [side for side in granularity.along(ndim) if side > 1]
    if ndim < 2 or len(set(sides)) != 1 or len(sides) > 2 or sides[0] not in _SIDES:
        raise _cannot(granularity, ndim)


def _cannot(granularity: AbstractGranularity, ndim: int) -> NotImplementedError:
    return NotImplementedError(
        f"The cast has {granularity!r} for an array of {ndim} axes. This kernel takes tiles of "
        f"1 x S, S x 1 and S x S along the last two axes, with S in {_SIDES}. Write casts='xla' in "
        "fp8.Kernels."
    )


def _dtype(rule: ScaleRule) -> DType:
    """The dtype in which the kernel writes scales. It writes E8M0 as bytes."""
    return jnp.dtype(jnp.float32 if rule.scale_format is None else jnp.uint8)
