"""The scaled matmul as its definition has it: dequantize in float32, multiply in float32."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array, DotDimensionNumbers, DType
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


def scaled_matmul(
    lhs: QuantizedTensor,
    rhs: QuantizedTensor,
    *,
    dimension_numbers: DotDimensionNumbers,
    out_dtype: DType,
    fast_accumulation: bool,
    out_sharding: Any,
    chip: str | None,
) -> Array:
    """See `kernels.scaled_matmul._api.scaled_matmul`."""
    del fast_accumulation, chip  # float32 throughout
    product = lax.dot_general(
        lhs.dequantize(jnp.float32), rhs.dequantize(jnp.float32), dimension_numbers,
        precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32, out_sharding=out_sharding,
    )  # fmt: skip
    return product.astype(out_dtype)
