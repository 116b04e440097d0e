"""The scales of two operands as Hopper's matmul reads them.

Letters: B batch, M N K matmul, S the tile along K, P = T / S of them in a step, C = ceil(K / T) steps; T = 128.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxfp8._typing import Array, Axes, DotDimensionNumbers
from jaxfp8.kernels.scaled_matmul._matrices import as_matrix
from jaxfp8.kernels.scaled_matmul._mosaic_scaling import Scaling, T, of_bytes
from jaxfp8.numerics._formats import E8M0
from jaxfp8.numerics._per_block import PerBlock
from jaxfp8.tensors._quantized_tensor import QuantizedTensor

_LEAST = 32
"""Values along K that one `wgmma` multiplies."""


def inner_tile(lhs: QuantizedTensor, rhs: QuantizedTensor, dimension_numbers: DotDimensionNumbers) -> tuple[int, int]:
    """Which pair of contracted axes has tiles, and S: 128 if they are multiples of it, or 32."""
    tiles = []
    for operand, axes in zip((lhs, rhs), dimension_numbers[0], strict=True):
        assert isinstance(operand.granularity, PerBlock)
        along = operand.granularity.along(operand.ndim)
        tiles.append([along[axis] for axis in axes])
    for tile in (T, _LEAST):
        whole = [pair for pair, side in enumerate(tiles[0]) if side % tile == 0]
        if whole:
            return whole[-1], tile
    raise NotImplementedError(f"tiles of {tiles[0]} along the contracted axes; it takes multiples of {_LEAST}")


def is_square(rhs: QuantizedTensor, axes: tuple[Axes, Axes, Axes], tile: int) -> bool:
    """Whether S columns of rhs have one scale for each S of K, so that it need not be repeated for each."""
    assert isinstance(rhs.granularity, PerBlock)
    sides = rhs.granularity.along(rhs.ndim)
    _, kept, contracted = axes
    alone = all(side == 1 for axis, side in enumerate(sides) if axis not in (*kept, contracted[-1]))
    return len(kept) == 1 and sides[kept[0]] == tile == sides[contracted[-1]] and alone


def scale_matrix(
    operand: QuantizedTensor, dimension_numbers: DotDimensionNumbers, side: int, scaling: Scaling
) -> Array:
    """Scales of lhs [B, M, P C] or rhs [B, N, P C]; of square tiles [B, N/S, P C], at the end [B, M or N, 1]."""
    contracted, scale = tuple(dimension_numbers[0][side]), operand.scale
    if scale.dtype == E8M0.dtype:
        scale = lax.bitcast_convert_type(scale, jnp.uint8)
        scale = scale if scaling.in_bytes[side] else of_bytes(scale)
    if scaling.at_end:
        shape = tuple(1 if axis in contracted else size for axis, size in enumerate(operand.shape))
        scale = jnp.broadcast_to(scale, shape)
    elif not (scaling.square and side == 1):
        scale = _for_each(operand, scale, contracted[-1], scaling.tile)
    return as_matrix(scale, dimension_numbers, side, tile=1 if scaling.at_end else scaling.parts)


def _for_each(operand: QuantizedTensor, scale: Array, inner: int, tile: int) -> Array:
    """One for each S along `inner`, and along other axes for each element."""
    assert isinstance(operand.granularity, PerBlock)
    shape = tuple(-(-size // tile) if axis == inner else size for axis, size in enumerate(operand.shape))
    along = operand.granularity.along(operand.ndim)
    sides = tuple(side // tile if axis == inner else side for axis, side in enumerate(along))
    if all(side == 1 for side in sides):
        return scale
    return jnp.broadcast_to(PerBlock(sides).expand(scale, shape), shape)


def laid(scale: Array, side: int, extent: int, scaling: Scaling) -> Array:
    """A scale matrix as the kernel takes it, zeros behind it up to whole tiles of `extent` rows or columns."""
    if not (scaling.square and side == 1):
        return padded(scale.mT, 2, extent)
    scale = padded(scale, 1, pl.cdiv(extent, scaling.tile))
    if scaling.parts == 1:
        return scale
    # Those of a step beside each other: [B, C, N/S P].
    batch, columns, cells = scale.shape
    scale = scale.reshape(batch, columns, cells // scaling.parts, scaling.parts)
    return scale.transpose(0, 2, 1, 3).reshape(batch, cells // scaling.parts, columns * scaling.parts)


def padded(x: Array, axis: int, multiple: int) -> Array:
    """Zeros behind an axis, up to a multiple."""
    missing = pl.cdiv(x.shape[axis], multiple) * multiple - x.shape[axis]
    pads = [(0, missing if i == axis else 0, 0) for i in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), pads) if missing else x
