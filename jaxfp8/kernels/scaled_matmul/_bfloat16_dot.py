"""A matmul of bfloat16 operands, accumulated in float32, on every device.

FP8 values become bfloat16 where no FP8 unit is used. Every FP8 value is exact in bfloat16.

On CPUs this is the fastest matmul that XLA has, twice as fast as float32. XLA takes it only if the
left operand has its contracted axis last in memory. The left operand of wgrad has another layout.
So it is transposed first, which costs a few percent of the matmul.

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
        # GPUs accumulate in float32, whatever dtype they write. A float16 result is rounded from
        # float32.
        written = call.out_dtype if call.out_dtype == jnp.bfloat16 else jnp.float32
        product = lax.dot_general(
            a, b, call.geometry.dimension_numbers,
            preferred_element_type=written, out_sharding=call.out_sharding,
        )  # fmt: skip
        return product.astype(call.out_dtype)

    return lax.platform_dependent(lhs, rhs, cpu=cpu, default=elsewhere)


def cpu_dot(a: Array, b: Array, call: MatmulCall) -> Array:
    """`bfloat16_dot` on a CPU, with a result in float32."""
    lhs = call.geometry.lhs
    in_order = call.geometry.with_lhs_in_order
    product = lax.dot_general(
        _as_laid_out(a.transpose(lhs.order)), _as_laid_out(b), in_order.dimension_numbers,
        preferred_element_type=jnp.float32, out_sharding=call.out_sharding,
    )  # fmt: skip
    # XLA folds a transposition of the product into the matmul, too, and that matmul fails.
    return lax.optimization_barrier(product)


def _as_laid_out(x: Array) -> Array:
    """x [...], as an array that XLA:CPU must read in row-major order.

    XLA:CPU chooses a matmul by the layouts of the operands. Afterwards it may fold a transposition
    into that matmul, which then fails ("Unsupported element type for DotThunk"). The barrier keeps
    transpositions out of the matmul. The added axis makes a reshape of what would otherwise be a
    transposed view.
    """
    return jnp.squeeze(lax.optimization_barrier(jnp.expand_dims(x, 0)), 0)
