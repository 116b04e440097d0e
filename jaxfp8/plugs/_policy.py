"""What plugs share: the recipe and options of a layer, and how a framework holds its state."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxfp8._call import check_options
from jaxfp8._typing import Array
from jaxfp8.matmul._options import LayerOptions, check_save_original, check_state_channel
from jaxfp8.plan._kernels import check_kernels
from jaxfp8.recipes._presets import check_recipe
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.state._init import init_state
from jaxfp8.state._state import LEAVES, MatmulState

# The recipe and the options of a matmul, as one hashable value: a static field of a layer.


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


# The import of a framework by its plug.


def guest(module: str, package: str) -> Any:
    """A module of a framework.

    Args:
      module: the name of the module.
      package: what `pip install` calls it.

    Returns:
      The module.

    Raises:
      ImportError: if the module cannot be imported. The message names the package to install.

    Example:
      >>> guest("jax.numpy", "jax").__name__
      'jax.numpy'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"this plug needs the module {module!r}, and importing it failed: {error}. Install it "
            f"with: pip install {package}",
            name=module,
        ) from error


# A state as separate arrays, for frameworks whose variables are arrays with names.

PREFIX = "fp8_"


def leaf_shapes(recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """The shape of each array of a state, by the name of its variable. All are float32.

    An array begins as zeros: a state that is 0 everywhere is unset.

    Example:
      >>> import jaxfp8 as fp8
      >>> leaf_shapes(fp8.recipes.delayed())["fp8_scale"]
      (3,)
      >>> leaf_shapes(fp8.recipes.current())
      {}
    """
    state = init_state(recipe)
    if not isinstance(state, MatmulState):
        return {}
    return {PREFIX + name: jnp.shape(getattr(state, name)) for name in LEAVES}


def state_of(recipe: Recipe, variable: Callable[[str], Array]) -> Any:
    """The state whose arrays are variables.

    Args:
      recipe: the recipe of the state.
      variable: returns the variable of a name.

    Returns:
      A state; () for recipes without state.

    Example:
      >>> import jax.numpy as jnp
      >>> import jaxfp8 as fp8
      >>> recipe = fp8.recipes.delayed()
      >>> zeros = {name: jnp.zeros(shape) for name, shape in leaf_shapes(recipe).items()}
      >>> state_of(recipe, zeros.get).scale.shape
      (3,)
    """
    state = init_state(recipe)
    if not isinstance(state, MatmulState):
        return ()
    leaves: dict[str, Any] = {name: variable(PREFIX + name) for name in LEAVES}
    return dataclasses.replace(state, **leaves)
