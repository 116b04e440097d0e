"""Current scaling: the scale of a tensor from its own amax."""

import dataclasses
from collections.abc import Callable

from jaxfp8._typing import Array, Implementation
from jaxfp8.kernels.cast._api import cast
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._granularity import AbstractGranularity, PerRow, PerTensor
from jaxfp8.numerics._scale import encoding_multiplier
from jaxfp8.quantizers._base import AbstractQuantizer, check_bool, check_value_format
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Current(AbstractQuantizer):
    """`multiplier = format.max / amax(x)`: always exact, at the price of one more read of x.

    Attributes:
      format: of the values.
      granularity: PerTensor(), or PerRow() for one scale a row that the matmul contracts.
      power_of_two: round the multiplier down to a power of two.

    Example:
      >>> import jaxfp8 as fp8
      >>> Current(format=fp8.E4M3).stateful
      False
    """

    format: Format
    granularity: AbstractGranularity = PerTensor()
    power_of_two: bool = False

    def __post_init__(self) -> None:
        check_value_format(self.format)
        check_bool("power_of_two", self.power_of_two)
        if not isinstance(self.granularity, PerTensor | PerRow):
            raise ValueError(f"granularity={self.granularity!r} does not fit a recipe; use PerTensor() or PerRow().")

    @property
    def value_format(self) -> Format:
        return self.format

    @property
    def stateful(self) -> bool:
        return False

    def quantize(
        self,
        x: Array,
        granularity: AbstractGranularity,
        *,
        amax: Callable[[], Array],
        scale: Array | None,
        all_set: bool,
        implementation: Implementation,
    ) -> QuantizedTensor:
        del scale, all_set
        multiplier = encoding_multiplier(amax(), self.format, power_of_two=self.power_of_two)
        return cast(x, multiplier, self.format, granularity, implementation=implementation)
