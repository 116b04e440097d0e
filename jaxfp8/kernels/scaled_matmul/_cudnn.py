"""The block-scaled matmul of Blackwell's tensor cores, through XLA and cuDNN.

The hardware multiplies tiles of 1x32 along the contracted axis with E8M0 scales (MXFP8). A tile of 128, or a square one, is
several of those with one scale, so every pair of tiles with power-of-two scales runs there.

Only for a chip that is named, for XLA has no such matmul for Hopper: there it compiles to a bfloat16 matmul or, from jax
0.11 on, to a loop of scalar code. On other platforms than CUDA the same call takes the path of `_xla_blocks.py`.

References:
  cuBLAS documentation, "1D block scaling"; XLA, gpu/transforms/block_scaling_rewriter.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array, Axes, DotDimensionNumbers, DType
from jaxfp8.kernels._platform import chip_named
from jaxfp8.kernels.scaled_matmul import _xla_blocks
from jaxfp8.kernels.scaled_matmul._block_scaled_dot import TILE, block_scaled_dot, takes_mesh
from jaxfp8.numerics._formats import E8M0
from jaxfp8.numerics._per_block import PerBlock
from jaxfp8.tensors._quantized_tensor import QuantizedTensor

_Shape: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Sizes of the batch, kept and contracted axes."""


def scaled_matmul(
    lhs: QuantizedTensor,
    rhs: QuantizedTensor,
    *,
    dimension_numbers: DotDimensionNumbers,
    out_dtype: DType,
    fast_accumulation: bool,
    out_sharding: Any,
    chip: str | None,
) -> Array:
    """See `kernels.scaled_matmul._api.scaled_matmul`."""
    del fast_accumulation  # float32 throughout
    described = None if chip is None else chip_named(chip)
    if described is None or not described.block_scaled_matmul:
        raise NotImplementedError(
            f"chip={chip!r} has no block-scaled matmul; name a Blackwell chip, 'b200' for instance"
        )
    for operand, axes in zip((lhs, rhs), dimension_numbers[0], strict=True):
        _check(operand, axes)

    def block_scaled(a: Array, b: Array, a_scale: Array, b_scale: Array) -> Array:
        written = out_dtype if out_dtype in (jnp.bfloat16, jnp.float16) else jnp.dtype(jnp.float32)
        shapes = [_matrix_shape(operand, dimension_numbers, side) for side, operand in enumerate((lhs, rhs))]
        matrices = [
            _matrix(v, shape, dimension_numbers, side)
            for side, (v, shape) in enumerate(zip((a, b), shapes, strict=True))
        ]
        scales = [
            _matrix(_per_32(operand, scale, dimension_numbers, side), shape, dimension_numbers, side, tile=1)
            for side, (operand, scale, shape) in enumerate(zip((lhs, rhs), (a_scale, b_scale), shapes, strict=True))
        ]
        turned = _is_turned(lhs, dimension_numbers, 0), _is_turned(rhs, dimension_numbers, 1)
        product = block_scaled_dot(jnp.dtype(written), turned)(*matrices, *scales)
        batch, kept, _ = zip(*shapes, strict=True)
        return product.reshape(*batch[0], *kept[0], *kept[1]).astype(out_dtype)

    def elsewhere(a: Array, b: Array, a_scale: Array, b_scale: Array) -> Array:
        operands = (
            QuantizedTensor(values, scale, operand.granularity, operand.dtype, operand.power_of_two)
            for operand, values, scale in ((lhs, a, a_scale), (rhs, b, b_scale))
        )
        return _xla_blocks.scaled_matmul(
            *operands, dimension_numbers=dimension_numbers, out_dtype=out_dtype, out_sharding=out_sharding
        )

    return lax.platform_dependent(lhs.values, rhs.values, lhs.scale, rhs.scale, cuda=block_scaled, default=elsewhere)


