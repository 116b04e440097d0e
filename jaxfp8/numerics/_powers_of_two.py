"""Powers of two from exponent bits, because `exp2` and `log2` are not exact in float32.

References:
  OCP Microscaling Formats (MX) v1.0, section 5.4 (E8M0) and 6.3 (the scale from the amax).
  Mishra et al., Recipes for pre-training LLMs with MXFP8, arXiv:2506.08027 (RCEIL).
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._typing import Array, ScaleRounding
from jaxfp8.numerics._constant import constant_like
from jaxfp8.numerics._float32 import TINY
from jaxfp8.numerics._formats import E8M0, Format

BIAS = 127
"""The biased exponent of 1 in float32 and in E8M0."""
_ROUND_UP = 0x007FFFFF - 0x600000  # 0x600000 is the mantissa of 448 and 57344, of 1.75 * 2^n
_NAN = 255  # the byte of NaN in E8M0


def power_of_two(exponent: Array) -> Array:
    """`2**exponent`, [...] float32, for integers from -126 to 127.

    Example:
      >>> power_of_two(jnp.int32(-3))
      Array(0.125, dtype=float32)
    """
    return lax.bitcast_convert_type((exponent + BIAS) << 23, jnp.float32)


def scale_exponent(amax: Array, format: Format, rounding: ScaleRounding = "rceil") -> Array:
    """The exponent k of a scale 2^k under which an amax fits the format, as k + 127, [...] int32.

    "rceil" rounds `amax / format.max` up to a power of two, exactly, so no value overflows. "floor"
    subtracts the exponent of `format.max` from that of amax. Its scale is half as large for some
    amaxes. Then values above `format.max` saturate.

    Args:
      amax: [...] float32, at least 0.
      format: the format of the values.
      rounding: "rceil" or "floor".

    Returns:
      k + 127. For an amax below 2^-126 it is below 1.

    Example:
      >>> import jaxfp8 as fp8
      >>> scale_exponent(jnp.array([448.0, 449.0]), fp8.E4M3)
      Array([127, 128], dtype=int32)
    """
    # With amax = a * 2^E and format.max = 1.75 * 2^n, their quotient is above 2^(E - n) if and only
    # if a > 1.75. This sum then carries into the exponent, so it rounds up exactly.
    up = _ROUND_UP if rounding == "rceil" else 0
    bits = lax.bitcast_convert_type(amax, jnp.int32)
    return (bits + (up - (format.max_exponent << 23))) >> 23


def to_e8m0(exponent: Array, finite: Array) -> Array:
    """`2**k` in E8M0, from `exponent`, which is k + 127; NaN where not `finite`.

    The byte is built from integers, because JAX casts a float 0 to the NaN of E8M0.

    Args:
      exponent: [...] int32, 0 to 254.
      finite: [...] bool.

    Example:
      >>> to_e8m0(jnp.array([0, 130]), jnp.array([True, False]))
      Array([5.87747e-39, nan], dtype=float8_e8m0fnu)
    """
    byte = lax.select(finite, exponent, constant_like(exponent, _NAN)).astype(jnp.uint8)
    return lax.bitcast_convert_type(byte, E8M0.dtype)


def factors_of(scale: Array) -> tuple[Array, ...]:
    """Factors, normal float32 numbers, whose product is the scale.

    A float32 scale is its only factor. An E8M0 scale has two, because 2^-127 is subnormal in
    float32 and would be flushed. `times` multiplies by them.

    Example:
      >>> factors_of(to_e8m0(jnp.int32(0), jnp.bool(True)))
      (Array(5.421011e-20, dtype=float32), Array(1.0842022e-19, dtype=float32))
    """
    if scale.dtype != E8M0.dtype:
        return (scale,)
    byte = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32)
    both = byte + BIAS  # the sum of the biased exponents of the factors
    half = both >> 1
    first, second = (
        lax.bitcast_convert_type(each << 23, jnp.float32) for each in (half, both - half)
    )
    return lax.select(byte == _NAN, constant_like(first, np.nan), first), second


def converted_factors_of(scale: Array) -> tuple[Array, ...]:
    """`factors_of` for CPUs: other factors with the same product, in half the operations.

    XLA:CPU converts E8M0 to float32 correctly, but it may flush 2^-127 to zero.

    Example:
      >>> converted_factors_of(to_e8m0(jnp.int32(0), jnp.bool(True)))
      (Array(1.1754944e-38, dtype=float32), Array(0.5, dtype=float32))
    """
    if scale.dtype != E8M0.dtype:
        return (scale,)
    power = scale.astype(jnp.float32)
    second = lax.clamp(np.float32(0.5), power * np.float32(1 / TINY), np.float32(1))
    return lax.max(power, constant_like(power, TINY)), second


def times(x: Array, factors: Sequence[Array]) -> Array:
    """x [...] times each factor, one after the other. It is exact wherever the result is normal.

    Args:
      x: [...] floating point. An inf may become the largest finite number.
      factors: of a scale, broadcastable to x and of its dtype.

    Example:
      >>> times(jnp.float32(4.0), factors_of(to_e8m0(jnp.int32(0), jnp.bool(True))))
      Array(2.3509887e-38, dtype=float32)
    """
    first, *others = factors
    product = x * first
    largest = np.asarray(jnp.finfo(x.dtype).max, x.dtype)
    for factor in others:
        # Without the bound, XLA multiplies two factors that are constants first. 2^-127 is then
        # flushed to zero.
        product = lax.clamp(-largest, product, largest) * factor
    return product
