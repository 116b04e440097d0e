"""What plugs share: the recipe and options of a layer, and the import of a framework."""

import dataclasses
import importlib
import traceback
from typing import Any

from jaxfp8._call import check_options
from jaxfp8.matmul._options import LayerOptions, check_save_original, check_state_channel
from jaxfp8.plan._kernels import check_kernels
from jaxfp8.recipes._presets import check_recipe
from jaxfp8.recipes._recipe import Recipe

# The recipe and the options of a matmul, as one hashable value: a static field of a layer.


@dataclasses.dataclass(frozen=True)
class Policy:
    """How a layer of a framework multiplies: the recipe, and its options as sorted pairs."""

    recipe: Recipe
    pairs: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, function: str, recipe: Recipe, options: LayerOptions) -> "Policy":
        """The policy of these arguments. `function` is the public one that got them, for messages.

        TypeError if `recipe` is not a Recipe, or if an option is unknown. ValueError if the recipe
        needs keys, or if `state_channel` or `save_original` is unknown.
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

    @property
    def passes_state_as_gradient(self) -> bool:
        """Whether a step may have one backward pass only, because the state is a gradient."""
        return bool(self.recipe.rows) and self.options.get("state_channel") == "gradient"


def is_called_by(module: str) -> bool:
    """Whether code of this module is on Python's stack, while a loss is traced.

    Loops over microbatches cannot be seen in another way.
    """
    frames = (frame for frame, _ in traceback.walk_stack(None))
    return any(frame.f_globals.get("__name__") == module for frame in frames)


# The import of a framework by its plug.


def import_guest(module: str, package: str) -> Any:
    """A module of a framework. ImportError names the package that `pip install` needs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"this plug needs the module {module!r}, and importing it failed: {error}. Install it "
            f"with: pip install {package}",
            name=module,
        ) from error
