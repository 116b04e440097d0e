"""Delayed scaling: the scale of this step from the amaxes of the last ones.

So a cast needs no amax of its own tensor and reads it once, collecting the amax on the way.

References:
  TransformerEngine user guide, FP8 delayed scaling.
  Peng et al., FP8-LM, arXiv:2310.18313, section 2 (non-finite amaxes stay out of the history).
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax.numpy as jnp

from jaxfp8._typing import Array, Implementation
from jaxfp8.kernels._met import Met
from jaxfp8.kernels._prologue import Source
from jaxfp8.kernels.cast._api import cast_copies
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._granularity import AbstractGranularity, PerTensor
from jaxfp8.numerics._scale import encoding_multiplier, inverse, is_usable
from jaxfp8.quantizers._base import AbstractQuantizer, check_bool, check_value_format
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


class DelayedRow(NamedTuple):
    """The state of one operand under delayed scaling; leading axes stack layers or experts."""

    scale: Array  # f32[...]; 0 = unset: no finite nonzero amax seen yet
    amax_history: Array  # f32[..., H]; slot 0 is the staging slot (0 between steps), 1 .. H-1 run from oldest to newest
    nonfinite_steps: Array  # f32[...]; steps whose amax was inf or NaN


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delayed(AbstractQuantizer):
    """`multiplier = format.max / max(amax_history) / 2**margin`, known when the step begins.

    Attributes:
      format: of the values.
      history_length: H, how many steps are remembered (TransformerEngine's default is 1024).
      algorithm: "max" over the window, or the "most_recent" amax.
      margin: powers of two to stay below the format's largest value.
      power_of_two: round the multiplier down to a power of two.
      granularity: PerTensor(), the only one that a row of state fits.

    Example:
      >>> import jaxfp8 as fp8
      >>> Delayed(format=fp8.E5M2).history_length
      16
    """

    format: Format
    history_length: int = 16
    algorithm: Literal["max", "most_recent"] = "max"
    margin: int = 0
    power_of_two: bool = False
    granularity: AbstractGranularity = PerTensor()

    def __post_init__(self) -> None:
        check_value_format(self.format)
        check_bool("power_of_two", self.power_of_two)
        if type(self.history_length) is not int or self.history_length < 1:
            raise ValueError(f"history_length={self.history_length!r} must be an integer of at least 1.")
        if self.algorithm not in ("max", "most_recent"):
            raise ValueError(f"algorithm={self.algorithm!r} is unknown; use 'max' or 'most_recent'.")
        if type(self.margin) is not int or not 0 <= self.margin <= 64:
            raise ValueError(f"margin={self.margin!r} must be an integer between 0 and 64 (powers of two).")
        if self.granularity != PerTensor():
            raise ValueError(
                f"granularity={self.granularity!r} has no fixed number of scales to remember; use PerTensor()."
            )

    @property
    def value_format(self) -> Format:
        return self.format

    @property
    def stateful(self) -> bool:
        return True

    def multiplier(self, amax: Array) -> Array:
        """The encoding multiplier that an amax asks for, [...] float32."""
        return encoding_multiplier(amax, self.format, margin=self.margin, power_of_two=self.power_of_two)

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
        assert scale is not None
        multiplier = inverse(scale)
        (granularity,) = set(granularities)  # one scale for the whole tensor fits every direction
        count = len(granularities)
        if not all_set:  # an unset scale takes the current amax, so that no step is wasted on a guess
            unset, current = scale == 0, self.multiplier(amax(granularity))
            multiplier, scale = jnp.where(unset, current, multiplier), jnp.where(unset, inverse(current), scale)
        return cast_copies(
            x, (multiplier,) * count, self.format, granularities,
            scales=(scale,) * count, transposed=transposed, column_sums=column_sums, implementation=implementation,
        )  # fmt: skip

    def update(self, row: DelayedRow, amax: Array) -> DelayedRow:
        """The row after a step whose largest amax was `amax` [...], once per optimizer step.

        1. write amax to slot 0; 2. take the maximum (or the most recent) of all H entries; 3. scale from it; 4. rotate
        by one, so that the new entry becomes the newest, and zero slot 0. An amax of zero changes nothing. One that is
        not finite is counted and changes nothing else: it never enters the history.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxfp8 as fp8
          >>> row = DelayedRow(jnp.zeros(()), jnp.zeros(3), jnp.zeros(()))
          >>> Delayed(format=fp8.E4M3, history_length=3).update(row, jnp.float32(7.0)).amax_history
          Array([0., 0., 7.], dtype=float32)
        """
        usable = is_usable(amax)
        history = jnp.asarray(row.amax_history).at[..., 0].set(amax)  # NumPy's, if just restored
        reference = jnp.max(history, axis=-1) if self.algorithm == "max" else amax
        rotated = jnp.roll(history, -1, axis=-1).at[..., 0].set(0.0)
        return DelayedRow(
            scale=jnp.where(usable, inverse(self.multiplier(reference)), row.scale),
            amax_history=jnp.where(usable[..., None], rotated, row.amax_history),
            nonfinite_steps=row.nonfinite_steps + (~jnp.isfinite(amax)).astype(jnp.float32),
        )
