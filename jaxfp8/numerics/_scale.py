"""Scales: from amaxes, by a rule.

`values = cast(x * multiplier)` and `x ~ values * scale`, with `scale = 1 / multiplier`.
"""

import dataclasses
import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._check import check_bool, check_one_of
from jaxfp8._typing import Array, ScaleRounding
from jaxfp8.numerics._exact import (
    BIAS,
    LARGEST,
    TINY,
    constant_like,
    divide,
    divide_in_integers,
    quotient_and_inverse,
)
from jaxfp8.numerics._formats import E8M0, Format

# From an amax to the encoding multiplier, and from the multiplier to the scale.


def is_usable(amax: Array) -> Array:
    """Whether an amax can set a scale: finite and at least 2^-126."""
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
    largest = format.max * 2.0**-margin
    amax = _usable(amax, largest, kernel_language=kernel_language)
    if not power_of_two:
        quotient = divide_in_integers if kernel_language else divide
        return quotient(largest, amax)
    # The multiplier rounded down is the inverse of the scale rounded up. `_scale_exponent` has that
    # exactly, without a division.
    exponent = (2 * BIAS - margin) - _scale_exponent(amax, format)
    exponent = lax.clamp(np.int32(1), exponent, np.int32(253))
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)


def _usable(amax: Array, largest: float, *, kernel_language: bool = False) -> Array:
    """The amax, or where it cannot set a scale `largest`, which gives the multiplier 1."""
    like = lax.full_like if kernel_language else constant_like
    return lax.select(is_usable(amax), amax, like(amax, largest))


def inverse(
    multiplier_or_scale: Array, *, power_of_two: bool = False, kernel_language: bool = False
) -> Array:
    """`1 / x`, correctly rounded: the scale of a multiplier, or the multiplier of a scale.

    The numbers are in [2^-126, 2^126]. If all are powers of two, no division is needed.
    """
    if power_of_two:
        bits = lax.bitcast_convert_type(multiplier_or_scale, jnp.int32)
        # 2^k has the bits (127 + k) << 23, its inverse (127 - k) << 23. Both are normal numbers.
        return lax.bitcast_convert_type((254 << 23) - bits, jnp.float32)
    if kernel_language:
        return divide_in_integers(1.0, multiplier_or_scale)
    return divide(1.0, multiplier_or_scale, clamped=False)


# ScaleRule: how an amax becomes a scale.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleRule:
    """How an amax becomes a scale.

    Attributes:
      power_of_two: round the multiplier down to a power of two.
      scale_format: None stores float32 scales. E8M0 stores powers of two in one byte (MXFP8).
      scale_rounding: how E8M0 scales are rounded. "rceil" rounds up, so that no value overflows.
        "floor" is the OCP specification's rule. Values above the format's largest value saturate.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> ScaleRule(scale_format=fp8.E8M0).apply(jnp.float32(449.0), fp8.E4M3)
      (Array(0.5, dtype=float32), Array(2, dtype=float8_e8m0fnu))
    """

    power_of_two: bool = False
    scale_format: Format | None = None
    scale_rounding: ScaleRounding = "rceil"

    def __post_init__(self) -> None:
        check_bool("power_of_two", self.power_of_two)
        if self.scale_format not in (None, E8M0):
            raise ValueError(
                f"scale_format={self.scale_format!r} holds no scales; use None (float32) or E8M0."
            )
        check_one_of("scale_rounding", self.scale_rounding, get_args(ScaleRounding))
        if self.scale_rounding != "rceil" and self.scale_format is None:
            raise ValueError(
                f"scale_rounding={self.scale_rounding!r} needs E8M0 scales; pass scale_format=E8M0 "
                "as well, or leave it out."
            )

    @functools.cached_property
    def exact(self) -> bool:
        """Whether every scale is a power of two, so that multiplying by it is exact."""
        return self.power_of_two or self.scale_format is not None

    def apply(
        self, amax: Array, format: Format, *, apart: bool = False, kernel_language: bool = False
    ) -> tuple[Array, Array]:
        """The encoding multiplier and the scale, for an amax [...] float32.

        With E8M0, an amax of zero, or one that counts as zero, gives byte 0 (2^-127). An amax of
        inf or NaN gives byte 255 (NaN) and the multiplier 1. Kernels have no float64.

        Args:
          amax: [...] float32.
          format: the format of the values.
          apart: whether a cast and a matmul read the two results, in different loops. On CPUs the
            multiplier is then a division, or both loops would compute the scale again. The bits are
            the same.
          kernel_language: whether this is part of a kernel.
        """
        if kernel_language:
            return self._apply(amax, format, kernel_language=True)
        return self._in_one_program(amax, format, apart)

    @functools.partial(jax.jit, static_argnums=(0, 2, 3))  # traced once for each shape
    def _in_one_program(self, amax: Array, format: Format, apart: bool) -> tuple[Array, Array]:
        elsewhere = functools.partial(self._apply, format=format, kernel_language=False)
        if self.scale_format is not None or not self.power_of_two:
            return elsewhere(amax)
        on_cpu = functools.partial(_powers_on_cpu, format=format, apart=apart)
        return lax.platform_dependent(amax, cpu=on_cpu, default=elsewhere)

    def _apply(self, amax: Array, format: Format, *, kernel_language: bool) -> tuple[Array, Array]:
        if self.scale_format is None and not self.power_of_two and not kernel_language:
            return quotient_and_inverse(format.max, _usable(amax, format.max))
        if self.scale_format is None:
            how = {"power_of_two": self.power_of_two, "kernel_language": kernel_language}
            multiplier = encoding_multiplier(amax, format, **how)
            return multiplier, inverse(multiplier, **how)
        finite = amax < jnp.inf  # False for NaN, as every comparison with it
        # The smallest scale is 2^-127. Its multiplier is 2^127, which is the largest power of two
        # in float32.
        exponent = jnp.maximum(_scale_exponent(amax, format, self.scale_rounding), 0)
        of_multiplier = lax.select(finite, exponent, constant_like(exponent, BIAS))
        multiplier = (2 * BIAS - of_multiplier) << 23
        return lax.bitcast_convert_type(multiplier, jnp.float32), _to_e8m0(exponent, finite)


