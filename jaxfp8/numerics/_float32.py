"""Inputs as float32, in which all scales and casts are computed."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._typing import Array

TINY = float(np.finfo(np.float32).tiny)
"""2^-126, the smallest normal float32.

CPUs and GPUs flush smaller magnitudes to zero, but not consistently. So they always count as zero.
"""
LARGEST = float(np.finfo(np.float32).max)
"""The largest float32."""


def is_finite(x: Array) -> Array:
    """`jnp.isfinite`, made of operations that every kernel language has.

    Example:
      >>> import jax.numpy as jnp
      >>> is_finite(jnp.array([1.0, jnp.inf, jnp.nan]))
      Array([ True, False, False], dtype=bool)
    """
    return jnp.abs(x) < jnp.inf  # False for NaN, as every comparison with it


def widened(x: Array) -> Array:
    """`x` [...] in float32. A float64 that overflows becomes the largest float32.

    So finite stays finite, and non-finite stays non-finite.

    Example:
      >>> import jax.numpy as jnp
      >>> widened(jnp.array([-2.0, jnp.inf], jnp.bfloat16))
      Array([-2., inf], dtype=float32)
    """
    if x.dtype == jnp.float64:
        # The conversion alone would make inf of a float64 that float32 cannot hold.
        x = jnp.where(is_finite(x), jnp.clip(x, -LARGEST, LARGEST), x)
    return x.astype(jnp.float32)


def to_float32(x: Array) -> Array:
    """`widened(x)`, [...], where a magnitude below 2^-126 becomes a zero of the same sign.

    Example:
      >>> import jax.numpy as jnp
      >>> to_float32(jnp.array([1e-39, -2.0], jnp.float32))
      Array([ 0., -2.], dtype=float32)
    """
    x = widened(x)
    # The sign is a bit mask, because kernel languages lack jnp.copysign.
    sign = lax.bitcast_convert_type(x, jnp.int32) & -(2**31)
    return jnp.where(jnp.abs(x) < TINY, lax.bitcast_convert_type(sign, jnp.float32), x)
