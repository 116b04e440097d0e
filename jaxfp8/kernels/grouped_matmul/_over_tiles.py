"""A loop over tiles of rows: each is multiplied by the matrix of its group.

The work is that of the rows, rounded up to tiles. The loop reads one matrix at a time where it is,
so no copy of a matrix is made for each tile or row. Its number of steps is known to the compiler: R
tiles. A GPU would otherwise ask the host after each step whether to go on. A CPU stops after the
last tile that a group needs.

Letters: T rows, E groups, P rows of a tile, R tiles; K N the axes of a matrix.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array, DType, PyTree
from jaxfp8.kernels.grouped_matmul._groups import Groups
from jaxfp8.numerics._formats import sum_dtype
from jaxfp8.sharding._amax import vary_as

Product = Callable[[Any, Any], Array]


def rows_product(
    product: Product, lhs: PyTree, rhs: PyTree, groups: Groups, columns: int, out_dtype: DType
) -> Array:
    """[T, N]: each row of a group times the group's matrix. Rows of the tail are 0.

    Args:
      product: multiplies [P, K] and [K, N], or the axes that it takes.
      lhs: tiles of rows. Each leaf is [R, ...].
      rhs: matrices. Each leaf is [E, ...].
      groups: which rows belong to which group.
      columns: N.
      out_dtype: the dtype of the result.
    """
    matrix, rows = groups.matrix, groups.live_rows
    place = jnp.arange(groups.tile, dtype=jnp.int32)[:, None]

    def loop(arrays: PyTree, *, steps: Array | int | None) -> Array:
        lhs, rhs, groups, matrix, rows = arrays

        def step(tile: Array, y: Array) -> Array:
            found = product(_at(lhs, tile), _at(rhs, matrix[tile])).astype(out_dtype)
            # Rows behind a ragged tile are those of the next tile, which writes them later, or of
            # the tail.
            found = jnp.where(place < rows[tile], found, jnp.zeros((), out_dtype))
            return lax.dynamic_update_slice(y, found, (groups.first_row[tile], jnp.int32(0)))

        y = jnp.zeros((groups.tokens + groups.tile, columns), out_dtype)
        y = _varying_as(y, arrays)
        steps = groups.used if steps is None else steps
        return lax.fori_loop(0, steps, step, y)[: groups.tokens]

    return _looped(loop, (lhs, rhs, groups, matrix, rows), groups.count)


def groups_product(
    product: Product, lhs: PyTree, rhs: PyTree, groups: Groups, shape: tuple[int, int],
    out_dtype: DType,
) -> Array:  # fmt: skip
    """[E, K, N]: for each group the sum of the products of its tiles. 0 for a group without rows.

    Args:
      product: multiplies [P, K] and [P, N] over the rows, with a result that is not rounded yet.
      lhs: tiles of rows. Each leaf is [R, ...].
      rhs: tiles of rows. Each leaf is [R, ...].
      groups: which rows belong to which group.
      shape: (K, N).
      out_dtype: the dtype of the result.
    """
    wide = sum_dtype(out_dtype)

    def loop(arrays: PyTree, *, steps: Array | int | None) -> Array:
        lhs, rhs, groups, matrices, rows = arrays

        def step(tile: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            summed, result = carry
            matrix = matrices[tile]
            found = product(_at(lhs, tile), _at(rhs, tile)).astype(wide)
            # A tile of no group adds nothing to the last group.
            found = jnp.where(rows[tile] > 0, found, jnp.zeros((), wide))
            summed = jnp.where(tile == groups.first_tile[matrix], found, summed + found)
            # Each tile writes the sum until then, and the last one stays.
            start = (matrix, jnp.int32(0), jnp.int32(0))
            return summed, lax.dynamic_update_slice(result, summed[None].astype(out_dtype), start)

        zeros = jnp.zeros(shape, wide), jnp.zeros((groups.experts, *shape), out_dtype)
        carry = tuple(_varying_as(each, arrays) for each in zeros)
        steps = groups.used if steps is None else steps
        return lax.fori_loop(0, steps, step, carry)[1]

    return _looped(loop, (lhs, rhs, groups, groups.matrix, groups.live_rows), groups.count)


def _looped(loop: Callable[..., Array], arrays: PyTree, tiles: int) -> Array:
    """The loop over the tiles of all groups on a CPU, and over all tiles elsewhere."""
    result: Array = lax.platform_dependent(
        arrays,
        cpu=functools.partial(loop, steps=None),
        default=functools.partial(loop, steps=tiles),
    )
    return result


def _at(stack: PyTree, index: Array) -> PyTree:
    """Entry number `index` of a stack: of each of its leaves."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), stack)


def _varying_as(x: Array, arrays: PyTree) -> Array:
    """x, with a type that varies over every mesh axis over which an array varies."""
    return functools.reduce(vary_as, jax.tree.leaves(arrays), x)
