"""C + product: a matmul that adds its product to an array C, like cuBLAS with beta = 1.

Letters: M N the axes of the product.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, Axes
from jaxfp8.kernels.scaled_matmul._call import MatmulCall
from jaxfp8.numerics._formats import FLOAT_DTYPES


def check_add_to(add_to: Array, shape: Axes) -> None:
    """Raise unless `add_to` is an array with a float dtype and the shape of the product.

    Args:
      add_to: C.
      shape: the shape of the product, [..., M, N].

    Raises:
      ValueError: for another shape.
      TypeError: for another dtype, and for anything that is no array.

    Example:
      >>> check_add_to(jnp.zeros((2, 3)), (2, 3))
    """
    if not isinstance(add_to, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise TypeError(
            f"add_to is of type {type(add_to).__name__}; pass an array of shape {list(shape)}."
        )
    if add_to.shape != shape:
        raise ValueError(
            f"add_to has shape {list(add_to.shape)}, but the product that is added to it has "
            f"{list(shape)}: give it that shape."
        )
    if add_to.dtype.name not in FLOAT_DTYPES:
        raise TypeError(
            f"add_to is of dtype {add_to.dtype.name}; cast it to one of {list(FLOAT_DTYPES)}."
        )


def adding(backend: Callable[..., Array]) -> Callable[..., Array]:
    """The backend of a scaled matmul, with an argument `add_to` for C.

    The backend writes its product in float32, and C is added to that. So the sum is rounded once.
    """

    @functools.wraps(backend)
    def scaled_matmul(
        lhs: QuantizedTensor,
        rhs: QuantizedTensor,
        call: MatmulCall,
        *,
        add_to: Array | None = None,
    ) -> Array:
        if add_to is None:
            return backend(lhs, rhs, call)
        product = backend(lhs, rhs, call.in_float32)
        return (add_to.astype(jnp.float32) + product).astype(call.out_dtype)

    return scaled_matmul
