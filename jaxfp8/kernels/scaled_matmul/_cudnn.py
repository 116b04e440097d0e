"""The block-scaled matmul of Blackwell's tensor cores, through XLA and cuDNN.

The hardware multiplies tiles of 1x32 along the contracted axis with E8M0 scales (MXFP8). A tile of
128 is several such tiles with one scale, and so is a square tile. So every pair of operands runs
there if their scales are powers of two and their tiles along K are multiples of 32.

Use it only on Blackwell. XLA has no such matmul for Hopper. There the call compiles to a bfloat16
matmul or, from jax 0.11 on, to a loop of scalar code. On other platforms than CUDA the same call
takes the path of `_xla.py`.

References:
  cuBLAS documentation, "1D block scaling"; XLA, gpu/transforms/block_scaling_rewriter.
"""

import dataclasses
import functools
import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from jaxfp8._geometry import OperandAxes
from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, DType
from jaxfp8.kernels._on_mesh import mesh_of
from jaxfp8.kernels.scaled_matmul import _xla
from jaxfp8.kernels.scaled_matmul._call import (
    MatmulCall,
    as_matrix,
    repeat_scale,
    transpose_last,
    xla_transposes,
)
from jaxfp8.kernels.scaled_matmul._partitioned import (
    Cells,
    check_mesh,
    check_not_empty,
    in_auto_mesh,
    mapped,
    partition_matmul,
)
from jaxfp8.numerics._formats import E8M0

# XLA's block-scaled matmul as an operation of JAX: on one device, on a mesh, under `jax.vmap`.
#
# `jax.nn.scaled_matmul` is the same operation, but it has two faults on a mesh. Its partitioning
# rule splits values and scales of the contracted axis independently. If a device then holds part of
# a tile, results are wrong without an error (seen with jax 0.12). Also, the type of its result
# varies over no manual axis, so `jax.shard_map` rejects it. Here tiles stay whole.
#
# Letters: B batch, M N K the axes of a matmul, T = K / 32 tiles.

_TILE = 32
"""Values along K that share a scale in the hardware."""
_CELLS = Cells(step=_TILE)

_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@functools.cache
def _block_scaled_dot(out_dtype: DType, transposed: tuple[bool, ...]) -> Callable[..., Array]:
    """The operation, for CUDA; E8M0 scales. `transposed` is what `xla_transposes` says."""
    local = functools.partial(_call, out_dtype, transposed)
    return mapped(local, partition_matmul(local, _CELLS), _CELLS)


def _call(out_dtype: DType, transposed: tuple[bool, ...], *arguments: Array) -> Array:
    """XLA's operation on the arrays of one device."""
    values = transpose_last(arguments[:2], transposed)
    (batch, rows, _), (_, columns, _) = (x.shape for x in values)
    config = {
        "lhs_batch_dimensions": [0],
        "rhs_batch_dimensions": [0],
        "dequantize_type": _NAMES[out_dtype.name],
    }
    call = jax.ffi.ffi_call(
        "__op$block_scaled_dot",
        jax.ShapeDtypeStruct((batch, rows, columns), out_dtype),
        custom_call_api_version=2,  # the version that takes a configuration in JSON
        legacy_backend_config=json.dumps({"scaled_dot_backend_config": config}),
    )
    return call(*values, *arguments[2:])


# The backend: operands and scales as that operation reads them.


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
        matrices = [as_matrix(v, axes, tile=_TILE) for v, axes in zip((a, b), sides, strict=True)]
        scales = [
            as_matrix(_per_32(operand, scale, axes), axes)
            for operand, scale, axes in zip((lhs, rhs), (a_scale, b_scale), sides, strict=True)
        ]
        dot = _block_scaled_dot(jnp.dtype(written), xla_transposes(sides, call.written_transposed))
        product = dot(*matrices, *scales)
        return product.reshape(call.geometry.out_shape(lhs.shape, rhs.shape)).astype(out_dtype)

    def elsewhere(a: Array, b: Array, a_scale: Array, b_scale: Array) -> Array:
        return _xla.scaled_matmul_in_blocks(
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
    check_not_empty(operand)
    inner = operand.granularity.along(operand.ndim)[axes.contracted[-1]]
    if inner % _TILE:
        raise NotImplementedError(
            f"An operand has a tile of {inner} along the contracted axis. This backend takes "
            f"multiples of {_TILE}. Write matmuls='xla' in fp8.Kernels."
        )
    check_mesh(jax.typeof(operand.values).sharding.mesh)
    check_mesh(jax.sharding.get_abstract_mesh())


def _per_32(operand: QuantizedTensor, scale: Array, axes: OperandAxes) -> Array:
    """The scale of each 1x32 tile, E8M0, in the rank of the operand."""
    if scale.dtype == E8M0.dtype:
        byte = lax.bitcast_convert_type(scale, jnp.uint8)
    else:  # the exponent field of a float32 power of two: both have the bias 127
        byte = (lax.bitcast_convert_type(scale, jnp.uint32) >> 23).astype(jnp.uint8)
    byte = repeat_scale(operand, byte, axes.contracted[-1], _TILE)
    return lax.bitcast_convert_type(byte, E8M0.dtype)
