"""How an optimizer stores its moments, and in how many bytes. Arithmetic stays in float32.

A format is a frozen dataclass. `pack` stores a float32 array, and `unpack` reads it again. What it
stores is one node of the optimizer state: an array, a `QuantizedTensor` or a NamedTuple.
"""

import abc
import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._typing import Array, Rounding
from jaxfp8.sharding._amax import varying

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
        return getattr(self, "rounding", "nearest") == "stochastic"

    @abc.abstractmethod
    def pack(self, x: Array, old: Any, *, signed: bool, key: Array | None) -> Any:
        """Stores an array.

        Args:
          x: float32 [...].
          old: what it replaces, or None.
          signed: whether x can be negative. A second moment cannot.
          key: a jax PRNG key, for stochastic rounding.
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
      rounding: "nearest" or "stochastic".

    Example:
      >>> BFloat16().pack(jnp.float32(0.1), None, signed=True, key=None)
      Array(0.100098, dtype=bfloat16)
    """

    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        check_rounding(self.rounding)

    def pack(self, x: Array, old: Any, *, signed: bool, key: Array | None) -> Array:
        if not self.is_stochastic:
            return x.astype(jnp.bfloat16)
        assert key is not None  # `with_moment_formats` makes it
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        # Random low bits carry into the high ones with the probability of the dropped fraction.
        up = bits + (jax.random.bits(key, x.shape, jnp.uint32) >> 16)
        kept = jnp.where(jnp.isfinite(x), up, bits) & jnp.uint32(0xFFFF0000)
        rounded = lax.bitcast_convert_type(kept, jnp.float32).astype(jnp.bfloat16)
        return jnp.where(jnp.isnan(x), jnp.bfloat16(jnp.nan), rounded)

    def unpack(self, stored: Array) -> Array:
        return lax.optimization_barrier(stored).astype(jnp.float32)

    def reads(self, stored: Any) -> bool:
        return isinstance(stored, jax.Array | np.ndarray) and stored.dtype == jnp.bfloat16


def check_rounding(rounding: object) -> None:
    """Raise ValueError unless it is a rounding.

    Example:
      >>> check_rounding("nearest")
    """
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding={rounding!r} is unknown; use 'nearest' or 'stochastic'.")


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
