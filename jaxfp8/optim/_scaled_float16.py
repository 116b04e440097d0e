"""A float32 tensor in float16 with one scale, a power of two.

The scale puts the largest magnitude between 32752 and 65504, the largest float16. So nothing
overflows. Values down to 2^-29 of the largest one keep 11 bits. Smaller ones have fewer.

References:
  Peng et al., FP8-LM, arXiv:2310.18313, section 2.3 (a float16 master with tensor scaling).
"""

import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array
from jaxfp8.numerics._exact import BIAS, power_of_two
from jaxfp8.optim._dither import as_float, settled_float
from jaxfp8.sharding._amax import manual_axes, pmax, types_tell, varying

_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_LAST_EXPONENT = 15  # of float16, whose largest value is 65504 = 0x1.ffcp15
_CARRY = 0x7FFFFF - 0x7FE000  # 0x7fe000 is the mantissa of 65504. A larger one needs 2^16
_SMALLEST = -126  # exponent of the smallest normal float32


def to_scaled_float16(
    x: Array, old_scale: Array | None, u: Array | None = None
) -> tuple[Array, Array]:
    """`x` as `values * scale`, with the scale of the largest finite magnitude in `x`.

    inf and NaN stay what they are, and have no effect on the scale. An x without a finite value
    other than 0 has the scale 1.

    Args:
      x: [...] float32.
      old_scale: float32 [], the scale that the new one replaces. Inside `jax.shard_map` the largest
        magnitude is reduced over the mesh axes over which x varies and the old scale does not.
        Without an old scale it is reduced over all axes over which x varies.
      u: thresholds of rounding, see `_dither`. None rounds to nearest even.

    Returns:
      values [...] float16, and scale [] float32. Their product is inf where x rounded to 11 bits is
      2^128. The bfloat16 of such an x is inf, too.

    Raises:
      ValueError: inside `shard_map(check_vma=False)`, where types do not say which axes these are.

    Example:
      >>> to_scaled_float16(jnp.array([3.0, -0.5]), None)
      (Array([ 4.915e+04, -8.192e+03], dtype=float16), Array(6.1035156e-05, dtype=float32))
    """
    if not types_tell():
        raise ValueError(
            f"master=Float16() inside shard_map(check_vma=False) over {manual_axes()}: types do "
            "not say over which axes its scale is shared. Use check_vma=True, or another master."
        )
    magnitude = lax.bitcast_convert_type(x, jnp.int32) & _MAGNITUDE
    # The order of magnitudes is the order of their bits.
    finite = jnp.where(magnitude < _INFINITY, magnitude, 0)
    largest = jnp.max(finite, initial=0)
    shared = varying(x) - (frozenset() if old_scale is None else varying(old_scale))
    largest = pmax(largest, shared)
    exponent = ((largest + _CARRY) >> 23) - (BIAS + _LAST_EXPONENT)
    exponent = jnp.where(largest == 0, 0, jnp.maximum(exponent, _SMALLEST))
    scaled, scale = x * power_of_two(-exponent), power_of_two(exponent)
    if u is None:
        return scaled.astype(jnp.float16), scale
    n = jnp.minimum(jnp.abs(scaled), float(jnp.finfo(jnp.float16).max))
    code = settled_float(n, jnp.float16, u)
    values = as_float(jnp.where(scaled < 0, code | 0x8000, code), jnp.float16)
    return jnp.where(jnp.isfinite(scaled), values, scaled.astype(jnp.float16)), scale


def from_scaled_float16(values: Array, scale: Array) -> Array:
    """`values * scale`, [...] float32.

    Example:
      >>> from_scaled_float16(jnp.array([49152.0], jnp.float16), jnp.float32(2**-14))
      Array([3.], dtype=float32)
    """
    # XLA may fold float32 -> float16 -> float32 into nothing. The barrier keeps the rounding.
    return lax.optimization_barrier(values).astype(jnp.float32) * scale
