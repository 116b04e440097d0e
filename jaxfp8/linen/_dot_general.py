"""`FP8DotGeneral`: the plug for flax's `dot_general_cls=`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn

from jaxfp8._typing import Array, DotDimensionNumbers, DType, Implementation
from jaxfp8.kernels._dispatch import Implementations
from jaxfp8.linen._kernel_part import shards
from jaxfp8.linen._state import matmul_state
from jaxfp8.ops._arguments import kernels_of
from jaxfp8.ops._dot_general import dot_general
from jaxfp8.ops._plug_misuse import needs_operands, refuse_class
from jaxfp8.recipes._presets import check_recipe, delayed
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._shard import Shard


class FP8DotGeneral(nn.Module):
    """A module that is called like `jax.lax.dot_general` and holds the quantizer state of one matmul.

    Attributes:
      recipe: which quantizer for which operand.
      reduce_axes, lhs_shard, rhs_shard, implementation: see `fp8.dot_general`.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> from jaxfp8 import recipes
      >>> from jaxfp8.linen import FP8DotGeneral
      >>> layer = nn.Dense(4, dot_general_cls=FP8DotGeneral.using(recipes.delayed()))
      >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 8)))
      >>> sorted(variables)
      ['_overwrite_with_gradient', 'params']
    """

    recipe: Recipe = delayed()
    reduce_axes: tuple[str, ...] | None = None
    lhs_shard: Shard | None = None
    rhs_shard: Shard | None = None
    implementation: Implementation | Implementations = None

    @classmethod
    def using(
        cls,
        recipe: Recipe,
        *,
        reduce_axes: tuple[str, ...] | None = None,
        lhs_shard: Shard | None = None,
        rhs_shard: Shard | None = None,
        implementation: Implementation | Implementations = None,
    ) -> Callable[..., "FP8DotGeneral"]:
        """What `dot_general_cls=`, `qkv_dot_general_cls=` and `out_dot_general_cls=` take: this class with its recipe."""
        return Plug(recipe, reduce_axes, lhs_shard, rhs_shard, implementation)

    def __new__(cls, *arguments: Any, **fields: Any) -> "FP8DotGeneral":
        refuse_class(cls, arguments, "dot_general_cls=FP8DotGeneral.using(recipe)")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_recipe(self.recipe)
        super().__post_init__()

    @nn.compact
    @needs_operands("dot_general_cls=FP8DotGeneral.using(recipe)")
    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: DotDimensionNumbers,
        precision: Any = None,
        preferred_element_type: DType | None = None,
        out_sharding: Any = None,
        bias: Array | None = None,
    ) -> Array:
        """See `fp8.dot_general`."""
        lhs_shard, rhs_shard = shards(self, self.lhs_shard, self.rhs_shard)
        return dot_general(
            lhs, rhs, dimension_numbers, precision, preferred_element_type,
            recipe=self.recipe, state=matmul_state(self, self.recipe), out_sharding=out_sharding, reduce_axes=self.reduce_axes,
            lhs_shard=lhs_shard, rhs_shard=rhs_shard, implementation=kernels_of(self.recipe, self.implementation),
            bias=bias,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Plug:
    """`FP8DotGeneral` with its recipe. Equal recipes make equal plugs, hence equal layers: jit does not trace them again.

    Attributes:
      recipe: which quantizer for which operand.
      reduce_axes, lhs_shard, rhs_shard, implementation: see `fp8.dot_general`.
      of_layer: made by a layer of ours from its own recipe, and not by a user.
    """

    recipe: Recipe
    reduce_axes: tuple[str, ...] | None
    lhs_shard: Shard | None
    rhs_shard: Shard | None
    implementation: Implementation | Implementations
    of_layer: bool = False

    def __post_init__(self) -> None:
        check_recipe(self.recipe)

    def __call__(self, *operands: Any, **fields: Any) -> FP8DotGeneral:
        if operands:
            raise TypeError(
                "dot_general=FP8DotGeneral.using(...) was given, but dot_general= needs a function like lax.dot_general; write "
                "dot_general_cls=FP8DotGeneral.using(recipe)."
            )
        return FP8DotGeneral(
            recipe=self.recipe, reduce_axes=self.reduce_axes, lhs_shard=self.lhs_shard, rhs_shard=self.rhs_shard,
            implementation=self.implementation, **fields,
        )  # fmt: skip
