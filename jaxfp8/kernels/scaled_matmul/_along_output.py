"""Scales that leave the sum: laid along the axes of a product, and multiplied onto it."""

import jax
import jax.numpy as jnp

from jaxfp8._typing import Array, Axes, DotDimensionNumbers


def along_output(scale: Array, ndims: tuple[int, int], dimension_numbers: DotDimensionNumbers, side: int) -> Array:
    """The scale of one operand, of its rank and 1 along contracted axes, as [batch, lhs kept, rhs kept]; [] as it is.

    Args:
      scale: of lhs (side 0) or rhs (side 1).
      ndims: ranks of lhs and rhs.
      dimension_numbers: of the product.
      side: 0 or 1.
    """
    if not scale.ndim:
        return scale
    contracted, batch = ((tuple(lhs_axes), tuple(rhs_axes)) for lhs_axes, rhs_axes in dimension_numbers)
    kept: list[Axes] = [tuple(axis for axis in range(ndims[i]) if axis not in contracted[i] + batch[i]) for i in (0, 1)]
    scale = scale.transpose(batch[side] + kept[side] + contracted[side])
    n_batch, n_kept = len(batch[side]), len(kept[side])
    scale = jnp.squeeze(
        scale, axis=tuple(range(n_batch + n_kept, scale.ndim))
    )  # contracted: size 1, or it had been refused
    first = n_batch if side == 1 else n_batch + n_kept
    return jnp.expand_dims(scale, tuple(range(first, first + len(kept[1 - side]))))


def scaled(product: Array, *scales: Array) -> Array:
    """`product * scale * scale`, [batch, lhs kept, rhs kept] float32."""
    # The smaller scale first, so that a finite result never overflows on the way.
    first, second = (_laid_as(scale, product) for scale in scales)
    return (product * jnp.minimum(first, second)) * jnp.maximum(first, second)


def _laid_as(scale: Array, product: Array) -> Array:
    """A scale with the sharding of the product that it multiplies, which in an Explicit mesh it must have."""
    sharding = jax.typeof(product).sharding
    if not scale.ndim or sharding.mesh.empty or jax.sharding.AxisType.Explicit not in sharding.mesh.axis_types:
        return scale
    spec = jax.P(*(along if size > 1 else None for along, size in zip(sharding.spec, scale.shape, strict=True)))
    return jax.sharding.reshard(scale, jax.sharding.NamedSharding(sharding.mesh, spec))
