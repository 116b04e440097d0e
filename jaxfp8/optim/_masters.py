"""Kinds of master weights.

A kind is a frozen dataclass. It sees the state of one parameter, a NamedTuple of arrays.
`MasterWeightsState` has the same NamedTuple of trees.
"""

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._check import check_one_of
from jaxfp8._pytrees import register_node
from jaxfp8._typing import Array, DType, PyTree
from jaxfp8.numerics._exact import BIAS, power_of_two
from jaxfp8.optim._moment_formats import (
    AbstractMomentFormat,
    as_float,
    round_to_float_code,
    shared_axes,
    thresholds,
)
from jaxfp8.sharding._amax import pmax

# A float32 as a bfloat16 and a remainder, in integer arithmetic on its bits.
#
# The high 16 bits of a float32 are a bfloat16. Rounding adds half of a bfloat16 spacing to the
# magnitude, and drops the low 16 bits. So a tie is rounded away from zero.
#
# Ties cannot go to even here. The remainder has 16 bits, and they say where between two bfloat16
# values the float32 is. Take an even bfloat16 `e`. With ties to even, the ties half a spacing above
# and below `e` would both round to `e`. Together with the values between them, `e` would stand for
# 2^16 + 1 values of float32. 16 bits tell only 2^16 apart. With ties away from zero each bfloat16
# stands for exactly 2^16 values.
#
# Integers keep subnormal numbers, which the float arithmetic of CPUs and GPUs may flush to zero.
#
# References:
#     TransformerEngine, FusedAdam, `store_param_remainders` (the same 16 bits).
#     FlashOptim, arXiv:2602.23349 (a remainder of 8 bits).

_MAGNITUDE = 0x7FFFFFFF  # all bits but the sign
_INFINITY = 0x7F800000  # a larger magnitude is a NaN
_QUIET = 0x00400000  # the first mantissa bit: a NaN that has it stays one without its low 16 bits


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _is_nan(bits: Array) -> Array:
    return (bits & _MAGNITUDE) > _INFINITY


def _half_added(bits: Array, dropped: int) -> Array:
    """The bits plus half of the spacing that is left without the last `dropped` bits, [...]."""
    # The sum would make -0 of a NaN with all mantissa bits. So a NaN gets its quiet bit instead.
    return jnp.where(_is_nan(bits), bits | _QUIET, bits + (1 << (dropped - 1)))


def _rounded_to_24_bits(x: Array) -> Array:
    """`x` [...] float32 without its last 8 mantissa bits, to nearest, ties away from zero."""
    kept = _half_added(_bits(x), 8) & ~jnp.uint32(0xFF)
    return lax.bitcast_convert_type(kept, jnp.float32)


def round_to_bfloat16(x: Array) -> Array:
    """`x` [...] float32 rounded to nearest, ties away from zero, [...] bfloat16."""
    high = _half_added(_bits(x), 16) >> 16
    return lax.bitcast_convert_type(high.astype(jnp.uint16), jnp.bfloat16)


def _split(x: Array) -> tuple[Array, Array]:
    """A float32 [...] as `round_to_bfloat16(x)` and its low 16 bits, uint16. Inverse: `_joined`."""
    bits = _bits(x)
    # With the remainder 0 a NaN keeps its sign, and the first 7 bits of its mantissa.
    low = jnp.where(_is_nan(bits), jnp.uint32(0), bits).astype(jnp.uint16)
    return round_to_bfloat16(x), low


def _joined(high: Array, low: Array) -> Array:
    """The float32 [...] of a bfloat16 [...] and its remainder [...] uint16, exactly."""
    top = lax.bitcast_convert_type(high, jnp.uint16).astype(jnp.uint32)
    wide = low.astype(jnp.uint32)
    # A remainder of 2^15 or more was rounded up, which added 1 to the high 16 bits.
    return lax.bitcast_convert_type(((top - (wide >> 15)) << 16) | wide, jnp.float32)


# A float32 tensor in float16 with one scale, a power of two.
#
# The scale puts the largest magnitude between 32752 and 65504, the largest float16. So nothing
# overflows. Values down to 2^-29 of the largest one keep 11 bits. Smaller ones have fewer.
#
# References:
#     Peng et al., FP8-LM, arXiv:2310.18313, section 2.3 (a float16 master with tensor scaling).

