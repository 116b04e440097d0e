"""The block-scaled matmul of Blackwell's tensor cores, through XLA and cuDNN.

The hardware multiplies tiles of 1x32 along the contracted axis with E8M0 scales (MXFP8). A tile of
128 is several such tiles with one scale, and so is a square tile. So every pair of operands runs
there if their scales are powers of two and their tiles along K are multiples of 32.

Use it only on Blackwell. XLA has no such matmul for Hopper. There the call compiles to a bfloat16
matmul or, from jax 0.11 on, to a loop of scalar code. On other platforms than CUDA the same call
takes the path of `_xla_blocks.py`.

References:
  cuBLAS documentation, "1D block scaling"; XLA, gpu/transforms/block_scaling_rewriter.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from jaxfp8._geometry import OperandAxes
from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels._on_mesh import mesh_of
from jaxfp8.kernels.scaled_matmul import _xla_blocks
from jaxfp8.kernels.scaled_matmul._block_scaled_dot import TILE, block_scaled_dot
from jaxfp8.kernels.scaled_matmul._call import MatmulCall
from jaxfp8.kernels.scaled_matmul._matrices import as_matrix, left_to_xla, repeated_scale
from jaxfp8.kernels.scaled_matmul._partitioned import in_auto_mesh, takes_mesh
from jaxfp8.numerics._formats import E8M0


def scaled_matmul(lhs: QuantizedTensor, rhs: QuantizedTensor, call: MatmulCall) -> Array:
    """See `fp8.scaled_matmul`. Sums are always in float32, also with fast accumulation."""
    for operand, axes in zip((lhs, rhs), call.geometry.sides, strict=True):
        _check(operand, axes)
    if AxisType.Explicit in mesh_of(lhs.values, rhs.values).axis_types:
        return in_auto_mesh(scaled_matmul, lhs, rhs, call)

    def block_scaled(a: Array, b: Array, a_scale: Array, b_scale: Array) -> Array:
        out_dtype = call.out_dtype
        written = out_dtype if out_dtype in (jnp.bfloat16, jnp.float16) else jnp.dtype(jnp.float32)
        sides = call.geometry.sides
        matrices = [as_matrix(v, axes, tile=TILE) for v, axes in zip((a, b), sides, strict=True)]
        scales = [
            as_matrix(_per_32(operand, scale, axes), axes)
            for operand, scale, axes in zip((lhs, rhs), (a_scale, b_scale), sides, strict=True)
        ]
        dot = block_scaled_dot(jnp.dtype(written), left_to_xla(sides, call.written_transposed))
        product = dot(*matrices, *scales)
        return product.reshape(call.geometry.out_shape(lhs.shape, rhs.shape)).astype(out_dtype)

    def elsewhere(a: Array, b: Array, a_scale: Array, b_scale: Array) -> Array:
        return _xla_blocks.scaled_matmul(
            dataclasses.replace(lhs, values=a, scale=a_scale),
            dataclasses.replace(rhs, values=b, scale=b_scale),
            call,
        )

    return lax.platform_dependent(
        lhs.values, rhs.values, lhs.scale, rhs.scale, cuda=block_scaled, default=elsewhere
    )


def _check(operand: QuantizedTensor, axes: OperandAxes) -> None:
    if not operand.granularity.in_tiles or not operand.power_of_two:
        raise NotImplementedError(
            f"An operand has {operand.granularity!r} and power_of_two={operand.power_of_two}; it "
            "takes tiles with power-of-two scales. Write matmuls='xla' in fp8.Kernels."
        )
    if 0 in operand.shape:
        raise NotImplementedError(
            f"An operand is empty, {list(operand.shape)}. This backend needs values. Write "
            "matmuls='xla' in fp8.Kernels."
        )
    inner = operand.granularity.along(operand.ndim)[axes.contracted[-1]]
    if inner % TILE:
        raise NotImplementedError(
            f"An operand has a tile of {inner} along the contracted axis. This backend takes "
            f"multiples of {TILE}. Write matmuls='xla' in fp8.Kernels."
        )
    for mesh in (jax.typeof(operand.values).sharding.mesh, jax.sharding.get_abstract_mesh()):
        if not takes_mesh(mesh):
            raise NotImplementedError(
                f"The mesh is {mesh}. Inside jax.shard_map this backend needs a mesh with all axes "
                "manual. Name all axes in jax.shard_map."
            )


def _per_32(operand: QuantizedTensor, scale: Array, axes: OperandAxes) -> Array:
    """The scale of each 1x32 tile, E8M0, in the rank of the operand."""
    byte = (
        lax.bitcast_convert_type(scale, jnp.uint8)
        if scale.dtype == E8M0.dtype
        else _exponent_byte(scale)
    )
    byte = repeated_scale(operand, byte, axes.contracted[-1], TILE)
    return lax.bitcast_convert_type(byte, E8M0.dtype)


def _exponent_byte(scale: Array) -> Array:
    """The E8M0 byte of a float32 power of two: its exponent field, for both have the bias 127."""
    return (lax.bitcast_convert_type(scale, jnp.uint32) >> 23).astype(jnp.uint8)
