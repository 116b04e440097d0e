"""The saturating cast to FP8: nearest-even and stochastic rounding."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array, Rounding
from jaxfp8.numerics._float32 import is_finite, to_float32
from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._powers_of_two import power_of_two


def saturating_cast(
    x: Array, multiplier: Array, format: Format, *, rounding: Rounding = "nearest", key: Array | None = None
) -> Array:
    """`round(clip(x * multiplier, -max, max))` in `format`.

    Finite in, finite out; an inf or NaN becomes the NaN of the format, so that guards against overflow see it.
    JAX's own casts do not saturate, and whether XLA's do depends on the fusion: the clip decides.

    Args:
      x: [...] floating point.
      multiplier: broadcastable to x, float32.
      format: E4M3 or E5M2.
      rounding: "nearest" (ties to even) or "stochastic" (up with the probability of the dropped fraction; needs `key`).
      key: a jax PRNG key, for stochastic rounding only.

    Returns:
      [...] in `format.dtype`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> saturating_cast(jnp.array([0.3, 1e9, -1e9]), jnp.float32(1.0), fp8.E4M3).astype(jnp.float32)
      Array([ 3.125e-01,  4.480e+02, -4.480e+02], dtype=float32)
    """
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding={rounding!r} is unknown; use 'nearest' or 'stochastic'.")
    if (rounding == "stochastic") != (key is not None):
        raise ValueError(
            f"rounding={rounding!r} with key={'given' if key is not None else None}: "
            "'stochastic' needs a key=, 'nearest' takes none."
        )
    x = to_float32(x)
    scaled = jnp.clip(x * multiplier, -format.max, format.max)
    if key is not None:
        scaled = _stochastic(scaled, format, key)
    return jnp.where(is_finite(x), scaled, jnp.nan).astype(format.dtype)


def _stochastic(v: Array, format: Format, key: Array) -> Array:
    """Round |v| <= max to a value of the format; up with the probability of the dropped fraction, to 2^-32."""
    biased = lax.bitcast_convert_type(jnp.abs(v), jnp.uint32) >> 23
    exponent = jnp.maximum(biased.astype(jnp.int32) - 127, format.min_exponent)
    # Spacing of the format at v and its inverse, as exact powers of two.
    spacing = power_of_two(exponent - format.mantissa_bits)
    steps = jnp.abs(v) * power_of_two(format.mantissa_bits - exponent)
    whole = jnp.floor(steps)
    threshold = ((steps - whole) * 2.0**32).astype(jnp.uint32)
    up = jax.random.bits(key, v.shape, jnp.uint32) < threshold
    return jnp.copysign((whole + up.astype(jnp.float32)) * spacing, v)
