"""Identity: the operand stays in high precision."""

import dataclasses
from typing import ClassVar

from jaxfp8.numerics._granularity import AbstractGranularity, PerTensor
from jaxfp8.quantizers._base import AbstractQuantizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity(AbstractQuantizer):
    """Leaves an operand in high precision. A matmul with such an operand is not in FP8.

    Example:
      >>> Identity().value_format is None
      True
    """

    uses_amax: ClassVar[bool] = False
    granularity: AbstractGranularity = PerTensor()

    def __post_init__(self) -> None:
        if self.granularity != PerTensor():
            raise ValueError(
                f"granularity={self.granularity!r} is not used, because Identity has no scale; "
                "leave it out."
            )

    @property
    def value_format(self) -> None:
        return None
