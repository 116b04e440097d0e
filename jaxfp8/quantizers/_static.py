"""Static scaling: a calibrated constant."""

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
    """Raise ValueError unless the scale is a number whose inverse is a normal float32 too.

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
    """A scale that was calibrated once: no amax, no state.

    Values beyond `scale * format.max` saturate.

    Attributes:
      format: of the values.
      scale: multiplies stored values back to real ones; in [2^-126, 2^126].
      rounding: of values, "nearest" or "stochastic", which needs a key at each call.
      granularity: PerTensor(), the only one that a single number fits.

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
