"""`rms_norm_quantize` and `swiglu_quantize`: `quantize` with a prologue, by the names of the field."""

from typing import Any

from jaxfp8._typing import ArrayLike
from jaxfp8.kernels._prologue import RMSNorm, SwiGLU
from jaxfp8.numerics._formats import Format
from jaxfp8.ops._quantize import quantize
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


def rms_norm_quantize(
    x: ArrayLike, gain: ArrayLike, format: Format, *args: Any, epsilon: float = 1e-6, **options: Any
) -> QuantizedTensor | tuple[QuantizedTensor, ...]:
    """`fp8.quantize((x, gain), format, ..., prologue=fp8.RMSNorm(epsilon=epsilon))`.

    Args:
      x: [..., M, K] bfloat16, float16, float32 or float64.
      gain: [K].
      format: E4M3 or E5M2.
      *args: granularity, of `fp8.quantize`.
      epsilon: of `fp8.RMSNorm`.
      **options: of `fp8.quantize`.

    Raises:
      TypeError, ValueError: naming the argument, its value and the cure.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> q = rms_norm_quantize(jnp.ones((64, 256)), jnp.ones(256), fp8.E4M3, fp8.PerBlock((1, 128)))
      >>> q.shape, q.scale.shape
      ((64, 256), (64, 2))

    References:
      Zhang and Sennrich, arXiv:1910.07467, section 3.
    """
    return quantize((x, gain), format, *args, prologue=RMSNorm(epsilon=epsilon), **options)


def swiglu_quantize(
    gate: ArrayLike, up: ArrayLike, format: Format, *args: Any, **options: Any
) -> QuantizedTensor | tuple[QuantizedTensor, ...]:
    """`fp8.quantize((gate, up), format, ..., prologue=fp8.SwiGLU())`.

    Args:
      gate: [..., M, K] bfloat16, float16, float32 or float64.
      up: of the same shape and dtype.
      format: E4M3 or E5M2.
      *args: granularity, of `fp8.quantize`.
      **options: of `fp8.quantize`.

    Raises:
      TypeError, ValueError: naming the argument, its value and the cure.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> swiglu_quantize(jnp.array([0.0, 20.0]), jnp.array([3.0, 0.5]), fp8.E4M3).dequantize()
      Array([ 0., 10.], dtype=float32)

    References:
      Shazeer, arXiv:2002.05202, section 2.
    """
    return quantize((gate, up), format, *args, prologue=SwiGLU(), **options)
