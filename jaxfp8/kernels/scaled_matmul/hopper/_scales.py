"""The scales of two operands as Hopper's matmul reads them.

Letters: B batch, M N K matmul, S the tile along K, P = T / S tiles in a step, C = ceil(K / T)
  steps; T = 128.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxfp8._geometry import Geometry, OperandAxes
from jaxfp8._typing import Array
from jaxfp8.kernels.scaled_matmul._matrices import as_matrix, repeated_scale
from jaxfp8.kernels.scaled_matmul.hopper._scaling import Scaling, T, of_bytes
from jaxfp8.numerics._formats import E8M0
from jaxfp8.tensors._quantized_tensor import QuantizedTensor

_LEAST = 32
"""Values along K that one `wgmma` multiplies."""


def inner_tile(lhs: QuantizedTensor, geometry: Geometry) -> tuple[int, int]:
    """Which pair of contracted axes has tiles, and S: 128 if they are multiples of it, or 32.

    `lhs` is in tiles, and rhs in the same along contracted axes.
    """
    along = lhs.granularity.along(lhs.ndim)
    tiles = [along[axis] for axis in geometry.lhs.contracted]
    for tile in (T, _LEAST):
        whole = [pair for pair, side in enumerate(tiles) if side % tile == 0]
        if whole:
            return whole[-1], tile
    raise NotImplementedError(
        f"tiles of {tiles} along the contracted axes; it takes multiples of {_LEAST}"
    )


def shares_columns(rhs: QuantizedTensor, axes: OperandAxes, tile: int) -> bool:
    """Whether S columns of rhs have one scale for each S of K: square tiles.

    Then the kernel reads one scale for all of these columns.
    """
    if len(axes.kept) != 1:
        return False
    square = dict.fromkeys((axes.kept[0], axes.contracted[-1]), tile)
    sides = enumerate(rhs.granularity.along(rhs.ndim))
    return all(side == square.get(axis, 1) for axis, side in sides)


def scale_matrix(operand: QuantizedTensor, axes: OperandAxes, side: int, scaling: Scaling) -> Array:
    """Scales of lhs (side 0) [B, M, P C] or rhs (side 1) [B, N, P C].

    For square tiles of rhs [B, N/S, P C]. If all of K shares a scale, [B, M or N, 1].
    """
    scale = operand.scale
    if scale.dtype == E8M0.dtype:
        scale = lax.bitcast_convert_type(scale, jnp.uint8)
        scale = scale if scaling.in_bytes[side] else of_bytes(scale)
    if scaling.at_end:
        shape = (1 if a in axes.contracted else size for a, size in enumerate(operand.shape))
        return as_matrix(jnp.broadcast_to(scale, tuple(shape)), axes)
    if not (scaling.square and side == 1):
        scale = repeated_scale(operand, scale, axes.contracted[-1], scaling.tile)
    return as_matrix(scale, axes, tile=scaling.parts)


def laid(scale: Array, side: int, extent: int, scaling: Scaling) -> Array:
    """A scale matrix as the kernel takes it.

    Zeros are behind it, up to whole tiles of `extent` rows of lhs or columns of rhs.
    """
    if not (scaling.square and side == 1):
        return padded(scale.mT, 2, extent)
    scale = padded(scale, 1, pl.cdiv(extent, scaling.tile))
    if scaling.parts == 1:
        return scale
    # Those of a step beside each other: [B, C, N/S P].
    batch, columns, cells = scale.shape
    scale = scale.reshape(batch, columns, cells // scaling.parts, scaling.parts)
    return scale.transpose(0, 2, 1, 3).reshape(
        batch, cells // scaling.parts, columns * scaling.parts
    )


def padded(x: Array, axis: int, multiple: int) -> Array:
    """Zeros behind an axis, up to a multiple."""
    missing = pl.cdiv(x.shape[axis], multiple) * multiple - x.shape[axis]
    pads = [(0, missing if i == axis else 0, 0) for i in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), pads) if missing else x
