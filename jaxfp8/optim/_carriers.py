"""Integers as floats of the same bits, so that they can leave a backward pass as cotangents.

JAX accepts a cotangent of floats only. A carrier is copied and never computed with. XLA may still
convert a small float to a wider one and back where it copies. That changes the bits of a NaN with a
payload. So each carrier has a dtype in which this cannot happen:

- 8 bits travel as float8_e4m3fn. Its codes are 254 different numbers and two NaNs without payload,
  so each code survives a conversion to a wider float and back.
- 16 bits travel as two such arrays, and not as float16, whose NaNs have payloads.
- 32 bits travel as float32, which XLA does not widen.
- Floats travel as they are.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array, DType

_BYTE = jnp.dtype(jnp.float8_e4m3fn)


def carriers_of(x: Array) -> tuple[Array, ...]:
    """The carriers of one array of an optimizer state: one or two floats of its shape.

    Args:
      x: [...], of a dtype of 8, 16 or 32 bits, or a float.

    Raises:
      TypeError: if no carrier has these bits.

    Example:
      >>> carriers_of(jnp.array([0, 56], jnp.uint8))
      (Array([0, 1], dtype=float8_e4m3fn),)
    """
    dtype = jnp.result_type(x)
    if is_float(dtype):
        return (x,)
    if dtype == jnp.bool_:
        return (_bits(x.astype(jnp.uint8), _BYTE),)
    if dtype in (jnp.int8, jnp.uint8):
        return (_bits(x, _BYTE),)
    if dtype in (jnp.int16, jnp.uint16):
        word = _bits(x, jnp.uint16)
        high, low = (word >> 8).astype(jnp.uint8), (word & jnp.uint16(0xFF)).astype(jnp.uint8)
        return _bits(high, _BYTE), _bits(low, _BYTE)
    if dtype in (jnp.int32, jnp.uint32):
        return (_bits(x, jnp.float32),)
    raise TypeError(
        f"an optimizer state with {dtype}{list(jnp.shape(x))} cannot leave a backward pass. Its "
        "arrays must be floats, bools, or integers of 8, 16 or 32 bits. Store keys of jax.random "
        "as jax.random.key_data."
    )


def carried(carriers: tuple[Array, ...], dtype: DType) -> Array:
    """The array that `carriers_of` gave to these carriers.

    Example:
      >>> carried(carriers_of(jnp.array([-1, 3], jnp.int16)), jnp.int16)
      Array([-1,  3], dtype=int16)
    """
    if is_float(dtype):
        return carriers[0]
    if dtype == jnp.bool_:
        return _bits(carriers[0], jnp.uint8) != 0
    if len(carriers) == 2:
        high, low = (_bits(carrier, jnp.uint8).astype(jnp.uint16) for carrier in carriers)
        return _bits((high << 8) | low, dtype)
    return _bits(carriers[0], dtype)


def is_float(dtype: Any) -> bool:
    """Whether JAX differentiates with respect to arrays of this dtype.

    Example:
      >>> is_float(jnp.float8_e5m2), is_float(jnp.int32)
      (True, False)
    """
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _bits(x: Array, dtype: DType) -> jax.Array:
    return lax.bitcast_convert_type(x, dtype)
