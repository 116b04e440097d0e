"""Static scaling: a calibrated constant."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from jaxfp8._typing import Array, Implementation
from jaxfp8.kernels._met import Met
from jaxfp8.kernels._prologue import Source
from jaxfp8.kernels.cast._api import cast_copies
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._granularity import AbstractGranularity, PerTensor
from jaxfp8.quantizers._base import AbstractQuantizer, check_value_format
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


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
    """A scale that was calibrated once: no amax, no state. Values beyond `scale * format.max` saturate.

    Attributes:
      format: of the values.
      scale: multiplies stored values back to real ones; in [2^-126, 2^126].
      granularity: PerTensor(), the only one that a single number fits.

    Example:
      >>> import jaxfp8 as fp8
      >>> Static(format=fp8.E4M3, scale=0.125).scale
      0.125
    """

    format: Format
    scale: float
    granularity: AbstractGranularity = PerTensor()

    def __post_init__(self) -> None:
        check_value_format(self.format)
        check_scale("scale", self.scale)
        if self.granularity != PerTensor():
            raise ValueError(
                f"granularity={self.granularity!r} needs more than one scale; Static has one: use PerTensor()."
            )

    @property
    def value_format(self) -> Format:
        return self.format

    @property
    def stateful(self) -> bool:
        return False

    def quantize(
        self,
        x: Source,
        granularities: tuple[AbstractGranularity, ...],
        *,
        amax: Callable[[AbstractGranularity], Array],
        scale: Array | None,
        all_set: bool,
        transposed: tuple[bool, ...] = (),
        column_sums: bool = False,
        implementation: Implementation,
    ) -> tuple[tuple[QuantizedTensor, ...], Met]:
        del amax, scale, all_set
        constant = np.float32(self.scale)
        multiplier, fixed = jnp.asarray(np.float32(1) / constant), jnp.asarray(constant)
        count = len(granularities)
        return cast_copies(
            x, (multiplier,) * count, self.format, granularities,
            scales=(fixed,) * count, transposed=transposed, column_sums=column_sums, implementation=implementation,
        )  # fmt: skip
