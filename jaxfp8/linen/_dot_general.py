"""`FP8DotGeneral` and `FP8EinsumOp`: what flax.linen's layers take as their matmul.

A plug is an object that is passed to flax as `dot_general_cls=` (`einsum_op=` in nnx).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Unpack

import flax.linen as nn

from jaxfp8._layer_arguments import documented
from jaxfp8._typing import Array, DotDimensionNumbers, DType, FP8StateError
from jaxfp8.linen._matmul_module import MatmulModule
from jaxfp8.linen._state import matmul_state, stored_state
from jaxfp8.matmul._given import needs_operands, refuse_class
from jaxfp8.matmul._options import LayerOptions, read_options
from jaxfp8.ops._dot_general import dot_general
from jaxfp8.ops._einsum import einsum
from jaxfp8.prologues._prologue import AbstractPrologue
from jaxfp8.recipes._presets import check_recipe
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.state._state import MatmulState

# `FP8DotGeneral`: the module that flax's layers call for their matmul.


@documented
class FP8DotGeneral(MatmulModule):
    """A module that is called like `jax.lax.dot_general`, with the state of one matmul.

    The arguments after `recipe` are options of `fp8.dot_general`.

    Attributes:
      recipe: which quantizer for which operand. Default: delayed scaling.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from jaxfp8 import recipes
      >>> from jaxfp8.linen import FP8DotGeneral
      >>> layer = nn.Dense(4, dot_general_cls=FP8DotGeneral.using(recipes.delayed()))
      >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 8)))
      >>> sorted(variables)
      ['_overwrite_with_gradient', 'params']
    """

    @classmethod
    def using(
        cls, recipe: Recipe, **options: Unpack[LayerOptions]
    ) -> Callable[..., "FP8DotGeneral"]:
        """An argument for `dot_general_cls=`, `qkv_dot_general_cls=` or `out_dot_general_cls=`.

        Args:
          recipe: which quantizer for which operand.
          **options: other fields of `FP8DotGeneral`, which explains them.

        Returns:
          A callable that flax calls in each layer to make its `FP8DotGeneral`.

        Raises:
          TypeError: if `recipe` is not a Recipe, or if an option is unknown.
        """
        return Plug.of(recipe, options)

    def __new__(cls, *arguments: Any, **fields: Any) -> "FP8DotGeneral":
        refuse_class(cls, arguments, "dot_general_cls=FP8DotGeneral.using(recipe)")
        return super().__new__(cls)

    @nn.compact
    @needs_operands("dot_general_cls=FP8DotGeneral.using(recipe)")
    def __call__(
        self,
        lhs: Array | tuple[Array, ...],
        rhs: Array,
        dimension_numbers: DotDimensionNumbers,
        precision: Any = None,
        preferred_element_type: DType | None = None,
        out_sharding: Any = None,
        bias: Array | None = None,
        prologue: AbstractPrologue | None = None,
    ) -> Array:
        """Multiply lhs and rhs. For the arguments, see `fp8.dot_general`."""
        options = self.matmul_options(out_sharding=out_sharding, prologue=prologue)
        return dot_general(
            lhs, rhs, dimension_numbers, precision, preferred_element_type, recipe=self.recipe,
            state=matmul_state(self, self.recipe, self.state_channel), bias=bias, **options,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Plug:
    """`FP8DotGeneral` with its recipe. `options` are its other fields, sorted pairs (name, value).

    Equal recipes make equal plugs, and equal plugs make equal layers. So `jax.jit` does not trace
    an equal layer again. `of_layer` says that a layer of jaxfp8 made the plug, and not a user.
    """

    recipe: Recipe
    options: tuple[tuple[str, Any], ...]
    of_layer: bool = False

    @classmethod
    def of(cls, recipe: Recipe, options: LayerOptions, *, of_layer: bool = False) -> "Plug":
        """The plug of a recipe. TypeError if it is no Recipe, or if an option is unknown."""
        check_recipe(recipe)
        read_options("fp8.linen.FP8DotGeneral.using", LayerOptions, options)
        return cls(recipe, tuple(sorted(options.items())), of_layer)

    def __call__(self, *operands: Any, **fields: Any) -> FP8DotGeneral:
        if operands:
            raise TypeError(
                "dot_general=FP8DotGeneral.using(...) was given, but dot_general= needs a function "
                "like lax.dot_general. Write dot_general_cls=FP8DotGeneral.using(recipe)."
            )
        return FP8DotGeneral(recipe=self.recipe, **dict(self.options), **fields)


# `FP8EinsumOp`: an einsum with quantizer state, for linen modules that call einsum themselves.


@documented
class FP8EinsumOp(MatmulModule):
    """A module that is called like `jnp.einsum` of two operands, with the state of one matmul.

    The arguments after `recipe` are options of `fp8.dot_general`.

    Attributes:
      recipe: which quantizer for which operand. Default: delayed scaling.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from jaxfp8.linen import FP8EinsumOp
      >>> class Heads(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x):
      ...         w = self.param("w", nn.initializers.lecun_normal(), (8, 2, 4))
      ...         return FP8EinsumOp()("bd,dhk->bhk", x, w)
      >>> Heads().init_with_output(jax.random.key(0), jnp.ones((3, 8)))[0].shape
      (3, 2, 4)
    """

    def __new__(cls, *arguments: Any, **fields: Any) -> "FP8EinsumOp":
        refuse_class(cls, arguments, "FP8EinsumOp(recipe)")
        return super().__new__(cls)

    def setup(self) -> None:
        # This call creates the state, and its result is dropped. If an attribute held the state,
        # flax would serialize it with the module.
        matmul_state(self, self.recipe, self.state_channel)

    def _stored(self) -> MatmulState | tuple[()]:
        if self.scope is None:
            raise FP8StateError(
                "an FP8EinsumOp is used outside of a module, where it has no state. Use it in the "
                "__call__ or setup of a flax.linen.Module. Or call fp8.einsum(equation, lhs, rhs, "
                "recipe=recipe, state=state)."
            )
        return stored_state(self, self.recipe)

    @needs_operands("FP8EinsumOp(recipe)(equation, lhs, rhs)", equation=True)
    def __call__(
        self,
        equation: str,
        lhs: Array | tuple[Array, ...],
        rhs: Array,
        precision: Any = None,
        preferred_element_type: DType | None = None,
        out_sharding: Any = None,
        prologue: AbstractPrologue | None = None,
    ) -> Array:
        """Compute the einsum. For the arguments, see `fp8.einsum`."""
        state = self._stored()
        options = self.matmul_options(out_sharding=out_sharding, prologue=prologue)
        return einsum(
            equation, lhs, rhs, recipe=self.recipe, state=state, precision=precision,
            preferred_element_type=preferred_element_type, **options,
        )  # fmt: skip

    @property
    def dot_general(self) -> Callable[..., Array]:
        """The matmul alone, for code that calls `jnp.einsum(..., _dot_general=op.dot_general)`.

        Prefer a call of the op itself, for two reasons. JAX's cache keeps every function that this
        property returns, together with its state. So read the property again for each call. And
        `jnp.einsum` can exchange the operands ("bd,dk->kb"). Then rhs is quantized as x, and lhs as
        w. `op(equation, lhs, rhs)` never exchanges them.
        """
        return functools.partial(
            dot_general, recipe=self.recipe, state=self._stored(), **self.matmul_options()
        )
