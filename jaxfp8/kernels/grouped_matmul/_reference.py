"""The grouped matmul by its definition: dequantize, multiply all tiles, and sum them by group.

It repeats the matrix of each tile in memory. It is for tests.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels.grouped_matmul._groups import Groups
from jaxfp8.kernels.scaled_matmul._call import MatmulCall


def grouped_matmul(
    lhs: QuantizedTensor, rhs: QuantizedTensor, groups: Groups, call: MatmulCall
) -> Array:
    """See `kernels.grouped_matmul._api.multiply`; float32 throughout, on every chip."""
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
