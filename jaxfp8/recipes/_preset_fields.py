"""The fields that a preset needs to make a recipe: the inverse of the presets."""

from collections.abc import Callable
from typing import Any

from jaxfp8.quantizers._base import AbstractQuantizer
from jaxfp8.quantizers._identity import Identity
from jaxfp8.recipes._presets import PRESETS, parameters_of
from jaxfp8.recipes._recipe import Recipe


def _of(matmul: str, side: str, field: str) -> Callable[[Recipe], Any]:
    """A function that reads a field of one quantizer of a recipe."""
    return lambda recipe: getattr(getattr(getattr(recipe, matmul), side), field)


def _scale(matmul: str, side: str) -> Callable[[Recipe], Any]:
    read = _of(matmul, side, "scale")
    return lambda recipe: as_number(read(recipe))


def _tile_dim(matmul: str, side: str) -> Callable[[Recipe], Any]:
    read = _of(matmul, side, "granularity")
    return lambda recipe: 1 if read(recipe).tile[0] == 1 else 2


# Where a recipe has the value of each field of a preset.
READERS: dict[str, Callable[[Recipe], Any]] = {
    "forward": _of("fprop", "lhs", "format"),
    "gradient": _of("dgrad", "lhs", "format"),
    "history_length": _of("fprop", "lhs", "history_length"),
    "algorithm": _of("fprop", "lhs", "algorithm"),
    "margin": _of("fprop", "lhs", "margin"),
    "power_of_two": _of("fprop", "lhs", "power_of_two"),
    "scale_rounding": _of("fprop", "lhs", "scale_rounding"),
    "gradient_rounding": _of("dgrad", "lhs", "rounding"),
    "high_precision_wgrad": lambda recipe: isinstance(recipe.wgrad.lhs, Identity),
    "x_tile_dim": _tile_dim("fprop", "lhs"),
    "w_tile_dim": _tile_dim("fprop", "rhs"),
    "g_tile_dim": _tile_dim("dgrad", "lhs"),
    "x_scale": _scale("fprop", "lhs"),
    "w_scale": _scale("fprop", "rhs"),
    "g_scale": _scale("dgrad", "lhs"),
}


def preset_fields(recipe: Recipe) -> dict[str, Any] | None:
    """All fields with which the preset `recipe.name` makes this recipe; None if none do.

    A recipe does not remember the preset that made it. So its fields are read from its quantizers,
    and the preset is called with them. Only an equal result counts.

    Example:
      >>> import jaxfp8 as fp8
      >>> preset_fields(fp8.recipes.mxfp8(w_tile_dim=2))
      {'scale_rounding': 'rceil', 'w_tile_dim': 2, 'gradient_rounding': 'nearest'}
    """
    if recipe.name not in PRESETS:
        return None
    try:
        fields = {name: READERS[name](recipe) for name in parameters_of(recipe.name)}
        made = PRESETS[recipe.name](**fields)
    except (AttributeError, TypeError, ValueError):  # another quantizer than that of the preset
        return None
    return fields if made == recipe else None


def foreign_quantizers(recipe: Recipe, known: set[type]) -> list[type[AbstractQuantizer]]:
    """The classes of quantizers in a recipe that are not in `known`.

    Example:
      >>> import jaxfp8 as fp8
      >>> foreign_quantizers(fp8.recipes.current(), {fp8.quantizers.Current})
      []
    """
    pairs = (recipe.fprop, recipe.dgrad, recipe.wgrad)
    kinds = (type(quantizer) for pair in pairs for quantizer in (pair.lhs, pair.rhs))
    return [kind for kind in dict.fromkeys(kinds) if kind not in known]


def as_number(value: Any) -> Any:
    """A number of NumPy as a float of Python that is equal to it. Other values are unchanged.

    Example:
      >>> import numpy as np
      >>> as_number(np.float32(0.5)), as_number(3)
      (0.5, 3)
    """
    if isinstance(value, bool | int | str) or type(value) is float:
        return value
    return float(value)
