"""`dot`: the matmul of a dense layer."""

from typing import Any, Unpack

from jaxfp8._typing import Array, DType
from jaxfp8.ops._arguments import check_operands
from jaxfp8.ops._dot_general import dot_general
from jaxfp8.ops._options import DotOptions, read_options
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.state._state import MatmulState
from jaxfp8.weights._quantized_weight import QuantizedWeight


def dot(
    lhs: Array | tuple[Array, ...],
    rhs: Array | QuantizedWeight,
    *,
    recipe: Recipe,
    state: MatmulState | tuple[()] | None = None,
    precision: Any = None,
    preferred_element_type: DType | None = None,
    **options: Unpack[DotOptions],
) -> Array:
    """`lhs @ rhs + bias` in FP8: [..., K] times [K, N].

    Args:
      lhs: activations [..., K]; with `prologue=` the tuple of its arrays.
      rhs: weights [K, N].
      recipe: the quantizer of each operand, for instance `fp8.recipes.current()`.
      state: the quantizer state of this matmul, for recipes with state (`fp8.init_state`).
      precision: see `dot_general`.
      preferred_element_type: see `dot_general`.
      **options: those of `dot_general`: `out_sharding`, `reduce_axes`, `x_shard`, `w_shard`,
        `y_shard`, `kernels`, `state_channel`, `key`, `prologue`, `name`, and `bias` [N].

    Returns:
      [..., N].

    Raises:
      ValueError: if rhs has other than two axes, or lhs has none.
      TypeError, ValueError, FP8StateError: see `dot_general`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> fp8.dot(jnp.ones((2, 4)), jnp.ones((4, 1)), recipe=fp8.recipes.rowwise())
      Array([[4.],
             [4.]], dtype=float32)
      >>> x, gain = 3 * jnp.ones((2, 4)), jnp.ones(4)
      >>> norm = fp8.prologues.RMSNorm()
      >>> fp8.dot((x, gain), jnp.ones((4, 1)), recipe=fp8.recipes.current(), prologue=norm)
      Array([[4.],
             [4.]], dtype=float32)
    """
    prologue = read_options("fp8.dot", DotOptions, options).prologue
    arrays, rhs = check_operands(lhs, rhs, recipe, prologue)
    ndim = arrays[0].ndim
    if ndim < 1 or rhs.ndim != 2:
        raise ValueError(
            f"lhs has shape {list(arrays[0].shape)}, rhs has shape {list(rhs.shape)}. fp8.dot "
            "takes lhs [..., K] and rhs [K, N]. For other axes use fp8.dot_general."
        )
    return dot_general(
        arrays if prologue else arrays[0], rhs, (((ndim - 1,), (0,)), ((), ())),
        precision, preferred_element_type, recipe=recipe, state=state, **options,
    )  # fmt: skip
