"""`quantize`: an array into a QuantizedTensor."""

import jax
import jax.numpy as jnp

from jaxfp8._typing import Array, ArrayLike, Implementation, Rounding
from jaxfp8.kernels.cast._api import cast
from jaxfp8.numerics._amax import amax
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._granularity import AbstractGranularity, PerTensor
from jaxfp8.numerics._scale import encoding_multiplier, inverse
from jaxfp8.ops._arguments import check_float
from jaxfp8.ops._once import once
from jaxfp8.quantizers._base import check_bool, check_value_format
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


def quantize(
    x: ArrayLike,
    format: Format,
    granularity: AbstractGranularity | None = None,
    *,
    power_of_two: bool = False,
    scale: ArrayLike | None = None,
    rounding: Rounding = "nearest",
    key: Array | None = None,
    implementation: Implementation = None,
) -> QuantizedTensor:
    """x in FP8: `values = round(x * m)`, `scale = 1 / m`, with `m = format.max / amax(x)` unless a scale is given.

    Finite input gives finite values; an element that is inf or NaN becomes NaN. Not differentiable: see
    `fp8.fake_quantize` for a straight-through gradient.

    Args:
      x: [...] bfloat16, float16, float32 or float64.
      format: E4M3 or E5M2.
      granularity: which values share a scale; default PerTensor().
      power_of_two: round the multiplier down to a power of two.
      scale: quantize with this scale instead (float32, shape `granularity.scale_shape(x.shape)`).
      rounding: "nearest" (even) or "stochastic" (needs `key`).
      key: a jax PRNG key.
      implementation: of the cast; None takes the first that can.

    Raises:
      TypeError, ValueError: naming the argument, its value and the cure.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> q = fp8.quantize(jnp.array([0.1, -7.0]), fp8.E4M3)
      >>> q.scale, q.dequantize()
      (Array(0.015625, dtype=float32), Array([ 0.1015625, -7.       ], dtype=float32))
    """
    x = once(check_float("x", x))
    check_value_format(format)
    check_bool("power_of_two", power_of_two)
    granularity = PerTensor() if granularity is None else granularity
    if not isinstance(granularity, AbstractGranularity):
        raise TypeError(f"granularity={granularity!r} is none; use fp8.PerTensor() or fp8.PerAxis(the axes to keep).")
    shape = granularity.scale_shape(x.shape)
    if scale is None:
        multiplier = encoding_multiplier(amax(x, granularity), format, power_of_two=power_of_two)
        scale = inverse(multiplier)
    else:
        if power_of_two:
            raise ValueError("power_of_two=True has no effect on a scale= that is given; pass one of the two.")
        scale = jnp.asarray(scale, jnp.float32)
        if scale.shape != shape:
            raise ValueError(
                f"scale has shape {list(scale.shape)}, but {granularity!r} of x {list(x.shape)} needs {list(shape)}."
            )
        # A traced scale cannot be looked at.
        if not isinstance(scale, jax.core.Tracer) and not jnp.all((scale >= 2.0**-126) & (scale <= 2.0**126)):
            raise ValueError(
                f"scale={scale} must be positive, between 2**-126 and 2**126; leave it out for the scale that fits x."
            )
        multiplier = inverse(scale)
    return cast(
        x, multiplier, format, granularity, scale=scale, rounding=rounding, key=key, implementation=implementation
    )


def fake_quantize(
    x: ArrayLike, format: Format, granularity: AbstractGranularity | None = None, *, power_of_two: bool = False
) -> Array:
    """x rounded to what FP8 can hold, in its own dtype; the gradient passes straight through.

    Args:
      x: [...] bfloat16, float16, float32 or float64.
      format: E4M3 or E5M2.
      granularity: which values share a scale; default PerTensor().
      power_of_two: round the multiplier down to a power of two.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> jax.grad(lambda x: fp8.fake_quantize(x, fp8.E4M3).sum())(jnp.array([0.1, 7.0]))
      Array([1., 1.], dtype=float32)

    References:
      Bengio et al., straight-through estimator, arXiv:1308.3432.
    """
    x = check_float("x", x)
    rounded = quantize(jax.lax.stop_gradient(x), format, granularity, power_of_two=power_of_two).dequantize()
    return rounded - (jax.lax.stop_gradient(x) - x)  # in this order the value is `rounded`, to the bit, -0 included
