"""`FP8EinsumOp`: an einsum with the quantizer state of its matmul, for linen modules that write their own."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn

from jaxfp8._errors import FP8StateError
from jaxfp8._typing import Array, DType, Implementation
from jaxfp8.kernels._dispatch import Implementations
from jaxfp8.linen._kernel_part import shards
from jaxfp8.linen._state import matmul_state, stored_state
from jaxfp8.ops._arguments import kernels_of
from jaxfp8.ops._dot_general import dot_general
from jaxfp8.ops._einsum import einsum
from jaxfp8.ops._plug_misuse import needs_operands, refuse_class
from jaxfp8.ops._state import MatmulState
from jaxfp8.recipes._presets import check_recipe, delayed
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._shard import Shard


class FP8EinsumOp(nn.Module):
    """A module that is called like `jnp.einsum` of two operands and holds the quantizer state of one matmul.

    Attributes:
      recipe: which quantizer for which operand; default: delayed scaling.
      reduce_axes, lhs_shard, rhs_shard, implementation: see `fp8.dot_general`.

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

    recipe: Recipe = delayed()
    reduce_axes: tuple[str, ...] | None = None
    lhs_shard: Shard | None = None
    rhs_shard: Shard | None = None
    implementation: Implementation | Implementations = None

    def __new__(cls, *arguments: Any, **fields: Any) -> "FP8EinsumOp":
        refuse_class(cls, arguments, "FP8EinsumOp(recipe)")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_recipe(self.recipe)
        super().__post_init__()

    def setup(self) -> None:
        matmul_state(self, self.recipe)  # creates it. An attribute that holds it would be serialized by flax

    def _stored(self) -> MatmulState | tuple[()]:
        if self.scope is None:
            raise FP8StateError(
                "an FP8EinsumOp is used outside of a module, where it has no state; use it in the __call__ or setup of a "
                "flax.linen.Module, or call fp8.einsum(equation, lhs, rhs, recipe=recipe, state=state)."
            )
        return stored_state(self, self.recipe)

    @needs_operands("FP8EinsumOp(recipe)(equation, lhs, rhs)", equation=True)
    def __call__(
        self,
        equation: str,
        lhs: Array,
        rhs: Array,
        precision: Any = None,
        preferred_element_type: DType | None = None,
        out_sharding: Any = None,
    ) -> Array:
        """See `fp8.einsum`."""
        lhs_shard, rhs_shard = shards(self, self.lhs_shard, self.rhs_shard)
        return einsum(
            equation, lhs, rhs, recipe=self.recipe, state=self._stored(), precision=precision,
            preferred_element_type=preferred_element_type, out_sharding=out_sharding, reduce_axes=self.reduce_axes,
            lhs_shard=lhs_shard, rhs_shard=rhs_shard, implementation=kernels_of(self.recipe, self.implementation),
        )  # fmt: skip

    @property
    def dot_general(self) -> Callable[..., Array]:
        """The matmul alone, for code that has `jnp.einsum(equation, lhs, rhs, _dot_general=op.dot_general)`.

        Read this property again for each call. JAX keeps each one in its cache, together with its state, so
        prefer a call of the op.
        `jnp.einsum` can exchange the operands ("bd,dk->kb"). Then rhs is quantized as x, and lhs as w.
        `op(equation, lhs, rhs)` never exchanges them.
        """
        lhs_shard, rhs_shard = shards(self, self.lhs_shard, self.rhs_shard)
        return functools.partial(
            dot_general, recipe=self.recipe, state=self._stored(), reduce_axes=self.reduce_axes, lhs_shard=lhs_shard,
            rhs_shard=rhs_shard, implementation=kernels_of(self.recipe, self.implementation),
        )  # fmt: skip
