"""flax.linen's dense layers with FP8 matmuls.

The same arguments, parameters and initial values, and a recipe.
"""

import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from jaxfp8._typing import Array
from jaxfp8.linen._dot_general import Plug
from jaxfp8.linen._matmul_module import KernelModule, PrologueModule
from jaxfp8.linen._state import matmul_state
from jaxfp8.ops._arguments import as_array
from jaxfp8.ops._bias import fits
from jaxfp8.ops._einsum import einsum
from jaxfp8.ops._layer_input import LayerInput
from jaxfp8.ops._options import options_of
from jaxfp8.recipes._presets import check_recipe


def _plug(layer: Any) -> None:
    """Put the recipe where flax looks for a dot_general, before the module is complete."""
    check_recipe(layer.recipe)
    given = layer.dot_general_cls
    ours = isinstance(given, Plug) and given.of_layer  # `clone` passes on what the layer had
    if layer.dot_general is not None or (given is not None and not ours):
        raise ValueError(
            f"{type(layer).__name__} brings its own dot_general; drop dot_general= and "
            f"dot_general_cls=, or use nn.{type(layer).__name__.removeprefix('FP8')}."
        )
    options = options_of(layer)
    layer.dot_general_cls = Plug.of(layer.recipe, options, of_layer=True)


class FP8Dense(PrologueModule, nn.Dense):
    """`flax.linen.Dense` in FP8.

    Attributes:
      prologue: `fp8.prologues.SwiGLU()`, and the layer is called with `inputs=(gate, up)`. Or
        `fp8.prologues.RMSNorm()`, and `inputs=(x, gain)`. The input of the matmul is then
        `prologue(*inputs)`, computed in the cast. flax's `promote_dtype` gets all activations among
        `inputs`. gain keeps its dtype: the norm is computed in float32, and rounded once.
      recipe: which quantizer for which operand; default: delayed scaling.
      reduce_axes, x_shard, w_shard, kernels: see `fp8.dot_general`; lhs is the input, rhs
        the kernel.
      (the others): of `flax.linen.Dense`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> from jaxfp8.linen import FP8Dense
      >>> layer = FP8Dense(4, dtype=jnp.bfloat16)
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 8)))[0].shape
      (2, 4)
      >>> gate, up = jnp.ones((2, 2, 8))  # the second matmul of a gated MLP
      >>> layer = FP8Dense(4, prologue=fp8.prologues.SwiGLU())
      >>> layer.init_with_output(jax.random.key(0), (gate, up))[0].shape
      (2, 4)
    """

    def __post_init__(self) -> None:
        _plug(self)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: Array | tuple[Array, ...]) -> Array:
        """As in `flax.linen.Dense`, but the matmul adds the bias if that gives the same result.

        Then the gradient of the matmul also sums the gradient of the bias.
        """
        given = LayerInput.read(inputs, self.prologue)
        kernel = self.param(
            "kernel", self.kernel_init, (given.like.shape[-1], self.features), self.param_dtype
        )
        bias = (
            self.param("bias", self.bias_init, (self.features,), self.param_dtype)
            if self.use_bias
            else None
        )
        promote = functools.partial(self.promote_dtype, dtype=self.dtype)
        given, w, bias = given.promoted(promote, kernel, bias)
        dimension_numbers = (((given.like.ndim - 1,), (0,)), ((), ()))
        dot_general = functools.partial(
            self.dot_general_cls(), given.lhs, w, dimension_numbers, precision=self.precision,
            prologue=self.prologue,
        )  # fmt: skip
        if bias is None or fits(bias, given.like, w):
            return dot_general(bias=bias)
        y = dot_general()
        return y + jnp.reshape(bias, (1,) * (y.ndim - 1) + (-1,))


class FP8DenseGeneral(KernelModule, nn.DenseGeneral):
    """`flax.linen.DenseGeneral` in FP8: any contracted and batch axes.

    Attributes:
      recipe: which quantizer for which operand; default: delayed scaling.
      reduce_axes, x_shard, w_shard, kernels: see `fp8.dot_general`; lhs is the input, rhs
        the kernel.
      (the others): of `flax.linen.DenseGeneral`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxfp8.linen import FP8DenseGeneral
      >>> layer = FP8DenseGeneral(features=(2, 3), axis=-1)
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((5, 8)))[0].shape
      (5, 2, 3)
    """

    def __post_init__(self) -> None:
        _plug(self)
        super().__post_init__()

    def __call__(self, inputs: Array) -> Array:
        """As in `flax.linen.DenseGeneral`."""
        return super().__call__(as_array("inputs", inputs))


class FP8Einsum(PrologueModule, nn.Einsum):
    """`flax.linen.Einsum` in FP8. flax's own has no `dot_general_cls=` to plug into.

    Attributes:
      prologue: see `FP8Dense`.
      recipe: which quantizer for which operand; default: delayed scaling.
      reduce_axes, x_shard, w_shard, kernels: see `fp8.dot_general`; lhs is the input, rhs
        the kernel.
      (the others): of `flax.linen.Einsum`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxfp8.linen import FP8Einsum
      >>> layer = FP8Einsum((8, 4), "bd,dk->bk")
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 8)))[0].shape
      (2, 4)
    """

    @nn.compact
    def __call__(self, inputs: Array | tuple[Array, ...], einsum_str: str | None = None) -> Array:
        """Apply the einsum.

        As in `flax.linen.Einsum`, the equation is given here or as an attribute, not both.
        """
        given = LayerInput.read(inputs, self.prologue)
        equation = nn.merge_param("einsum_str", self.einsum_str, einsum_str).replace(" ", "")
        if "->" not in equation or equation.count(",") != 1:
            raise ValueError(
                f"einsum_str={equation!r} must have two operands and an explicit '->'."
            )
        kernel = self.param("kernel", self.kernel_init, self.shape, self.param_dtype)
        bias, bias_shape = None, ()
        if self.use_bias:
            own_shape, bias_shape = self._get_bias_shape(equation, given.like, kernel)
            bias = self.param("bias", self.bias_init, own_shape, self.param_dtype)
        promote = functools.partial(self.promote_dtype, dtype=self.dtype)
        given, w, bias = given.promoted(promote, kernel, bias)
        options = self.matmul_options()
        options["prologue"] = self.prologue
        y = einsum(
            equation, given.lhs, w, recipe=self.recipe, state=matmul_state(self, self.recipe),
            precision=self.precision, preferred_element_type=self.preferred_element_type,
            **options,
        )  # fmt: skip
        return y if bias is None else y + jnp.reshape(bias, bias_shape)
