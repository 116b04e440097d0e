"""flax.linen's dense layers with FP8 matmuls.

They have the arguments, parameters and initial values of flax's layers, and a recipe.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from jaxfp8._layer_arguments import documented
from jaxfp8._typing import Array
from jaxfp8.linen._dot_general import Plug
from jaxfp8.linen._matmul_module import MatmulModule, init_local_shard, is_local_shard
from jaxfp8.linen._state import matmul_state
from jaxfp8.matmul._given import multiply_with_bias
from jaxfp8.matmul._options import KeepsFP8, LayerInput, as_array, check_prologue, options_of
from jaxfp8.ops._einsum import einsum
from jaxfp8.prologues._prologue import AbstractPrologue
from jaxfp8.recipes._presets import check_recipe


def _plug(layer: Any) -> None:
    """Store the recipe in `dot_general_cls`, where flax looks for a matmul.

    The `__post_init__` of a layer calls it before that of flax, which freezes the fields.
    """
    check_recipe(layer.recipe)
    given = layer.dot_general_cls
    # `clone` passes the plug of the first layer to the second. That plug is no mistake of a user.
    ours = isinstance(given, Plug) and given.of_layer
    if layer.dot_general is not None or (given is not None and not ours):
        raise ValueError(
            f"{type(layer).__name__} brings its own dot_general. Drop dot_general= and "
            f"dot_general_cls=, or use nn.{type(layer).__name__.removeprefix('FP8')}."
        )
    options = options_of(layer)
    layer.dot_general_cls = Plug.of(layer.recipe, options, of_layer=True)


class _KernelModule(MatmulModule):
    """A layer with a kernel. Inside `jax.shard_map` the kernel may be one device's shard.

    flax compares the shape of a kernel with the shape that `init_fn` returns. So inside
    `jax.shard_map`, `init_fn` must return a shard.
    """

    @nn.nowrap
    def param(
        self, name: str, init_fn: Callable[..., Any], *init_args: Any, **arguments: Any
    ) -> Any:
        """See `flax.linen.Module.param`. Inside `jax.shard_map` it makes a shard of the kernel."""
        if name == "kernel" and self.w_shard is not None and is_local_shard(self.w_shard):
            init_fn = init_local_shard(init_fn, self.w_shard)
        return super().param(name, init_fn, *init_args, **arguments)


class _PrologueModule(_KernelModule):
    """A layer that can compute a prologue inside the cast of its input."""

    prologue: AbstractPrologue | None = None

    def __post_init__(self) -> None:
        check_prologue("inputs", self.prologue)
        super().__post_init__()


@documented
class FP8Dense(_PrologueModule, nn.Dense):
    """`flax.linen.Dense` in FP8: y [..., N] = x [..., K] @ kernel [K, N] + bias [N].

    flax's arguments come first, then the options of `fp8.dot_general`. The input is lhs, and the
    kernel is rhs.

    Attributes:
      features: N, the size of the last axis of the result.

    Raises:
      TypeError: if `recipe` is not a Recipe.
      ValueError: if `dot_general` or `dot_general_cls` is given.

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
        """Apply the layer to x [..., K], or to the arrays of the prologue.

        The matmul adds the bias if that gives the result of `flax.linen.Dense`. Then the backward
        pass of the matmul also sums the gradient of the bias.
        """
        return apply_dense(self, LayerInput.read(inputs, self.prologue), self.dot_general_cls())


def apply_dense(layer: nn.Dense, given: LayerInput, matmul: Callable[..., Array]) -> Array:
    """What a layer with the fields of `nn.Dense` computes, with an `FP8DotGeneral` as matmul."""
    kernel = layer.param(
        "kernel", layer.kernel_init, (given.like.shape[-1], layer.features), layer.param_dtype
    )
    bias = (
        layer.param("bias", layer.bias_init, (layer.features,), layer.param_dtype)
        if layer.use_bias
        else None
    )
    promote = functools.partial(layer.promote_dtype, dtype=layer.dtype)
    given, w, bias = given.promoted(promote, kernel, bias)
    matmul = functools.partial(matmul, precision=layer.precision)
    return multiply_with_bias(matmul, given, w, bias)


