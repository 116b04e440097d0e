"""The grouped matmul of Hopper's tensor cores, in Pallas (Mosaic GPU).

It is the kernel of the dense scaled matmul (`scaled_matmul/hopper`), with a map from tiles of rows
to groups in global memory. It reads the matrix of a group where it is. It writes the rows of the
result in their places, and zeros to the rows of no group, so nothing is copied afterwards.

Letters: T rows, E groups, P rows of a tile, R tiles; K N the axes of matrices.
In the code T is 128, as in the dense kernel.

References:
  DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.3; DeepGEMM, m-grouped and k-grouped
  matmuls.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType

from jaxfp8._geometry import Geometry
from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels._on_mesh import mesh_of
from jaxfp8.kernels.grouped_matmul._groups import Groups
from jaxfp8.kernels.scaled_matmul._call import MatmulCall, as_matrix, transpose_last, xla_transposes
from jaxfp8.kernels.scaled_matmul.hopper._door import check_operands
from jaxfp8.kernels.scaled_matmul.hopper._kernel import grouped_kernel
from jaxfp8.kernels.scaled_matmul.hopper._matmul import (
    Matmul,
    inner_tile,
    lay_out_scales,
    pad_to_multiple,
    scale_matrix,
    shares_columns,
)
from jaxfp8.kernels.scaled_matmul.hopper._scaling import Scaling, T
from jaxfp8.kernels.scaled_matmul.hopper._tiling import (
    CHOICES,
    MULTIPROCESSORS,
    GroupSteps,
    RowTiles,
    Tiling,
)
from jaxfp8.numerics._formats import E8M0
from jaxfp8.sharding._amax import vary_as

_BOX = 8  # rows of a box in shared memory


def grouped_matmul(
    lhs: QuantizedTensor,
    rhs: QuantizedTensor,
    groups: Groups,
    call: MatmulCall,
    *,
    tiling: Tiling | None = None,
) -> Array:
    """See `kernels.grouped_matmul._api.multiply`. P is 128.

    Raises NotImplementedError for operands that the dense kernel does not take, and for another P.
    Also for several devices, except inside `jax.shard_map` with all axes manual.
    """
    one = _first(lhs), _first(rhs)
    check_operands(*one, call)
    mesh = mesh_of(lhs.values, rhs.values)
    if mesh.size > 1 and {*mesh.axis_types} != {AxisType.Manual}:
        raise NotImplementedError(
            f"The mesh is {mesh}. Rows of a group may be on any of its devices. Call "
            "fp8.ragged_dot inside jax.shard_map, with all axes of the mesh manual."
        )
    if groups.tile != T:
        raise NotImplementedError(
            f"Blocks have {groups.tile} rows, as the tiles of the recipe need. This kernel takes "
            f"blocks of {T} rows. Write matmuls='xla' in fp8.Kernels."
        )

    @custom_vmap
    def multiply(lhs: QuantizedTensor, rhs: QuantizedTensor, groups: Groups) -> Array:
        leaves = jax.tree.leaves((lhs, rhs, groups))
        product = _groups if call.sums_rows else _rows
        return functools.reduce(vary_as, leaves, product(lhs, rhs, groups, call, tiling))

    @multiply.def_vmap
    def batched(size: int, mapped: Any, *arguments: Any) -> tuple[Array, bool]:
        full = jax.tree.map(
            lambda leaf, there: leaf if there else jnp.broadcast_to(leaf, (size, *leaf.shape)),
            arguments, tuple(mapped),
        )  # fmt: skip
        return jax.lax.map(lambda each: multiply(*each), full), True

    return multiply(lhs, rhs, groups)


def _first(stack: QuantizedTensor) -> QuantizedTensor:
    """The type of one tensor of a stack."""
    return jax.eval_shape(lambda stack: jax.tree.map(lambda leaf: leaf[0], stack), stack)


def _rows(
    lhs: QuantizedTensor, rhs: QuantizedTensor, groups: Groups, call: MatmulCall,
    tiling: Tiling | None,
) -> Array:  # fmt: skip
    """[T, N]: each row of a group times the group's matrix."""
    geometry, scaling = _scaling(lhs, rhs, call)
    values, scales = zip(
        *(_matrices(each, geometry, side, scaling) for side, each in enumerate((lhs, rhs))),
        strict=True,
    )
    # Tiles of rows follow each other in one matrix.
    a, a_scale = (x.reshape(1, -1, x.shape[-1]) for x in (values[0], scales[0]))
    b, n = values[1], values[1].shape[1]
    a, b = transpose_last((a, b), xla_transposes(geometry.sides, call.written_transposed))
    tiles_of_n = -(-n // 128)
    tiling = tiling or CHOICES["large" if groups.count * tiles_of_n >= MULTIPROCESSORS else "small"]
    down, across = tiling.tile
    b = pad_to_multiple(b, 1, _BOX)
    matmul = Matmul(
        batch=1, m=a.shape[1], n=b.shape[1], k=a.shape[2], formats=(a.dtype, b.dtype),
        out_dtype=call.out_dtype, tiling=tiling, scaling=scaling, grouping="rows",
        out_rows=groups.tokens,
    )  # fmt: skip
    a_scale = lay_out_scales(a_scale, 0, down, scaling)
    b_scale = lay_out_scales(scales[1], 1, across * tiling.cluster, scaling)
    tiles = _row_tiles(groups, down, matmul.steps)
    return grouped_kernel(matmul)(a, b, a_scale, b_scale, tiles)[0, :, :n]


def _row_tiles(groups: Groups, down: int, steps: int) -> RowTiles:
    """The map from the kernel's tiles of rows, of which a tile of P rows has P / `down`."""
    parts = jnp.arange(groups.tile // down, dtype=jnp.int32)[None, :] * down
    rows = jnp.clip(groups.rows[:, None] - parts, 0, down)
    live = jnp.clip(groups.live_rows[:, None] - parts, 0, down)
    return RowTiles(
        matrix=jnp.repeat(groups.matrix, parts.size),
        first_row=(groups.first_row[:, None] + parts).reshape(-1),
        rows=rows.reshape(-1),
        steps=jnp.where(live > 0, jnp.int32(steps), 0).reshape(-1),
    )


def _groups(
    lhs: QuantizedTensor, rhs: QuantizedTensor, groups: Groups, call: MatmulCall,
    tiling: Tiling | None,
) -> Array:  # fmt: skip
    """[E, K, N]: for each group the sum over its rows."""
    geometry, scaling = _scaling(lhs, rhs, call)
    sides = [_matrices(each, geometry, side, scaling) for side, each in enumerate((lhs, rhs))]
    # Rows of all tiles follow each other along the contracted axis, the last one.
    values = [values.swapaxes(0, 1).reshape(1, values.shape[1], -1) for values, _ in sides]
    values = transpose_last(values, xla_transposes(geometry.sides, call.written_transposed))
    (_, m, k), n = values[0].shape, values[1].shape[1]
    scales = []
    for _, scale in sides:
        if scaling.at_end:  # all tiles of a group have its scales
            last = groups.count - 1
            scales.append(jnp.take(scale, jnp.minimum(groups.first_tile, last), axis=0))
        else:
            scales.append(scale.swapaxes(0, 1).reshape(1, scale.shape[1], -1))
    tiles = groups.experts * -(-m // 128) * -(-n // 128)
    tiling = tiling or CHOICES["large" if tiles >= MULTIPROCESSORS else "small"]
    down, across = tiling.tile
    a, b = (pad_to_multiple(x, 1, _BOX) for x in values)
    matmul = Matmul(
        batch=groups.experts, m=a.shape[1], n=b.shape[1], k=k, formats=(a.dtype, b.dtype),
        out_dtype=call.out_dtype, tiling=tiling, scaling=scaling, grouping="groups",
    )  # fmt: skip
    a_scale = lay_out_scales(scales[0], 0, down, scaling)
    b_scale = lay_out_scales(scales[1], 1, across * tiling.cluster, scaling)
    steps = GroupSteps(first=groups.first_tile, count=groups.tiles)
    return grouped_kernel(matmul)(a, b, a_scale, b_scale, steps)[:, :m, :n]


def _scaling(
    lhs: QuantizedTensor, rhs: QuantizedTensor, call: MatmulCall
) -> tuple[Geometry, Scaling]:
    """The axes of the matmul of one group, and how the product is scaled."""
    geometry = call.geometry
    a, b = _first(lhs), _first(rhs)
    if not a.granularity.in_tiles:
        return geometry, Scaling(at_end=True, fast=call.fast_accumulation)
    _, tile = inner_tile(a, geometry)
    # With square tiles of 32 a patch is 32 columns wide. A ragged patch of so few bytes a row
    # could not be written in parts.
    square = tile == T and shares_columns(b, geometry.rhs, tile)
    in_bytes = tile < T and a.scale.dtype == E8M0.dtype
    return geometry, Scaling(tile=tile, square=square, in_bytes=(in_bytes, False))


def _matrices(
    stack: QuantizedTensor, geometry: Geometry, side: int, scaling: Scaling
) -> tuple[Array, Array]:
    """Values [S, M, K] and scales [S, M, C] of a stack of S matrices, K padded to whole steps."""
    axes = geometry.sides[side]

    def one(each: QuantizedTensor) -> tuple[Array, Array]:
        return as_matrix(each.values, axes, tile=T)[0], scale_matrix(each, axes, side, scaling)[0]

    return jax.vmap(one)(stack)
