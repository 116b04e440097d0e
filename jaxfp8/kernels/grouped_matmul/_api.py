"""The entry to the grouped matmul: two stacks of QuantizedTensors in, high precision out.

A stack is a `QuantizedTensor` whose values and scales have one more axis in front: it holds one
tensor for each group, or for each tile of rows. Its granularity is that of one of these tensors, as
under `jax.vmap`.

The grouped matmul by its definition and the one for XLA are here, too.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, DType, PyTree
from jaxfp8.kernels._dispatch import Backend, Route, dispatch
from jaxfp8.kernels.grouped_matmul._groups import Groups
from jaxfp8.kernels.scaled_matmul import _api as scaled_matmul
from jaxfp8.kernels.scaled_matmul._call import MatmulCall
from jaxfp8.numerics._formats import sum_dtype
from jaxfp8.sharding._amax import vary_as

# The grouped matmul by its definition: dequantize, multiply all tiles, and sum them by group.
#
# It repeats the matrix of each tile in memory. It is for tests.


def _grouped_by_definition(
    lhs: QuantizedTensor, rhs: QuantizedTensor, groups: Groups, call: MatmulCall
) -> Array:
    """See `multiply`; float32 throughout, on every chip."""
    a, b = (jax.vmap(lambda each: each.dequantize(jnp.float32))(operand) for operand in (lhs, rhs))

    def product(a: Array, b: Array) -> Array:
        return lax.dot_general(
            a, b, call.geometry.dimension_numbers, precision=lax.Precision.HIGHEST
        )

    if call.sums_rows:
        summed = jax.ops.segment_sum(jax.vmap(product)(a, b), groups.group, groups.experts)
        return summed.astype(call.out_dtype)
    products = jax.vmap(product)(a, groups.of_tiles(b))
    y = jnp.zeros((groups.tokens, products.shape[-1]), jnp.float32)
    return y.at[groups.row].set(products, mode="drop").astype(call.out_dtype)


# A loop over tiles of rows: each is multiplied by the matrix of its group.
#
# The work is that of the rows, rounded up to tiles. The loop reads one matrix at a time where it
# is, so no copy of a matrix is made for each tile or row. Its number of steps is known to the
# compiler: R tiles. A GPU would otherwise ask the host after each step whether to go on. A CPU
# stops after the last tile that a group needs.
#
# Letters: T rows, E groups, P rows of a tile, R tiles; K N the axes of a matrix.

_Product = Callable[[Any, Any], Array]


def rows_product(
    product: _Product, lhs: PyTree, rhs: PyTree, groups: Groups, columns: int, out_dtype: DType
) -> Array:
    """[T, N]: each row of a group times the group's matrix. Rows of the tail are 0.

    `product` multiplies [P, K] and [K, N], or the axes that it takes. Each leaf of lhs is [R, ...],
    and each leaf of rhs [E, ...]. `columns` is N.
    """
    matrix, rows = groups.matrix, groups.live_rows
    place = jnp.arange(groups.tile, dtype=jnp.int32)[:, None]

    def loop(steps: Array | int) -> Array:
        def step(tile: Array, y: Array) -> Array:
            found = product(_at(lhs, tile), _at(rhs, matrix[tile])).astype(out_dtype)
            # Rows behind a ragged tile are those of the next tile, which writes them later, or of
            # the tail.
            found = jnp.where(place < rows[tile], found, jnp.zeros((), out_dtype))
            return lax.dynamic_update_slice(y, found, (groups.first_row[tile], jnp.int32(0)))

        y = jnp.zeros((groups.tokens + groups.tile, columns), out_dtype)
        y = _varying_as(y, (lhs, rhs, groups))
        return lax.fori_loop(0, steps, step, y)[: groups.tokens]

    return _looped(loop, groups)


def groups_product(
    product: _Product, lhs: PyTree, rhs: PyTree, groups: Groups, shape: tuple[int, int],
    out_dtype: DType,
) -> Array:  # fmt: skip
    """[E, K, N]: for each group the sum of the products of its tiles. 0 for a group without rows.

    `product` multiplies [P, K] and [P, N] over the rows, and does not round. Each leaf of lhs and
    rhs is [R, ...]. `shape` is (K, N).
    """
    wide, matrices, rows = sum_dtype(out_dtype), groups.matrix, groups.live_rows

    def loop(steps: Array | int) -> Array:
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
        carry = tuple(_varying_as(each, (lhs, rhs, groups)) for each in zeros)
        return lax.fori_loop(0, steps, step, carry)[1]

    return _looped(loop, groups)


def _looped(loop: Callable[[Array | int], Array], groups: Groups) -> Array:
    """The loop over the tiles of all groups on a CPU, and over all tiles elsewhere."""
    result: Array = lax.platform_dependent(
        cpu=lambda: loop(groups.used), default=lambda: loop(groups.count)
    )
    return result


def _at(stack: PyTree, index: Array) -> PyTree:
    """Entry number `index` of a stack: of each of its leaves."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, keepdims=False), stack)


