"""XLA's block-scaled matmul as an operation of JAX: on one device, on a mesh, under `jax.vmap`.

`jax.nn.scaled_matmul` is the same operation, but it has two faults on a mesh. Its partitioning
rule splits values and scales of the contracted axis independently. If a device then holds part of a
tile, results are wrong without an error (seen with jax 0.12). Also, the type of its result varies
over no manual axis, so `jax.shard_map` rejects it. Here tiles stay whole.

Letters: B batch, M N K the axes of a matmul, T = K / 32 tiles.
"""

import functools
import json

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from jaxfp8._typing import Array, DType
from jaxfp8.kernels.scaled_matmul._matrices import transposed_last
from jaxfp8.kernels.scaled_matmul._partitioned import Cells, Dot, partitioned
from jaxfp8.sharding._amax import vary_as

TILE = 32
"""Values along K that share a scale in the hardware."""

_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@functools.cache
def block_scaled_dot(out_dtype: DType, transposed: tuple[bool, ...]) -> Dot:
    """The operation, for CUDA; E8M0 scales.

    Args:
      out_dtype: the dtype of the result, bfloat16, float16 or float32.
      transposed: for lhs and rhs, whether XLA wrote values [B, M, K] as [B, K, M] in memory. Then
        it has to transpose them for this operation.
    """
    local = functools.partial(_call, out_dtype, transposed)
    return mapped(local, partitioned(local, Cells(step=TILE)))


def _call(out_dtype: DType, transposed: tuple[bool, ...], *arguments: Array) -> Array:
    """XLA's operation on the arrays of one device."""
    values = transposed_last(arguments[:2], transposed)
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


def mapped(local: Dot, on_mesh: Dot) -> Dot:
    """`local` inside `jax.shard_map`, `on_mesh` elsewhere. Under `jax.vmap` it is still one call.

    If both operands are mapped, B grows. If only one operand is mapped, its rows grow, so that the
    other one is not repeated.
    """

    @custom_vmap
    def dot(*arguments: Array) -> Array:
        if jax.sharding.get_abstract_mesh().manual_axes:
            for argument in arguments:
                arguments = tuple(vary_as(x, argument) for x in arguments)
            return vary_as(local(*arguments), arguments[0])
        return on_mesh(*arguments)

    @dot.def_vmap
    def batched(size: int, is_mapped: list[bool], *arguments: Array) -> tuple[Array, bool]:
        sides = [is_mapped[side] or is_mapped[side + 2] for side in (0, 1)]  # values or scales
        full = [
            jnp.broadcast_to(x, (size, *x.shape)) if sides[n % 2] and not is_mapped[n] else x
            for n, x in enumerate(arguments)
        ]
        if all(sides):
            product = dot(*(x.reshape(-1, *x.shape[2:]) for x in full))
            return product.reshape(size, -1, *product.shape[1:]), True
        rows = [
            x.swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[3]) if x.ndim == 4 else x for x in full
        ]
        product = dot(*rows)
        axis = 1 if sides[0] else 2
        split = (
            *product.shape[:axis],
            size,
            product.shape[axis] // size,
            *product.shape[axis + 1 :],
        )
        return jnp.moveaxis(product.reshape(split), axis, 0), True

    return dot
