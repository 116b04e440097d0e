"""A float32 as a bfloat16 and a remainder, in integer arithmetic on its bits.

The high 16 bits of a float32 are a bfloat16. Rounding adds half of a bfloat16 spacing to the
magnitude, and drops the low 16 bits. So a tie is rounded away from zero.

Ties cannot go to even here. The remainder has 16 bits, and they say where between two bfloat16
values the float32 is. Take an even bfloat16 `e`. With ties to even, the ties half a spacing above
and below `e` would both round to `e`. Together with the values between them, `e` would stand for
2^16 + 1 values of float32. 16 bits tell only 2^16 apart. With ties away from zero each bfloat16
stands for exactly 2^16 values.

Integers keep subnormal numbers, which the float arithmetic of CPUs and GPUs may flush to zero.

References:
  TransformerEngine, FusedAdam, `store_param_remainders` (the same 16 bits).
  FlashOptim, arXiv:2602.23349 (a remainder of 8 bits).
"""

import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array

_MAGNITUDE = 0x7FFFFFFF  # all bits but the sign
_INFINITY = 0x7F800000  # a larger magnitude is a NaN
_QUIET = 0x00400000  # the first mantissa bit: a NaN that has it stays one without its low 16 bits


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _is_nan(bits: Array) -> Array:
    return (bits & _MAGNITUDE) > _INFINITY


def _half_added(bits: Array, dropped: int) -> Array:
    """The bits plus half of the spacing that is left without the last `dropped` bits, [...]."""
    # The sum would make -0 of a NaN with all mantissa bits. So a NaN gets its quiet bit instead.
    return jnp.where(_is_nan(bits), bits | _QUIET, bits + (1 << (dropped - 1)))


def rounded_to_24_bits(x: Array) -> Array:
    """`x` without its last 8 mantissa bits, rounded to nearest, ties away from zero.

    Args:
      x: [...] float32.

    Returns:
      [...] float32, whose last 8 bits are 0. NaN stays NaN. A magnitude of `(2 - 2^-16) * 2^127` or
      more becomes inf.

    Example:
      >>> rounded_to_24_bits(jnp.float32(1 + 2**-16)) == 1 + 2**-15
      Array(True, dtype=bool)
    """
    kept = _half_added(_bits(x), 8) & ~jnp.uint32(0xFF)
    return lax.bitcast_convert_type(kept, jnp.float32)


def rounded_to_bfloat16(x: Array) -> Array:
    """`x` [...] float32 rounded to nearest, ties away from zero, [...] bfloat16.

    NaN stays NaN, and inf stays inf. `x.astype(jnp.bfloat16)` differs at ties: it rounds them to
    even.

    Example:
      >>> tie = jnp.float32(1 + 2**-8)
      >>> rounded_to_bfloat16(tie), tie.astype(jnp.bfloat16)
      (Array(1.00781, dtype=bfloat16), Array(1, dtype=bfloat16))
    """
    high = _half_added(_bits(x), 16) >> 16
    return lax.bitcast_convert_type(high.astype(jnp.uint16), jnp.bfloat16)


def split(x: Array) -> tuple[Array, Array]:
    """A float32 as a bfloat16 and its low 16 bits. `joined` makes the float32 of them again.

    Args:
      x: [...] float32.

    Returns:
      `rounded_to_bfloat16(x)` [...], and the remainder [...] uint16. The remainder of NaN is 0, so
      a NaN keeps its sign and the first 7 bits of its mantissa, with the quiet bit set.

    Example:
      >>> split(jnp.float32(1 - 2**-24))
      (Array(1, dtype=bfloat16), Array(65535, dtype=uint16))
    """
    bits = _bits(x)
    low = jnp.where(_is_nan(bits), jnp.uint32(0), bits).astype(jnp.uint16)
    return rounded_to_bfloat16(x), low


def joined(high: Array, low: Array) -> Array:
    """The float32 [...] of a bfloat16 [...] and its remainder [...] uint16, exactly.

    Example:
      >>> x = jnp.float32(0.1)
      >>> joined(*split(x)) == x
      Array(True, dtype=bool)
    """
    top = lax.bitcast_convert_type(high, jnp.uint16).astype(jnp.uint32)
    wide = low.astype(jnp.uint32)
    # A remainder of 2^15 or more was rounded up, which added 1 to the high 16 bits.
    return lax.bitcast_convert_type(((top - (wide >> 15)) << 16) | wide, jnp.float32)
