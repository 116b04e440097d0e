"""`dot`: the dense layer's matmul."""

from typing import Any

from jaxfp8._typing import Array, DType, Implementation
from jaxfp8.kernels._dispatch import Implementations
from jaxfp8.kernels._prologue import AbstractPrologue
from jaxfp8.ops._arguments import check_operands
from jaxfp8.ops._dot_general import dot_general
from jaxfp8.ops._state import MatmulState
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._shard import Shard


def dot(
    lhs: Array | tuple[Array, ...],
    rhs: Array,
    *,
    recipe: Recipe,
    state: MatmulState | tuple[()] | None = None,
    precision: Any = None,
    preferred_element_type: DType | None = None,
    out_sharding: Any = None,
    reduce_axes: tuple[str, ...] | None = None,
    lhs_shard: Shard | None = None,
    rhs_shard: Shard | None = None,
    implementation: Implementation | Implementations = None,
    prologue: AbstractPrologue | None = None,
    bias: Array | None = None,
) -> Array:
    """`lhs @ rhs + bias` in FP8: [..., K] times [K, N].

    Args:
      lhs: activations [..., K]; with `prologue=` the tuple of its arrays.
      rhs: weights [K, N].
      recipe: which quantizer for which operand.
      state: of this matmul, for recipes that have any.
      precision: see `dot_general`.
      preferred_element_type: see `dot_general`.
      out_sharding: see `dot_general`.
      reduce_axes: see `dot_general`.
      lhs_shard: see `dot_general`.
      rhs_shard: see `dot_general`.
      implementation: see `dot_general`.
      prologue: see `dot_general`.
      bias: [N], see `dot_general`.

    Returns:
      [..., N].

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> fp8.dot(jnp.ones((2, 4)), jnp.ones((4, 1)), recipe=fp8.recipes.rowwise())
      Array([[4.],
             [4.]], dtype=float32)
      >>> x, gain = 3 * jnp.ones((2, 4)), jnp.ones(4)
      >>> fp8.dot((x, gain), jnp.ones((4, 1)), recipe=fp8.recipes.current(), prologue=fp8.RMSNorm())
      Array([[4.],
             [4.]], dtype=float32)
    """
    arrays, rhs = check_operands(lhs, rhs, recipe, prologue)
    ndim = arrays[0].ndim
    if ndim < 1 or rhs.ndim != 2:
        raise ValueError(
            f"dot takes lhs [..., K] and rhs [K, N], got shapes {list(arrays[0].shape)} and {list(rhs.shape)}; "
            "use fp8.dot_general."
        )
    return dot_general(
        arrays if prologue else arrays[0], rhs, (((ndim - 1,), (0,)), ((), ())), precision, preferred_element_type,
        recipe=recipe, state=state, out_sharding=out_sharding, reduce_axes=reduce_axes,
        lhs_shard=lhs_shard, rhs_shard=rhs_shard, implementation=implementation, prologue=prologue, bias=bias,
    )  # fmt: skip
