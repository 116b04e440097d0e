"""The block-scaled matmul of Blackwell's tensor cores, through XLA and cuDNN.

The hardware multiplies tiles of 1x32 along the contracted axis with E8M0 scales (MXFP8). A tile of 128, or a square one, is
several of those with one scale, so every pair of tiles with power-of-two scales runs there.

Only for a chip that is named, for XLA has no such matmul for Hopper: there it compiles to a bfloat16 matmul or, from jax
0.11 on, to a loop of scalar code. On other platforms than CUDA the same call takes the path of `_xla_blocks.py`.

References:
  cuBLAS documentation, "1D block scaling"; XLA, gpu/transforms/block_scaling_rewriter.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from jaxfp8._typing import Array, DotDimensionNumbers, DType
from jaxfp8.kernels._on_mesh import mesh_of
from jaxfp8.kernels._platform import chip_named
from jaxfp8.kernels.scaled_matmul import _xla_blocks
from jaxfp8.kernels.scaled_matmul._block_scaled_dot import TILE, block_scaled_dot
from jaxfp8.kernels.scaled_matmul._matrices import as_matrix, axes_of, matrix_shape
from jaxfp8.kernels.scaled_matmul._partitioned import in_auto_mesh, takes_mesh
from jaxfp8.numerics._formats import E8M0
from jaxfp8.numerics._per_block import PerBlock
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


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
    """See `kernels.scaled_matmul._api.scaled_matmul`; sums are in float32 throughout."""
    described = None if chip is None else chip_named(chip)
    if described is None or not described.block_scaled_matmul:
        raise NotImplementedError(
            f"chip={chip!r} has no block-scaled matmul; name a Blackwell chip, 'b200' for instance"
        )
    for operand, axes in zip((lhs, rhs), dimension_numbers[0], strict=True):
        _check(operand, axes)
    if AxisType.Explicit in mesh_of(lhs.values, rhs.values).axis_types:
        inside = functools.partial(
            scaled_matmul, dimension_numbers=dimension_numbers, out_dtype=out_dtype, fast_accumulation=fast_accumulation,
            out_sharding=None, chip=chip,
        )  # fmt: skip
        return in_auto_mesh(inside, lhs, rhs, dimension_numbers, out_sharding)

    def block_scaled(a: Array, b: Array, a_scale: Array, b_scale: Array) -> Array:
        written = out_dtype if out_dtype in (jnp.bfloat16, jnp.float16) else jnp.dtype(jnp.float32)
        shapes = [matrix_shape(operand.shape, dimension_numbers, side) for side, operand in enumerate((lhs, rhs))]
        matrices = [as_matrix(v, dimension_numbers, side, tile=TILE) for side, v in enumerate((a, b))]
        scales = [
            as_matrix(_per_32(operand, scale, dimension_numbers, side), dimension_numbers, side)
            for side, (operand, scale) in enumerate(((lhs, a_scale), (rhs, b_scale)))
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
            raise NotImplementedError(f"{mesh}; inside jax.shard_map it takes meshes that are manual along all axes")


def _is_turned(operand: QuantizedTensor, dimension_numbers: DotDimensionNumbers, side: int) -> bool:
    """Whether the contracted axis has to move behind one that is kept."""
    _, kept, contracted = axes_of(operand.ndim, dimension_numbers, side)
    return contracted[-1] < max(kept, default=-1)


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
