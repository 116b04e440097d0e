"""Bias, and the cotangents of a call.

The custom gradient of the matmul includes the bias. The kernel that casts the gradient of the
result reads all of it, so it can also sum its columns for the bias.

The result of a matmul is [B, M, N]. B are the batch axes, M the axes that lhs keeps, and N the axes
that rhs keeps. In this file `product` is the result before the bias is added.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._geometry import TrainingGeometry, inverse_permutation
from jaxfp8._typing import Array, ArrayLike, Axes, DType, FP8StateError, UncollectedStateError
from jaxfp8.matmul._call import Call
from jaxfp8.matmul._options import check_float
from jaxfp8.numerics._formats import FLOAT_DTYPES, product_dtype, sum_dtype
from jaxfp8.sharding._amax import varying, varying_type

# The bias of a matmul, and its gradient.


def check_bias(bias: ArrayLike, shape: Axes) -> Array:
    """The bias as an array of `shape`, [B, N].

    Raises:
      TypeError, ValueError: the message names the bias, its dtype or shape, and the cure.

    Example:
      >>> import jax.numpy as jnp
      >>> check_bias(jnp.ones(3), (3,)).shape
      (3,)
    """
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
    """The gradient [B, N] of a bias: sums over M of the result's gradient [B, M, N].

    Sums are in float32, or in float64 for float64. They are rounded to the dtype of the bias.

    Args:
      gradient: the gradient of the result.
      column_sums: `CastExtras.column_sums` of the gradient, or None.
      bias: the type of the bias.
      geometry: the axes of the three matmuls.
    """
    axes = _summed(geometry)
    summed = gradient if column_sums is None else column_sums
    total = jnp.sum(summed, axes, sum_dtype(summed.dtype))
    # Devices that share the bias must share its gradient.
    missing = varying(total) - varying_type(bias)
    if missing:
        total = lax.psum(total, tuple(sorted(missing)))
    total = total.astype(bias.dtype)
    if jax.sharding.AxisType.Explicit in bias.sharding.mesh.axis_types:
        total = jax.sharding.reshard(total, bias.sharding)
    return total


def fits(bias: Array, lhs: Array, rhs: Array, preferred_element_type: DType | None = None) -> bool:
    """Whether `dot` can add the bias of a layer: lhs [..., K] times rhs [K, N].

    If not, flax adds the bias after the matmul. flax then broadcasts the bias, and promotes the
    sum. `dot` does neither, and takes no complex bias.

    Example:
      >>> import jax.numpy as jnp
      >>> x, w = jnp.ones((2, 4), jnp.bfloat16), jnp.ones((4, 3), jnp.bfloat16)
      >>> fits(jnp.ones(3, jnp.bfloat16), x, w), fits(jnp.ones(3), x, w)
      (True, False)
    """
    product = preferred_element_type or product_dtype(lhs.dtype, rhs.dtype)
    return (
        bias.shape == rhs.shape[-1:] and bias.dtype == product and bias.dtype.name in FLOAT_DTYPES
    )


def sums_columns(geometry: TrainingGeometry) -> bool:
    """Whether column sums of g, over its last axis but one, help to sum the gradient of the bias.

    They help if the bias lacks that axis and has the last one.

    Example:
      >>> sums_columns(TrainingGeometry.of((((1,), (0,)), ((), ())), 2, 2))
      True
    """
    summed, ndim = _summed(geometry), len(geometry.wgrad.rhs.order)
    return ndim - 2 in summed and ndim - 1 not in summed


def _summed(geometry: TrainingGeometry) -> Axes:
    """The axes M of the result [B, M, N]."""
    return geometry.fprop.added_axes[1]


# Gradients as their tensors are: with their axes in order, their sharding and their mesh axes.


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


# The check of what a matmul is differentiated with respect to.


def check_differentiated(call: Call, primals: Any) -> None:
    """Check what a matmul is differentiated with respect to.

    Args:
      call: the static part of the call.
      primals: `Arrays`. Each leaf has a `value`, and `perturbed`: whether it is differentiated.

    Raises:
      UncollectedStateError: if a matmul with state is differentiated without its state.
      FP8StateError: if the FP8 values of a weight are differentiated.
    """
    own = primals.quantizers
    if any(leaf.perturbed for leaf in jax.tree.leaves(primals.held, is_leaf=_is_primal)):
        raise FP8StateError(
            "an FP8 weight is being differentiated, but its values have no gradient. Use "
            "fp8.value_and_grad(loss)(params, state, ...) in place of jax.value_and_grad, with "
            "state=() for recipes without state (nnx: fp8.nnx.value_and_grad). It gives the "
            "gradient of the weight in high precision."
        )
    # The gradient of a bias alone reads no FP8 tensor, so it needs no state.
    matmul = [primals.x, primals.w, *([] if own.known is None else [own.known])]
    differentiated = any(each.perturbed for each in matmul)
    if call.collected and differentiated and (own.ledger is None or not own.ledger.perturbed):
        if call.in_gradient_channel:
            raise UncollectedStateError(
                'a matmul with state_channel="gradient" is being differentiated, but not with '
                "respect to its state, so the next state would be lost. Differentiate all "
                "variables, also those of the state: jax.value_and_grad(loss)(variables), and "
                "without stop_gradient. In nnx write argnums=nnx.DiffState(0, nnx.Any(nnx.Param, "
                "fp8.nnx.FP8State)). If this loss does not train the network, use "
                "jax.lax.stop_gradient(fp8.freeze(state))."
            )
        raise UncollectedStateError(
            "a matmul with quantizer state is being differentiated, but its state is not "
            "collected. Use fp8.value_and_grad in place of jax.value_and_grad (nnx: "
            "fp8.nnx.value_and_grad). Pass the state that it gives to the loss on to the layers, "
            "without stop_gradient. If this loss does not train the network, use "
            "fp8.freeze(state) or fp8.nnx.freeze(model)."
        )


def _is_primal(node: object) -> bool:
    return isinstance(node, jax.custom_derivatives.CustomVJPPrimal)
