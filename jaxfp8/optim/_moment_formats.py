"""Formats of moments, and the rounding that they share.

A format is a frozen dataclass. `pack` stores a float32 array, and `unpack` reads it again. What it
stores is one node of the optimizer state: an array, a `QuantizedTensor` or a NamedTuple.
"""

import abc
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._check import check_one_of
from jaxfp8._typing import Array, DType
from jaxfp8.sharding._amax import manual_axes, types_show_varying, varying_axes

# How moments are rounded: by a threshold that changes at every step, so that all of them decay.
#
# A moment whose gradient is 0 is multiplied by `b1` or `b2`. Near 0, 0.9 of a code's value is
# nearest to that code again. Such a moment never decays, and its parameter moves for ever. So a
# moment that lies between two codes is rounded up if its fraction of the way is above a
# **threshold** `u` in [0, 1).
#
# The threshold of a value is the fractional part of `u0 + h(step)`. The hash h gives numbers that
# are spread evenly, and that tell nothing about each other. Hence:
#
# - A moment that a step would lower by the fraction d of a code leaves this code after 1 / d steps
#   in the mean. So a first moment without a gradient decays from any code to 0. In the first
#   262,144 steps no wait is longer than 15 / d (tests/optim/test_dither.py).
# - In each step a value is rounded up as often as its fraction says, whatever happened before. So
#   the mean of what is stored is the value, also far below one code.
#
# Multiples of the golden ratio are spread more evenly, but each one tells the next one. A code that
# went up at a small threshold then lives for a fixed number of steps, which is not 1 / d. Such
# moments were 20 % too small with b1 = 0.9.
#
# Sixteen neighbours have sixteen equally spaced `u0`, so that their mean error is small. Thresholds
# depend on the step and on the place along the last axis. So a mesh does not change them, and no
# key is needed. Both moments of a value have the same threshold. If both are far below one code,
# they go up together. With thresholds of their own, a first moment that went up would more often
# meet a second one that did not, and the update would be large.
#
# References:
#     Roberts, IRE Trans. Inf. Theory 8 (1962) (dither: the mean of what is rounded is the value).
#     Appleby, MurmurHash3 (the hash: the finalizer of 32 bits).

_STRIDE = 7  # from one u0 to the next, in sixteenths. It is odd, so 16 neighbours have all of them


def thresholds(step: Array | None, shape: tuple[int, ...]) -> Array:
    """The threshold of each value [..., C], an odd multiple of 2^-23: float32 [1, ..., C].

    `step` is the number of the update, int32 []. None gives 1/2, which rounds to nearest.
    """
    if step is None:
        return jnp.float32(0.5)
    places = (1,) * (len(shape) - 1) + shape[-1:]
    place = lax.broadcasted_iota(jnp.uint32, places, len(places) - 1) if shape else jnp.uint32(0)
    bits = _hash(step) + place * jnp.uint32(_STRIDE << 28)  # 1/16 is 2^28. Whole parts overflow
    # With 24 bits a float32 would round. A threshold of 0 would round up what is next to a code.
    return ((bits >> 10).astype(jnp.float32) + 0.5) * 2.0**-22


def _hash(step: Array) -> Array:
    """32 bits that tell nothing about those of other steps, uint32 []."""
    # Multiplication by an odd number and a shifted exclusive or can be undone. So each hash occurs
    # once in 2^32 steps.
    h = (jnp.asarray(step).astype(jnp.uint32) + 1) * jnp.uint32(0x9E3779B9)
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def round_code(n: Array, below: Array, value_of: Callable[[Array], Array], u: Array) -> Array:
    """The code `below`, or the next one if n is far enough on the way to it, [...] int32.

    `below` is the last code whose value is at most n. It may be off by 1 where n is next to a value
    of a code, which `value_of` gives. `u` has thresholds.
    """
    low, high = value_of(below), value_of(below + 1)
    return below + (n - low > u * (high - low)).astype(jnp.int32)


def round_to_float_code(n: Array, dtype: DType, u: Array) -> Array:
    """`round_code` for codes of a short float: `float_code_below` n, or the next, int32 [...]."""
    value_of = functools.partial(float_of, dtype=dtype)
    return round_code(n, float_code_below(n, dtype), value_of, u)


def float_code_below(n: Array, dtype: DType) -> Array:
    """The code of the largest value of a short float that is at most n, from 0 on: [...] int32."""
    info = jnp.finfo(dtype)
    dropped = 23 - info.nmant
    # Without the difference of the biases, the first bits of a float32 are a normal code.
    normal = (lax.bitcast_convert_type(n, jnp.int32) >> dropped) - (
        (info.minexp + 126) << info.nmant
    )
    subnormal = (n * 2.0 ** (info.nmant - info.minexp)).astype(jnp.int32)
    return jnp.where(n < 2.0**info.minexp, subnormal, normal)


def float_of(code: Array, dtype: DType) -> Array:
    """The value of a code, float32 [...]. It is made of bits, so XLA folds no conversion away."""
    return as_float(code, dtype).astype(jnp.float32)


def as_float(code: Array, dtype: DType) -> Array:
    """Codes [...] as floats of these bits, [...] in the dtype."""
    unsigned = jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")
    return lax.bitcast_convert_type(code.astype(unsigned), dtype)


# How an optimizer stores its moments, and in how many bytes. Arithmetic stays in float32.


def shared_axes(what: object, x: Array, old_scale: Array | None) -> frozenset[str]:
    """The mesh axes over which shards of x share a scale that replaces `old_scale`.

    ValueError where types do not give them. `what` is what the message calls the format.
    """
    if not types_show_varying():
        raise ValueError(
            f"{what} inside shard_map(check_vma=False) over {manual_axes()}: types do not say over "
            "which axes its scale is shared. Use check_vma=True, or a format with a scale for each "
            "group, such as Int8()."
        )
    return varying_axes(x) - (frozenset() if old_scale is None else varying_axes(old_scale))


