"""The door of the scaled matmul: two QuantizedTensors in, high precision out."""

import jax
import jax.numpy as jnp

from jaxfp8._typing import Array, DotDimensionNumbers, DType, Implementation
from jaxfp8.kernels._dispatch import dispatch
from jaxfp8.kernels.scaled_matmul import _reference, _xla
from jaxfp8.numerics._formats import E5M2
from jaxfp8.numerics._granularity import PerTensor
from jaxfp8.tensors._quantized_tensor import QuantizedTensor, validate

BACKENDS = {"xla": _xla.scaled_matmul, "reference": _reference.scaled_matmul}


def scaled_matmul(
    lhs: QuantizedTensor,
    rhs: QuantizedTensor,
    *,
    dimension_numbers: DotDimensionNumbers | None = None,
    preferred_element_type: DType | None = None,
    fast_accumulation: bool = False,
    out_sharding: jax.sharding.NamedSharding | jax.P | None = None,
    implementation: Implementation = None,
) -> Array:
    """`dequantize(lhs) @ dequantize(rhs)`, accumulated in float32.

    Args:
      lhs: [..., M, K] or as `dimension_numbers` say; scaled per tensor or along axes that are not contracted.
      rhs: [K, N] or as `dimension_numbers` say.
      dimension_numbers: as in `jax.lax.dot_general`; default: the last axis of lhs with the first of rhs.
      preferred_element_type: dtype of the result; default: what the operands' dtypes promote to.
      fast_accumulation: let Hopper's tensor cores keep about 14 bits of each partial sum (cuBLASLt's fast mode).
      out_sharding: as in `jax.lax.dot_general`, for Explicit meshes.
      implementation: a backend by name, or None for the first that can.

    Returns:
      [..., M, N], batch axes first.

    Raises:
      ValueError: for E5M2 x E5M2, which no hardware multiplies; for a scale that varies along a contracted axis.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> q = fp8.quantize(7 * jnp.eye(2), fp8.E4M3)
      >>> fp8.scaled_matmul(q, q)
      Array([[49.,  0.],
             [ 0., 49.]], dtype=float32)
    """
    validate(lhs, "lhs")
    validate(rhs, "rhs")
    if dimension_numbers is None:
        dimension_numbers = (((lhs.ndim - 1,), (0,)), ((), ()))
    if lhs.format == rhs.format == E5M2:
        raise ValueError("lhs and rhs are both E5M2, which no hardware multiplies; quantize one of them to E4M3.")
    for name, operand, contracted in zip(("lhs", "rhs"), (lhs, rhs), dimension_numbers[0], strict=True):
        if not isinstance(operand.granularity, PerTensor) and any(
            operand.scale.shape[axis] != 1 for axis in contracted
        ):
            raise ValueError(
                f"{name} is scaled by {operand.granularity!r}, which varies along its contracted axes {tuple(contracted)}: "
                "such scales cannot leave the sum. Quantize it along the axes that are kept."
            )
    if preferred_element_type is None:
        preferred_element_type = jnp.promote_types(lhs.dtype, rhs.dtype)
    return dispatch(
        "scaled_matmul", BACKENDS, implementation, lhs, rhs,
        dimension_numbers=dimension_numbers, out_dtype=jnp.dtype(preferred_element_type),
        fast_accumulation=fast_accumulation, out_sharding=out_sharding,
    )  # fmt: skip
