"""`rms_norm_quantize` and `swiglu_quantize`: an activation made and quantized in one call."""

from typing import Any

from jaxfp8._typing import Array, ArrayLike, Implementation, Rounding, ScaleRounding
from jaxfp8.kernels._prologue import AbstractPrologue, RMSNorm, SwiGLU, produce
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.ops._arguments import check_float
from jaxfp8.ops._once import once
from jaxfp8.ops._quantize import quantize_source
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


def rms_norm_quantize(
    x: ArrayLike,
    gain: ArrayLike,
    format: Format,
    granularity: AbstractGranularity | tuple[AbstractGranularity, ...] | None = None,
    *,
    epsilon: float = 1e-6,
    power_of_two: bool = False,
    scale_format: Format | None = None,
    scale_rounding: ScaleRounding = "rceil",
    scale: ArrayLike | None = None,
    rounding: Rounding = "nearest",
    key: Array | None = None,
    implementation: Implementation = None,
) -> QuantizedTensor | tuple[QuantizedTensor, ...]:
    """`fp8.quantize(fp8.RMSNorm(epsilon=epsilon)(x, gain), ...)`, to the bit; a kernel reads x and writes FP8, nothing between.

    Args:
      x: [..., M, K] bfloat16, float16, float32 or float64.
      gain: [K].
      format: E4M3 or E5M2.
      granularity: as in `fp8.quantize`, one or a tuple.
      epsilon: of `fp8.RMSNorm`.
      power_of_two: as in `fp8.quantize`, like all that follow.
      scale_format: None or E8M0.
      scale_rounding: of E8M0 scales.
      scale: a scale to quantize with.
      rounding: "nearest" or "stochastic".
      key: a jax PRNG key.
      implementation: of the cast. "mosaic" normalizes in the kernel, "triton" refuses.

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
    return _quantize(
        RMSNorm(epsilon=epsilon), (x, gain), format, granularity, power_of_two=power_of_two, scale_format=scale_format,
        scale_rounding=scale_rounding, scale=scale, rounding=rounding, key=key, implementation=implementation,
    )  # fmt: skip


def swiglu_quantize(
    gate: ArrayLike,
    up: ArrayLike,
    format: Format,
    granularity: AbstractGranularity | tuple[AbstractGranularity, ...] | None = None,
    *,
    power_of_two: bool = False,
    scale_format: Format | None = None,
    scale_rounding: ScaleRounding = "rceil",
    scale: ArrayLike | None = None,
    rounding: Rounding = "nearest",
    key: Array | None = None,
    implementation: Implementation = None,
) -> QuantizedTensor | tuple[QuantizedTensor, ...]:
    """`fp8.quantize(fp8.SwiGLU()(gate, up), ...)`, to the bit; a kernel reads gate and up and writes FP8, nothing between.

    Args:
      gate: [..., M, K] bfloat16, float16, float32 or float64.
      up: of the same shape and dtype.
      format: E4M3 or E5M2.
      granularity: as in `fp8.quantize`, one or a tuple.
      power_of_two: as in `fp8.quantize`, like all that follow.
      scale_format: None or E8M0.
      scale_rounding: of E8M0 scales.
      scale: a scale to quantize with.
      rounding: "nearest" or "stochastic".
      key: a jax PRNG key.
      implementation: of the cast. "mosaic" multiplies in the kernel, "triton" refuses.

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
    return _quantize(
        SwiGLU(), (gate, up), format, granularity, power_of_two=power_of_two, scale_format=scale_format,
        scale_rounding=scale_rounding, scale=scale, rounding=rounding, key=key, implementation=implementation,
    )  # fmt: skip


def _quantize(
    prologue: AbstractPrologue, arrays: tuple[ArrayLike, ...], *args: Any, **options: Any
) -> QuantizedTensor | tuple[QuantizedTensor, ...]:
    checked = (check_float(name, each) for name, each in zip(prologue.names, arrays, strict=True))
    return quantize_source(produce(prologue, *once(tuple(checked))), *args, **options)
