"""The dtypes that go into a cast and come out of a matmul."""

import jax.numpy as jnp

from jaxfp8._typing import DType

FLOAT_DTYPES = ("bfloat16", "float16", "float32", "float64")


def sum_dtype(dtype: DType) -> DType:
    """The dtype in which values of a dtype are summed: float64 for float64, else float32.

    Example:
      >>> sum_dtype(jnp.bfloat16), sum_dtype(jnp.float64)
      (dtype('float32'), dtype('float64'))
    """
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def product_dtype(lhs: DType, rhs: DType) -> DType:
    """The dtype that `jax.lax.dot_general` gives to the product of two float dtypes.

    It is the one with the larger range, and of two with the same range the more precise one.
    (`jnp.dot` promotes, which makes float32 of bfloat16 and float16.)

    Example:
      >>> product_dtype(jnp.bfloat16, jnp.float16), product_dtype(jnp.bfloat16, jnp.float32)
      (dtype(bfloat16), dtype('float32'))
    """
    infos = jnp.finfo(lhs), jnp.finfo(rhs)
    return jnp.dtype(max(infos, key=lambda info: (info.maxexp, info.nmant)).dtype)


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
