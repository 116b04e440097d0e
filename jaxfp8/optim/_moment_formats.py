"""How an optimizer stores its moments, and in how many bytes. Arithmetic stays in float32.

A format is a frozen dataclass. `pack` stores a float32 array, and `unpack` reads it again. What it
stores is one node of the optimizer state: an array, a `QuantizedTensor` or a NamedTuple.
"""

import abc
import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._typing import Array
from jaxfp8.optim._dither import thresholds
from jaxfp8.sharding._amax import varying

MomentRounding: TypeAlias = Literal["dithered", "stochastic"]
SMALL = 4096
"""Arrays with fewer values stay in float32: norms and biases. They take few bytes."""


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
        """Stores an array.

        Args:
          x: float32 [...].
          old: what it replaces, or None.
          signed: whether x can be negative. A second moment cannot.
          key: a jax PRNG key, for stochastic rounding.
          step: int32 [], the number of the update. It gives the thresholds of rounding, see
            `_dither`. None rounds to nearest, as for a moment that no update follows.
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
        # A tuple, so that it can be hashed, and a list that changes later changes no format.
        try:
            rules = tuple((match, format) for match, format in self.rules)
        except (TypeError, ValueError):
            raise ValueError(
                f"rules={self.rules!r} must be pairs of a pattern and a format. Write "
                "PerParameter([('.*embed.*', Float32())], Int8())."
            ) from None
        object.__setattr__(self, "rules", rules)
        for match, _ in self.rules:
            try:
                re.compile(match)
            except (re.error, TypeError) as error:
                raise ValueError(
                    f"rule {match!r} is no regular expression: {error}. Write a pattern of paths, "
                    "such as '.*embed.*'."
                ) from None

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
    """Raise ValueError unless moments can be rounded so.

    Example:
      >>> check_rounding("dithered")
    """
    if rounding == "nearest":
        raise ValueError(
            "rounding='nearest': small moments would never decay, because 0.9 of a small code is "
            "nearest to that code again. Use 'dithered', the default, or 'stochastic'."
        )
    if rounding not in ("dithered", "stochastic"):
        raise ValueError(f"rounding={rounding!r} is unknown; use 'dithered' or 'stochastic'.")


def check_size(name: str, size: object, *, least: int) -> None:
    """Raise ValueError unless it is an integer of at least `least`.

    Example:
      >>> check_size("group", 128, least=2)
    """
    if type(size) is not int or size < least:
        raise ValueError(f"{name}={size!r} must be an integer of at least {least}.")


def global_size(x: Array) -> int:
    """The number of values of an array on all devices.

    Inside `jax.shard_map` an array that varies over a mesh axis counts as split over it.

    Example:
      >>> global_size(jnp.ones((2, 3)))
      6
    """
    axes = varying(x) if isinstance(x, jax.Array) else ()
    return math.prod(jnp.shape(x)) * math.prod(lax.axis_size(axis) for axis in axes)
