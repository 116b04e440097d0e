"""flax.nnx's dense layers with FP8 matmuls.

The same arguments, parameters and initial values, and a recipe.
"""

import functools
from collections.abc import Sequence
from typing import Any, Unpack

import jax.numpy as jnp
from flax import nnx

from jaxfp8._typing import Array
from jaxfp8.nnx._arguments import (
    EinsumArguments,
    LinearArguments,
    LinearGeneralArguments,
    take_matmul,
)
from jaxfp8.nnx._dot_general import FP8DotGeneral, FP8EinsumOp
from jaxfp8.ops._arguments import as_array, check_prologue
from jaxfp8.ops._bias import fits
from jaxfp8.ops._layer_input import LayerInput
from jaxfp8.prologues._prologue import AbstractPrologue


class FP8Linear(nnx.Linear):
    """`flax.nnx.Linear` in FP8.

    Args:
      in_features: size of the contracted axis.
      out_features: size of the last output axis.
      prologue: `fp8.prologues.SwiGLU()`, and the layer is called with `inputs=(gate, up)`. Or
        `fp8.prologues.RMSNorm()`, and `inputs=(x, gain)`. The input of the matmul is then
        `prologue(*inputs)`, computed in the cast. flax's `promote_dtype` gets all activations among
        `inputs`. gain keeps its dtype: the norm is computed in float32, and rounded once.
      recipe: which quantizer for which operand; default: delayed scaling.
      reduce_axes, x_shard, w_shard, kernels: see `fp8.dot_general`; lhs is the input, rhs
        the kernel.
      **arguments: of `flax.nnx.Linear`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxfp8 as fp8
      >>> from jaxfp8.nnx import FP8Linear
      >>> FP8Linear(8, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))(jnp.ones((2, 8))).shape
      (2, 4)
      >>> gate, up = jnp.ones((2, 2, 8))  # the second matmul of a gated MLP
      >>> layer = FP8Linear(8, 4, prologue=fp8.prologues.SwiGLU(), rngs=nnx.Rngs(0))
      >>> layer((gate, up)).shape
      (2, 4)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        prologue: AbstractPrologue | None = None,
        **arguments: Unpack[LinearArguments],
    ) -> None:
        check_prologue("inputs", prologue)
        self.prologue = prologue
        matmul, rest = take_matmul(FP8DotGeneral, "FP8Linear", arguments, "dot_general")
        super().__init__(in_features, out_features, dot_general=matmul, **rest)
        matmul.start_keys(arguments.get("rngs"))

    def __call__(self, inputs: Array | tuple[Array, ...], out_sharding: Any = None) -> Array:
        """As in `flax.nnx.Linear`, but the matmul adds the bias if that gives the same result.

        Then the gradient of the matmul also sums the gradient of the bias.
        """
        given, w, bias = _promoted(self, LayerInput.read(inputs, self.prologue))
        if not isinstance(self.dot_general, FP8DotGeneral):
            return super().__call__(given.value, out_sharding)
        dimension_numbers = (((given.like.ndim - 1,), (0,)), ((), ()))
        dot_general = functools.partial(
            self.dot_general, given.lhs, w, dimension_numbers, self.precision,
            self.preferred_element_type, out_sharding=out_sharding, prologue=self.prologue,
        )  # fmt: skip
        if bias is None or fits(bias, given.like, w, self.preferred_element_type):
            return dot_general(bias=bias)
        y = dot_general()
        return y + jnp.reshape(bias, (1,) * (y.ndim - 1) + (-1,))


class FP8LinearGeneral(nnx.LinearGeneral):
    """`flax.nnx.LinearGeneral` in FP8: any contracted and batch axes.

    Args:
      in_features: sizes of the contracted axes.
      out_features: sizes of the output axes.
      recipe: which quantizer for which operand; default: delayed scaling.
      reduce_axes, x_shard, w_shard, kernels: see `fp8.dot_general`; lhs is the input, rhs
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
      prologue: see `FP8Linear`.
      recipe: which quantizer for which operand; default: delayed scaling.
      reduce_axes, x_shard, w_shard, kernels: see `fp8.dot_general`; lhs is the input, rhs
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
        *,
        prologue: AbstractPrologue | None = None,
        **arguments: Unpack[EinsumArguments],
    ) -> None:
        check_prologue("inputs", prologue)
        self.prologue = prologue
        matmul, rest = take_matmul(FP8EinsumOp, "FP8Einsum", arguments, "einsum_op")
        super().__init__(einsum_str, kernel_shape, bias_shape, einsum_op=matmul, **rest)
        matmul.start_keys(arguments.get("rngs"))

    def __call__(
        self,
        inputs: Array | tuple[Array, ...],
        einsum_str: str | None = None,
        out_sharding: Any = None,
    ) -> Array:
        """As in `flax.nnx.Einsum`."""
        given = LayerInput.read(inputs, self.prologue)
        if self.prologue is None:
            return super().__call__(given.value, einsum_str, out_sharding)
        given, w, bias = _promoted(self, given)
        if not isinstance(self.einsum_op, FP8EinsumOp):
            return super().__call__(given.value, einsum_str, out_sharding)
        equation = (self.einsum_str if einsum_str is None else einsum_str).replace(" ", "")
        self._einsum_str_check(equation)
        y = self.einsum_op(
            equation, given.lhs, w, self.precision, self.preferred_element_type, out_sharding,
            self.prologue,
        )  # fmt: skip
        if bias is None:
            return y
        return y + jnp.reshape(bias, self._infer_broadcasted_bias_shape(equation, given.like, w))


def _promoted(
    layer: FP8Linear | FP8Einsum, given: LayerInput
) -> tuple[LayerInput, Array, Array | None]:
    """The input, the kernel and the bias in the dtype of the layer."""

    def promote(*arrays: Any) -> Any:
        return layer.promote_dtype(arrays, dtype=layer.dtype)

    bias = None if layer.bias is None else layer.bias[...]
    return given.promoted(promote, layer.kernel[...], bias)
