"""Handles: the arrays that the gradients of FP8 weights flow to.

JAX would give FP8 values a cotangent in FP8. So a weight is differentiated with respect to another
array of its shape, which no matmul reads: its original, or zeros. XLA makes no array of zeros that
nobody reads.
"""

import dataclasses

import jax

from jaxfp8._typing import Array, PyTree
from jaxfp8.weights._quantized_weight import QuantizedWeight, is_weight


def handle(weight: QuantizedWeight) -> Array:
    """The array [...] that the gradient of a weight flows to.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> w = fp8.quantize_params({"kernel": jnp.ones((4, 4))}, fp8.recipes.current())["kernel"]
      >>> handle(w).shape
      (4, 4)
    """
    if weight.original is not None:
        return weight.original
    # Multiplied from the values, because `jnp.zeros` would have another sharding and type.
    return weight.values[0].astype(weight.dtype) * 0


def handles_of(params: PyTree) -> PyTree:
    """The parameters, with the handle of each weight in its place.

    Example:
      >>> handles_of({"bias": 1.0})
      {'bias': 1.0}
    """
    return jax.tree.map(lambda n: handle(n) if is_weight(n) else n, params, is_leaf=is_weight)


def with_handles(params: PyTree, handles: PyTree) -> PyTree:
    """The parameters, with other values of `handles_of`.

    Example:
      >>> with_handles({"bias": 1.0}, {"bias": 2.0})
      {'bias': 2.0}
    """
    return jax.tree.map(
        lambda node, array: (
            dataclasses.replace(node, original=array) if is_weight(node) else array
        ),
        params, handles, is_leaf=is_weight,
    )  # fmt: skip
