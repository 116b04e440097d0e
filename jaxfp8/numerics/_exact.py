"""Arithmetic that has the same bits on every backend: division, powers of two, inputs in float32.

No float32 division can be trusted. On NVIDIA GPUs, XLA compiles it to `div.full.f32`, which is not
correctly rounded. On CPUs, XLA replaces the division by a constant, and by a broadcast scalar, by a
multiplication by the inverse: 2 units in the last place off, and inf above 8.5e37. There it also
rewrites `1 / (448 / amax)`. TPUs multiply by an approximate inverse. So there are two exact ways,
with the same bits:

- CPUs and GPUs divide in float64, and round to float32. That may be rewritten, and stays exact.
- TPUs and kernel languages have no float64. Integer arithmetic corrects an estimate there.

References:
  Figueroa, When is double rounding innocuous?, SIGNUM Newsletter 30(3), 1995.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._typing import Array
from jaxfp8.numerics._formats import E8M0

# Inputs as float32, in which all scales and casts are computed.

TINY = float(np.finfo(np.float32).tiny)
"""2^-126, the smallest normal float32.

CPUs and GPUs flush smaller magnitudes to zero, but not consistently. So they always count as zero.
"""
LARGEST = float(np.finfo(np.float32).max)
"""The largest float32."""


def is_finite(x: Array) -> Array:
    """`jnp.isfinite`, made of operations that every kernel language has."""
    return jnp.abs(x) < jnp.inf  # False for NaN, as every comparison with it


def widen(x: Array) -> Array:
    """`x` [...] in float32. A float64 that overflows becomes the largest float32."""
    if x.dtype == jnp.float64:
        # The conversion alone would make inf of a float64 that float32 cannot hold.
        x = jnp.where(is_finite(x), jnp.clip(x, -LARGEST, LARGEST), x)
    return x.astype(jnp.float32)


def to_float32(x: Array) -> Array:
    """`widen(x)`, [...], where a magnitude below 2^-126 becomes a zero of the same sign."""
    x = widen(x)
    # The sign is a bit mask, because kernel languages lack jnp.copysign.
    sign = lax.bitcast_convert_type(x, jnp.int32) & -(2**31)
    return jnp.where(jnp.abs(x) < TINY, lax.bitcast_convert_type(sign, jnp.float32), x)


# Constants in the shape of another array, which stay inside the loop that reads them.
#
# JAX moves what does not depend on an iteration out of a differentiated `lax.scan`, and keeps it
# for all iterations. For an array of a constant this is a loss. The loop would keep 2 or 4 bytes
# for each value, and a cast would read them beside its tensor.


def constant_like(x: Array, value: float) -> Array:
    """`value` in the shape and dtype of x [...], computed from x, so that JAX does not move it."""
    # XLA knows that the result does not depend on x, and folds it into the operation that reads it.
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return (x & 0) | int(value)
    integers = np.dtype(f"int{8 * x.dtype.itemsize}")
    bits = np.asarray(value, x.dtype).view(integers)
    zero = lax.bitcast_convert_type(x, integers) & integers.type(0)
    return lax.bitcast_convert_type(zero | bits, x.dtype)


# A float32 quotient with the same bits on every chip, whatever a compiler makes of the division.


def divide(numerator: float, denominator: Array, *, clamped: bool = True) -> Array:
    """`numerator / denominator`, correctly rounded and clamped to [2^-126, 2^126].

    The denominators [...] are positive, finite and normal, or NaN. The clamp keeps both the
    quotient and its inverse normal numbers. `clamped=False` saves it where the quotient is in
    range.
    """
    quotient: Array = lax.platform_dependent(
        denominator,
        cpu=functools.partial(_divide_on_cpu, numerator, clamped=clamped),
        tpu=functools.partial(_divide_on_tpu, numerator),
        default=functools.partial(_divide_in_float64, numerator, clamped=clamped),
    )
    return quotient


def _divide_on_cpu(numerator: float, denominator: Array, *, clamped: bool) -> Array:
    # XLA may drop the conversion of a float64 quotient to float32, so a quotient must be rounded. A
    # rounding after the division would be computed again by each reader. So the next division
    # rounds its operand.
    with jax.enable_x64(True):
        wide = lax.convert_element_type(denominator, np.float64)
        wide = lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=23)
        return lax.convert_element_type(_quotient(numerator, wide, clamped=clamped), np.float32)


def _divide_on_tpu(numerator: float, denominator: Array) -> Array:
    quotient: Array = divide_in_integers(numerator, denominator)
    return lax.select(denominator == denominator, quotient, denominator)  # NaN stays NaN


def _divide_in_float64(numerator: float, denominator: Array, *, clamped: bool) -> Array:
    # The quotient of two significands of 24 bits is a float32, or it is at least 2^-49 of itself
    # away from every number of 25 bits, where rounding to float32 changes its result. A float64
    # quotient is off by 2^-53 of itself, and by at most 2^-51 if a compiler multiplies by the
    # inverse. So it rounds as the exact one does.
    with jax.enable_x64(True):  # for these operations only; no result is float64
        wide = lax.convert_element_type(denominator, np.float64)
        quotient = _quotient(numerator, wide, clamped=clamped)
        # XLA may drop a conversion to float32 and back, but not this rounding.
        rounded = lax.reduce_precision(quotient, exponent_bits=8, mantissa_bits=23)
        return lax.convert_element_type(rounded, np.float32)


def _quotient(numerator: float, denominator: Array, *, clamped: bool) -> Array:
    """`numerator / denominator`, [...] float64."""
    top = np.float64(np.float32(numerator))
    if clamped:
        # The division comes last, because XLA computes what follows it once for each use.
        denominator = lax.clamp(top * TINY, denominator, top / TINY)
    return constant_like(denominator, top) / denominator


def quotient_and_inverse(numerator: float, denominator: Array) -> tuple[Array, Array]:
    """`divide(numerator, denominator)`, and the inverse of that, [...] float32."""

    def each(way: Callable[..., Array], denominator: Array) -> tuple[Array, Array]:
        quotient = way(numerator, denominator, clamped=True)
        return quotient, way(1.0, quotient, clamped=False)

    return lax.platform_dependent(
        denominator,
        cpu=functools.partial(each, _divide_on_cpu),
        tpu=functools.partial(each, lambda top, x, clamped: _divide_on_tpu(top, x)),
        default=functools.partial(each, _divide_in_float64),
    )


# A bound of the error of the estimate, in units in the last place. `div.full.f32` is off by at most
# 2 (PTX ISA), and a multiplication by an inverse, too. The inverse of a TPU is not documented.
# Its compiler adds no step to that of v6e and 7x, and one step of Newton's to that of v5e and v5p.
# So 6 bits of 24 are left for it. The conversion to an integer drops less than 1.
_SLACK = 32


# jit compiles these forty operations as one. One by one, the first eager call of each shape
# would take a second.
@functools.partial(jax.jit, static_argnames="numerator", inline=True)
def divide_in_integers(numerator: float, denominator: Array) -> Array:
    """`divide` without float64, always clamped."""
    # Both significands are integers in [2^23, 2^24). The quotient is
    # top / bottom * 2^(top_exponent - bottom_exponent).
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
    # (2 * _SLACK + 1) * bottom, below 2^31, so it is exact.
    scaled = lax.select(
        at_least_1,
        *(jnp.full_like(bottom, np.int64(top << shift).astype(np.int32)) for shift in (23, 24)),
    )
    remainder = scaled - quotient * bottom
    missing = lax.div(remainder, bottom)
    quotient = quotient + missing
    remainder = remainder - missing * bottom
    # Now 0 <= remainder < bottom, and this rounds to nearest. No tie can occur. In a tie
    # 2 * quotient + 1 would divide `top`: an odd number of 25 bits, where `top` has 24.
    quotient = quotient + jnp.where(2 * remainder > bottom, 1, 0)

    power = int(top_exponent) - bottom_exponent - jnp.where(at_least_1, 0, 1)
    # The leading bit of the quotient, 2^23, adds 1 to the exponent field: hence 126, not 127. A
    # carry to 2^24 adds 2, which is right, too. This clip keeps the shift inside 32 bits.
    biased = jnp.clip(power + 126, -1, 253)
    # Positive floats are ordered as their bits are. So this clip of bits clamps the quotient.
    return lax.bitcast_convert_type(
        jnp.clip((biased << 23) + quotient, 1 << 23, 253 << 23), jnp.float32
    )


def _estimate(dividend: Array, divisor: Array) -> Array:
    """`dividend / divisor`, within `_SLACK - 1` units in the last place, on every chip."""
    return dividend / divisor


# Powers of two from exponent bits, because `exp2` is not exact in float32.
#
# References:
#     OCP Microscaling Formats (MX) v1.0, section 5.4 (E8M0).

BIAS = 127
"""The biased exponent of 1 in float32 and in E8M0."""


def power_of_two(exponent: Array) -> Array:
    """`2**exponent`, [...] float32, for integers from -126 to 127."""
    return lax.bitcast_convert_type((exponent + BIAS) << 23, jnp.float32)


def factors_of(scale: Array) -> tuple[Array, ...]:
    """Factors, normal float32 numbers, whose product is the scale. `times` multiplies by them."""
    if scale.dtype != E8M0.dtype:
        return (scale,)
    # Two, because 2^-127 is subnormal in float32 and would be flushed.
    byte = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32)
    both = byte + BIAS  # the sum of the biased exponents of the factors
    half = both >> 1
    first, second = (
        lax.bitcast_convert_type(each << 23, jnp.float32) for each in (half, both - half)
    )
    return lax.select(byte == E8M0.nan_byte, constant_like(first, np.nan), first), second


def times(x: Array, factors: Sequence[Array]) -> Array:
    """x [...] times each factor, exact wherever the result is normal. An inf may become finite."""
    first, *others = factors
    product = x * first
    largest = np.asarray(jnp.finfo(x.dtype).max, x.dtype)
    for factor in others:
        # Without the bound, XLA multiplies two factors that are constants first. 2^-127 is then
        # flushed to zero.
        product = lax.clamp(-largest, product, largest) * factor
    return product
