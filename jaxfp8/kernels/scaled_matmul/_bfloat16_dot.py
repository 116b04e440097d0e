"""A product of bfloat16 operands, accumulated in float32, on whatever device: what FP8 values become where no FP8 unit is used.

Every FP8 value is exact in bfloat16. On CPUs this is the fastest matmul that XLA has, twice as fast as float32, but it is
found only if the left operand lies in memory with the contracted axis last. That of wgrad does not; so it is transposed
first, which costs a few percent of the matmul.

References:
  XLA, cpu/dot_library_rewriter.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array, DotDimensionNumbers, DType


def bfloat16_dot(
    lhs: Array, rhs: Array, dimension_numbers: DotDimensionNumbers, out_dtype: DType, out_sharding: Any
) -> Array:
    """`lax.dot_general` of two bfloat16 arrays with float32 accumulation, in `out_dtype`."""

    def cpu(a: Array, b: Array) -> Array:
        return cpu_dot(a, b, dimension_numbers, out_sharding).astype(out_dtype)

    def elsewhere(a: Array, b: Array) -> Array:
        # GPUs accumulate in float32 whatever they write; a float16 result is rounded from float32.
        written = out_dtype if out_dtype == jnp.bfloat16 else jnp.float32
        product = lax.dot_general(a, b, dimension_numbers, preferred_element_type=written, out_sharding=out_sharding)
        return product.astype(out_dtype)

    return lax.platform_dependent(lhs, rhs, cpu=cpu, default=elsewhere)


def cpu_dot(a: Array, b: Array, dimension_numbers: DotDimensionNumbers, out_sharding: Any) -> Array:
    """The same on a CPU, float32 out."""
    ((contracted, _), (batch, _)) = dimension_numbers
    kept = (axis for axis in range(a.ndim) if axis not in (*contracted, *batch))
    order = (*batch, *kept, *contracted)
    rows = tuple(tuple(order.index(axis) for axis in axes) for axes in (contracted, batch))
    canonical = ((rows[0], dimension_numbers[0][1]), (rows[1], dimension_numbers[1][1]))
    product = lax.dot_general(
        _as_laid_out(a.transpose(order)), _as_laid_out(b), canonical,
        preferred_element_type=jnp.float32, out_sharding=out_sharding,
    )  # fmt: skip
    return lax.optimization_barrier(product)  # of a transposed product XLA makes a matmul that fails, too


def _as_laid_out(x: Array) -> Array:
    """x [...], which XLA:CPU has to take as an array in row-major order that is already there.

    It chooses a matmul by the layout of the operands, and may fold a transposition into the matmul afterwards: into one
    that then fails ("Unsupported element type for DotThunk"). The barrier keeps transpositions out, and the new axis makes
    a reshape of what would otherwise be a transposed view.
    """
    return jnp.squeeze(lax.optimization_barrier(jnp.expand_dims(x, 0)), 0)
