"""The scaled matmul by its definition: dequantize in float32, then multiply in float32."""

import jax.numpy as jnp
from jax import lax

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels.scaled_matmul._call import MatmulCall


def scaled_matmul(lhs: QuantizedTensor, rhs: QuantizedTensor, call: MatmulCall) -> Array:
    """See `fp8.scaled_matmul`; float32 throughout, on every chip."""
    product = lax.dot_general(
        lhs.dequantize(jnp.float32),
        rhs.dequantize(jnp.float32),
        call.geometry.dimension_numbers,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
        out_sharding=call.out_sharding,
    )
    return product.astype(call.out_dtype)
