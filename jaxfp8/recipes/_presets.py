"""Recipes by name."""

import inspect
from collections.abc import Callable
from typing import Any

from jaxfp8.recipes._per_tensor import current, delayed, identity, rowwise, static
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.recipes._tiled import blockwise, mxfp8

PRESETS: dict[str, Callable[..., Recipe]] = {
    "delayed": delayed,
    "current": current,
    "rowwise": rowwise,
    "blockwise": blockwise,
    "mxfp8": mxfp8,
    "static": static,
    "identity": identity,
}


def get(name: str, **fields: Any) -> Recipe:
    """A recipe by its name, for command lines and config files.

    Args:
      name: "delayed", "current", "rowwise", "blockwise", "mxfp8", "static" or "identity".
      **fields: keyword arguments of the function `fp8.recipes.<name>`.

    Raises:
      ValueError: if the name is unknown.
      TypeError: if a field is unknown.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.recipes.get("delayed", margin=1) == fp8.recipes.delayed(margin=1)
      True
    """
    if name not in PRESETS:
        raise ValueError(f"recipe {name!r} is unknown; use one of {sorted(PRESETS)}.")
    known = list(inspect.signature(PRESETS[name]).parameters)
    if unknown := sorted(set(fields) - set(known)):
        raise TypeError(f"recipe {name!r} has no fields {unknown}; it has {known}.")
    return PRESETS[name](**fields)


def check_recipe(recipe: object) -> None:
    """Raise TypeError unless it is a Recipe.

    Example:
      >>> import jaxfp8 as fp8
      >>> check_recipe(fp8.recipes.current())
    """
    if isinstance(recipe, Recipe):
        return
    name = recipe if isinstance(recipe, str) else getattr(recipe, "__name__", None)
    # The message names the recipe that was meant, if it was passed as a string or a function.
    meant = name if name in PRESETS else "delayed"
    raise TypeError(
        f"recipe={recipe!r} is of type {type(recipe).__name__}, but a Recipe is needed; write "
        f"recipe=fp8.recipes.{meant}()."
    )