_LAST_EXPONENT = 15  # of float16, whose largest value is 65504 = 0x1.ffcp15
_CARRY = 0x7FFFFF - 0x7FE000  # 0x7fe000 is the mantissa of 65504. A larger one needs 2^16
_SMALLEST = -126  # exponent of the smallest normal float32


def _to_scaled_float16(
    x: Array, old_scale: Array | None, u: Array | None = None
) -> tuple[Array, Array]:
    """`x` [...] as `values * scale`, with the scale of the largest finite magnitude in `x`.

    The new scale replaces `old_scale`. `u` has `thresholds` of rounding; None rounds to nearest.
    """
    magnitude = lax.bitcast_convert_type(x, jnp.int32) & _MAGNITUDE
    # The order of magnitudes is the order of their bits. inf and NaN have no effect on the scale.
    finite = jnp.where(magnitude < _INFINITY, magnitude, 0)
    largest = jnp.max(finite, initial=0)
    largest = pmax(largest, shared_axes("Float16()", x, old_scale))
    exponent = ((largest + _CARRY) >> 23) - (BIAS + _LAST_EXPONENT)
    exponent = jnp.where(largest == 0, 0, jnp.maximum(exponent, _SMALLEST))
    scaled, scale = x * power_of_two(-exponent), power_of_two(exponent)
    if u is None:
        return scaled.astype(jnp.float16), scale
    n = jnp.minimum(jnp.abs(scaled), float(jnp.finfo(jnp.float16).max))
    code = round_to_float_code(n, jnp.float16, u)
    values = as_float(jnp.where(scaled < 0, code | 0x8000, code), jnp.float16)
    return jnp.where(jnp.isfinite(scaled), values, scaled.astype(jnp.float16)), scale


def _from_scaled_float16(values: Array, scale: Array) -> Array:
    """`values * scale`, [...] float32."""
    # XLA may fold float32 -> float16 -> float32 into nothing. The barrier keeps the rounding.
    return lax.optimization_barrier(values).astype(jnp.float32) * scale


# Kinds of master weights: how an optimizer stores them, and in how many bytes.


@register_node
class Float32State(NamedTuple):
    """A float32 master weight."""

    values: PyTree  # float32 [...]


@register_node
class BFloat16PlusState(NamedTuple):
    """A master weight as a bfloat16 and a remainder."""

    high: PyTree  # bfloat16 [...]; None if the parameter is this array
    low: PyTree  # uint16 or uint8 [...]


@register_node
class Float16State(NamedTuple):
    """A master weight as `values * scale`."""

    values: PyTree  # float16 [...]
    scale: PyTree  # float32 [], a power of two


@register_node
class FP8State(NamedTuple):
    """A master weight as `values * scale`, for experiments."""

    values: PyTree  # FP8 [...]
    scale: PyTree  # float32 []


MasterState = Float32State | BFloat16PlusState | Float16State | FP8State


class AbstractMaster(abc.ABC):
    """How master weights are stored."""

    state: ClassVar[type[MasterState]]

    @abc.abstractmethod
    def store(
        self, master: Array, weight_dtype: DType | None, old: Any = None
    ) -> tuple[Any, Array]:
        """Stores a master weight float32 [...], and returns what `load` will read of the state.

        `weight_dtype` is that of the parameter, None for a quantized weight. `old` is the state
        that the new one replaces, if there is one.
        """

    def check_master(self) -> None:  # noqa: B027  # most kinds may
        """Raise ValueError if this must not store master weights. A moment may be stored so."""

    @abc.abstractmethod
    def load(self, stored: Any, weight: Any) -> Array:
        """The master weight float32 [...] of a state and of the parameter."""


