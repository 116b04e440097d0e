"""Scales that are constant along contracted axes: they are multiplied onto the product."""

import jax
import jax.numpy as jnp

from jaxfp8._geometry import Geometry
from jaxfp8._typing import Array


def along_output(scale: Array, geometry: Geometry, side: int) -> Array:
    """A scale with the axes of the product, [*batch, *lhs kept, *rhs kept].

    It has size 1 along the axes that its operand does not have.

    Args:
      scale: of lhs or rhs, with the rank of the operand and size 1 along contracted axes. A scale
        [] is returned as it is.
      geometry: the axes of the matmul.
      side: 0 for lhs, 1 for rhs.
    """
    if not scale.ndim:
        return scale
    axes = geometry.sides[side]
    contracted = axes.in_order.contracted  # of size 1: other scales are rejected before
    scale = jnp.squeeze(scale.transpose(axes.order), contracted)
    return jnp.expand_dims(scale, geometry.added_axes[side])


def scaled(product: Array, *scales: Array) -> Array:
    """`product * scale * scale`, [batch, lhs kept, rhs kept] float32."""
    first, second = scales
    if jax.sharding.AxisType.Explicit in jax.typeof(product).sharding.mesh.axis_types:
        first, second = (_laid_as(each, product) if each.ndim else each for each in scales)
    # The smaller scale first. Otherwise a product times the larger scale could overflow, although
    # the result is finite.
    return (product * jnp.minimum(first, second)) * jnp.maximum(first, second)


def _laid_as(scale: Array, product: Array) -> Array:
    """A scale with the sharding of the product, which it must have in an Explicit mesh."""
    sharding = jax.typeof(product).sharding
    axes = zip(sharding.spec, scale.shape, strict=True)
    spec = jax.P(*(along if size > 1 else None for along, size in axes))
    return jax.sharding.reshard(scale, jax.sharding.NamedSharding(sharding.mesh, spec))
