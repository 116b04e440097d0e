"""The bias of a matmul, and its gradient.

The custom gradient of the matmul includes the bias. The kernel that casts the gradient of the
result reads all of it, so it can also sum its columns for the bias.

The result of a matmul is [B, M, N]. B are the batch axes, M the axes that lhs keeps, and N the axes
that rhs keeps. In this file `product` is the result before the bias is added.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._geometry import TrainingGeometry
from jaxfp8._typing import Array, ArrayLike, Axes, DType
from jaxfp8.matmul._options import check_float
from jaxfp8.numerics._formats import FLOAT_DTYPES, product_dtype, sum_dtype
from jaxfp8.sharding._amax import varying_axes, varying_axes_of_type


def check_bias(bias: ArrayLike, shape: Axes) -> Array:
    """The bias as an array of `shape`, [B, N]."""
    bias = check_float("bias", bias)
    if bias.shape != shape:
        raise ValueError(
            f"bias has shape {list(bias.shape)}. It must have {list(shape)}, the axes of the "
            "result that come from rhs. Reshape it."
        )
    return bias


def add_bias(product: Array, bias: Array | None, geometry: TrainingGeometry) -> Array:
    """`product` [B, M, N] plus `bias` [B, N], in the dtype of `product`."""
    if bias is None:
        return product
    bias, summed = bias.astype(product.dtype), _summed(geometry)
    sharding = jax.typeof(product).sharding
    if jax.sharding.AxisType.Explicit in sharding.mesh.axis_types:
        # Without this, the sum would take the sharding of the bias. The gradient of the result,
        # which is cast later, would have it, too.
        spec = jax.P(*(entry for axis, entry in enumerate(sharding.spec) if axis not in summed))
        bias = jax.sharding.reshard(bias, jax.NamedSharding(sharding.mesh, spec))
    return product + jnp.expand_dims(bias, summed)


def bias_gradient(
    gradient: Array, column_sums: Array | None, bias: Any, geometry: TrainingGeometry
) -> Array:
    """The gradient [B, N] of a bias with the type `bias`: sums over M of [B, M, N].

    Sums are in float32, or in float64 for float64. `column_sums` are `CastExtras.column_sums`.
    """
    axes = _summed(geometry)
    summed = gradient if column_sums is None else column_sums
    total = jnp.sum(summed, axes, sum_dtype(summed.dtype))
    # Devices that share the bias must share its gradient.
    missing = varying_axes(total) - varying_axes_of_type(bias)
    if missing:
        total = lax.psum(total, tuple(sorted(missing)))
    total = total.astype(bias.dtype)
    if jax.sharding.AxisType.Explicit in bias.sharding.mesh.axis_types:
        total = jax.sharding.reshard(total, bias.sharding)
    return total


def bias_fits(
    bias: Array, lhs: Array, rhs: Array, preferred_element_type: DType | None = None
) -> bool:
    """Whether `dot` can add the bias of a layer: lhs [..., K] times rhs [K, N].

    If not, flax adds the bias after the matmul. flax then broadcasts the bias, and promotes the
    sum. `dot` does neither, and takes no complex bias.
    """
    product = preferred_element_type or product_dtype(lhs.dtype, rhs.dtype)
    return (
        bias.shape == rhs.shape[-1:] and bias.dtype == product and bias.dtype.name in FLOAT_DTYPES
    )


def sums_columns(geometry: TrainingGeometry) -> bool:
    """Whether column sums of g, over its last axis but one, help to sum the gradient of the bias.

    They help if the bias lacks that axis and has the last one.
    """
    summed, ndim = _summed(geometry), len(geometry.wgrad.rhs.order)
    return ndim - 2 in summed and ndim - 1 not in summed


def _summed(geometry: TrainingGeometry) -> Axes:
    """The axes M of the result [B, M, N]."""
    return geometry.fprop.added_axes[1]
