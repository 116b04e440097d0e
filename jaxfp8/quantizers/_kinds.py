"""The quantizers: `Current`, `Delayed`, `Static` and `Identity`.

References:
  TransformerEngine user guide, FP8 delayed scaling.
  Peng et al., FP8-LM, arXiv:2310.18313, section 2 (non-finite amaxes stay out of the history).
"""

import dataclasses
import functools
import math
from typing import ClassVar, Literal, get_args

import jax.numpy as jnp
import numpy as np

from jaxfp8._check import check_bool, check_int, check_number, check_one_of
from jaxfp8._pytrees import register_value
from jaxfp8._quantized_tensor import Cast, CastExtras, QuantizedTensor
from jaxfp8._typing import Array, Rounding, ScaleRounding
from jaxfp8.kernels.cast._api import KnownScale, cast_copies
from jaxfp8.numerics._exact import TINY
from jaxfp8.numerics._formats import E8M0, Format, check_value_format
from jaxfp8.numerics._granularity import AbstractGranularity, PerRow, PerTensor
from jaxfp8.numerics._per_block import PerBlock
from jaxfp8.numerics._scale import ScaleRule, encoding_multiplier, inverse, is_usable
from jaxfp8.prologues._prologue import Produced, Source
from jaxfp8.quantizers._base import AbstractQuantizer, Fault, RowState, ScaleInputs

# Delayed scaling: the scale of this step comes from the amaxes of the last steps.
#
# So the scale is known before the cast. The cast reads its tensor once and finds the new amax in
# the same read.


@register_value
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

    def __post_init__(self) -> None:
        check_value_format(self.format)
        check_bool("power_of_two", self.power_of_two)
        check_one_of("rounding", self.rounding, get_args(Rounding))
        check_int("history_length", self.history_length)
        check_one_of("algorithm", self.algorithm, ("max", "most_recent"))
        check_int("margin", self.margin, least=0, most=64)

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

        The amax becomes the newest entry of the history, and gives the next scale together with the
        others. An amax of zero changes nothing. An amax that is not finite never enters the
        history. It is counted in `nonfinite_steps`, and changes nothing else.
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
        # The checks of the history replace the one that every quantizer has. They are stricter.
        others = [fault for fault in super().faults(row) if fault.leaf != "amax_history"]
        scale, history = np.asarray(row.scale), np.asarray(row.amax_history)
        found = others + _faults_of_history(history)
        if self.history_length > 1:  # else there is only the staging slot
            found += _related(self, scale, history, ~np.any([f.rows for f in found], axis=0))
        return [fault for fault in found if fault.rows.any()]


# Faults of a history and its scale in a file. With `Delayed.update`, these hold between steps:
#
# - An amax in the history is at least 2^-126. An empty slot is 0.
# - The staging slot is 0.
# - Entries fill the history from its newest end, without gaps.
# - A scale is unset if and only if the history is empty.
# - The scale is that of the largest entry, or of an entry that was just rotated out.

_LARGEST_FALL = 2.0**20
"""How many times larger than all entries of a history the entry that was just rotated out may be.

A loss scale can fall by 2^16 at once, and the amaxes of gradients with it.
"""

_ROUNDING = 1e-6  # relative: about 8 units in the last place of float32


def _faults_of_history(history: np.ndarray) -> list[Fault]:
    """The faults of histories f32[..., H] alone."""
    amaxes = np.all((history == 0) | ((history >= TINY) & (history < np.inf)), axis=-1)
    staged = amaxes & (history[..., 0] != 0)
    return [
        Fault("amax_history", ~amaxes, "every amax must be 0 or finite and at least 2^-126"),
        Fault("amax_history", staged, "slot 0, the staging slot, must be 0 between steps"),
    ]


def _related(
    quantizer: Delayed, scale: np.ndarray, history: np.ndarray, sound: np.ndarray
) -> list[Fault]:
    """Histories with gaps, and scales that do not match them, in rows without another fault."""
    filled = history[..., 1:] > 0
    gap = sound & np.any(filled[..., :-1] & ~filled[..., 1:], axis=-1)
    empty = ~filled[..., -1]
    unset = sound & ~gap & (empty != (scale == 0))
    last = quantizer.algorithm == "most_recent"
    reference = history[..., -1] if last else np.max(history, axis=-1)
    asked = np.asarray(inverse(quantizer.multiplier(jnp.asarray(reference))), np.float64)
    # `update` computes the scale before it rotates. So in a full history the entry that gave the
    # scale may have been rotated out just now. Then the scale is larger than the entries give.
    fall = np.where(filled[..., 0] & (not last), _LARGEST_FALL, 1 + _ROUNDING)
    far = (
        sound
        & ~gap
        & ~empty
        & ~unset
        & ((scale < asked * (1 - _ROUNDING)) | (scale > asked * fall))
    )
    return [
        Fault(
            "amax_history",
            gap,
            "entries must fill the slots up to the last one, the newest, without a gap",
        ),
        Fault("scale", unset, "it must be 0 (unset) exactly if the history is empty"),
        Fault("scale", far, "it is not the scale that the amaxes of its history ask for"),
    ]


# Current scaling: a tensor, row or tile is scaled by its own amax.


@register_value
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
        check_one_of("rounding", self.rounding, get_args(Rounding))
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
            return cast_copies(x, cast, key=key)
        if isinstance(x, Produced) and _wide_operands(x) > 1:
            # The amax was taken before, in another read. To write x there and read it here costs no
            # more than to read the two arrays of the prologue again.
            x = x.value
        return super().quantize(x, cast, inputs, key=key)


def _wide_operands(x: Produced) -> int:
    """How many arrays of the size of x a kernel reads to compute x."""
    return sum(math.prod(each.shape) == math.prod(x.shape) for each in x.operands)


# Static scaling: the scale is a constant that was calibrated before.


def check_scale(name: str, scale: object) -> float:
    """Raise ValueError unless the scale and its inverse are normal float32 numbers."""
    needed = "a positive number between 2**-126 and 2**126"
    return check_number(name, scale, needed, least=2.0**-126, most=2.0**126)


@register_value
@dataclasses.dataclass(frozen=True, kw_only=True)
class Static(AbstractQuantizer):
    """A constant scale that was calibrated before. It needs no amax and has no state.

    Values beyond `scale * format.max` saturate.

    Attributes:
      format: the FP8 format of the values.
      scale: multiplies stored values back to real ones; in [2^-126, 2^126].
      rounding: how values are rounded, "nearest" or "stochastic" (needs a key at each call).

    Example:
      >>> import jaxfp8 as fp8
      >>> Static(format=fp8.E4M3, scale=0.125).scale
      0.125
    """

    uses_amax: ClassVar[bool] = False
    format: Format
    scale: float
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        check_value_format(self.format)
        object.__setattr__(self, "scale", check_scale("scale", self.scale))  # a float, not NumPy's
        check_one_of("rounding", self.rounding, get_args(Rounding))

    @property
    def value_format(self) -> Format:
        return self.format

    def choose_scale(self, inputs: ScaleInputs, granularity: AbstractGranularity) -> KnownScale:
        constant = np.float32(self.scale)
        return KnownScale(jnp.asarray(np.float32(1) / constant), jnp.asarray(constant))


# Identity: the operand stays in high precision.


@register_value
@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity(AbstractQuantizer):
    """Leaves an operand in high precision. A matmul with such an operand is not in FP8.

    Example:
      >>> Identity().value_format is None
      True
    """

    uses_amax: ClassVar[bool] = False

    @property
    def value_format(self) -> None:
        return None
