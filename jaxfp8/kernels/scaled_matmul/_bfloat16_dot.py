"""A matmul of bfloat16 operands, accumulated in float32, on every device.

FP8 values become bfloat16 where no FP8 unit is used. Every FP8 value is exact in bfloat16. On CPUs
this is the fastest matmul that XLA has, twice as fast as float32. XLA takes it only if the left
operand has its contracted axis last in memory. The left operand of wgrad has not. So it is
transposed first, which costs a few percent of the matmul.

References:
  XLA, cpu/dot_library_rewriter.
"""

import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array
from jaxfp8.kernels.scaled_matmul._call import MatmulCall


def bfloat16_dot(lhs: Array, rhs: Array, call: MatmulCall) -> Array:
    """The matmul of two bfloat16 arrays with float32 accumulation, in `call.out_dtype`."""

    def cpu(a: Array, b: Array) -> Array:
        return cpu_dot(a, b, call).astype(call.out_dtype)

    def elsewhere(a: Array, b: Array) -> Array:
        # GPUs accumulate in float32 whatever they write; a float16 result is rounded from float32.
        written = call.out_dtype if call.out_dtype == jnp.bfloat16 else jnp.float32
        product = lax.dot_general(
            a, b, call.geometry.dimension_numbers,
            preferred_element_type=written, out_sharding=call.out_sharding,
        )  # fmt: skip
        return product.astype(call.out_dtype)

    return lax.platform_dependent(lhs, rhs, cpu=cpu, default=elsewhere)


def cpu_dot(a: Array, b: Array, call: MatmulCall) -> Array:
    """The same on a CPU, float32 out."""
    lhs = call.geometry.lhs
    in_order = call.geometry.with_lhs_in_order
    product = lax.dot_general(
        _as_laid_out(a.transpose(lhs.order)), _as_laid_out(b), in_order.dimension_numbers,
        preferred_element_type=jnp.float32, out_sharding=call.out_sharding,
    )  # fmt: skip
    # of a transposed product XLA makes a matmul that fails, too
    return lax.optimization_barrier(product)


def _as_laid_out(x: Array) -> Array:
    """x [...], which XLA:CPU has to take as an array in row-major order that is already there.

    It chooses a matmul by the layout of the operands, and may fold a transposition into the matmul
    afterwards: into one that then fails ("Unsupported element type for DotThunk"). The barrier
    keeps transpositions out, and the new axis makes a reshape of what would otherwise be a
    transposed view.
    """
    return jnp.squeeze(lax.optimization_barrier(jnp.expand_dims(x, 0)), 0)
