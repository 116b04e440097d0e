"""ScaleRule: how an amax becomes a scale."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array, ScaleRounding
from jaxfp8.numerics._constant import constant_like
from jaxfp8.numerics._formats import E8M0, Format
from jaxfp8.numerics._powers_of_two import BIAS, scale_exponent, to_e8m0
from jaxfp8.numerics._scale import encoding_multiplier, inverse


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
        if not isinstance(self.power_of_two, bool):
            raise TypeError(f"power_of_two={self.power_of_two!r} must be True or False.")
        if self.scale_format not in (None, E8M0):
            raise ValueError(
                f"scale_format={self.scale_format!r} holds no scales; use None (float32) or E8M0."
            )
        if self.scale_rounding not in ("rceil", "floor"):
            raise ValueError(
                f"scale_rounding={self.scale_rounding!r} is unknown; use 'rceil' or 'floor'."
            )
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
        self, amax: Array, format: Format, *, kernel_language: bool = False
    ) -> tuple[Array, Array]:
        """The encoding multiplier [...] float32, and the scale [...] in its format.

        With E8M0, an amax of zero, or one that counts as zero, gives byte 0 (2^-127). An amax of
        inf or NaN gives byte 255 (NaN) and the multiplier 1.

        Args:
          amax: [...] float32.
          format: the format of the values.
          kernel_language: whether this is part of a kernel, which has no float64.
        """
        if kernel_language:
            return self._apply(amax, format, kernel_language=True)
        return self._in_one_program(amax, format)

    @functools.partial(jax.jit, static_argnums=(0, 2))  # traced once for each shape
    def _in_one_program(self, amax: Array, format: Format) -> tuple[Array, Array]:
        return self._apply(amax, format, kernel_language=False)

    def _apply(self, amax: Array, format: Format, *, kernel_language: bool) -> tuple[Array, Array]:
        if self.scale_format is None:
            how = {"power_of_two": self.power_of_two, "kernel_language": kernel_language}
            multiplier = encoding_multiplier(amax, format, **how)
            return multiplier, inverse(multiplier, **how)
        finite = amax < jnp.inf  # False for NaN, as every comparison with it
        # The smallest scale is 2^-127. Its multiplier is 2^127, which is the largest power of two
        # in float32.
        exponent = jnp.maximum(scale_exponent(amax, format, self.scale_rounding), 0)
        of_multiplier = lax.select(finite, exponent, constant_like(exponent, BIAS))
        multiplier = (2 * BIAS - of_multiplier) << 23
        return lax.bitcast_convert_type(multiplier, jnp.float32), to_e8m0(exponent, finite)
