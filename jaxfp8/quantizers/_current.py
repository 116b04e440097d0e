"""Current scaling: the scale of a tensor, a row or a tile from its own amax."""

import dataclasses
from collections.abc import Callable

from jaxfp8._typing import Array, Implementation, ScaleRounding
from jaxfp8.kernels._met import Met
from jaxfp8.kernels._prologue import Source, value_of, wide_operands
from jaxfp8.kernels.cast._api import cast_copies
from jaxfp8.kernels.quantize._api import quantize
from jaxfp8.numerics._formats import E8M0, Format
from jaxfp8.numerics._granularity import AbstractGranularity, PerRow, PerTensor
from jaxfp8.numerics._per_block import PerBlock
from jaxfp8.numerics._scale_rule import ScaleRule
from jaxfp8.quantizers._base import AbstractQuantizer, check_bool, check_value_format
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Current(AbstractQuantizer):
    """`multiplier = format.max / amax(x)`: always exact, at the price of one more read of x.

    Attributes:
      format: of the values.
      granularity: PerTensor(); PerRow() for one scale a row that the matmul contracts; PerBlock((1, T)) for tiles along the
        contracted axis, PerBlock((T, T)) for square ones, which serve both directions.
      power_of_two: round the multiplier down to a power of two.
      scale_format: None for float32 scales, E8M0 for those of MXFP8 (tiles only).
      scale_rounding: of E8M0 scales, "rceil" or "floor".

    Example:
      >>> import jaxfp8 as fp8
      >>> Current(format=fp8.E4M3).stateful
      False
    """

    format: Format
    granularity: AbstractGranularity = PerTensor()
    power_of_two: bool = False
    scale_format: Format | None = None
    scale_rounding: ScaleRounding = "rceil"

    def __post_init__(self) -> None:
        check_value_format(self.format)
        check_bool("power_of_two", self.power_of_two)
        if not isinstance(self.granularity, PerTensor | PerRow | PerBlock):
            raise ValueError(
                f"granularity={self.granularity!r} does not fit a recipe; use PerTensor(), PerRow() or PerBlock((1, T))."
            )
        if isinstance(self.granularity, PerBlock):
            tile = self.granularity.tile
            if len(tile) != 2 or tile[0] not in (1, tile[1]):
                raise ValueError(
                    f"granularity={self.granularity!r} does not fit a recipe: a tile is (along the kept axis, along the "
                    "contracted axis), and runs along the contracted one, (1, T), or is square, (T, T)."
                )
        elif self.scale_format is not None:
            raise ValueError(
                f"scale_format={self.scale_format!r} needs tiles, got granularity={self.granularity!r}; use PerBlock((1, 32))."
            )
        _ = self.rule

    @property
    def value_format(self) -> Format:
        return self.format

    @property
    def stateful(self) -> bool:
        return False

    @property
    def rule(self) -> ScaleRule:
        """How an amax becomes a scale."""
        power_of_two = self.power_of_two or self.scale_format == E8M0
        return ScaleRule(power_of_two=power_of_two, scale_format=self.scale_format, scale_rounding=self.scale_rounding)

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
        del scale, all_set
        if isinstance(self.granularity, PerBlock):  # a tile lies on one device: its amax is at hand
            return quantize(
                x, self.format, granularities, self.rule,
                transposed=transposed, column_sums=column_sums, implementation=implementation,
            )  # fmt: skip
        if wide_operands(x) > 1:
            # Its amaxes were taken before: to write x and read it again costs no more than to read two arrays.
            x = value_of(x)
        known = {each: self.rule.apply(amax(each), self.format) for each in dict.fromkeys(granularities)}
        multipliers, scales = zip(*(known[each] for each in granularities), strict=True)
        return cast_copies(
            x, multipliers, self.format, granularities,
            scales=scales, transposed=transposed, column_sums=column_sums, power_of_two=self.rule.exact,
            implementation=implementation,
        )  # fmt: skip