@documented
class FP8DenseGeneral(_KernelModule, nn.DenseGeneral):
    """`flax.linen.DenseGeneral` in FP8: any contracted and batch axes.

    flax's arguments come first, then the options of `fp8.dot_general`. The input is lhs, and the
    kernel is rhs.

    Attributes:
      features: size of the last axis of the result, or a tuple of sizes for several axes.
      axis: axis of the input that is contracted, or a tuple of axes.
      batch_dims: leading axes of the input that kernel and bias have too.

    Raises:
      TypeError: if `recipe` is not a Recipe.
      ValueError: if `dot_general` or `dot_general_cls` is given.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxfp8.linen import FP8DenseGeneral
      >>> layer = FP8DenseGeneral(features=(2, 3), axis=-1)
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((5, 8)))[0].shape
      (5, 2, 3)
    """

    def __post_init__(self) -> None:
        _plug(self)
        self.promote_dtype = KeepsFP8.of(self.promote_dtype)
        super().__post_init__()

    def __call__(self, inputs: Array) -> Array:
        """Apply the layer to one array."""
        return super().__call__(as_array("inputs", inputs))


@documented
class FP8Einsum(_PrologueModule, nn.Einsum):
    """`flax.linen.Einsum` in FP8. flax's layer has no argument for another matmul.

    flax's arguments come first, then the options of `fp8.dot_general`. The input is lhs, and the
    kernel is rhs.

    Attributes:
      shape: shape of the kernel.
      einsum_str: the equation: input, kernel, and "->" with the result. Default: None; then each
        call needs it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxfp8.linen import FP8Einsum
      >>> layer = FP8Einsum((8, 4), "bd,dk->bk")
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 8)))[0].shape
      (2, 4)
    """

    @nn.compact
    def __call__(self, inputs: Array | tuple[Array, ...], einsum_str: str | None = None) -> Array:
        """Apply the einsum to the input and the kernel.

        As in `flax.linen.Einsum`, the equation is an argument here or an attribute, not both.

        Raises:
          ValueError: if the equation is given twice or not at all. Also if it has no "->", or if it
            does not have two operands.
        """

        def multiply(*operands: Any, **options: Any) -> Array:
            state = matmul_state(self, self.recipe, self.state_channel)
            options |= self.matmul_options()
            return einsum(*operands, recipe=self.recipe, state=state, **options)

        return apply_einsum(self, LayerInput.read(inputs, self.prologue), einsum_str, multiply)


def apply_einsum(
    layer: nn.Einsum, given: LayerInput, einsum_str: str | None, multiply: Callable[..., Array]
) -> Array:
    """What a layer with the fields of `nn.Einsum` computes, with `multiply` as `fp8.einsum`.

    `multiply` may draw a key. It is called after the parameters are made, whose keys flax counts.
    """
    equation = nn.merge_param("einsum_str", layer.einsum_str, einsum_str).replace(" ", "")
    if "->" not in equation or equation.count(",") != 1:
        raise ValueError(
            f"einsum_str={equation!r} must have two operands and an explicit '->'. Write for "
            "instance einsum_str='bd,dk->bk'."
        )
    kernel = layer.param("kernel", layer.kernel_init, layer.shape, layer.param_dtype)
    bias, bias_shape = None, ()
    if layer.use_bias:
        own_shape, bias_shape = layer._get_bias_shape(equation, given.like, kernel)
        bias = layer.param("bias", layer.bias_init, own_shape, layer.param_dtype)
    promote = functools.partial(layer.promote_dtype, dtype=layer.dtype)
    given, w, bias = given.promoted(promote, kernel, bias)
    y = multiply(
        equation, given.lhs, w, precision=layer.precision,
        preferred_element_type=layer.preferred_element_type, prologue=given.prologue,
    )  # fmt: skip
    return y if bias is None else y + jnp.reshape(bias, bias_shape)
