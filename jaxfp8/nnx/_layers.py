"""The dense layers of flax.nnx in FP8.

They have the arguments, parameters and initial values of flax's layers, and a recipe.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Required, TypeVar, Unpack

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer, PrecisionLike, PromoteDtypeFn

from jaxfp8._call import option_names
from jaxfp8._layer_arguments import documented
from jaxfp8._typing import Array
from jaxfp8.matmul._given import multiply_with_bias
from jaxfp8.matmul._options import KeepsFP8, LayerInput, LayerOptions, as_array, check_prologue
from jaxfp8.nnx._dot_general import LATER, AbstractFP8Matmul, FP8DotGeneral, FP8EinsumOp
from jaxfp8.prologues._prologue import AbstractPrologue
from jaxfp8.recipes._recipe import Recipe

# Types of the arguments that the nnx layers pass on to flax's layers.

M = TypeVar("M", bound=AbstractFP8Matmul)


class EinsumArguments(LayerOptions, total=False):
    """Options of jaxfp8, and arguments that all three layers of flax take."""

    rngs: Required[nnx.Rngs]
    dtype: Dtype | None
    param_dtype: Dtype
    precision: PrecisionLike
    kernel_init: Initializer
    bias_init: Initializer
    promote_dtype: PromoteDtypeFn
    preferred_element_type: Dtype | None
    kernel_metadata: Mapping[str, Any]
    bias_metadata: Mapping[str, Any]


class LinearArguments(EinsumArguments, total=False):
    """Arguments of `FP8Linear`."""

    use_bias: bool


class LinearGeneralArguments(LinearArguments, total=False):
    """Arguments of `FP8LinearGeneral`."""

    axis: int | Sequence[int]
    batch_axis: Mapping[int, int]


def _take_matmul(
    kind: type[M], recipe: Recipe | None, layer: str, arguments: Any, *refused: str
) -> tuple[M, dict[str, Any]]:
    """The matmul of a layer, of class `kind`, and the arguments that are left for flax's layer.

    The layer calls `start_keys` of the matmul after flax has drawn the kernel. So the kernel does
    not depend on the recipe. `refused` are flax's arguments that replace the matmul: they raise
    ValueError unless they are None.
    """
    for name in refused:
        if arguments.get(name) is not None:
            raise ValueError(
                f"{layer} brings its own matmul. Drop {name}={arguments[name]!r}, or use "
                f"nnx.{layer.removeprefix('FP8')}."
            )
    names = option_names(LayerOptions)
    ours = {name: arguments[name] for name in names if name in arguments}
    rest = {name: arguments[name] for name in arguments if name not in (*names, *refused)}
    return kind(recipe, rngs=LATER, **ours), rest


# flax.nnx's dense layers with FP8 matmuls.


@documented
class FP8Linear(nnx.Linear):
    """`flax.nnx.Linear` in FP8: y [..., N] = x [..., K] @ kernel [K, N] + bias [N].

    It takes flax's arguments but `dot_general`, and the options of `fp8.dot_general`. The input is
    lhs, and the kernel is rhs.

    Args:
      in_features: K, the size of the contracted axis.
      out_features: N, the size of the last axis of the result.

    Raises:
      TypeError: if `recipe` is not a Recipe, or if an argument is unknown.
      ValueError: if `dot_general` is given, or if `rngs` lacks a stream for stochastic rounding.

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
        recipe: Recipe | None = None,
        prologue: AbstractPrologue | None = None,
        **arguments: Unpack[LinearArguments],
    ) -> None:
        check_prologue("inputs", prologue)
        self.prologue = prologue
        matmul, rest = _take_matmul(FP8DotGeneral, recipe, "FP8Linear", arguments, "dot_general")
        super().__init__(in_features, out_features, dot_general=matmul, **rest)
        self.promote_dtype = KeepsFP8.of(self.promote_dtype)
        matmul.start_keys(arguments.get("rngs"))

    def __call__(self, inputs: Array | tuple[Array, ...], out_sharding: Any = None) -> Array:
        """Apply the layer to x [..., K], or to the arrays of the prologue.

        The matmul adds the bias if that gives the result of `flax.nnx.Linear`. Then the backward
        pass of the matmul also sums the gradient of the bias.
        """
        given, w, bias = _promoted(self, LayerInput.read(inputs, self.prologue))
        if not isinstance(self.dot_general, FP8DotGeneral):
            return super().__call__(given.value, out_sharding)
        dtype = self.preferred_element_type
        matmul = functools.partial(
            self.dot_general, precision=self.precision, preferred_element_type=dtype,
            out_sharding=out_sharding,
        )  # fmt: skip
        return multiply_with_bias(matmul, given, w, bias, dtype)


