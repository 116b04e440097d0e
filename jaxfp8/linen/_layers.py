"""flax.linen's dense layers with FP8 matmuls: the same arguments, parameters and initial values, and a recipe."""

import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from jaxfp8._typing import Array, Implementation
from jaxfp8.kernels._dispatch import Implementations
from jaxfp8.linen._dot_general import Plug
from jaxfp8.linen._kernel_part import KernelPart, shards
from jaxfp8.linen._state import matmul_state
from jaxfp8.ops._arguments import as_array, kernels_of
from jaxfp8.ops._bias import fits
from jaxfp8.ops._einsum import einsum
from jaxfp8.recipes._presets import check_recipe, delayed
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._shard import Shard


def _plug(layer: Any) -> None:
    """Put the layer's recipe where flax looks for its dot_general, before the module is complete."""
    check_recipe(layer.recipe)
    given = layer.dot_general_cls
    ours = isinstance(given, Plug) and given.of_layer  # `clone` passes on what the layer had
    if layer.dot_general is not None or (given is not None and not ours):
        raise ValueError(
            f"{type(layer).__name__} brings its own dot_general; drop dot_general= and dot_general_cls=, or use "
            f"nn.{type(layer).__name__.removeprefix('FP8')}."
        )
    layer.dot_general_cls = Plug(
        layer.recipe, layer.reduce_axes, layer.lhs_shard, layer.rhs_shard, layer.implementation, of_layer=True
    )


class FP8Dense(KernelPart, nn.Dense):
    """`flax.linen.Dense` in FP8.

    Attributes:
      recipe: which quantizer for which operand; default: delayed scaling.
      reduce_axes, lhs_shard, rhs_shard, implementation: see `fp8.dot_general`; lhs is the input, rhs the kernel.
      (the others): of `flax.linen.Dense`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxfp8.linen import FP8Dense
      >>> layer = FP8Dense(4, dtype=jnp.bfloat16)
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 8)))[0].shape
      (2, 4)
    """

    recipe: Recipe = delayed()
    reduce_axes: tuple[str, ...] | None = None
    lhs_shard: Shard | None = None
    rhs_shard: Shard | None = None
    implementation: Implementation | Implementations = None

    def __post_init__(self) -> None:
        _plug(self)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        """As in `flax.linen.Dense`, but a bias of the result's shape and dtype goes into the matmul, whose gradient sums it."""
        inputs = as_array("inputs", inputs)
        kernel = self.param("kernel", self.kernel_init, (inputs.shape[-1], self.features), self.param_dtype)
        bias = self.param("bias", self.bias_init, (self.features,), self.param_dtype) if self.use_bias else None
        x, w, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        assert x is not None
        assert w is not None
        dimension_numbers = (((x.ndim - 1,), (0,)), ((), ()))
        dot_general = functools.partial(self.dot_general_cls(), x, w, dimension_numbers, precision=self.precision)
        if bias is None or fits(bias, x, w):
            return dot_general(bias=bias)
        y = dot_general()
        return y + jnp.reshape(bias, (1,) * (y.ndim - 1) + (-1,))


class FP8DenseGeneral(KernelPart, nn.DenseGeneral):
    """`flax.linen.DenseGeneral` in FP8: any contracted and batch axes.

    Attributes:
      recipe: which quantizer for which operand; default: delayed scaling.
      reduce_axes, lhs_shard, rhs_shard, implementation: see `fp8.dot_general`; lhs is the input, rhs the kernel.
      (the others): of `flax.linen.DenseGeneral`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxfp8.linen import FP8DenseGeneral
      >>> layer = FP8DenseGeneral(features=(2, 3), axis=-1)
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((5, 8)))[0].shape
      (5, 2, 3)
    """

    recipe: Recipe = delayed()
    reduce_axes: tuple[str, ...] | None = None
    lhs_shard: Shard | None = None
    rhs_shard: Shard | None = None
    implementation: Implementation | Implementations = None

    def __post_init__(self) -> None:
        _plug(self)
        super().__post_init__()

    def __call__(self, inputs: Array) -> Array:
        """As in `flax.linen.DenseGeneral`."""
        return super().__call__(as_array("inputs", inputs))


class FP8Einsum(KernelPart, nn.Einsum):
    """`flax.linen.Einsum` in FP8. flax's own has no `dot_general_cls=` to plug into.

    Attributes:
      recipe: which quantizer for which operand; default: delayed scaling.
      reduce_axes, lhs_shard, rhs_shard, implementation: see `fp8.dot_general`; lhs is the input, rhs the kernel.
      (the others): of `flax.linen.Einsum`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxfp8.linen import FP8Einsum
      >>> layer = FP8Einsum((8, 4), "bd,dk->bk")
      >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 8)))[0].shape
      (2, 4)
    """

    recipe: Recipe = delayed()
    reduce_axes: tuple[str, ...] | None = None
    lhs_shard: Shard | None = None
    rhs_shard: Shard | None = None
    implementation: Implementation | Implementations = None

    def __post_init__(self) -> None:
        check_recipe(self.recipe)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs: Array, einsum_str: str | None = None) -> Array:
        """Apply the einsum; as in `flax.linen.Einsum`, the equation is given here or as an attribute, not both."""
        inputs = as_array("inputs", inputs)
        equation = nn.merge_param("einsum_str", self.einsum_str, einsum_str).replace(" ", "")
        if "->" not in equation or equation.count(",") != 1:
            raise ValueError(f"einsum_str={equation!r} must have two operands and an explicit '->'.")
        kernel = self.param("kernel", self.kernel_init, self.shape, self.param_dtype)
        bias, bias_shape = None, ()
        if self.use_bias:
            own_shape, bias_shape = self._get_bias_shape(equation, inputs, kernel)
            bias = self.param("bias", self.bias_init, own_shape, self.param_dtype)
        x, w, bias = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        assert x is not None
        assert w is not None
        lhs_shard, rhs_shard = shards(self, self.lhs_shard, self.rhs_shard)
        y = einsum(
            equation, x, w, recipe=self.recipe, state=matmul_state(self, self.recipe), precision=self.precision,
            preferred_element_type=self.preferred_element_type, reduce_axes=self.reduce_axes, lhs_shard=lhs_shard,
            rhs_shard=rhs_shard, implementation=kernels_of(self.recipe, self.implementation),
        )  # fmt: skip
        return y if bias is None else y + jnp.reshape(bias, bias_shape)
