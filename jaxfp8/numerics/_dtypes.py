"""The dtypes that go into a cast and come out of a matmul."""

import jax.numpy as jnp

from jaxfp8._typing import DType

FLOAT_DTYPES = ("bfloat16", "float16", "float32", "float64")


def check_out_dtype(preferred_element_type: DType) -> DType:
    """The dtype of a matmul's result, after a check.

    Raises:
      TypeError: if no matmul can return this dtype.

    Example:
      >>> check_out_dtype(jnp.bfloat16)
      dtype(bfloat16)
    """
    try:
        dtype = jnp.dtype(preferred_element_type)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in FLOAT_DTYPES:
        given = repr(preferred_element_type) if dtype is None else dtype.name
        raise TypeError(
            f"preferred_element_type={given} is no dtype that a matmul can return; use one of "
            f"{list(FLOAT_DTYPES)}."
        )
    return dtype
