"""Moments and master weights in FP8, with one scale for a tensor."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxfp8._quantized_tensor import Cast, Direction, QuantizedTensor
from jaxfp8._typing import Array, DType, Rounding
from jaxfp8.kernels.cast._api import KnownScale, cast_copies
from jaxfp8.numerics._amax import amax
from jaxfp8.numerics._exact import TINY
from jaxfp8.numerics._formats import E4M3, Format
from jaxfp8.numerics._granularity import PerTensor
from jaxfp8.numerics._scale import ScaleRule
from jaxfp8.optim._dither import as_float, settled_float, thresholds
from jaxfp8.optim._masters import AbstractMaster, FP8State, MasterState
from jaxfp8.optim._moment_formats import (
    SMALL,
    AbstractMomentFormat,
    MomentRounding,
    check_rounding,
    check_size,
)
from jaxfp8.quantizers._base import check_value_format
from jaxfp8.sharding._amax import manual_axes, pmax, types_tell, varying


@dataclasses.dataclass(frozen=True)
class FP8(AbstractMaster, AbstractMomentFormat):
    """A first moment in FP8 with one float32 scale for a tensor: 1 byte a value.

    A master weight is refused, too. It loses updates below 2^-5 of a weight. FP8-LM found that
    training diverges (section 3.4).

    A second moment is refused. E4M3 holds magnitudes down to 2^-18 of the largest one, and the
    second moment is a square: where the gradient is below 2^-9 of the largest one, it becomes 0.
    The update divides by its root. FP8-LM found that training diverges (section 3.4).

    Attributes:
      format: E4M3 or E5M2.
      rounding: of a moment. "dithered", by thresholds that change at every step, or "stochastic",
        at random. A master weight is rounded to nearest.
      min_size: a smaller array stays in float32.
      force: True stores also a second moment and a master weight, for experiments.

    References:
      Peng et al., FP8-LM, arXiv:2310.18313, section 2.3.

    Example:
      >>> FP8().pack(jnp.array([1.0, -448.0]), None, signed=True, key=None).values.dtype.name
      'float8_e4m3fn'
    """

    format: Format = E4M3
    rounding: MomentRounding = "dithered"
    min_size: int = SMALL
    force: bool = False
    state: ClassVar[type[MasterState]] = FP8State
    for_second_moment: ClassVar[str | None] = (
        "one scale for a tensor makes zeros of its small values, and the update divides by their "
        "root (FP8-LM, section 3.4). Use Float16(), Int8() or ExpandedFP8(), or FP8(force=True)"
    )

    def __post_init__(self) -> None:
        check_value_format(self.format)
        check_rounding(self.rounding)
        check_size("min_size", self.min_size, least=0)

    def pack(
        self, x: Array, old: Any, *, signed: bool, key: Array | None, step: Array | None = None
    ) -> QuantizedTensor:
        if not types_tell():
            raise ValueError(
                f"{self} inside shard_map(check_vma=False) over {manual_axes()}: types do not say "
                "over which axes its scale is shared. Use check_vma=True, or Int8()."
            )
        replaced = frozenset() if old is None else varying(old.scale)
        # One inf or NaN must not give the whole tensor the scale 1, under which small values are 0.
        finite = jnp.where(jnp.isfinite(x), x, 0)
        largest = pmax(amax(finite, PerTensor()), varying(x) - replaced)
        known = KnownScale(*ScaleRule().apply(largest, self.format))
        if not (self.is_stochastic or step is None):
            return self._dithered(x, known, thresholds(step, x.shape))
        rounding: Rounding = "stochastic" if self.is_stochastic else "nearest"
        cast = Cast(format=self.format, directions=(Direction(PerTensor()),), rounding=rounding)
        ((stored,), _) = cast_copies(x, cast, (known,), key=key)
        return stored

    def _dithered(self, x: Array, known: KnownScale, u: Array) -> QuantizedTensor:
        format, magnitude = self.format, jnp.abs(x)
        zero = (magnitude - magnitude) * known.multiplier  # NaN if one of them is not finite
        # A magnitude below 2^-126 counts as 0, as in every cast.
        n = jnp.where(magnitude < TINY, 0, magnitude) * known.multiplier
        n = jnp.minimum(n, format.max)
        code = jnp.where(zero == zero, settled_float(n, format.dtype, u), format.nan_byte)
        values = as_float(jnp.where(x < 0, code | 0x80, code), format.dtype)
        return QuantizedTensor(values, known.scale, PerTensor(), jnp.dtype(jnp.float32))

    def unpack(self, stored: QuantizedTensor) -> Array:
        return stored.dequantize(jnp.float32)

    def reads(self, stored: Any) -> bool:
        return isinstance(stored, QuantizedTensor) and stored.values.dtype == self.format.dtype

    def store(
        self, master: Array, weight_dtype: DType | None, old: Any = None
    ) -> tuple[FP8State, Array]:
        stored = self.pack(master, old, signed=True, key=None)
        return FP8State(stored.values, stored.scale), self.unpack(stored)

    def load(self, stored: FP8State, weight: Any) -> Array:
        values, scale = map(jnp.asarray, stored)
        tensor = QuantizedTensor(values, scale, PerTensor(), jnp.dtype(jnp.float32))
        return self.unpack(tensor)

    def check_master(self) -> None:
        if not self.force:
            raise ValueError(
                f"master={self!r} loses updates below 2^-5 of a weight. FP8-LM found that training "
                "diverges (section 3.4). Use BFloat16Plus(bits=8), or FP8(force=True) for "
                "experiments."
            )
        if self.is_stochastic:
            raise ValueError(
                f"master={self!r}: master weights have no key, and are rounded to nearest. Leave "
                "rounding= out."
            )
