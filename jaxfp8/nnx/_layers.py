"""flax.nnx's dense layers with FP8 matmuls.

The same arguments, parameters and initial values, and a recipe.
"""

from collections.abc import Sequence
from typing import Any, Unpack

from flax import nnx

from jaxfp8._typing import Array
from jaxfp8.nnx._arguments import (
    EinsumArguments,
    LinearArguments,
    LinearGeneralArguments,
    take_matmul,
)
from jaxfp8.nnx._dot_general import FP8DotGeneral, FP8EinsumOp
from jaxfp8.ops._arguments import as_array
from jaxfp8.ops._bias import fits


class FP8Linear(nnx.Linear):
    """`flax.nnx.Linear` in FP8.

    Args:
      in_features: size of the contracted axis.
      out_features: size of the last output axis.
      recipe: which quantizer for which operand; default: delayed scaling.
      reduce_axes, x_shard, w_shard, implementation: see `fp8.dot_general`; lhs is the input, rhs
        the kernel.
      **arguments: of `flax.nnx.Linear`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxfp8.nnx import FP8Linear
      >>> FP8Linear(8, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))(jnp.ones((2, 8))).shape
      (2, 4)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        **arguments: Unpack[LinearArguments],
    ) -> None:
        matmul, rest = take_matmul(FP8DotGeneral, "FP8Linear", arguments, "dot_general")
        super().__init__(in_features, out_features, dot_general=matmul, **rest)
        matmul.start_keys(arguments.get("rngs"))

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """As in `flax.nnx.Linear`, but the matmul adds the bias if that gives the same result.

        Then the gradient of the matmul also sums the gradient of the bias.
        """
        inputs = as_array("inputs", inputs)
        bias = None if self.bias is None else self.bias[...]
        x, w, bias = self.promote_dtype((inputs, self.kernel[...], bias), dtype=self.dtype)
        inside = bias is None or fits(bias, x, w, self.preferred_element_type)
        if not inside or not isinstance(self.dot_general, FP8DotGeneral):
            return super().__call__(inputs, out_sharding)
        return self.dot_general(
            x, w, (((x.ndim - 1,), (0,)), ((), ())), self.precision, self.preferred_element_type,
            out_sharding=out_sharding, bias=bias,
        )  # fmt: skip


class FP8LinearGeneral(nnx.LinearGeneral):
    """`flax.nnx.LinearGeneral` in FP8: any contracted and batch axes.

    Args:
      in_features: sizes of the contracted axes.
      out_features: sizes of the output axes.
      recipe: which quantizer for which operand; default: delayed scaling.
      reduce_axes, x_shard, w_shard, implementation: see `fp8.dot_general`; lhs is the input, rhs
        the kernel.
      **arguments: of `flax.nnx.LinearGeneral`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxfp8.nnx import FP8LinearGeneral
      >>> FP8LinearGeneral(8, (2, 3), rngs=nnx.Rngs(0))(jnp.ones((5, 8))).shape
      (5, 2, 3)
    """

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        **arguments: Unpack[LinearGeneralArguments],
    ) -> None:
        matmul, rest = take_matmul(
            FP8DotGeneral, "FP8LinearGeneral", arguments, "dot_general", "dot_general_cls"
        )
        super().__init__(in_features, out_features, dot_general=matmul, **rest)
        matmul.start_keys(arguments.get("rngs"))

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """As in `flax.nnx.LinearGeneral`."""
        return super().__call__(as_array("inputs", inputs), out_sharding)


class FP8Einsum(nnx.Einsum):
    """`flax.nnx.Einsum` in FP8.

    Args:
      einsum_str: the equation, the kernel being the second operand.
      kernel_shape: shape of the kernel.
      bias_shape: shape of the bias, None for none.
      recipe: which quantizer for which operand; default: delayed scaling.
      reduce_axes, x_shard, w_shard, implementation: see `fp8.dot_general`; lhs is the input, rhs
        the kernel.
      **arguments: of `flax.nnx.Einsum`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxfp8.nnx import FP8Einsum
      >>> FP8Einsum("bd,dk->bk", (8, 4), rngs=nnx.Rngs(0))(jnp.ones((2, 8))).shape
      (2, 4)
    """

    def __init__(
        self,
        einsum_str: str,
        kernel_shape: tuple[int, ...],
        bias_shape: tuple[int, ...] | None = None,
        **arguments: Unpack[EinsumArguments],
    ) -> None:
        matmul, rest = take_matmul(FP8EinsumOp, "FP8Einsum", arguments, "einsum_op")
        super().__init__(einsum_str, kernel_shape, bias_shape, einsum_op=matmul, **rest)
        matmul.start_keys(arguments.get("rngs"))

    def __call__(
        self, inputs: Array, einsum_str: str | None = None, out_sharding: Any = None
    ) -> Array:
        """As in `flax.nnx.Einsum`."""
        return super().__call__(as_array("inputs", inputs), einsum_str, out_sharding)