def _check(operand: QuantizedTensor, contracted: Sequence[int]) -> None:
    if not isinstance(operand.granularity, PerBlock) or not operand.power_of_two:
        raise NotImplementedError(
            f"{operand.granularity!r} with power_of_two={operand.power_of_two}; it takes tiles with power-of-two scales"
        )
    if 0 in operand.shape:
        raise NotImplementedError(f"an empty operand, {list(operand.shape)}")
    inner = operand.granularity.along(operand.ndim)[contracted[-1]]
    if inner % TILE:
        raise NotImplementedError(f"a tile of {inner} along the contracted axis; it takes multiples of {TILE}")
    for mesh in (jax.typeof(operand.values).sharding.mesh, jax.sharding.get_abstract_mesh()):
        if not takes_mesh(mesh):
            raise NotImplementedError(
                f"{mesh}; it takes meshes whose axes are all Auto, or inside jax.shard_map all Manual"
            )


def _axes(operand: QuantizedTensor, dimension_numbers: DotDimensionNumbers, side: int) -> tuple[Axes, Axes, Axes]:
    contracted, batch = (tuple(pair[side]) for pair in dimension_numbers)
    return batch, tuple(a for a in range(operand.ndim) if a not in batch + contracted), contracted


def _matrix_shape(operand: QuantizedTensor, dimension_numbers: DotDimensionNumbers, side: int) -> _Shape:
    batch, kept, contracted = (
        tuple(operand.shape[axis] for axis in axes) for axes in _axes(operand, dimension_numbers, side)
    )
    return batch, kept, contracted


def _is_turned(operand: QuantizedTensor, dimension_numbers: DotDimensionNumbers, side: int) -> bool:
    """Whether the contracted axis has to move behind one that is kept."""
    _, kept, contracted = _axes(operand, dimension_numbers, side)
    return contracted[-1] < max(kept, default=-1)


def _matrix(x: Array, shape: _Shape, dimension_numbers: DotDimensionNumbers, side: int, tile: int = TILE) -> Array:
    """x [...] as [batch, kept, contracted], the innermost contracted axis padded to whole tiles."""
    contracted, batch = (tuple(pair[side]) for pair in dimension_numbers)
    kept = tuple(a for a in range(x.ndim) if a not in batch + contracted)
    pads = [(0, -x.shape[a] % tile if a == contracted[-1] else 0) for a in range(x.ndim)]
    x = jnp.pad(x, pads) if any(after for _, after in pads) else x
    n_batch, n_kept = math.prod(shape[0]), math.prod(shape[1])
    contracted_size = math.prod(x.shape[a] for a in contracted)
    return x.transpose(batch + kept + contracted).reshape(n_batch, n_kept, contracted_size)


def _per_32(operand: QuantizedTensor, scale: Array, dimension_numbers: DotDimensionNumbers, side: int) -> Array:
    """The scale of each 1x32 tile, E8M0, in the rank of the operand."""
    granularity = operand.granularity
    assert isinstance(granularity, PerBlock)
    byte = lax.bitcast_convert_type(scale, jnp.uint8) if scale.dtype == E8M0.dtype else _exponent_byte(scale)
    inner = dimension_numbers[0][side][-1]
    tile = granularity.along(operand.ndim)
    # Every axis at full length but the innermost contracted one, which keeps a cell for each 32.
    shape = tuple(-(-size // TILE) if axis == inner else size for axis, size in enumerate(operand.shape))
    sides = tuple(side // TILE if axis == inner else side for axis, side in enumerate(tile))
    if any(side > 1 for side in sides):
        byte = jnp.broadcast_to(PerBlock(sides).expand(byte, shape), shape)
    return lax.bitcast_convert_type(byte, E8M0.dtype)


def _exponent_byte(scale: Array) -> Array:
    """The E8M0 byte of a float32 power of two, which is its exponent field."""
    return (lax.bitcast_convert_type(scale, jnp.uint32) >> 23).astype(jnp.uint8)
