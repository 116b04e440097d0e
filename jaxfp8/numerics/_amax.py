"""The largest magnitude of each scale cell, that is of the values that share one scale."""

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
    # Only NaN differs from itself. Mosaic kernels call this, too.
    return jnp.where(largest != largest, jnp.array(jnp.inf, x.dtype), largest)


def amax(x: Array, granularity: AbstractGranularity) -> Array:
    """`max |x|` over each scale cell, float32.

    It is inf if the cell holds an inf or a NaN, and 0 if the cell is empty.

    NaN becomes inf before the maximum, because XLA:CPU's maximum loses NaN in larger arrays (seen
    with 4,096 elements). The maximum is taken in the dtype of x, because XLA would write a float32
    copy of x to memory between two reductions.

    Args:
      x: [...] floating point.
      granularity: which values share a scale.

    Returns:
      An array of shape `granularity.scale_shape(x.shape)`, float32.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> amax(jnp.array([[1.0, -3.0], [2.0, 0.5]]), fp8.PerAxis(0))
      Array([[3.],
             [2.]], dtype=float32)
    """
    # The conversion to float32 is monotonic, so it may follow the maximum.
    return to_float32(granularity.maximum(magnitude(x)))
