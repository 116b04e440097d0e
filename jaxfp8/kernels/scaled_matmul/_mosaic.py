"""The scaled matmul of Hopper's tensor cores, in Pallas (Mosaic GPU).

Operands are both in tiles of 128 or 32, whose products are scaled one by one, or both scaled per tensor or along kept axes:
then the sum is scaled before it is written, without the second pass over the product that XLA's backend needs for rows.

The kernel (`_mosaic_kernel.py`) reads both operands with K last, as Hopper multiplies FP8. Others are transposed before, by
XLA: one pass over FP8 values, none where the quantizer wrote them so (a copy in tiles of 128x1 lies transposed already). An
operand whose K is no multiple of 128, or whose rows are none of 8, is copied with zeros behind it, likewise.

Letters: B batch, M N K matmul, C = ceil(K/T); T = 128.

References:
  DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3; numerics: `tensors/_scale_layout.py` (HopperLayout).
"""

import functools
import inspect
import math
from typing import Any

import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType

from jaxfp8._typing import Array, DotDimensionNumbers, DType
from jaxfp8.kernels._on_mesh import mesh_of
from jaxfp8.kernels._platform import chip_named
from jaxfp8.kernels.scaled_matmul._matrices import as_matrix, axes_of, matrix_shape
from jaxfp8.kernels.scaled_matmul._mosaic_kernel import kernel
from jaxfp8.kernels.scaled_matmul._mosaic_memory import whole_row
from jaxfp8.kernels.scaled_matmul._mosaic_scales import inner_tile, is_square, laid, padded, scale_matrix
from jaxfp8.kernels.scaled_matmul._mosaic_scaling import Scaling, T
from jaxfp8.kernels.scaled_matmul._mosaic_tiling import Tiling, choose
from jaxfp8.kernels.scaled_matmul._partitioned import in_auto_mesh, partitioned, takes_mesh
from jaxfp8.numerics._formats import E8M0
from jaxfp8.numerics._per_block import PerBlock
from jaxfp8.sharding._amax import vary_as
from jaxfp8.tensors._quantized_tensor import QuantizedTensor

_WRITTEN = (jnp.bfloat16, jnp.float16, jnp.float32)
_FEW = 128
"""Rows of lhs for which each byte of rhs counts. With more of them operations do, and E8M0 takes five to become float32."""
_BOX = 8  # rows of a permuted box in shared memory


def scaled_matmul(
    lhs: QuantizedTensor,
    rhs: QuantizedTensor,
    *,
    dimension_numbers: DotDimensionNumbers,
    out_dtype: DType,
    fast_accumulation: bool,
    out_sharding: Any,
    chip: str | None,
    add_to: Array | None = None,
    tiling: Tiling | None = None,
) -> Array:
    """See `kernels.scaled_matmul._api.scaled_matmul`.

    Args:
      lhs: scaled per tensor or along axes that are not contracted, or in tiles of a multiple of 32 along a contracted axis.
      rhs: likewise; in tiles if lhs is.
      dimension_numbers: any.
      out_dtype: bfloat16, float16 or float32.
      fast_accumulation: whether sums stay in the tensor cores, if the operands are not in tiles. Else each 128 products are
        added in float32.
      out_sharding: as in `jax.lax.dot_general`, in an Explicit mesh.
      chip: None or a Hopper chip.
      add_to: bfloat16, float16 or float32, of the result's shape.
      tiling: how the product is cut; default: by its shape (`_mosaic_tiling.choose`).

    Raises:
      NotImplementedError: for other tiles and scales, an empty operand, another chip, a partly manual mesh, `add_to` on several
        devices but inside `jax.shard_map`, and jax before 0.11.
    """
    if add_to is not None and add_to.dtype not in _WRITTEN:
        raise NotImplementedError(f"add_to in {add_to.dtype}")
    at_end = _check(lhs, rhs, dimension_numbers, out_dtype, chip, add_to)
    if AxisType.Explicit in mesh_of(lhs.values, rhs.values).axis_types:
        inside = functools.partial(
            scaled_matmul, dimension_numbers=dimension_numbers, out_dtype=out_dtype, fast_accumulation=fast_accumulation,
            out_sharding=None, chip=chip, add_to=add_to, tiling=tiling,
        )  # fmt: skip
        return in_auto_mesh(inside, lhs, rhs, dimension_numbers, out_sharding)
    if out_sharding is not None:
        raise NotImplementedError(f"out_sharding={out_sharding}, which is for Explicit meshes")
    # The axis along which tiles run goes last.
    pairs, tile = list(zip(*dimension_numbers[0], strict=True)), T
    if not at_end:
        inner, tile = inner_tile(lhs, rhs, dimension_numbers)
        pairs.append(pairs.pop(inner))
    dimension_numbers = (tuple(zip(*pairs, strict=True)), dimension_numbers[1])  # type: ignore[assignment]
    square = not at_end and is_square(rhs, axes_of(rhs.ndim, dimension_numbers, 1), tile)
    (batch, m, _), (_, n, _) = (matrix_shape(x.shape, dimension_numbers, i) for i, x in enumerate((lhs, rhs)))
    in_bytes = [tile != T and operand.scale.dtype == E8M0.dtype for operand in (lhs, rhs)]
    in_bytes[1] &= not square and math.prod(m) <= _FEW
    scaling = Scaling(
        tile=tile, at_end=at_end, square=square, in_bytes=(in_bytes[0], in_bytes[1]), fast=at_end and fast_accumulation
    )
    values = [as_matrix(operand.values, dimension_numbers, i, tile=T) for i, operand in enumerate((lhs, rhs))]
    scales = [scale_matrix(operand, dimension_numbers, i, scaling) for i, operand in enumerate((lhs, rhs))]
    before = () if add_to is None else (add_to.reshape(values[0].shape[0], math.prod(m), math.prod(n)),)
    product = _multiply(out_dtype, tiling, scaling)(*values, *scales, *before)
    return product.reshape(*batch, *m, *n)


