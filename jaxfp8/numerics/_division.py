"""A float32 quotient with the same bits on every chip.

XLA compiles a float32 division to `div.full.f32` on NVIDIA GPUs, which is not correctly rounded,
and rewrites `1 / (448 / amax)` on CPUs. So a float32 division only estimates the quotient here;
integers, which are exact wherever there are integers, correct and round it. A step holds a dozen
quotients for each matmul: short code is what keeps compilation fast.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._typing import Array

# Units in the last place that the estimate may be off: `div.full.f32` is off by 2 at most (PTX
# ISA), the conversion to an integer drops up to 1.
_SLACK = 4


# Fifty integer operations: compiled one by one, the first eager call of each shape would take a
# second.
@functools.partial(jax.jit, static_argnames=("numerator", "exponent"), inline=True)
def divide(numerator: float, denominator: Array, *, exponent: int = 0) -> Array:
    """`numerator / denominator * 2**exponent`, correctly rounded and clamped to [2^-126, 2^126].

    The clamp keeps the quotient and its inverse normal numbers (docs: numerics, "scale from amax").

    Args:
      numerator: a positive float32 constant.
      denominator: [...] float32, positive, finite and normal.
      exponent: a power of two to multiply by, without rounding.

    Returns:
      [...] float32.

    Example:
      >>> import jax.numpy as jnp
      >>> divide(448.0, jnp.float32(3.0))
      Array(149.33333, dtype=float32)
    """
    top, top_exponent = np.frexp(np.float32(numerator))
    top = int(top * 2**24)
    bits = lax.bitcast_convert_type(denominator, jnp.int32)
    bottom = (bits & 0x007FFFFF) | 0x00800000
    bottom_exponent = (bits >> 23) - 126

    # quotient = top * 2^shift / bottom in [2^23, 2^24), with shift 23 or 24, as a whole number and
    # a remainder.
    at_least_1 = top >= bottom
    dividend = lax.select(
        at_least_1, *(jnp.full_like(bottom, top * 2.0**shift, jnp.float32) for shift in (23, 24))
    )
    # Below the true one, by 2 * _SLACK at most.
    quotient = _estimate(dividend, bottom.astype(jnp.float32)).astype(jnp.int32) - _SLACK
    # The difference of two numbers of 48 bits is small, so 32 bits that wrap around hold all of it.
    scaled = lax.select(
        at_least_1, *(jnp.full_like(bottom, _wrap(top << shift)) for shift in (23, 24))
    )
    remainder = scaled - quotient * bottom
    missing = lax.div(remainder, bottom)
    quotient = quotient + missing
    remainder = remainder - missing * bottom
    # To nearest; a tie would take a 25-bit odd divisor of `top`, which has 24 bits.
    quotient = quotient + jnp.where(2 * remainder > bottom, 1, 0)

    power = int(top_exponent) + exponent - bottom_exponent - jnp.where(at_least_1, 0, 1)
    # The leading bit of the quotient, or a carry to 2^24, adds itself to the exponent.
    biased = jnp.clip(power + 126, -1, 253)
    return lax.bitcast_convert_type(
        jnp.clip((biased << 23) + quotient, 1 << 23, 253 << 23), jnp.float32
    )


def _estimate(dividend: Array, divisor: Array) -> Array:
    """`dividend / divisor`, near enough; by itself, so that a test can make it worse."""
    return dividend / divisor


def _wrap(value: int) -> int:
    """An integer as the 32-bit one that arithmetic that wraps around takes it for."""
    return (value + 2**31) % 2**32 - 2**31