@dataclasses.dataclass(frozen=True)
class Float32(AbstractMaster, AbstractMomentFormat):
    """A float32 master weight, or moment: 4 bytes.

    Example:
      >>> Float32().store(jnp.float32(0.1), jnp.dtype("bfloat16"))[0]
      Float32State(values=Array(0.1, dtype=float32))
    """

    state: ClassVar[type[MasterState]] = Float32State

    def store(
        self, master: Array, weight_dtype: DType | None, old: Any = None
    ) -> tuple[Float32State, Array]:
        return Float32State(master), master

    def load(self, stored: Float32State, weight: Any) -> Array:
        return jnp.asarray(stored.values)

    def pack(
        self, x: Array, old: Any, *, signed: bool, key: Array | None, step: Array | None = None
    ) -> Array:
        return x.astype(jnp.float32)

    def unpack(self, stored: Array) -> Array:
        return stored

    def reads(self, stored: Any) -> bool:
        return isinstance(stored, jax.Array | np.ndarray) and stored.dtype == jnp.float32


@dataclasses.dataclass(frozen=True)
class BFloat16Plus(AbstractMaster):
    """The bfloat16 weight plus a remainder of 16 or 8 bits.

    With 16 bits, weight and remainder are together exactly the float32 master weight. With 8 bits
    they are a float of 24 bits: the float32 rounded to nearest, ties away from zero. The weight is
    then the rounding of that float.

    A parameter that is a bfloat16 array is itself the high part. Then only the remainder is stored:
    2 bytes or 1. For other parameters the high part is stored too: 4 bytes or 3.

    Attributes:
      bits: of the remainder, 16 or 8.

    References:
      TransformerEngine, FusedAdam, `store_param_remainders` (16 bits).
      FlashOptim, arXiv:2602.23349 (8 bits).

    Example:
      >>> BFloat16Plus(bits=8).store(jnp.float32(0.1), jnp.dtype("bfloat16"))[0]
      BFloat16PlusState(high=None, low=Array(205, dtype=uint8))
    """

    bits: int = 16
    state: ClassVar[type[MasterState]] = BFloat16PlusState

    def __post_init__(self) -> None:
        check_one_of("bits", self.bits, (16, 8))

    def store(
        self, master: Array, weight_dtype: DType | None, old: Any = None
    ) -> tuple[BFloat16PlusState, Array]:
        if self.bits == 8:
            master = _rounded_to_24_bits(master)
        high, low = _split(master)
        if self.bits == 8:
            low = (low >> 8).astype(jnp.uint8)
        return BFloat16PlusState(None if weight_dtype == jnp.bfloat16 else high, low), master

    def load(self, stored: BFloat16PlusState, weight: Any) -> Array:
        high = jnp.asarray(weight if stored.high is None else stored.high)
        low = jnp.asarray(stored.low).astype(jnp.uint16)
        return _joined(high, low << 8 if self.bits == 8 else low)


@dataclasses.dataclass(frozen=True)
class Float16(AbstractMaster, AbstractMomentFormat):
    """A float16 master weight, or moment, with one float32 scale for a tensor: 2 bytes.

    Each update computes the scale from the largest magnitude. Values have 11 bits, so an update
    below 2^-12 of a weight is lost.

    References:
      Peng et al., FP8-LM, arXiv:2310.18313, section 2.3.

    Example:
      >>> stored, master = Float16().store(jnp.float32(0.75), jnp.dtype("bfloat16"))
      >>> stored.scale == 2.0**-16, master
      (Array(True, dtype=bool), Array(0.75, dtype=float32))
    """

    state: ClassVar[type[MasterState]] = Float16State

    def store(
        self, master: Array, weight_dtype: DType | None, old: Any = None
    ) -> tuple[Float16State, Array]:
        values, scale = _to_scaled_float16(master, old.scale if old else None)
        stored = Float16State(values, scale)
        return stored, self.load(stored, None)

    def load(self, stored: Float16State, weight: Any) -> Array:
        return _from_scaled_float16(jnp.asarray(stored.values), jnp.asarray(stored.scale))

    def pack(
        self, x: Array, old: Any, *, signed: bool, key: Array | None, step: Array | None = None
    ) -> Float16State:
        u = None if step is None else thresholds(step, x.shape)
        values, scale = _to_scaled_float16(x, old.scale if old else None, u)
        if not signed:
            # The update divides by the root of a second moment, so it must not become 0.
            values = jnp.where((x > 0) & (values == 0), jnp.float16(2.0**-24), values)
        return Float16State(values, scale)

    def unpack(self, stored: Float16State) -> Array:
        return self.load(stored, None)

    def reads(self, stored: Any) -> bool:
        return isinstance(stored, Float16State)
