"""A gradient that can be taken once."""

from typing import TypeVar

import jax

from jaxfp8._errors import FP8StateError

T = TypeVar("T")


@jax.custom_jvp
def once(tree: T) -> T:
    """The tree itself; differentiating it is an error, since the derivative of a cast is zero almost everywhere.

    Example:
      >>> import jax.numpy as jnp
      >>> once(jnp.float32(1.0))
      Array(1., dtype=float32)
    """
    return tree


@once.defjvp
def _refuse(primals, tangents):
    del primals, tangents
    raise FP8StateError("FP8 matmuls have no second derivative; use recipes.identity() where one is needed.")