MomentRounding: TypeAlias = Literal["dithered", "stochastic"]


class AbstractMomentFormat(abc.ABC):
    """How one moment is stored."""

    min_size: int = 0
    """A smaller array, counted on its global shape, stays in float32."""
    for_second_moment: ClassVar[str | None] = None
    """Why this format cannot store a second moment; None if it can."""

    @property
    def is_stochastic(self) -> bool:
        """Whether `pack` needs a key."""
        return getattr(self, "rounding", "dithered") == "stochastic"

    @abc.abstractmethod
    def pack(
        self, x: Array, old: Any, *, signed: bool, key: Array | None, step: Array | None = None
    ) -> Any:
        """Stores x, float32 [...].

        Args:
          x: the moment.
          old: what it replaces, or None.
          signed: whether x can be negative. A second moment cannot.
          key: a jax PRNG key, for stochastic rounding.
          step: int32 [], the number of the update, for `thresholds`. None rounds to nearest, as for
            a moment that no update follows.
        """

    @abc.abstractmethod
    def unpack(self, stored: Any) -> Array:
        """The array float32 [...] that `pack` stored."""

    @abc.abstractmethod
    def reads(self, stored: Any) -> bool:
        """Whether this format can have stored it."""


@dataclasses.dataclass(frozen=True)
class BFloat16(AbstractMomentFormat):
    """A moment in bfloat16: 2 bytes a value.

    Attributes:
      rounding: "dithered", by thresholds that change at every step, or "stochastic", at random.

    Example:
      >>> BFloat16().pack(jnp.float32(0.1), None, signed=True, key=None)
      Array(0.100098, dtype=bfloat16)
    """

    rounding: MomentRounding = "dithered"

    def __post_init__(self) -> None:
        check_rounding(self.rounding)

    def pack(
        self, x: Array, old: Any, *, signed: bool, key: Array | None, step: Array | None = None
    ) -> Array:
        if self.is_stochastic:
            assert key is not None  # `with_moment_formats` makes it
            low = jax.random.bits(key, x.shape, jnp.uint32) >> 16
        elif step is None:
            return x.astype(jnp.bfloat16)
        else:
            low = (thresholds(step, x.shape) * 2.0**16).astype(jnp.uint32)
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        # These low bits carry into the high ones as often as the dropped fraction says.
        up = bits + low
        kept = jnp.where(jnp.isfinite(x), up, bits) & jnp.uint32(0xFFFF0000)
        rounded = lax.bitcast_convert_type(kept, jnp.float32).astype(jnp.bfloat16)
        return jnp.where(jnp.isnan(x), np.array(np.nan, jnp.bfloat16), rounded)

    def unpack(self, stored: Array) -> Array:
        return lax.optimization_barrier(stored).astype(jnp.float32)

    def reads(self, stored: Any) -> bool:
        return isinstance(stored, jax.Array | np.ndarray) and stored.dtype == jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class PerParameter:
    """A format for each parameter, chosen by its name.

    bitsandbytes, for instance, keeps the moments of its `StableEmbedding` in 32 bits.

    Attributes:
      rules: pairs `(pattern, format)`. A pattern is a regular expression that the whole path of a
        parameter must match, with keys joined by "/", as in `fp8.convert`. The first match counts.
      default: the format of all other parameters.

    Raises:
      ValueError: for an invalid regular expression. By `init` of the optimizer, if a rule matches
        no parameter.

    Example:
      >>> from jaxfp8.optim import Float32, Int8
      >>> formats = PerParameter([(".*(embed|norm|head).*", Float32())], Int8())
      >>> formats.of("decoder/norm_1/scale"), formats.of("decoder/up/kernel").group
      (Float32(), 128)
    """

    rules: Sequence[tuple[str, AbstractMomentFormat]]
    default: AbstractMomentFormat

    def __post_init__(self) -> None:
        try:
            # A tuple, so that it can be hashed, and a list that changes later changes no format.
            rules = tuple((match, format) for match, format in self.rules)
            for match, _ in rules:
                re.compile(match)
        except (TypeError, ValueError, re.error) as error:
            raise ValueError(
                f"rules={self.rules!r}: {error}. They must be pairs of a regular expression and a "
                "format. Write PerParameter([('.*embed.*', Float32())], Int8())."
            ) from None
        object.__setattr__(self, "rules", rules)

    @property
    def formats(self) -> tuple[AbstractMomentFormat, ...]:
        """All formats that it can choose."""
        return (*(format for _, format in self.rules), self.default)

    def of(self, name: str) -> AbstractMomentFormat:
        """The format of the parameter with this path."""
        found = (format for match, format in self.rules if re.fullmatch(match, name))
        return next(found, self.default)

    def check_used(self, names: Iterable[str]) -> None:
        """Raise ValueError if a rule matches no parameter. A wrong pattern would do nothing."""
        known = sorted(names)
        for match, _ in self.rules:
            if not any(re.fullmatch(match, name) for name in known):
                raise ValueError(
                    f"rule {match!r} matches no parameter. It must match the whole path, as "
                    f"'.*norm.*' does. Paths are {known[:10]}."
                )


def check_rounding(rounding: object) -> None:
    """Raise ValueError unless moments can be rounded so."""
    if rounding == "nearest":
        raise ValueError(
            "rounding='nearest': small moments would never decay, because 0.9 of a small code is "
            "nearest to that code again. Use 'dithered', the default, or 'stochastic'."
        )
    check_one_of("rounding", rounding, ("dithered", "stochastic"))
