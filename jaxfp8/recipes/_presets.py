"""Recipes by name."""

import difflib
import inspect
from collections.abc import Callable, Iterable
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
    """A recipe by its name, with fields as keyword arguments.

    `fp8.recipes.parse` reads a whole recipe from a command line, and `fp8.recipes.from_dict` from a
    config file.

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
    return make(name, fields)


def make(name: str, fields: dict[str, Any]) -> Recipe:
    """See `get`. The fields are a dict, so that a field called "name" is an error of `get`, too.

    Example:
      >>> make("current", {}).name
      'current'
    """
    if name not in PRESETS:
        raise ValueError(
            f"recipe {name!r} is unknown; use one of {sorted(PRESETS)}.{nearest(name, PRESETS)}"
        )
    known = list(parameters_of(name))
    if unknown := sorted(set(fields) - set(known)):
        raise TypeError(
            f"recipe {name!r} has no fields {unknown}; it has {known}.{nearest(unknown[0], known)}"
        )
    return PRESETS[name](**fields)


def parameters_of(name: str) -> dict[str, inspect.Parameter]:
    """The parameters of a preset, by name.

    Example:
      >>> list(parameters_of("mxfp8"))
      ['scale_rounding', 'w_tile_dim', 'gradient_rounding']
    """
    return dict(inspect.signature(PRESETS[name]).parameters)


def nearest(name: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known name that is most like it, if any.

    Example:
      >>> nearest("blockwize", PRESETS)
      " Did you mean 'blockwise'?"
    """
    found = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {found[0]!r}?" if found else ""


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
