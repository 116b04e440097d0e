"""The scaled matmul of Hopper's tensor cores, in Pallas (Mosaic GPU).

It takes two kinds of operands. If both are in tiles of 128 or 32, the product of each tile is
scaled. If both are scaled per tensor or along kept axes, the sum is scaled before it is written.
XLA's backend needs a second pass over the result for scales of rows.

The kernel (`_kernel.py`) reads both operands with K last in memory, because Hopper multiplies FP8
only like that. XLA transposes other operands before the kernel, in one pass over FP8 values. There
is no such pass if the quantizer wrote the copy transposed, as it does for tiles of 128x1. XLA also
copies an operand to pad it, if K is no multiple of 128 or its rows are no multiple of 8.

Letters: B batch, M N K the axes of the matmul; T = 128.

References:
  DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from jaxfp8._geometry import Geometry
from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, DType
from jaxfp8.kernels._mosaic_tiles import check_jax
from jaxfp8.kernels._on_mesh import mesh_of
from jaxfp8.kernels.scaled_matmul._call import MatmulCall, as_matrix, transpose_last, xla_transposes
from jaxfp8.kernels.scaled_matmul._partitioned import (
    check_mesh,
    check_not_empty,
    in_auto_mesh,
    mapped,
    partition_matmul,
)
from jaxfp8.kernels.scaled_matmul.hopper._kernel import multiply
from jaxfp8.kernels.scaled_matmul.hopper._matmul import (
    inner_tile,
    scale_matrix,
    shares_columns,
)
from jaxfp8.kernels.scaled_matmul.hopper._scaling import Scaling, T
from jaxfp8.kernels.scaled_matmul.hopper._tiling import CHOICES, MULTIPROCESSORS, Tiling
from jaxfp8.numerics._formats import E8M0

_WRITTEN = (jnp.bfloat16, jnp.float16, jnp.float32)
_FEW = 128
"""Up to this number of rows of lhs, the bytes of rhs bound the time.