@documented
class FP8LinearGeneral(nnx.LinearGeneral):
    """`flax.nnx.LinearGeneral` in FP8: any contracted and batch axes.

    It takes flax's arguments but `dot_general` and `dot_general_cls`, and the options of
    `fp8.dot_general`. The input is lhs, and the kernel is rhs.

    Args:
      in_features: size of the contracted axis, or a tuple of sizes for several axes.
      out_features: size of the last axis of the result, or a tuple of sizes for several axes.
      axis: axis of the input that is contracted, or a tuple of axes.
      batch_axis: `{axis: size}` of the input's axes that kernel and bias have too.

    Raises:
      TypeError: if `recipe` is not a Recipe, or if an argument is unknown.
      ValueError: if `dot_general` or `dot_general_cls` is given. Also if `rngs` lacks a stream for
        stochastic rounding.

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
        *,
        recipe: Recipe | None = None,
        **arguments: Unpack[LinearGeneralArguments],
    ) -> None:
        matmul, rest = _take_matmul(
            FP8DotGeneral, recipe, "FP8LinearGeneral", arguments, "dot_general", "dot_general_cls"
        )
        super().__init__(in_features, out_features, dot_general=matmul, **rest)
        self.promote_dtype = KeepsFP8.of(self.promote_dtype)
        matmul.start_keys(arguments.get("rngs"))

    def __call__(self, inputs: Array, out_sharding: Any = None) -> Array:
        """Apply the layer to one array."""
        return super().__call__(as_array("inputs", inputs), out_sharding)


@documented
class FP8Einsum(nnx.Einsum):
    """`flax.nnx.Einsum` in FP8.

    It takes flax's arguments but `einsum_op`, and the options of `fp8.dot_general`. The input is
    lhs, and the kernel is rhs.

    Args:
      einsum_str: the equation: input, kernel, and "->" with the result.
      kernel_shape: shape of the kernel.
      bias_shape: shape of the bias. Default: None, no bias.

    Raises:
      TypeError: if `recipe` is not a Recipe, or if an argument is unknown.
      ValueError: if `einsum_op` is given, or if `rngs` lacks a stream for stochastic rounding.

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
        recipe: Recipe | None = None,
        prologue: AbstractPrologue | None = None,
        **arguments: Unpack[EinsumArguments],
    ) -> None:
        check_prologue("inputs", prologue)
        self.prologue = prologue
        matmul, rest = _take_matmul(FP8EinsumOp, recipe, "FP8Einsum", arguments, "einsum_op")
        super().__init__(einsum_str, kernel_shape, bias_shape, einsum_op=matmul, **rest)
        self.promote_dtype = KeepsFP8.of(self.promote_dtype)
        matmul.start_keys(arguments.get("rngs"))

    def __call__(
        self,
        inputs: Array | tuple[Array, ...],
        einsum_str: str | None = None,
        out_sharding: Any = None,
    ) -> Array:
        """Apply the einsum to the input and the kernel. `einsum_str` here replaces the layer's."""
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
    """The input, the kernel and the bias, converted by the layer's `promote_dtype`."""

    def promote(*arrays: Any) -> Any:
        return layer.promote_dtype(arrays, dtype=layer.dtype)

    bias = None if layer.bias is None else layer.bias[...]
    return given.promoted(promote, layer.kernel[...], bias)
