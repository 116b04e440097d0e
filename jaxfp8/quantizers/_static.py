"""Static scaling: the scale is a constant that was calibrated before."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from jaxfp8._typing import Rounding
from jaxfp8.kernels.cast._api import KnownScale
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._granularity import AbstractGranularity, PerTensor
from jaxfp8.quantizers._base import (
    AbstractQuantizer,
    ScaleInputs,
    check_rounding,
    check_value_format,
)


def check_scale(name: str, scale: object) -> None:
    """Raise ValueError unless the scale and its inverse are normal float32 numbers.

    Example:
      >>> check_scale("scale", 0.125)
    """
    if (
        isinstance(scale, bool)
        or not isinstance(scale, int | float | np.floating)
        or not 2.0**-126 <= scale <= 2.0**126
    ):
        raise ValueError(f"{name}={scale!r} must be a positive number between 2**-126 and 2**126.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Static(AbstractQuantizer):
    """A constant scale that was calibrated before. It needs no amax and has no state.

    Values beyond `scale * format.max` saturate.

    Attributes:
      format: the FP8 format of the values.
      scale: multiplies stored values back to real ones; in [2^-126, 2^126].
      rounding: how values are rounded, "nearest" or "stochastic" (needs a key at each call).
      granularity: PerTensor(). No other one is possible, because there is one scale.

    Example:
      >>> import jaxfp8 as fp8
      >>> Static(format=fp8.E4M3, scale=0.125).scale
      0.125
    """

    uses_amax: ClassVar[bool] = False
    format: Format
    scale: float
    rounding: Rounding = "nearest"
    granularity: AbstractGranularity = PerTensor()

    def __post_init__(self) -> None:
        check_value_format(self.format)
        check_scale("scale", self.scale)
        check_rounding("rounding", self.rounding)
        if self.granularity != PerTensor():
            raise ValueError(
                f"granularity={self.granularity!r} needs more than one scale; Static has one: use "
                "PerTensor()."
            )

    @property
    def value_format(self) -> Format:
        return self.format

    def choose_scale(self, inputs: ScaleInputs, granularity: AbstractGranularity) -> KnownScale:
        constant = np.float32(self.scale)
        return KnownScale(jnp.asarray(np.float32(1) / constant), jnp.asarray(constant))
