"""The recipe and the options of a matmul, as one hashable value: a static field of a layer."""

import dataclasses
from typing import Any

from jaxfp8._call import check_options
from jaxfp8.ops._options import LayerOptions, check_save_original, check_state_channel
from jaxfp8.plan._kernels import check_kernels
from jaxfp8.recipes._presets import check_recipe
from jaxfp8.recipes._recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Policy:
    """How a layer of a framework multiplies.

    Attributes:
      recipe: which quantizer for which operand.
      pairs: the options of the matmul, as sorted pairs (name, value).
    """

    recipe: Recipe
    pairs: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, function: str, recipe: Recipe, options: LayerOptions) -> "Policy":
        """The policy of these arguments.

        Args:
          function: the public function that got the arguments, for messages.
          recipe: which quantizer for which operand.
          options: the options of the matmul.

        Raises:
          TypeError: if `recipe` is not a Recipe, or if an option is unknown.
          ValueError: if the recipe needs keys, or if `state_channel` or `save_original` is
            unknown.

        Example:
          >>> import jaxfp8 as fp8
          >>> Policy.of("f", fp8.recipes.current(), {"state_channel": "gradient"}).options
          {'state_channel': 'gradient'}
        """
        check_recipe(recipe)
        check_options(function, LayerOptions, options)
        check_kernels(options.get("kernels"))
        check_state_channel(options.get("state_channel"))
        check_save_original(options.get("save_original"))
        if recipe.needs_key:
            raise ValueError(
                f"recipe {recipe.name!r} rounds stochastically, which needs a key at each step. "
                f"{function} has no keys. Use gradient_rounding='nearest'."
            )
        return cls(recipe, tuple(sorted(options.items())))

    @property
    def options(self) -> Any:
        """The options, for `**`."""
        return dict(self.pairs)
