"""Constants in the shape of another array, which stay inside the loop that reads them.

JAX moves what does not depend on an iteration out of a differentiated `lax.scan`, and keeps it for
all iterations. For an array of a constant this is a loss. The loop would keep 2 or 4 bytes for each
value, and a cast would read them beside its tensor.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._typing import Array


def constant_like(x: Array, value: float) -> Array:
    """`value` in the shape and dtype of x [...], computed from x, so that JAX does not move it.

    XLA knows that the result does not depend on x, and folds it into the operation that reads it.

    Example:
      >>> import jax.numpy as jnp
      >>> constant_like(jnp.zeros(2), 3.0)
      Array([3., 3.], dtype=float32)
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return (x & 0) | int(value)
    integers = np.dtype(f"int{8 * x.dtype.itemsize}")
    bits = np.asarray(value, x.dtype).view(integers)
    zero = lax.bitcast_convert_type(x, integers) & integers.type(0)
    return lax.bitcast_convert_type(zero | bits, x.dtype)