def _check(
    lhs: QuantizedTensor,
    rhs: QuantizedTensor,
    dimension_numbers: DotDimensionNumbers,
    out_dtype: DType,
    chip: str | None,
    add_to: Array | None,
) -> bool:
    """Raise NotImplementedError for what the kernel cannot do. Whether all of K shares its scales."""
    if "idx" in inspect.signature(plgpu.load).parameters:
        raise NotImplementedError("jax before 0.11 cannot multiply a transposed FP8 tile")
    if chip is not None and (chip_named(chip).compute_capability or (0,))[0] != 9:
        raise NotImplementedError(f"chip={chip!r} is no Hopper chip, for which the kernel is written")
    if out_dtype not in _WRITTEN:
        raise NotImplementedError(f"a result in {out_dtype}")
    for operand in (lhs, rhs):
        if operand.scale.dtype != jnp.float32 and not isinstance(operand.granularity, PerBlock):
            raise NotImplementedError(f"{operand.granularity!r} with scales in {operand.scale.dtype}; it takes float32")
        if 0 in operand.shape:
            raise NotImplementedError(f"an empty operand, {list(operand.shape)}")
    mesh = mesh_of(lhs.values, rhs.values)
    if not takes_mesh(mesh):
        raise NotImplementedError(f"{mesh}; inside jax.shard_map it takes meshes that are manual along all axes")
    if add_to is not None and mesh.size > 1 and {*mesh.axis_types} != {AxisType.Manual}:
        raise NotImplementedError(f"add_to in {mesh}; on several devices add inside jax.shard_map")
    if not dimension_numbers[0][0]:
        raise NotImplementedError("no axis is contracted")
    in_tiles = [isinstance(operand.granularity, PerBlock) for operand in (lhs, rhs)]
    if len(set(in_tiles)) > 1:
        raise NotImplementedError(f"{lhs.granularity!r} with {rhs.granularity!r}; it takes tiles with tiles")
    return not in_tiles[0]


def _multiply(out_dtype: DType, tiling: Tiling | None, scaling: Scaling) -> Any:
    """The product [B, M, N] of values [B, M, K], [B, N, K] with scales, added to C [B, M, N] if given; under vmap B grows."""

    @custom_vmap
    def product(*arguments: Array) -> Array:
        local = functools.partial(_padded_product, out_dtype, tiling, scaling)
        # Also where no mesh is known: what another kernel wrote has none in its type, and may lie on several devices.
        if {*mesh_of(*arguments).axis_types} != {AxisType.Manual} and len(arguments) == 4:
            return partitioned(local, scaling.cells)(*arguments)
        for argument in arguments:
            arguments = tuple(vary_as(x, argument) for x in arguments)
        return vary_as(local(*arguments), arguments[0])

    @product.def_vmap
    def batched(size: int, is_mapped: list[bool], *arguments: Array) -> tuple[Array, bool]:
        stacked = [
            x if mapped else jnp.broadcast_to(x, (size, *x.shape))
            for x, mapped in zip(arguments, is_mapped, strict=True)
        ]
        result = product(*(x.reshape(-1, *x.shape[2:]) for x in stacked))
        return result.reshape(size, -1, *result.shape[1:]), True

    return product


def _padded_product(
    out_dtype: DType,
    tiling: Tiling | None,
    scaling: Scaling,
    lhs: Array,
    rhs: Array,
    lhs_scale: Array,
    rhs_scale: Array,
    add_to: Array | None = None,
) -> Array:
    (batch, m, k), n = lhs.shape, rhs.shape[1]
    tiling = choose(batch, m, n, scaling, added=add_to is not None) if tiling is None else tiling
    down, across = tiling.tile
    across *= tiling.cluster
    lhs, rhs = (padded(x, 1, _BOX) for x in (lhs, rhs))
    lhs_scale, rhs_scale = (
        laid(x, i, side, scaling) for i, (x, side) in enumerate(((lhs_scale, down), (rhs_scale, across)))
    )
    formats = (lhs.dtype, rhs.dtype)
    before: tuple[Array, ...] = ()
    dtype = None
    if add_to is not None:
        before, dtype = (padded(padded(add_to, 1, _BOX), 2, whole_row(1, add_to.dtype.itemsize)),), add_to.dtype
    call = kernel(batch, lhs.shape[1], rhs.shape[1], k, formats, out_dtype, tiling, scaling, dtype)
    return call(lhs, rhs, lhs_scale, rhs_scale, *before)[:, :m, :n]
