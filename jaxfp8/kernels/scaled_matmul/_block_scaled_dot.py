"""XLA's block-scaled matmul as an operation of JAX: on one device, on a mesh, under `jax.vmap`.

`jax.nn.scaled_matmul` is the same operation. It is not used, for its rule of partitioning splits values and scales of the
contracted axis by themselves: where a device would hold part of a tile, results are wrong, silently (seen with jax 0.12);
and its type varies over no manual axis, so that `jax.shard_map` refuses it. Here tiles stay whole.

Letters: B batch, M N K matmul, T = K / 32 tiles.
"""

import functools
import json
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding

from jaxfp8._typing import Array, DType
from jaxfp8.sharding._amax import vary_as
from jaxfp8.sharding._specs import mesh_axes

TILE = 32
"""Values along K that share a scale in the hardware."""

_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

Dot: TypeAlias = Callable[..., Array]
"""(values [B, M, K], values [B, N, K], scales [B, M, T], scales [B, N, T]) -> [B, M, N]"""


@functools.cache
def block_scaled_dot(out_dtype: DType, turned: tuple[bool, bool]) -> Dot:
    """The operation, for CUDA; E8M0 scales.

    Args:
      out_dtype: of the result, bfloat16, float16 or float32.
      turned: for lhs and rhs, whether values [B, M, K] were [B, K, M] before they were transposed for this.
    """
    local = functools.partial(_call, out_dtype, turned)
    return mapped(local, partitioned(local))


def _call(out_dtype: DType, turned: tuple[bool, bool], *arguments: Array) -> Array:
    """XLA's operation on the arrays of one device."""
    values = [_transposed_last(x) if was else x for x, was in zip(arguments[:2], turned, strict=True)]
    (batch, rows, _), (_, columns, _) = (x.shape for x in values)
    config = {"lhs_batch_dimensions": [0], "rhs_batch_dimensions": [0], "dequantize_type": _NAMES[out_dtype.name]}
    call = jax.ffi.ffi_call(
        "__op$block_scaled_dot",
        jax.ShapeDtypeStruct((batch, rows, columns), out_dtype),
        custom_call_api_version=2,  # with a configuration in JSON
        legacy_backend_config=json.dumps({"scaled_dot_backend_config": config}),
    )
    return call(*values, *arguments[2:])


def _transposed_last(x: Array) -> Array:
    """x [B, M, K], which XLA has to transpose after all else: FP8, and not the wider array that it was cast from.

    Left alone it moves the transposition up through the cast, and then casts the copy of the other direction, and masks for
    both, in that order too: a third more traffic in a layer. Nothing passes a barrier in one dimension.
    """
    before = x.mT
    return lax.optimization_barrier(before.reshape(-1)).reshape(before.shape).mT


def takes_mesh(mesh: Any) -> bool:
    """Whether the operation can be traced in this mesh: all axes Auto, or all Manual."""
    return len(set(mesh.axis_types)) <= 1 and AxisType.Explicit not in mesh.axis_types


def mapped(local: Dot, on_mesh: Dot) -> Dot:
    """`on_mesh`, or inside `jax.shard_map` `local`; under `jax.vmap` one call.

    Where only one operand is mapped its rows grow, and the other is not repeated; else B grows.
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
        rows = [x.swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[3]) if x.ndim == 4 else x for x in full]
        product = dot(*rows)
        axis = 1 if sides[0] else 2
        split = (*product.shape[:axis], size, product.shape[axis] // size, *product.shape[axis + 1 :])
        return jnp.moveaxis(product.reshape(split), axis, 0), True

    return dot


def partitioned(local: Dot) -> Dot:
    """`local` on the devices of an Auto mesh: tiles stay whole, and partial sums are added across devices."""

    def partition(mesh: Any, arguments: Any, result: Any) -> Any:
        del result
        lhs, rhs, out, summed = _specs(mesh, arguments[2].shape[2], *map(_spec, arguments[:2]))

        def on_device(*arguments: Array) -> Array:
            product = local(*arguments)
            return lax.psum(product, summed) if summed else product

        placed = tuple(NamedSharding(mesh, jax.P(*spec)) for spec in (lhs, rhs, lhs, rhs))
        return mesh, on_device, NamedSharding(mesh, jax.P(*out)), placed

    def infer(mesh: Any, arguments: Any, result: Any) -> Any:
        del result
        out = _specs(mesh, arguments[2].shape[2], *map(_spec, arguments[:2]))[2]
        return NamedSharding(mesh, jax.P(*out))

    def by(scales: str, values: str, **sizes: int) -> Dot:
        dot = custom_partitioning(lambda *arguments: local(*arguments))
        rule = f"b m {values}, b n {values}, b m {scales}, b n {scales} -> b m n"
        dot.def_partition(
            partition, infer_sharding_from_operands=infer, sharding_rule=rule, need_replication_factors=("k",), **sizes
        )
        return dot

    # The inside of a tile, k, is never split. A rule cannot have a factor of 1, hence another one for a single tile.
    many, single = by("t", "(t k)", k=TILE), by("t", "k")
    return lambda *arguments: (many if arguments[2].shape[2] > 1 else single)(*arguments)


Spec: TypeAlias = tuple[tuple[str, ...], ...]
"""Mesh axes along each axis."""


def _spec(x: Any) -> Spec:
    spec = (*x.sharding.spec, None, None, None)[:3]
    return tuple(map(mesh_axes, spec))


def _specs(mesh: Any, tiles: int, lhs: Spec, rhs: Spec) -> tuple[Spec, Spec, Spec, tuple[str, ...]]:
    """How lhs [B, M, K], rhs [B, N, K] and the result have to lie, and over which mesh axes partial results are summed."""
    sizes = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
    taken: set[str] = set()

    def free(axes: tuple[str, ...]) -> tuple[str, ...]:
        """Those mesh axes that no other axis took."""
        left = tuple(axis for axis in axes if axis not in taken)
        taken.update(left)
        return left

    batch = free(lhs[0] or rhs[0])
    # K stays split if both sides agree and each device gets whole tiles.
    agreed = lhs[2] if lhs[2] == rhs[2] else ()
    contracted = free(agreed) if tiles % math.prod(sizes[axis] for axis in agreed) == 0 else ()
    rows, columns = free(lhs[1]), free(rhs[1])
    return (batch, rows, contracted), (batch, columns, contracted), (batch, rows, columns), contracted
