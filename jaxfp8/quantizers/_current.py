"""Current scaling: a tensor, row or tile is scaled by its own amax."""

import dataclasses
import functools

from jaxfp8._typing import Array, Rounding, ScaleRounding
from jaxfp8.kernels._extras import CastExtras
from jaxfp8.kernels.quantize._api import quantize
from jaxfp8.numerics._formats import E8M0, Format
from jaxfp8.numerics._granularity import AbstractGranularity, PerRow, PerTensor
from jaxfp8.numerics._per_block import PerBlock
from jaxfp8.numerics._scale_rule import ScaleRule
from jaxfp8.prologues._prologue import Produced, Source, wide_operands
from jaxfp8.quantizers._base import (
    AbstractQuantizer,
    ScaleInputs,
    check_bool,
    check_rounding,
    check_value_format,
)
from jaxfp8.tensors._cast import Cast
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Current(AbstractQuantizer):
    """`multiplier = format.max / amax(x)`, from the amax of this step. It has no state.

    The amax takes one more read of x than a scale that is known.

    Attributes:
      format: the FP8 format of the values.
      granularity: which values share a scale. PerTensor() gives one scale. PerRow() gives one scale
        for each row that the matmul contracts. PerBlock((1, T)) gives tiles along the contracted
        axis. PerBlock((T, T)) gives square tiles, of which one copy serves both directions.
      power_of_two: round the multiplier down to a power of two.
      scale_format: None for float32 scales, E8M0 for the scales of MXFP8 (tiles only).
      scale_rounding: how E8M0 scales are rounded, "rceil" (up) or "floor". See `fp8.ScaleRule`.
      rounding: how values are rounded, "nearest" or "stochastic" (needs a key at each call).

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
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        check_value_format(self.format)
        check_bool("power_of_two", self.power_of_two)
        check_rounding("rounding", self.rounding)
        if not isinstance(self.granularity, PerTensor | PerRow | PerBlock):
            raise ValueError(
                f"granularity={self.granularity!r} does not fit a recipe; use PerTensor(), "
                "PerRow() or PerBlock((1, T))."
            )
        if isinstance(self.granularity, PerBlock):
            tile = self.granularity.tile
            if len(tile) != 2 or tile[0] not in (1, tile[1]):
                raise ValueError(
                    f"granularity={self.granularity!r} does not fit a recipe. Its sides are along "
                    "the kept axis and along the contracted axis. Use PerBlock((1, T)), or "
                    "PerBlock((T, T)) for square tiles."
                )
        elif self.scale_format is not None:
            raise ValueError(
                f"scale_format={self.scale_format!r} needs tiles, got "
                f"granularity={self.granularity!r}; use PerBlock((1, 32))."
            )
        _ = self.rule  # computed once here, to check its fields

    @property
    def value_format(self) -> Format:
        return self.format

    @functools.cached_property
    def rule(self) -> ScaleRule:
        """How an amax becomes a scale."""
        power_of_two = self.power_of_two or self.scale_format == E8M0
        return ScaleRule(
            power_of_two=power_of_two,
            scale_format=self.scale_format,
            scale_rounding=self.scale_rounding,
        )

    def quantize(
        self, x: Source, cast: Cast, inputs: ScaleInputs, *, key: Array | None = None
    ) -> tuple[tuple[QuantizedTensor, ...], CastExtras]:
        if self.granularity.in_tiles:  # a tile is on one device, so a kernel can find its amax
            return quantize(x, cast, key=key)
        if isinstance(x, Produced) and wide_operands(x) > 1:
            # The amax was taken before, in another read. To write x there and read it here costs no
            # more than to read the two arrays of the prologue again.
            x = x.value
        return super().quantize(x, cast, inputs, key=key)
