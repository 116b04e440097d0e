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
from jax.custom_batching import sequential_vmap
from jax.sharding import AxisType

from jaxfp8._geometry import Geometry
from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels._on_mesh import mesh_of
from jaxfp8.kernels.grouped_matmul._groups import Groups
from jaxfp8.kernels.scaled_matmul._call import MatmulCall, as_matrix, transpose_last, xla_transposes
from jaxfp8.kernels.scaled_matmul.hopper._door import check_operands, scaling_of
from jaxfp8.kernels.scaled_matmul.hopper._kernel import multiply
from jaxfp8.kernels.scaled_matmul.hopper._matmul import scale_matrix
from jaxfp8.kernels.scaled_matmul.hopper._scaling import Scaling, T
from jaxfp8.kernels.scaled_matmul.hopper._tiling import (
    CHOICES,
    MULTIPROCESSORS,
    GroupSteps,
    RowTiles,
    Tiling,
)
from jaxfp8.sharding._amax import vary_as


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

    @sequential_vmap
    def product(lhs: QuantizedTensor, rhs: QuantizedTensor, groups: Groups) -> Array:
        leaves = jax.tree.leaves((lhs, rhs, groups))
        return functools.reduce(vary_as, leaves, _product(lhs, rhs, groups, call, tiling))

    result: Array = product(lhs, rhs, groups)
    return result


def _first(stack: QuantizedTensor) -> QuantizedTensor:
    """The type of one tensor of a stack."""
    return jax.eval_shape(lambda stack: jax.tree.map(lambda leaf: leaf[0], stack), stack)


def _product(
    lhs: QuantizedTensor, rhs: QuantizedTensor, groups: Groups, call: MatmulCall,
    tiling: Tiling | None,
) -> Array:  # fmt: skip
    """[T, N]: each row of a group times its matrix. Or [E, K, N]: the sum over its rows."""
    geometry, scaling = scaling_of(_first(lhs), _first(rhs), call, grouped=True)
    (a, a_scale), (b, b_scale) = (
        _matrices(each, geometry, side, scaling) for side, each in enumerate((lhs, rhs))
    )
    transposed = xla_transposes(geometry.sides, call.written_transposed)
    how: dict[str, Any] = {"scaling": scaling, "out_dtype": call.out_dtype}
    if not call.sums_rows:
        # Tiles of rows follow each other in one matrix.
        a, a_scale = (x.reshape(1, -1, x.shape[-1]) for x in (a, a_scale))
        tiling = tiling or _choose(groups.count, b.shape[1])
        tiles = _row_tiles(groups, tiling.tile[0], a.shape[2] // T)
        values = transpose_last((a, b), transposed)
        return multiply(
            values, (a_scale, b_scale), tiling, batch=1, groups=tiles, out_rows=groups.tokens, **how
        )[0]

    def along_k(x: Array) -> Array:
        # Rows of all tiles follow each other along the contracted axis, the last one.
        return x.swapaxes(0, 1).reshape(1, x.shape[1], -1)

    def of_groups(scale: Array) -> Array:
        # All tiles of a group have its scales.
        return jnp.take(scale, jnp.minimum(groups.first_tile, groups.count - 1), axis=0)

    values = transpose_last(map(along_k, (a, b)), transposed)
    scales = [*map(of_groups if scaling.at_end else along_k, (a_scale, b_scale))]
    tiling = tiling or _choose(groups.experts * -(-a.shape[1] // T), b.shape[1])
    steps = GroupSteps(first=groups.first_tile, count=groups.tiles)
    return multiply(values, scales, tiling, batch=groups.experts, groups=steps, **how)


def _choose(tiles_of_rows: int, n: int) -> Tiling:
    """The tiling from `CHOICES` for a result of so many tiles of T rows, and N columns."""
    return CHOICES["large" if tiles_of_rows * -(-n // T) >= MULTIPROCESSORS else "small"]


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


def _matrices(
    stack: QuantizedTensor, geometry: Geometry, side: int, scaling: Scaling
) -> tuple[Array, Array]:
    """Values [S, M, K] and scales [S, M, C] of a stack of S matrices, K padded to whole steps."""
    axes = geometry.sides[side]

    def one(each: QuantizedTensor) -> tuple[Array, Array]:
        return as_matrix(each.values, axes, tile=T)[0], scale_matrix(each, axes, side, scaling)[0]

    return jax.vmap(one)(stack)
