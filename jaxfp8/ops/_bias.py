"""The bias of a matmul: added to the product, and its gradient.

Inside the matmul's own gradient, because what casts the product's gradient reads all of it, and can
sum its columns.

Letters: B, M, N the batch axes and those that lhs and rhs keep, in this order those of the product.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._geometry import TrainingGeometry
from jaxfp8._typing import Array, ArrayLike, Axes, DType
from jaxfp8.numerics._dtypes import FLOAT_DTYPES
from jaxfp8.ops._arguments import check_float
from jaxfp8.sharding._amax import varying


def check_bias(bias: ArrayLike, shape: Axes) -> Array:
    """The bias as an array of `shape`, [B, N].

    Raises:
      TypeError, ValueError: naming it, its shape and the cure.

    Example:
      >>> import jax.numpy as jnp
      >>> check_bias(jnp.ones(3), (3,)).shape
      (3,)
    """
    bias = check_float("bias", bias)
    if bias.shape != shape:
        raise ValueError(
            f"bias has shape {list(bias.shape)}, but the axes of the result that rhs has are "
            f"{list(shape)}; reshape it."
        )
    return bias


def add_bias(product: Array, bias: Array | None, geometry: TrainingGeometry) -> Array:
    """[B, M, N] plus [B, N], in the dtype of the product."""
    if bias is None:
        return product
    bias, summed = bias.astype(product.dtype), _summed(geometry)
    sharding = jax.typeof(product).sharding
    if jax.sharding.AxisType.Explicit in sharding.mesh.axis_types:
        # Or the product, and the gradient that is to be cast, would be sharded as the bias is.
        spec = jax.P(*(entry for axis, entry in enumerate(sharding.spec) if axis not in summed))
        bias = jax.sharding.reshard(bias, jax.NamedSharding(sharding.mesh, spec))
    return product + jnp.expand_dims(bias, summed)


def bias_gradient(
    gradient: Array, column_sums: Array | None, bias: Any, geometry: TrainingGeometry
) -> Array:
    """The gradient [B, N] of a bias: sums over M of the result's gradient [B, M, N].

    Sums are in float32 (in float64 for float64), and are rounded to the dtype of the bias.

    Args:
      gradient: of the product.
      column_sums: `CastExtras.column_sums` of it, or None.
      bias: its type.
      geometry: of the matmul.
    """
    axes = _summed(geometry)
    summed = gradient if column_sums is None else column_sums
    total = jnp.sum(summed, axes, jnp.float64 if summed.dtype == jnp.float64 else jnp.float32)
    missing = varying(total) - frozenset(bias.manual_axis_type.varying)
    if missing:
        total = lax.psum(total, tuple(sorted(missing)))
    total = total.astype(bias.dtype)
    if jax.sharding.AxisType.Explicit in bias.sharding.mesh.axis_types:
        total = jax.sharding.reshard(total, bias.sharding)
    return total


def fits(bias: Array, lhs: Array, rhs: Array, preferred_element_type: DType | None = None) -> bool:
    """Whether a layer's bias can go into its matmul, lhs [..., K] times rhs [K, N].

    Flax broadcasts, and promotes the sum.

    Our matmuls do not take a complex bias. flax adds it after the matmul, so a layer with
    `identity()` works.

    Example:
      >>> import jax.numpy as jnp
      >>> x, w = jnp.ones((2, 4), jnp.bfloat16), jnp.ones((4, 3), jnp.bfloat16)
      >>> fits(jnp.ones(3, jnp.bfloat16), x, w), fits(jnp.ones(3), x, w)
      (True, False)
    """
    product = preferred_element_type or jnp.promote_types(lhs.dtype, rhs.dtype)
    return (
        bias.shape == rhs.shape[-1:] and bias.dtype == product and bias.dtype.name in FLOAT_DTYPES
    )


def sums_columns(geometry: TrainingGeometry) -> bool:
    """Whether sums along the last but one axis of a gradient are on the way to those of the bias.

    Example:
      >>> sums_columns(TrainingGeometry.of((((1,), (0,)), ((), ())), 2, 2))
      True
    """
    summed, ndim = _summed(geometry), len(geometry.wgrad.rhs.order)
    return ndim - 2 in summed and ndim - 1 not in summed


def _summed(geometry: TrainingGeometry) -> Axes:
    """The axes M of the product."""
    return geometry.fprop.added_axes[1]
