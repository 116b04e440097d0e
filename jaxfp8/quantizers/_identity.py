"""Identity: the operand stays in high precision."""

import dataclasses
from collections.abc import Callable

from jaxfp8._typing import Array, Implementation
from jaxfp8.kernels._met import Met
from jaxfp8.kernels._prologue import Source, value_of
from jaxfp8.numerics._granularity import AbstractGranularity, PerTensor
from jaxfp8.quantizers._base import AbstractQuantizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity(AbstractQuantizer):
    """Leaves the operand alone; a matmul with such an operand runs in high precision.

    Example:
      >>> Identity().value_format is None
      True
    """

    granularity: AbstractGranularity = PerTensor()

    def __post_init__(self) -> None:
        if self.granularity != PerTensor():
            raise ValueError(f"granularity={self.granularity!r} is not used, since nothing is scaled; leave it out.")

    @property
    def value_format(self) -> None:
        return None

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
    ) -> tuple[tuple[Array, ...], Met]:
        del amax, scale, all_set, transposed, column_sums, implementation
        return (value_of(x),) * len(granularities), Met()