def _varying_as(x: Array, arrays: PyTree) -> Array:
    """x, with a type that varies over every mesh axis over which an array varies."""
    return functools.reduce(vary_as, jax.tree.leaves(arrays), x)


# The grouped matmul for XLA: a loop over tiles, with the scaled matmul of one tile inside.
#
# `jax.lax.ragged_dot` is not used here: for GPUs and CPUs XLA compiles it to a dense product, with
# the work of E groups for each row.


def _grouped_by_xla(
    lhs: QuantizedTensor, rhs: QuantizedTensor, groups: Groups, call: MatmulCall, *, backend: str
) -> Array:
    """See `multiply`. `backend` is the scaled matmul that multiplies a tile, "xla" or "cudnn"."""
    if groups.tile == 1:
        lhs, rhs, groups = _in_larger_tiles(lhs, rhs, groups, call)
    multiply = functools.partial(scaled_matmul.multiply, attempts=(backend,))
    rows, columns = call.geometry.out_shape(lhs.shape[1:], rhs.shape[1:])
    if call.sums_rows:
        product = functools.partial(multiply, call=call.in_float32)
        return groups_product(product, lhs, rhs, groups, (rows, columns), call.out_dtype)
    product = functools.partial(multiply, call=call)
    return rows_product(product, lhs, rhs, groups, columns, call.out_dtype)


_ROWS_OF_A_STEP = 128


def _in_larger_tiles(
    lhs: QuantizedTensor, rhs: QuantizedTensor, groups: Groups, call: MatmulCall
) -> tuple[QuantizedTensor, QuantizedTensor, Groups]:
    """The same operands, where each row was a tile. A loop would take a step for each row."""
    larger = Groups.of(groups.tiles, tokens=groups.tokens, tile=_ROWS_OF_A_STEP)
    row = jnp.where(larger.row < groups.tokens, larger.row, 0)
    first = jnp.minimum(larger.first_row, groups.tokens - 1)

    def tiled(stack: QuantizedTensor) -> QuantizedTensor:
        if not stack.granularity.in_one:
            raise NotImplementedError(
                f"A row is a tile here, so scales of {stack.granularity!r} are those of one row. "
                "Use a recipe with scales of tensors, such as current()."
            )
        live = (larger.row < groups.tokens)[..., None]
        values = jnp.where(live, stack.values[:, 0][row], jnp.zeros((), stack.values.dtype))
        return dataclasses.replace(stack, values=values, scale=stack.scale[first])

    return tiled(lhs), tiled(rhs) if call.sums_rows else rhs, larger


# The backends, and the entry.


def _elsewhere(like: Any, *operands: Any, tiling: Any = None) -> Array:
    """The grouped matmul that other platforms run instead of a kernel. It has no tilings."""
    del like, tiling
    return _grouped_by_xla(*operands, backend="xla")


# Most names are those of scaled matmuls, which also say the routes. A row with families is one
# kernel for all groups. The others loop over tiles.
BACKENDS: dict[str, Backend] = {
    "cudnn": Backend(function=functools.partial(_grouped_by_xla, backend="cudnn")),
    "xla": Backend(function=functools.partial(_grouped_by_xla, backend="xla")),
    "mosaic": Backend(
        "jaxfp8.kernels.grouped_matmul._mosaic",
        "grouped_matmul",
        needs="Pallas Mosaic GPU",
        platform="cuda",
        elsewhere=_elsewhere,
        families=("Hopper",),
        rows=128,
    ),
    "mosaic_tpu": Backend(
        "jaxfp8.kernels.grouped_matmul._mosaic_tpu",
        "grouped_matmul",
        needs="Pallas Mosaic TPU",
        platform="tpu",
        elsewhere=_elsewhere,
        families=("Ironwood",),
        route=Route.FP8,
        takes=("tensors",),
        in_place=True,
        rows=256,
    ),
    "ragged_dot": Backend(
        "jaxfp8.kernels.grouped_matmul._ragged_dot",
        "grouped_matmul",
        platform="tpu",
        elsewhere=_elsewhere,
        families=("Ironwood",),
        route=Route.FP8_ROWS,
        takes=("tensors", "rows"),
        rows=256,
    ),
    "reference": Backend(function=_grouped_by_definition),
}


def multiply(
    lhs: QuantizedTensor,
    rhs: QuantizedTensor,
    groups: Groups,
    call: MatmulCall,
    attempts: Iterable[str],
) -> Array:
    """The matmul of each group: of its rows with its matrix, or of its rows with its rows.

    Letters: T rows, E groups, P rows of a tile, R tiles. lhs has tiles of rows [R, P, K], and rhs
    matrices [E, K, N], or the axes that the call names. The result is [T, N], with 0 in the rows of
    no group.

    If the call sums over rows (`MatmulCall.sums_rows`), rhs has tiles of rows [R, P, N]. The result
    is [E, K, N], with 0 for a group without rows.
    """
    product: Array = dispatch("grouped_matmul", BACKENDS, attempts, lhs, rhs, groups, call)
    return product
