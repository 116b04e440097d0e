"""Gradients as their tensors are: with their axes in order, their sharding and their mesh axes."""

from typing import Any

import jax
from jax import lax

from jaxfp8._geometry import inverse_permutation
from jaxfp8._typing import Array, Axes
from jaxfp8.sharding._amax import varying, varying_type


def sharding_of(aval: Any, axes: Axes) -> Any:
    """The sharding of a result whose axes are those of `aval`, permuted by `axes`.

    `cotangent` transposes the result to the order of `aval`. Then both have one sharding. None
    outside of Explicit meshes, where the compiler decides.

    Example:
      >>> import jax.numpy as jnp
      >>> sharding_of(jax.typeof(jnp.ones((2, 3))), (1, 0))
    """
    mesh = aval.sharding.mesh
    if mesh.empty or jax.sharding.AxisType.Explicit not in mesh.axis_types:
        return None
    return jax.sharding.NamedSharding(mesh, jax.P(*(aval.sharding.spec[axis] for axis in axes)))


def cotangent(result: Array, axes: Axes, aval: Any) -> Array:
    """The cotangent of a tensor, from the result of a matmul.

    The result is summed over the manual mesh axes that the tensor does not vary over. Its axes are
    then transposed to the order of the tensor.

    Args:
      result: [...], with the axes of the tensor, permuted by `axes`.
      axes: which axis of the tensor each axis of the result is.
      aval: the type of the tensor.

    Example:
      >>> import jax.numpy as jnp
      >>> cotangent(jnp.ones((3, 2)), (1, 0), jax.typeof(jnp.ones((2, 3)))).shape
      (2, 3)
    """
    missing = varying(result) - varying_type(aval)
    if missing:
        result = lax.psum(result, tuple(sorted(missing)))
    return result.transpose(inverse_permutation(axes))
