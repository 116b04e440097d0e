"""C + product: the array that a product is added to, as cuBLAS does it with beta = 1.

Letters: M N of the product.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._typing import Array, Axes, DType
from jaxfp8.numerics._dtypes import FLOAT_DTYPES


def check_add_to(add_to: Array, shape: Axes) -> None:
    """Raise unless it is an array with the shape of the product, [..., M, N], and a float dtype.

    Raises:
      ValueError: for another shape.
      TypeError: for another dtype, and for what is no array.

    Example:
      >>> check_add_to(jnp.zeros((2, 3)), (2, 3))
    """
    if not isinstance(add_to, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise TypeError(f"add_to is of type {type(add_to).__name__}; pass an array of shape {list(shape)}.")
    if add_to.shape != shape:
        raise ValueError(
            f"add_to has shape {list(add_to.shape)}, but the product that is added to it has {list(shape)}: give it that shape."
        )
    if add_to.dtype.name not in FLOAT_DTYPES:
        raise TypeError(f"add_to is of dtype {add_to.dtype.name}; cast it to one of {list(FLOAT_DTYPES)}.")


def adding(backend: Callable[..., Array]) -> Callable[..., Array]:
    """A backend of the scaled matmul that takes `add_to` as well: it writes float32, to which C is added; one rounding."""

    @functools.wraps(backend)
    def scaled_matmul(*operands: Any, out_dtype: DType, add_to: Array | None, **options: Any) -> Array:
        if add_to is None:
            return backend(*operands, out_dtype=out_dtype, **options)
        product = backend(*operands, out_dtype=jnp.dtype(jnp.float32), **options)
        return (add_to.astype(jnp.float32) + product).astype(out_dtype)

    return scaled_matmul
