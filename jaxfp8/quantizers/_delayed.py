"""Delayed scaling: the scale of this step comes from the amaxes of the last steps.

So the scale is known before the cast. The cast reads its tensor once and finds the new amax in the
same read.

References:
  TransformerEngine user guide, FP8 delayed scaling.
  Peng et al., FP8-LM, arXiv:2310.18313, section 2 (non-finite amaxes stay out of the history).
"""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np

from jaxfp8._typing import Array, Rounding
from jaxfp8.kernels.cast._api import KnownScale
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._granularity import AbstractGranularity, PerTensor
from jaxfp8.numerics._scale import encoding_multiplier, inverse, is_usable
from jaxfp8.quantizers._base import (
    AbstractQuantizer,
    RowState,
    check_bool,
    check_rounding,
    check_value_format,
)
from jaxfp8.quantizers._faults import Fault, faults_of_delayed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delayed(AbstractQuantizer):
    """`multiplier = format.max / max(amax_history) / 2**margin`, known when the step begins.

    Attributes:
      format: the FP8 format of the values.
      history_length: H, how many steps are remembered (TransformerEngine's default is 1024).
      algorithm: which amax gives the scale, the "max" of the history or the "most_recent".
      margin: how many powers of two to stay below the format's largest value, 0 to 64.
      power_of_two: round the multiplier down to a power of two.
      rounding: how values are rounded, "nearest" or "stochastic" (needs a key at each call).
      granularity: PerTensor(). No other one is possible, because a row of state has one scale.

    Example:
      >>> import jaxfp8 as fp8
      >>> Delayed(format=fp8.E5M2).history_length
      16
    """

    stateful: ClassVar[bool] = True
    format: Format
    history_length: int = 16
    algorithm: Literal["max", "most_recent"] = "max"
    margin: int = 0
    power_of_two: bool = False
    rounding: Rounding = "nearest"
    granularity: AbstractGranularity = PerTensor()

    def __post_init__(self) -> None:
        check_value_format(self.format)
        check_bool("power_of_two", self.power_of_two)
        check_rounding("rounding", self.rounding)
        if type(self.history_length) is not int or self.history_length < 1:
            raise ValueError(
                f"history_length={self.history_length!r} must be an integer of at least 1."
            )
        if self.algorithm not in ("max", "most_recent"):
            raise ValueError(
                f"algorithm={self.algorithm!r} is unknown; use 'max' or 'most_recent'."
            )
        if type(self.margin) is not int or not 0 <= self.margin <= 64:
            raise ValueError(
                f"margin={self.margin!r} must be an integer between 0 and 64 (powers of two)."
            )
        if self.granularity != PerTensor():
            raise ValueError(
                f"granularity={self.granularity!r} needs more than one scale, but a row of state "
                "has one; use PerTensor()."
            )

    @property
    def value_format(self) -> Format:
        return self.format

    @property
    def has_exact_scales(self) -> bool:
        return self.power_of_two

    def multiplier(self, amax: Array) -> Array:
        """The encoding multiplier for an amax, [...] float32."""
        return encoding_multiplier(
            amax, self.format, margin=self.margin, power_of_two=self.power_of_two
        )

    def scale_of_amax(self, amax: Array) -> KnownScale:
        multiplier = self.multiplier(amax)
        return KnownScale(multiplier, inverse(multiplier))

    def update(self, row: RowState, amax: Array) -> RowState:
        """The row after an optimizer step whose largest amax was `amax` [...].

        1. Write the amax to slot 0, the staging slot.
        2. Take the maximum of all H entries, or with "most_recent" the amax itself.
        3. Compute the scale from it.
        4. Rotate by one, so that the new entry becomes the newest, and zero slot 0.

        An amax of zero changes nothing. An amax that is not finite never enters the history. It is
        counted in `nonfinite_steps`, and changes nothing else.

        Example:
          >>> import jax.numpy as jnp
          >>> import jaxfp8 as fp8
          >>> row = RowState(jnp.zeros(()), jnp.zeros(3), jnp.zeros(()))
          >>> quantizer = Delayed(format=fp8.E4M3, history_length=3)
          >>> quantizer.update(row, jnp.float32(7.0)).amax_history
          Array([0., 0., 7.], dtype=float32)
        """
        usable = is_usable(amax)
        history, newest = row.amax_history, amax[..., None]
        reference = amax
        if self.algorithm == "max":
            reference = jnp.max(jnp.concatenate([history[..., 1:], newest], axis=-1), axis=-1)
        # Without the oldest entry: slot 0 becomes the newest one, and the staging slot is 0 again.
        entries = [history[..., 2:], newest] if self.history_length > 1 else []
        rotated = jnp.concatenate([jnp.zeros_like(newest), *entries], axis=-1)
        return RowState(
            scale=jnp.where(usable, inverse(self.multiplier(reference)), row.scale),
            amax_history=jnp.where(usable[..., None], rotated, row.amax_history),
            nonfinite_steps=row.nonfinite_steps + jnp.where(jnp.isfinite(amax), 0.0, 1.0),
        )

    def faults(self, row: RowState) -> list[Fault]:
        return faults_of_delayed(self, *map(np.asarray, row))
