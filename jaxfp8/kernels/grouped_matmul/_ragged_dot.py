"""The grouped matmul of XLA for TPUs: `jax.lax.ragged_dot` of FP8 operands.

XLA compiles it to a kernel of its own, a `tpu_custom_call`. The matrix unit of a TPU 7x reads E4M3
and E5M2 in it, also one of each. The kernel writes float32, and then the scales are multiplied onto
the product. So a scale must be constant along contracted axes.

The tiles of all groups are the rows of one matrix. A group has whole tiles there, so no step of the
kernel has rows of two groups. The kernel takes 256 rows a step if these divide the rows, and else
as few as 8. So tiles have multiples of 256 rows (`BACKENDS` in `_api.py`).

XLA's kernel leaves rows behind the last group as they are in memory, which may be NaN. JAX says 0.
So rows of the result are taken by index, and only those of a group.

Letters: T rows, E groups, P rows of a tile, R tiles; K N the axes of matrices.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels.grouped_matmul._groups import Groups, on_one_device
from jaxfp8.kernels.scaled_matmul._call import MatmulCall
from jaxfp8.kernels.scaled_matmul._xla import along_output, scale_product

# [T, K] and [T, N] become [E, K, N]. The rows are contracted, and groups split them.
_SUM_ROWS = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
# XLA's kernel does not compile for FP8 operands at another precision, and
# `jax_default_matmul_precision` may ask for one. Products of FP8 values are exact at every one.
_PRECISION = lax.Precision.DEFAULT


def grouped_matmul(
    lhs: QuantizedTensor, rhs: QuantizedTensor, groups: Groups, call: MatmulCall
) -> Array:
    """See `kernels.grouped_matmul._api.multiply`.

    Raises NotImplementedError for scales of tiles. Also for several devices, except inside
    `jax.shard_map` with all axes manual.
    """
    if lhs.granularity.in_tiles or rhs.granularity.in_tiles:
        raise NotImplementedError(
            f"The operands have scales of {lhs.granularity!r} and {rhs.granularity!r}. Scales of "
            "tiles change along a contracted axis, and jax.lax.ragged_dot multiplies without "
            "scales. Use a recipe with scales of tensors or of rows, such as current()."
        )
    multiply = functools.partial(_sum_rows if call.sums_rows else _multiply_rows, call=call)
    return on_one_device(multiply, lhs, rhs, groups)


def _multiply_rows(
    lhs: QuantizedTensor, rhs: QuantizedTensor, groups: Groups, call: MatmulCall
) -> Array:
    """[T, N]: each row of a group times its matrix. Rows of the tail are 0."""
    matrices = rhs.values
    if call.geometry.rhs.contracted == (1,):
        # Without the barrier XLA casts w once more, and writes that copy transposed. With dimension
        # numbers in place of the transpose, XLA drops the scope that `assert_fp8_gemms` reads.
        matrices = lax.optimization_barrier(matrices).mT
    product = lax.ragged_dot(
        _rows_of(lhs.values), matrices, groups.tiles * groups.tile,
        precision=_PRECISION, preferred_element_type=jnp.float32,
    )  # fmt: skip
    product = product.reshape(groups.count, groups.tile, -1)
    scaled = _scaled(product, lhs.scale, groups.of_tiles(rhs.scale), call)
    return _rows_of(scaled).at[groups.place].get(mode="fill", fill_value=0)


def _sum_rows(
    lhs: QuantizedTensor, rhs: QuantizedTensor, groups: Groups, call: MatmulCall
) -> Array:
    """[E, K, N]: for each group the sum of the products of its rows. 0 for a group without rows."""
    product = lax.ragged_dot_general(
        _rows_of(lhs.values), _rows_of(rhs.values), groups.tiles * groups.tile, _SUM_ROWS,
        precision=_PRECISION, preferred_element_type=jnp.float32,
    )  # fmt: skip
    # All tiles of a group have its scales. A group without tiles gets any, which may be NaN.
    first = jnp.minimum(groups.first_tile, groups.count - 1)
    scaled = _scaled(product, lhs.scale[first], rhs.scale[first], call)
    return jnp.where(groups.tiles[:, None, None] > 0, scaled, jnp.zeros((), scaled.dtype))


def _rows_of(tiles: Array) -> Array:
    """[R * P, ...], the rows of all tiles [R, P, ...]."""
    return tiles.reshape(-1, *tiles.shape[2:])


def _scaled(products: Array, lhs: Array, rhs: Array, call: MatmulCall) -> Array:
    """Float32 products [S, ...] times scales of lhs and rhs, [S, ...], in `call.out_dtype`."""

    def one(product: Array, *scales: Array) -> Array:
        sides = (along_output(each, call.geometry, side) for side, each in enumerate(scales))
        return scale_product(product, *sides).astype(call.out_dtype)

    return jax.vmap(one)(products, lhs, rhs)
