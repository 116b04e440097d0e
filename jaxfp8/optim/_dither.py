"""How moments are rounded: by a threshold that changes at every step, so that all of them decay.

A moment whose gradient is 0 is multiplied by `b1` or `b2`. Near 0, 0.9 of a code's value is nearest
to that code again. Such a moment never decays, and its parameter moves for ever. So a moment that
lies between two codes is rounded up if its fraction of the way is above a **threshold** `u` in
[0, 1).

The threshold of a value is the fractional part of `u0 + h(step)`. The hash h gives numbers that are
spread evenly, and that tell nothing about each other. Hence:

- A moment that a step would lower by the fraction d of a code leaves this code after 1 / d steps in
  the mean. So a first moment without a gradient decays from any code to 0. In the first 262,144
  steps no wait is longer than 15 / d (tests/optim/test_dither.py).
- In each step a value is rounded up as often as its fraction says, whatever happened before. So the
  mean of what is stored is the value, also far below one code.

Multiples of the golden ratio are spread more evenly, but each one tells the next one. A code that
went up at a small threshold then lives for a fixed number of steps, which is not 1 / d. Such
moments were 20 % too small with b1 = 0.9.

Sixteen neighbours have sixteen equally spaced `u0`, so that their mean error is small. Thresholds
depend on the step and on the place along the last axis. So a mesh does not change them, and no key
is needed. Both moments of a value have the same threshold. If both are far below one code, they go
up together. With thresholds of their own, a first moment that went up would more often meet a
second one that did not, and the update would be large.

References:
  Roberts, IRE Trans. Inf. Theory 8 (1962) (dither: the mean of what is rounded is the value).
  Appleby, MurmurHash3 (the hash: the finalizer of 32 bits).
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array, DType

STRIDE = 7  # from one u0 to the next, in sixteenths. It is odd, so 16 neighbours have all of them


def thresholds(step: Array | None, shape: tuple[int, ...]) -> Array:
    """The threshold of each value [..., C], an odd multiple of 2^-23: float32 [1, ..., C].

    Args:
      step: int32 [], the number of the update. None gives 1/2, which rounds to nearest.
      shape: of the values.

    Example:
      >>> thresholds(jnp.int32(1), (2, 2)).shape
      (1, 2)
    """
    if step is None:
        return jnp.float32(0.5)
    places = (1,) * (len(shape) - 1) + shape[-1:]
    place = lax.broadcasted_iota(jnp.uint32, places, len(places) - 1) if shape else jnp.uint32(0)
    bits = _hash(step) + place * jnp.uint32(STRIDE << 28)  # 1/16 is 2^28. Whole parts overflow
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


def settled(n: Array, below: Array, value_of: Callable[[Array], Array], u: Array) -> Array:
    """The code `below`, or the next one if n is far enough on the way to it, [...] int32.

    Args:
      n: float32 [...], at least 0.
      below: int32 [...], the last code whose value is at most n. It may be off by 1 where n is next
        to a value.
      value_of: the value float32 [...] of codes int32 [...]. It grows with the code.
      u: thresholds.

    Example:
      >>> settled(jnp.float32(2.3), jnp.int32(2), lambda code: code * 1.0, jnp.float32(0.2))
      Array(3, dtype=int32)
    """
    low, high = value_of(below), value_of(below + 1)
    return below + (n - low > u * (high - low)).astype(jnp.int32)


def settled_float(n: Array, dtype: DType, u: Array) -> Array:
    """`settled` among the codes of a short float: `float_below` n, or the next one, [...] int32.

    Example:
      >>> settled_float(jnp.float32(1.1), jnp.float8_e5m2, jnp.float32(0.3))
      Array(61, dtype=int32)
    """
    value_of = functools.partial(float_of, dtype=dtype)
    return settled(n, float_below(n, dtype), value_of, u)


def float_below(n: Array, dtype: DType) -> Array:
    """The code of the largest value of a short float that is at most n, [...] int32.

    Args:
      n: float32 [...], from 0 to the largest value of the dtype.
      dtype: of 16 bits or fewer.

    Example:
      >>> float_below(jnp.float32(449.0), jnp.float8_e4m3fn)
      Array(126, dtype=int32)
    """
    info = jnp.finfo(dtype)
    dropped = 23 - info.nmant
    # Without the difference of the biases, the first bits of a float32 are a normal code.
    normal = (lax.bitcast_convert_type(n, jnp.int32) >> dropped) - (
        (info.minexp + 126) << info.nmant
    )
    subnormal = (n * 2.0 ** (info.nmant - info.minexp)).astype(jnp.int32)
    return jnp.where(n < 2.0**info.minexp, subnormal, normal)


def float_of(code: Array, dtype: DType) -> Array:
    """The value of a code, float32 [...]. It is made of bits, so XLA folds no conversion away.

    Example:
      >>> float_of(jnp.int32(126), jnp.float8_e4m3fn)
      Array(448., dtype=float32)
    """
    return as_float(code, dtype).astype(jnp.float32)


def as_float(code: Array, dtype: DType) -> Array:
    """Codes [...] as floats of these bits, [...] in the dtype.

    Example:
      >>> as_float(jnp.int32(126), jnp.float8_e4m3fn)
      Array(448, dtype=float8_e4m3fn)
    """
    unsigned = jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")
    return lax.bitcast_convert_type(code.astype(unsigned), dtype)