def _powers_on_cpu(amax: Array, *, format: Format, apart: bool) -> tuple[Array, Array]:
    """`ScaleRule.apply` for float32 powers of two, in fewer operations."""
    # `exponent` is that of the scale, at its place in a float32. Its biased value is at most
    # 255 - `max_exponent`.
    bits = lax.bitcast_convert_type(_usable(amax, format.max), jnp.int32)
    exponent = (bits + (_ROUND_UP - (format.max_exponent << 23))) & -(1 << 23)
    scale = lax.bitcast_convert_type(jnp.maximum(exponent, 1 << 23), jnp.float32)
    if not apart:
        return inverse(scale, power_of_two=True), scale
    # XLA:CPU does not fuse a division into what reads it. All that is before it would be computed
    # again in the cast and in the matmul. A quotient of powers of two is exact, however a compiler
    # rewrites it.
    multiplier = constant_like(scale, 1.0) / scale
    return multiplier, inverse(multiplier, power_of_two=True)


# The scale 2^k of an amax, from exponent bits, because `log2` is not exact in float32.
#
# References:
#     OCP Microscaling Formats (MX) v1.0, section 6.3 (the scale from the amax).
#     Mishra et al., Recipes for pre-training LLMs with MXFP8, arXiv:2506.08027 (RCEIL).

_ROUND_UP = 0x007FFFFF - 0x600000  # 0x600000 is the mantissa of 448 and 57344, of 1.75 * 2^n


def _scale_exponent(amax: Array, format: Format, rounding: ScaleRounding = "rceil") -> Array:
    """The exponent k of a scale 2^k under which an amax fits the format, as k + 127, [...] int32.

    For an amax below 2^-126 it is below 1.
    """
    # "rceil" rounds `amax / format.max` up to a power of two. "floor" subtracts the exponent of
    # `format.max` from that of amax: values above `format.max` may saturate.
    # With amax = a * 2^E and format.max = 1.75 * 2^n, their quotient is above 2^(E - n) if and only
    # if a > 1.75. This sum then carries into the exponent, so it rounds up exactly.
    up = _ROUND_UP if rounding == "rceil" else 0
    bits = lax.bitcast_convert_type(amax, jnp.int32)
    return (bits + (up - (format.max_exponent << 23))) >> 23


def _to_e8m0(exponent: Array, finite: Array) -> Array:
    """`2**k` in E8M0, from `exponent`, which is k + 127, 0 to 254; NaN where not `finite`."""
    # The byte is built from integers, because JAX casts a float 0 to the NaN of E8M0.
    byte = lax.select(finite, exponent, constant_like(exponent, E8M0.nan_byte)).astype(jnp.uint8)
    return lax.bitcast_convert_type(byte, E8M0.dtype)
