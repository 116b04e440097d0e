"""The scales of two operands as Hopper's matmul reads them.

Letters: B batch, M N K the axes of the matmul, S the side of a tile along K, P = T / S tiles in a
  step, C = ceil(K / T) steps; T = 128.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxfp8._geometry import Geometry, OperandAxes
from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels.scaled_matmul._matrices import as_matrix, repeated_scale
from jaxfp8.kernels.scaled_matmul.hopper._scaling import Scaling, T, of_bytes
from jaxfp8.numerics._formats import E8M0

_LEAST = 32
"""Values along K that one `wgmma` multiplies."""


def inner_tile(lhs: QuantizedTensor, geometry: Geometry) -> tuple[int, int]:
    """Which pair of contracted axes has tiles, and S.

    S is 128 if the tiles are multiples of 128, and 32 if they are multiples of 32. Along contracted
    axes lhs and rhs have the same tiles.
    """
    along = lhs.granularity.along(lhs.ndim)
    tiles = [along[axis] for axis in geometry.lhs.contracted]
    for tile in (T, _LEAST):
        whole = [pair for pair, side in enumerate(tiles) if side % tile == 0]
        if whole:
            return whole[-1], tile
    raise NotImplementedError(
        f"The tiles along the contracted axes are {tiles}. This kernel takes multiples of "
        f"{_LEAST}. Write matmuls='xla' in fp8.Kernels."
    )


def shares_columns(rhs: QuantizedTensor, axes: OperandAxes, tile: int) -> bool:
    """Whether rhs is in square tiles: S columns and S values along K have one scale.

    Then the kernel reads one scale for all of these columns.
    """
    if len(axes.kept) != 1:
        return False
    square = dict.fromkeys((axes.kept[0], axes.contracted[-1]), tile)
    sides = enumerate(rhs.granularity.along(rhs.ndim))
    return all(side == square.get(axis, 1) for axis, side in sides)


def scale_matrix(operand: QuantizedTensor, axes: OperandAxes, side: int, scaling: Scaling) -> Array:
    """The scales of lhs (side 0) as [B, M, P C], or of rhs (side 1) as [B, N, P C].

    Square tiles of rhs give [B, N/S, P C]. If all of K shares a scale, the last size is 1.
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
    """A scale matrix in the layout that the kernel reads (`_kernel.kernel`).

    It is padded with zeros to whole tiles of `extent` rows of lhs or columns of rhs.
    """
    if not (scaling.square and side == 1):
        return padded(scale.mT, 2, extent)
    scale = padded(scale, 1, pl.cdiv(extent, scaling.tile))
    if scaling.parts == 1:
        return scale
    # The scales of a step become adjacent, [B, C, N/S P], so that they are one copy.
    batch, columns, cells = scale.shape
    scale = scale.reshape(batch, columns, cells // scaling.parts, scaling.parts)
    return scale.transpose(0, 2, 1, 3).reshape(
        batch, cells // scaling.parts, columns * scaling.parts
    )


def padded(x: Array, axis: int, multiple: int) -> Array:
    """x with zeros at the end of an axis, so that its size is a multiple of `multiple`."""
    missing = pl.cdiv(x.shape[axis], multiple) * multiple - x.shape[axis]
    pads = [(0, missing if i == axis else 0, 0) for i in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), pads) if missing else x
