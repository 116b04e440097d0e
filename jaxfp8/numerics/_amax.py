"""The largest magnitude of each scale cell, that is of the values that share one scale."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._typing import Array, DType
from jaxfp8.numerics._float32 import widened
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


@functools.partial(jax.jit, static_argnames="granularity")  # traced once for each shape
def amax(x: Array, granularity: AbstractGranularity) -> Array:
    """`max |x|` over each scale cell, float32.

    It is inf if the cell holds an inf or a NaN, and 0 if the cell is empty. It may be below 2^-126.
    Scale rules and ledgers count such an amax as zero.

    Magnitudes are ordered as their bits are, and the bits of NaN are above those of inf. So this is
    a maximum of integers, and it cannot lose a NaN. A maximum of floats can: XLA:CPU's does, in
    larger arrays. XLA:CPU would also write a float32 copy of a 16-bit float array to memory.

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
    return from_bits(granularity.maximum(magnitude_bits(x)), x.dtype)


def magnitude_bits(x: Array) -> Array:
    """The bits of `|x|`, [...] unsigned integers.

    Example:
      >>> import jax.numpy as jnp
      >>> magnitude_bits(jnp.array([-2.0, 2.0]))
      Array([1073741824, 1073741824], dtype=uint32)
    """
    integers = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    without_sign = (1 << (8 * x.dtype.itemsize - 1)) - 1
    return lax.bitcast_convert_type(x, integers) & integers.type(without_sign)


def from_bits(largest: Array, dtype: DType) -> Array:
    """The amax, float32, from the largest bits of magnitudes of this dtype; inf for NaN.

    Example:
      >>> import jax.numpy as jnp
      >>> from_bits(jnp.uint32(1073741824), jnp.float32)
      Array(2., dtype=float32)
    """
    inf = np.array(np.inf, dtype).view(largest.dtype)
    # The conversion to float32 is monotonic, so it may follow the maximum.
    return widened(lax.bitcast_convert_type(jnp.minimum(largest, inf), dtype))
