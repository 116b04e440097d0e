"""The options of a matmul: what it takes besides operands, recipe and state.

A new option is a new field of `Options`, and of the `TypedDict` of the functions that take it. One
of `LayerOptions` is a field of `linen.MatmulModule`, too.
"""

import dataclasses
from typing import Any, TypedDict

from jaxfp8._call_options import check_options, option_names
from jaxfp8._typing import Array, Implementation
from jaxfp8.kernels._dispatch import Implementations, check_backend_name
from jaxfp8.kernels._prologue import AbstractPrologue
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._shard import Shard


class LayerOptions(TypedDict, total=False):
    """What a layer keeps for the calls of its matmul; see `fp8.dot_general`."""

    reduce_axes: tuple[str, ...] | None
    x_shard: Shard | None
    w_shard: Shard | None
    implementation: Implementation | Implementations


class MatmulOptions(LayerOptions, total=False):
    """What every matmul takes; see `fp8.dot_general`."""

    out_sharding: Any
    key: Array | None


class DotOptions(MatmulOptions, total=False):
    """What `dot_general` and `dot` take; see `fp8.dot_general`."""

    prologue: AbstractPrologue | None
    bias: Array | None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """The options of one call, with their defaults."""

    reduce_axes: tuple[str, ...] | None = None
    x_shard: Shard | None = None
    w_shard: Shard | None = None
    implementation: Implementation | Implementations = None
    out_sharding: Any = None
    key: Array | None = None
    prologue: AbstractPrologue | None = None
    bias: Array | None = None

    @property
    def implementations(self) -> Implementations:
        """The backend of casts and that of matmuls.

        Raises:
          TypeError: unless `implementation` is a name, an `Implementations` or None.
        """
        if isinstance(self.implementation, Implementations):
            return self.implementation
        check_backend_name("implementation", self.implementation)
        return Implementations(casts=self.implementation, matmuls=self.implementation)


def read_options(function: str, known: type, options: Any) -> Options:
    """The options of a call.

    Args:
      function: its name, for the message.
      known: the TypedDict of its options.
      options: what the user passed.

    Raises:
      TypeError: for an option that the function does not have.

    Example:
      >>> read_options("dot", DotOptions, {"x_shard": None}).bias is None
      True
    """
    check_options(function, known, options)
    return Options(**options)


def options_of(layer: Any, recipe: Recipe) -> LayerOptions:
    """The options that a layer keeps in attributes of their names.

    Rules (`fp8.plan.skip_slow`) may give a layer a recipe without FP8. Then the name of a kernel
    backend is left out, because `fp8.dot_general` raises an error for it.

    Example:
      >>> import jaxfp8 as fp8
      >>> layer = fp8.linen.FP8Dense(4, implementation="xla")
      >>> options_of(layer, layer.recipe)["implementation"]
      'xla'
      >>> options_of(layer, fp8.recipes.identity())["implementation"] is None
      True
    """
    given: Any = {name: getattr(layer, name) for name in option_names(LayerOptions)}
    kept = LayerOptions(**given)
    if recipe.is_identity:
        kept["implementation"] = None
    return kept
