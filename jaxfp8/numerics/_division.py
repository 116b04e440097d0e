"""A float32 quotient with the same bits on every chip.

XLA compiles a float32 division to `div.full.f32` on NVIDIA GPUs, which is not correctly rounded, and rewrites
`1 / (448 / amax)` on CPUs. Scales are few, so they are divided by schoolbook long division on the integer
significands: exact by construction wherever integers are.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._typing import Array

_DIGIT_BITS = 8  # a 24-bit remainder shifted by one digit still fits 32 bits
_DIGITS = 4


# Fifty integer operations: compiled one by one, the first eager call of each shape would take a second.
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
    top = jnp.uint32(int(top * 2**24))
    bits = lax.bitcast_convert_type(denominator, jnp.uint32)
    bottom = (bits & 0x007FFFFF) | 0x00800000
    bottom_exponent = (bits >> 23).astype(jnp.int32) - 126

    # quotient = top / bottom in [1/2, 2), with 32 bits behind the point and the remainder as the sticky bit.
    whole = (top >= bottom).astype(jnp.uint32)
    remainder = top - whole * bottom
    fraction = jnp.zeros_like(bottom)
    for _ in range(_DIGITS):
        remainder = remainder << _DIGIT_BITS
        digit = remainder // bottom
        remainder = remainder - digit * bottom
        fraction = (fraction << _DIGIT_BITS) | digit

    # 24 significant bits: 1.xxx keeps 23 bits of the fraction, 0.1xxx keeps 24. Ties cannot happen unless exact,
    # but are rounded to even all the same.
    drop = jnp.where(whole > 0, jnp.uint32(9), jnp.uint32(8))
    kept = jnp.where(whole > 0, jnp.uint32(0x00800000), jnp.uint32(0)) | (fraction >> drop)
    half = jnp.uint32(1) << (drop - 1)
    rest = fraction & ((jnp.uint32(1) << drop) - 1)
    up = (rest > half) | ((rest == half) & ((remainder > 0) | ((kept & 1) > 0)))
    significand = kept + up.astype(jnp.uint32)  # 2^24 when it rounds up to the next power of two

    power = int(top_exponent) + exponent - bottom_exponent - jnp.where(whole > 0, 0, 1)
    carry = significand >> 24
    significand = significand >> carry
    power = power + carry.astype(jnp.int32)
    # Clamp. An exponent of 126 holds the power of two alone.
    too_large, too_small = power >= 126, power < -126
    mantissa = jnp.where(too_large | too_small, jnp.uint32(0), significand & 0x007FFFFF)
    biased = (jnp.clip(power, -126, 126) + 127).astype(jnp.uint32)
    return lax.bitcast_convert_type((biased << 23) | mantissa, jnp.float32)
