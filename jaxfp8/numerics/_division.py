"""A float32 quotient with the same bits on every chip, whatever a compiler makes of the division.

No float32 division can be trusted. On NVIDIA GPUs, XLA compiles it to `div.full.f32`, which is not
correctly rounded. On CPUs, XLA replaces the division by a constant, and by a broadcast scalar, by a
multiplication by the inverse: 2 units in the last place off, and inf above 8.5e37. There it also
rewrites `1 / (448 / amax)`. So there are two exact ways:

- `divide` divides in float64, and rounds to float32. It may be rewritten, and stays exact.
- `divide_in_integers` corrects an estimate by integer arithmetic. Kernel languages lack float64.

References:
  Figueroa, When is double rounding innocuous?, SIGNUM Newsletter 30(3), 1995.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._typing import Array
from jaxfp8.numerics._constant import constant_like
from jaxfp8.numerics._float32 import TINY

# A bound of the error of the estimate, in units in the last place. `div.full.f32` is off by at most
# 2 (PTX ISA), and a multiplication by an inverse, too. The conversion to an integer drops less
# than 1.
_SLACK = 4


def divide(
    numerator: float, denominator: Array, *, exponent: int = 0, clamped: bool = True
) -> Array:
    """`numerator / denominator * 2**exponent`, correctly rounded and clamped to [2^-126, 2^126].

    The clamp keeps both the quotient and its inverse normal numbers.

    Why is it exact? The quotient of two significands of 24 bits is a float32, or it is at least
    2^-49 of itself away from every number of 25 bits, where rounding to float32 changes its result.
    A float64 quotient is off by 2^-53 of itself, and by at most 2^-51 if a compiler multiplies by
    the inverse.

    Args:
      numerator: a positive float32 constant.
      denominator: [...] float32, positive, finite and normal.
      exponent: the exponent of a power of two to multiply by, without rounding.
      clamped: whether to clamp. If False, the quotient must be in range, or is inf or NaN.

    Returns:
      [...] float32.

    Example:
      >>> import jax.numpy as jnp
      >>> divide(448.0, jnp.float32(3.0))
      Array(149.33333, dtype=float32)
    """
    with jax.enable_x64(True):  # for these operations only; no result is float64
        top = np.float64(np.float32(numerator)) * 2.0**exponent
        wide = lax.convert_element_type(denominator, np.float64)
        if clamped:
            # The division comes last, because XLA computes what follows it once for each use.
            wide = lax.clamp(top * TINY, wide, top / TINY)
        # XLA may drop a conversion to float32 and back, but not this rounding.
        rounded = lax.reduce_precision(
            constant_like(wide, top) / wide, exponent_bits=8, mantissa_bits=23
        )
        return lax.convert_element_type(rounded, np.float32)


# jit compiles these forty operations as one. One by one, the first eager call of each
# shape would take a second.
@functools.partial(jax.jit, static_argnames=("numerator", "exponent"), inline=True)
def divide_in_integers(numerator: float, denominator: Array, *, exponent: int = 0) -> Array:
    """`divide` without float64.

    Example:
      >>> import jax.numpy as jnp
      >>> divide_in_integers(448.0, jnp.float32(3.0))
      Array(149.33333, dtype=float32)
    """
    # Both significands are integers in [2^23, 2^24). The quotient is
    # top / bottom * 2^(top_exponent - bottom_exponent + exponent).
    top, top_exponent = np.frexp(np.float32(numerator))
    top = int(top * 2**24)
    bits = lax.bitcast_convert_type(denominator, jnp.int32)
    bottom = (bits & 0x007FFFFF) | 0x00800000
    bottom_exponent = (bits >> 23) - 126

    # `quotient` is the whole part of top * 2^shift / bottom. With shift 23 or 24 it is in
    # [2^23, 2^24), so it has the 24 bits of a float32 significand.
    at_least_1 = top >= bottom
    dividend = lax.select(
        at_least_1, *(jnp.full_like(bottom, top * 2.0**shift, jnp.float32) for shift in (23, 24))
    )
    # Both operands of the estimate are exact in float32: each has 24 bits. Less the slack, the
    # estimate is never above the true quotient, and below it by 2 * _SLACK at most.
    quotient = _estimate(dividend, bottom.astype(jnp.float32)).astype(jnp.int32) - _SLACK
    # Both terms of the remainder have 48 bits and wrap around in int32. Their difference is at most
    # 2 * _SLACK * bottom, below 2^28, so it is exact.
    scaled = lax.select(
        at_least_1, *(jnp.full_like(bottom, _wrap(top << shift)) for shift in (23, 24))
    )
    remainder = scaled - quotient * bottom
    missing = lax.div(remainder, bottom)
    quotient = quotient + missing
    remainder = remainder - missing * bottom
    # Now 0 <= remainder < bottom, and this rounds to nearest. No tie can occur. In a tie
    # 2 * quotient + 1 would divide `top`: an odd number of 25 bits, where `top` has 24.
    quotient = quotient + jnp.where(2 * remainder > bottom, 1, 0)

    power = int(top_exponent) + exponent - bottom_exponent - jnp.where(at_least_1, 0, 1)
    # The leading bit of the quotient, 2^23, adds 1 to the exponent field: hence 126, not 127. A
    # carry to 2^24 adds 2, which is right, too. This clip keeps the shift inside 32 bits.
    biased = jnp.clip(power + 126, -1, 253)
    # Positive floats are ordered as their bits are. So this clip of bits clamps the quotient.
    return lax.bitcast_convert_type(
        jnp.clip((biased << 23) + quotient, 1 << 23, 253 << 23), jnp.float32
    )


def _estimate(dividend: Array, divisor: Array) -> Array:
    """`dividend / divisor`, within 2 units in the last place. A test replaces it by a worse one."""
    return dividend / divisor


def _wrap(value: int) -> int:
    """The signed 32-bit integer that equals `value` modulo 2^32."""
    return (value + 2**31) % 2**32 - 2**31
