"""The largest magnitude of each scale cell."""

import jax.numpy as jnp

from jaxfp8._typing import Array
from jaxfp8.numerics._float32 import to_float32
from jaxfp8.numerics._granularity import AbstractGranularity


def magnitude(x: Array) -> Array:
    """`|x|`, [...], with inf for NaN, so that no maximum loses it.

    Example:
      >>> import jax.numpy as jnp
      >>> magnitude(jnp.array([-2.0, jnp.nan]))
      Array([ 2., inf], dtype=float32)
    """
    largest = jnp.abs(x)
    return jnp.where(largest != largest, jnp.array(jnp.inf, x.dtype), largest)


def amax(x: Array, granularity: AbstractGranularity) -> Array:
    """`max |x|` over each scale cell, float32.

    Inf if the cell holds an inf or a NaN; 0 for an empty cell.

    NaN is turned into inf before the maximum, because XLA's CPU maximum loses NaN in larger arrays.
    The maximum is taken in the dtype of x, where it is as exact: of a float32 copy XLA would write
    all of it to memory between two reductions.

    Args:
      x: [...] floating point.
      granularity: which values share a cell.

    Returns:
      Array of `granularity.scale_shape(x.shape)`, float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> amax(jnp.array([[1.0, -3.0], [2.0, 0.5]]), fp8.PerAxis(0))
      Array([[3.],
             [2.]], dtype=float32)
    """
    return to_float32(granularity.maximum(magnitude(x)))
