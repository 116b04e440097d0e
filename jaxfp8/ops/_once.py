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


@jax.custom_jvp
def constant(tree: T) -> T:
    """The tree itself, for `fp8.quantize`: differentiating it is an error.

    Example:
      >>> import jax.numpy as jnp
      >>> constant(jnp.float32(1.0))
      Array(1., dtype=float32)
    """
    return tree


@constant.defjvp
def _refuse_first(primals, tangents):
    del tangents
    shapes = [list(leaf.shape) for leaf in jax.tree.leaves(primals)]
    raise TypeError(
        f"fp8.quantize of x {', '.join(map(str, shapes))} is being differentiated, but it has no gradient. Use "
        "fp8.fake_quantize for a straight-through gradient, fp8.dot for a matmul in FP8, or jax.lax.stop_gradient(x)."
    )
