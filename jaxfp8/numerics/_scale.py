"""From an amax to the encoding multiplier, and from the multiplier to the scale.

`values = cast(x * multiplier)` and `x ~ values * scale`, with `scale = 1 / multiplier`.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._typing import Array
from jaxfp8.numerics import _powers_of_two as powers
from jaxfp8.numerics._constant import constant_like
from jaxfp8.numerics._division import divide, divide_in_integers
from jaxfp8.numerics._float32 import LARGEST, TINY
from jaxfp8.numerics._formats import Format


def is_usable(amax: Array) -> Array:
    """Whether an amax can set a scale: finite and at least 2^-126.

    Example:
      >>> import jax.numpy as jnp
      >>> is_usable(jnp.array([0.0, 1.0, jnp.inf]))
      Array([False,  True, False], dtype=bool)
    """
    # False for NaN, as every comparison with it.
    return amax == lax.clamp(np.float32(TINY), amax, np.float32(LARGEST))


def encoding_multiplier(
    amax: Array,
    format: Format,
    *,
    margin: int = 0,
    power_of_two: bool = False,
    kernel_language: bool = False,
) -> Array:
    """`format.max / amax / 2**margin`, the factor that fills the format's range.

    It is correctly rounded in float32. It is clamped to [2^-126, 2^126], so that both the
    multiplier and its inverse are normal numbers. It is 1 if the amax is zero, below 2^-126 or not
    finite. (TransformerEngine's JAX half returns inf below 1.3e-36, which makes finite inputs NaN.)

    Args:
      amax: [...] float32.
      format: the format of the values.
      margin: how many powers of two to stay below the format's largest value.
      power_of_two: round down to a power of two, so that scaling is exact and no value overflows.
      kernel_language: whether this is part of a kernel, which has no float64.

    Returns:
      [...] float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> encoding_multiplier(jnp.float32(7.0), fp8.E4M3)
      Array(64., dtype=float32)

    References:
      TransformerEngine user guide, FP8 delayed scaling.
    """
    # This constant gives the multiplier 1.
    largest = format.max * 2.0**-margin
    like = lax.full_like if kernel_language else constant_like
    amax = lax.select(is_usable(amax), amax, like(amax, largest))
    if not power_of_two:
        quotient = divide_in_integers if kernel_language else divide
        return quotient(format.max, amax, exponent=-margin)
    # The multiplier rounded down is the inverse of the scale rounded up. `scale_exponent` has that
    # exactly, without a division.
    exponent = (2 * powers.BIAS - margin) - powers.scale_exponent(amax, format)
    exponent = lax.clamp(np.int32(1), exponent, np.int32(253))
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)


def inverse(
    multiplier_or_scale: Array, *, power_of_two: bool = False, kernel_language: bool = False
) -> Array:
    """`1 / x`, correctly rounded: the scale of a multiplier, or the multiplier of a scale.

    Args:
      multiplier_or_scale: [...] float32 in [2^-126, 2^126].
      power_of_two: whether all of them are powers of two. Then no division is needed.
      kernel_language: whether this is part of a kernel, which has no float64.

    Returns:
      [...] float32.

    Example:
      >>> import jax.numpy as jnp
      >>> inverse(jnp.float32(64.0))
      Array(0.015625, dtype=float32)
    """
    if power_of_two:
        bits = lax.bitcast_convert_type(multiplier_or_scale, jnp.int32)
        # 2^k has the bits (127 + k) << 23, its inverse (127 - k) << 23. Both are normal numbers.
        return lax.bitcast_convert_type((254 << 23) - bits, jnp.float32)
    if kernel_language:
        return divide_in_integers(1.0, multiplier_or_scale)
    return divide(1.0, multiplier_or_scale, clamped=False)
