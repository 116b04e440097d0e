"""The largest magnitude of each scale cell, that is of the values that share one scale."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._typing import Array
from jaxfp8.numerics._constant import constant_like
from jaxfp8.numerics._float32 import widened
from jaxfp8.numerics._granularity import AbstractGranularity


def magnitude(x: Array, *, kernel_language: bool = False) -> Array:
    """`|x|`, [...], with inf for NaN, so that no maximum loses it.

    Args:
      x: [...] floating point.
      kernel_language: whether this is part of a kernel.

    Example:
      >>> import jax.numpy as jnp
      >>> magnitude(jnp.array([-2.0, jnp.nan]))
      Array([ 2., inf], dtype=float32)
    """
    largest = jnp.abs(x)
    like = lax.full_like if kernel_language else constant_like
    return lax.select(largest == largest, largest, like(largest, np.inf))  # NaN differs from itself


@functools.partial(jax.jit, static_argnames="granularity")  # traced once for each shape
def amax(x: Array, granularity: AbstractGranularity) -> Array:
    """`max |x|` over each scale cell, float32.

    It is inf if the cell holds an inf or a NaN, and 0 if the cell is empty. It may be below 2^-126.
    Scale rules and ledgers count such an amax as zero.

    NaN becomes inf before a maximum of floats, because XLA:CPU's loses NaN in larger arrays (seen
    with 4,096 elements). The maximum is taken in the dtype of x, because XLA would write a float32
    copy of x to memory between two reductions. XLA:CPU does so even then, for 16-bit floats. So on
    CPUs it is a maximum of bits: magnitudes are ordered as their bits are, and the bits of NaN are
    above those of inf. (On GPUs XLA would send 16-bit integers to other devices as 32 bits.) As
    float32 numbers the bits would be reduced faster, but XLA:CPU would write these to memory, too.

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

    def of_bits(x: Array) -> Array:
        integers = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        without_sign = (1 << (8 * x.dtype.itemsize - 1)) - 1
        bits = lax.bitcast_convert_type(x, integers) & integers.type(without_sign)
        largest = jnp.minimum(granularity.maximum(bits), np.array(np.inf, x.dtype).view(integers))
        return widened(lax.bitcast_convert_type(largest, x.dtype))

    def of_floats(x: Array) -> Array:
        # The conversion to float32 is monotonic, so it may follow the maximum.
        return widened(granularity.maximum(magnitude(x)))

    return lax.platform_dependent(x, cpu=of_bits, default=of_floats)
