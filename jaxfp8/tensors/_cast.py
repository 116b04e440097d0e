"""Cast: everything that decides how an array becomes FP8, except its scales."""

import dataclasses
import functools

from jaxfp8._typing import Array, DType, Rounding
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.numerics._scale_rule import ScaleRule
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


@dataclasses.dataclass(frozen=True)
class Direction:
    """One FP8 copy of an array, for the matmuls that contract the same axes of it.

    Attributes:
      granularity: which values share a scale.
      transposed: whether the last two axes of the copy are transposed in memory. Hopper's matmuls
        read an operand like that if they contract the first of these two axes. The shape of the
        copy is still that of the array. XLA chooses layouts itself. Its backend only keeps the
        transposition behind the cast.

    Example:
      >>> import jaxfp8 as fp8
      >>> Direction(fp8.PerBlock((1, 128))).transposed
      False
    """

    granularity: AbstractGranularity
    transposed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cast:
    """How an array becomes FP8, in one or more copies. Hashable.

    One `Cast` describes all copies, so that a kernel can make them in one read of the array. A new
    option of casts is a new field here.

    Attributes:
      format: the FP8 format of the values.
      directions: one direction for each copy.
      rule: how an amax becomes a scale. Two-level scales would be a new field of the rule. (NVFP4
        has an E4M3 scale for each tile and one float32 scale for the tensor.) The second scale
        would be a new field of `QuantizedTensor`.
      rounding: "nearest" (ties to even) or "stochastic" (needs a key). All copies use the same
        random bits.
      column_sums: whether to sum the columns, too. A backend leaves the sums out if it would have
        to read the array again for them (`CastExtras`).
      separate: whether matmuls read the matrices [M, K] of an array [..., M, K] one by one, as
        those of experts. A kernel then transposes each by itself. Otherwise it may take all of
        them as one matrix.
      backends: names of backends. The first one that supports the case makes the copies.

    Example:
      >>> import jaxfp8 as fp8
      >>> both = Direction(fp8.PerBlock((1, 128))), Direction(fp8.PerBlock((128, 1)))
      >>> len(Cast(format=fp8.E4M3, directions=both).granularities)
      2
    """

    format: Format
    directions: tuple[Direction, ...]
    rule: ScaleRule = ScaleRule()
    rounding: Rounding = "nearest"
    column_sums: bool = False
    separate: bool = False
    backends: tuple[str, ...] = ("xla",)

    @functools.cached_property
    def granularities(self) -> tuple[AbstractGranularity, ...]:
        """The granularity of each copy."""
        return tuple(direction.granularity for direction in self.directions)

    @functools.cached_property
    def transposed(self) -> tuple[bool, ...]:
        """Whether each copy is written transposed."""
        return tuple(direction.transposed for direction in self.directions)

    def copies(
        self, values: tuple[Array, ...], scales: tuple[Array, ...], dtype: DType
    ) -> tuple[QuantizedTensor, ...]:
        """The payloads and scales of a cast, as `QuantizedTensor`s.

        Args:
          values: FP8 payloads [...], one for each direction.
          scales: one for each direction, of shape `granularity.scale_shape(values.shape)`.
          dtype: the dtype of the array that was cast.

        Returns:
          One `QuantizedTensor` [...] for each direction.
        """
        return tuple(
            QuantizedTensor(*each, dtype, self.rule.exact)
            for each in zip(values, scales, self.granularities, strict=True)
        )