With more rows operations bound the time, and converting one E8M0 scale to float32 takes five.
"""


def scaled_matmul(
    lhs: QuantizedTensor,
    rhs: QuantizedTensor,
    call: MatmulCall,
    *,
    add_to: Array | None = None,
    tiling: Tiling | None = None,
) -> Array:
    """See `fp8.scaled_matmul`. `_choose` takes a tiling if there is none.

    Both operands are in tiles of a multiple of 32 along a contracted axis, or both are scaled per
    tensor or along axes that are not contracted. With fast accumulation sums stay in the tensor
    cores, unless the operands are in tiles. Otherwise each 128 products are added in float32, or
    each 32 with tiles of 32. `add_to` is of the result's shape.

    Raises NotImplementedError for other operands, meshes with some axes manual, and
    `jax_enable_x64`. Also for `add_to` on several devices or in an Explicit mesh, except inside
    `jax.shard_map`.
    """
    check_operands(lhs, rhs, call)
    _check_call(lhs, rhs, call, add_to)
    if AxisType.Explicit in mesh_of(lhs.values, rhs.values).axis_types:
        return in_auto_mesh(functools.partial(scaled_matmul, tiling=tiling), lhs, rhs, call)
    if call.out_sharding is not None:
        raise NotImplementedError(
            f"out_sharding={call.out_sharding} needs an Explicit mesh. Leave it out, or make the "
            "mesh Explicit."
        )
    geometry, scaling = scaling_of(lhs, rhs, call)
    sides = list(zip((lhs, rhs), geometry.sides, strict=True))
    values = [as_matrix(operand.values, axes, tile=T) for operand, axes in sides]
    scales = [
        scale_matrix(operand, axes, side, scaling) for side, (operand, axes) in enumerate(sides)
    ]
    rows, columns = (x.shape[1] for x in values)
    before = () if add_to is None else (add_to.reshape(values[0].shape[0], rows, columns),)
    transposed = xla_transposes(geometry.sides, call.written_transposed)
    local = functools.partial(_product, call.out_dtype, tiling, scaling, transposed)
    # `_check_call` lets `add_to` pass on one device only, and inside `jax.shard_map`.
    split = partition_matmul(local, scaling.cells) if add_to is None else local
    product = mapped(local, split, scaling.cells)(*values, *scales, *before)
    return product.reshape(geometry.out_shape(lhs.shape, rhs.shape))


def scaling_of(
    lhs: QuantizedTensor, rhs: QuantizedTensor, call: MatmulCall, *, grouped: bool = False
) -> tuple[Geometry, Scaling]:
    """The axes of the matmul, with those of tiles innermost, and how the result is scaled."""
    if not lhs.granularity.in_tiles:
        return call.geometry, Scaling(at_end=True, fast=call.fast_accumulation)
    pair, tile = inner_tile(lhs, call.geometry)
    geometry = call.geometry.with_innermost(pair)
    square = shares_columns(rhs, geometry.rhs, tile)
    # The kernel can read E8M0 scales of 1x32 as bytes. It always does so for lhs, and for rhs if
    # that saves time.
    lhs_in_bytes, rhs_in_bytes = (
        tile < T and operand.scale.dtype == E8M0.dtype for operand in (lhs, rhs)
    )
    _, rows, _ = geometry.lhs.matrix_shape(lhs.shape)
    rhs_in_bytes = rhs_in_bytes and not square and rows <= _FEW
    if grouped:
        # With square tiles of 32 a patch is 32 columns wide. A ragged patch of so few bytes a row
        # could not be written in parts.
        square, rhs_in_bytes = square and tile == T, False
    return geometry, Scaling(tile=tile, square=square, in_bytes=(lhs_in_bytes, rhs_in_bytes))


def check_operands(lhs: QuantizedTensor, rhs: QuantizedTensor, call: MatmulCall) -> None:
    """Raise NotImplementedError for a process, operands or a result that the kernel cannot do."""
    check_jax()
    if jax.config.read("jax_enable_x64"):
        raise NotImplementedError(
            "jax_enable_x64 is on. The kernel counts tiles in int32. Write matmuls='xla' in "
            "fp8.Kernels, or switch jax_enable_x64 off."
        )
    for operand in (lhs, rhs):
        if operand.scale.dtype != jnp.float32 and not operand.granularity.in_tiles:
            raise NotImplementedError(
                f"An operand has {operand.granularity!r} with scales in {operand.scale.dtype}. "
                "Without tiles this kernel takes float32 scales. Write matmuls='xla' in "
                "fp8.Kernels."
            )
        check_not_empty(operand)
    if call.out_dtype not in _WRITTEN:
        raise NotImplementedError(
            f"The result is {call.out_dtype}. This kernel writes bfloat16, float16 or float32. "
            "Take one of these."
        )
    if lhs.granularity.in_tiles != rhs.granularity.in_tiles:
        raise NotImplementedError(
            f"lhs has {lhs.granularity!r}, and rhs has {rhs.granularity!r}. This kernel takes "
            "tiles only with tiles. Write matmuls='xla' in fp8.Kernels."
        )


def _check_call(
    lhs: QuantizedTensor, rhs: QuantizedTensor, call: MatmulCall, add_to: Array | None
) -> None:
    """Raise NotImplementedError for a mesh, an addend or axes that the kernel cannot do."""
    if add_to is not None and add_to.dtype not in _WRITTEN:
        raise NotImplementedError(
            f"add_to is {add_to.dtype}. This kernel reads bfloat16, float16 or float32. Cast it to "
            "one of these."
        )
    mesh = mesh_of(lhs.values, rhs.values)
    check_mesh(mesh)
    is_split = mesh.size > 1 or AxisType.Explicit in mesh.axis_types
    if add_to is not None and is_split and {*mesh.axis_types} != {AxisType.Manual}:
        raise NotImplementedError(
            f"add_to is given in {mesh}. On several devices, and in Explicit meshes, this kernel "
            "adds only inside jax.shard_map. Call it there."
        )
    if not call.geometry.lhs.contracted:
        raise NotImplementedError(
            "In this matmul no axis is contracted. This kernel needs one. Write matmuls='xla' in "
            "fp8.Kernels."
        )


def _choose(batch: int, m: int, n: int, scaling: Scaling, *, added: bool = False) -> Tiling:
    """The tiling from `CHOICES` for a batch of results [M, N], to which an array may be added."""
    if m <= 64:
        return CHOICES["decode"]
    if batch * -(-m // 128) * -(-n // 128) < MULTIPROCESSORS:
        return CHOICES["few" if m <= 128 else "small"]
    enough = batch * -(-m // 256) * -(-n // 128) >= MULTIPROCESSORS
    # "wide" has no registers for an addend.
    return CHOICES["wide" if scaling.fast and enough and not added else "large"]


def _product(
    out_dtype: DType,
    tiling: Tiling | None,
    scaling: Scaling,
    transposed: tuple[bool, ...],
    *arguments: Array,
) -> Array:
    """[B, M, N] of values [B, M, K] and [B, N, K], their scales, and maybe C [B, M, N].

    `transposed` is what `xla_transposes` says.
    """
    lhs, rhs, *scales = arguments[:4]
    add_to = arguments[4] if len(arguments) > 4 else None
    (batch, m, _), n = lhs.shape, rhs.shape[1]
    if tiling is None:
        tiling = _choose(batch, m, n, scaling, added=add_to is not None)
    values = transpose_last((lhs, rhs), transposed)
    return multiply(
        values, scales, tiling, scaling, batch=batch, out_dtype=out_dtype, add_to=add_to
    )
