"""Groups: which rows of an array belong to which expert, and how tiles of rows cover them.

The rows of an array [T, K] are sorted by group: first those of group 0, then those of group 1. The
rows that are left over are the tail. Each group is covered by tiles of P rows, and so is the tail.
Only the last tile of a group is ragged. So no tile holds rows of two groups. The tiles are a padded
copy of the array, [R, P, K], whose missing rows are 0.

The number of tiles R depends on T, on P and on the number of groups alone. So a program is compiled
once for all sizes. Tiles that no group needs are left unused, at the end.

A tile may have one row (P = 1). Then the tiles are the rows of the array, where they are.

Letters: T rows (tokens), E groups (experts), P rows of a tile, R tiles; K N the axes of matrices.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.sharding import AxisType

from jaxfp8._pytrees import STATIC, register_node
from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels._on_mesh import mesh_of
from jaxfp8.sharding._amax import vary_as


@register_node
@dataclasses.dataclass(frozen=True)
class Groups:
    """The tiles of rows that cover all groups, and the tail behind them."""

    # Sizes [5, 0, 3] of T = 10 rows, in tiles of P = 4, have groups [0, 0, 2, 3, 4] and rows
    # [4, 1, 3, 2, 0].
    group: Array  # i32[R], the group of each tile; E in the tail, E + 1 for an unused tile
    first_row: Array  # i32[R], the first row of each tile; T for an unused tile
    rows: Array  # i32[R], how many rows of a tile exist; 0 for an unused tile
    first_tile: Array  # i32[E], the first tile of each group
    tiles: Array  # i32[E], the number of tiles of each group
    tokens: int = dataclasses.field(metadata=STATIC)  # T
    tile: int = dataclasses.field(metadata=STATIC)  # P

    @classmethod
    def of(cls, sizes: Array, *, tokens: int, tile: int) -> "Groups":
        """The tiles of groups of sizes i32[E]. T is `tokens`, and P is `tile`.

        A size below 0 counts as 0. If the sizes add up to more than T, the last groups get what is
        left.
        """
        ends = group_ends(sizes, tokens)
        # The tail is one more group.
        starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
        ends = jnp.concatenate([ends, jnp.full(1, tokens, jnp.int32)])
        tiles = -(-(ends - starts) // tile)
        last_tiles = jnp.cumsum(tiles, dtype=jnp.int32)
        first_tiles = last_tiles - tiles
        index = jnp.arange(_tile_count(tokens, sizes.shape[0], tile), dtype=jnp.int32)
        group = jnp.sum(last_tiles[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
        begin, end, first = (
            jnp.take(each, group, mode="fill", fill_value=tokens)
            for each in (starts, ends, first_tiles)
        )
        first_row = jnp.minimum(begin + jnp.maximum(index - first, 0) * tile, tokens)
        rows = jnp.clip(end - first_row, 0, tile)
        return cls(group, first_row, rows, first_tiles[:-1], tiles[:-1], tokens, tile)

    @property
    def count(self) -> int:
        """R, the number of tiles. A mapped axis in front does not count."""
        return self.group.shape[-1]

    @property
    def experts(self) -> int:
        """E."""
        return self.tiles.shape[-1]

    @property
    def used(self) -> Array:
        """i32[], the number of tiles of all groups. They come first."""
        return jnp.sum(self.tiles, dtype=jnp.int32)

    @property
    def live_rows(self) -> Array:
        """i32[R], how many rows of each tile belong to a group: 0 in the tail."""
        return jnp.where(self.group < self.experts, self.rows, 0)

    @property
    def matrix(self) -> Array:
        """i32[R], the index of a matrix for each tile, which never decreases."""
        # Tiles of no group have that of the last used tile.
        last = jnp.max(jnp.where(self.tiles > 0, jnp.arange(self.experts), 0))
        return jnp.minimum(self.group, last.astype(jnp.int32))

    @property
    def row(self) -> Array:
        """i32[R, P], which row of the array a row of a tile is; T for a row that no group has."""
        place = jnp.arange(self.tile, dtype=jnp.int32)[None, :]
        row = self.first_row[:, None] + place
        return jnp.where(place < self.live_rows[:, None], row, self.tokens)

    @property
    def place(self) -> Array:
        """i32[T], which row of all tiles [R * P] a row of the array is; R * P in the tail."""
        if self.tile == 1:
            return self.row[:, 0]
        row = jnp.arange(self.tokens, dtype=jnp.int32)[:, None]
        begun = self.first_row[None, :] <= row  # the tiles until that of the row
        tile = jnp.sum(begun, axis=1, dtype=jnp.int32) - 1
        first_row = jnp.max(jnp.where(begun, self.first_row, 0), axis=1)
        row = row[:, 0]
        place = tile * self.tile + row - first_row
        live = row < jnp.sum(self.live_rows, dtype=jnp.int32)
        return jnp.where(live, place, self.count * self.tile)

    def tiled(self, x: Array) -> Array:
        """x [T, K] in tiles, [R, P, K]. Rows that no group has are 0, whatever x holds there."""
        if self.tile == 1:
            live = self.live_rows.reshape(-1, 1, *[1] * (x.ndim - 1)) > 0
            return jnp.where(live, x[:, None], jnp.zeros((), x.dtype))
        return x.at[self.row].get(mode="fill", fill_value=0)

    def largest(self, of_tiles: Array) -> Array:
        """The maximum of each group, [E, ...], of numbers [R, ...] that are not negative."""
        if of_tiles.ndim == 1:  # a comparison is faster than the scatter of `segment_max`
            own = self.group[None, :] == jnp.arange(self.experts, dtype=jnp.int32)[:, None]
            return jnp.max(jnp.where(own, of_tiles[None, :], 0.0), axis=1, initial=0.0)
        found = jax.ops.segment_max(
            of_tiles, self.group, self.experts, indices_are_sorted=True, mode="drop"
        )
        return jnp.maximum(found, 0)  # 0 for a group without tiles

    def of_tiles(self, of_groups: Array) -> Array:
        """For each tile the entry of its group, [R, ...], of [E, ...]."""
        return jnp.take(of_groups, self.matrix, axis=0)


def group_ends(sizes: Array, tokens: int) -> Array:
    """i32[E], where the rows of each group end, for sizes i32[E]: [5, -1, 3] gives [5, 5, 8]."""
    # Each size is at most T before it is added, so that no sum overflows.
    limited = jnp.clip(sizes, 0, tokens)
    ends: Array = lax.associative_scan(lambda a, b: jnp.minimum(a + b, tokens), limited)
    return ends


def _tile_count(tokens: int, experts: int, tile: int) -> int:
    """R: the most tiles that groups of any sizes, and the tail, can need."""
    # A group that has rows needs at most one tile more than its full tiles, and that one has a row.
    ragged = min(experts + 1, tokens)
    return (tokens - ragged) // tile + ragged


# What the grouped matmuls for TPUs need around them.


def on_one_device(
    multiply: Callable[[QuantizedTensor, QuantizedTensor, Groups], Array],
    lhs: QuantizedTensor,
    rhs: QuantizedTensor,
    groups: Groups,
) -> Array:
    """`multiply(lhs, rhs, groups)`, also under `jax.vmap`: one member after the other.

    Raises NotImplementedError for several devices, except inside `jax.shard_map` with all axes
    manual.
    """
    mesh = mesh_of(lhs.values, rhs.values)
    if mesh.size > 1 and {*mesh.axis_types} != {AxisType.Manual}:
        raise NotImplementedError(
            f"The mesh is {mesh}. Rows of a group may be on any of its devices. Call "
            "fp8.ragged_dot inside jax.shard_map, with all axes of the mesh manual."
        )

    # JAX has no rule for the `jax.vmap` of such kernels that maps sizes of groups along any axis.
    @sequential_vmap
    def product(lhs: QuantizedTensor, rhs: QuantizedTensor, groups: Groups) -> Array:
        # Operands of a kernel must vary over the same mesh axes.
        leaves, tree = jax.tree.flatten((lhs, rhs, groups))
        leaves = [functools.reduce(vary_as, leaves, leaf) for leaf in leaves]
        return multiply(*jax.tree.unflatten(tree, leaves))

    result: Array = product(lhs, rhs, groups)
    return result
