"""Recipes as text and as plain dicts."""

import ast
import contextlib
import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxfp8._check import check_type
from jaxfp8.numerics._formats import E4M3, E5M2, E8M0, Format
from jaxfp8.numerics._granularity import PerRow, PerTensor
from jaxfp8.numerics._per_block import PerBlock
from jaxfp8.quantizers._base import AbstractQuantizer
from jaxfp8.quantizers._kinds import Current, Delayed, Identity, Static
from jaxfp8.recipes._presets import PRESETS, check_recipe, make_preset, parameters_of, suggest_name
from jaxfp8.recipes._recipe import Operands, Recipe

# The fields that a preset needs to make a recipe: the inverse of the presets.


_read = operator.attrgetter

# Where a recipe has the value of each field of a preset.
_READERS: dict[str, Callable[[Recipe], Any]] = {
    "forward": _read("fprop.lhs.format"),
    "gradient": _read("dgrad.lhs.format"),
    "history_length": _read("fprop.lhs.history_length"),
    "algorithm": _read("fprop.lhs.algorithm"),
    "margin": _read("fprop.lhs.margin"),
    "power_of_two": _read("fprop.lhs.power_of_two"),
    "scale_rounding": _read("fprop.lhs.scale_rounding"),
    "gradient_rounding": _read("dgrad.lhs.rounding"),
    "high_precision_wgrad": lambda recipe: isinstance(recipe.wgrad.lhs, Identity),
    "x_tile_dim": lambda recipe: _tile_dim(recipe.fprop.lhs),
    "w_tile_dim": lambda recipe: _tile_dim(recipe.fprop.rhs),
    "g_tile_dim": lambda recipe: _tile_dim(recipe.dgrad.lhs),
    "x_scale": _read("fprop.lhs.scale"),
    "w_scale": _read("fprop.rhs.scale"),
    "g_scale": _read("dgrad.lhs.scale"),
}


def _tile_dim(quantizer: Any) -> int:
    return len(quantizer.granularity.tiled_axes)


def _preset_fields(recipe: Recipe) -> dict[str, Any] | None:
    """All fields with which the preset `recipe.name` makes this recipe; None if none do."""
    if recipe.name not in PRESETS:
        return None
    # A recipe does not remember the preset that made it. So its fields are read from its
    # quantizers, and the preset is called with them. Only an equal result counts.
    try:
        fields = {name: _READERS[name](recipe) for name in parameters_of(recipe.name)}
        made = PRESETS[recipe.name](**fields)
    except (AttributeError, TypeError, ValueError):  # another quantizer than that of the preset
        return None
    return fields if made == recipe else None


# Recipes as text, for command lines: `parse` reads it, and `to_string` writes it.

_FORMATS = {format.name: format for format in (E4M3, E5M2, E8M0)}


def parse(text: str) -> Recipe:
    """The recipe that a text names, for instance "blockwise(x_tile_dim=1)".

    The text is read as data. No code in it runs.

    Args:
      text: the name of a preset, alone or with keyword arguments in parentheses. An argument is a
        number, True, False, a quoted string, or a format (E4M3 or E5M2, quoted or not).

    Raises:
      TypeError: if `text` is no string.
      ValueError: if the text has another form, or names an unknown preset, field or value. argparse
        shows messages of `argparse.ArgumentTypeError` only, so catch the ValueError there.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.recipes.parse("current") == fp8.recipes.current()
      True
      >>> fp8.recipes.parse("delayed(history_length=1024, gradient=E4M3)").dgrad.lhs.format
      E4M3
    """
    needed = "a string, for instance 'blockwise(x_tile_dim=1)'. For a dict: fp8.recipes.from_dict"
    check_type("text", text, str, needed)
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        what = error.msg if isinstance(error, SyntaxError) else error
        raise _unreadable(text, f"it cannot be read ({what})") from None
    name, keywords = tree, []
    if isinstance(tree, ast.Call):
        if tree.args:
            raise _unreadable(text, f"{ast.unparse(tree.args[0])!r} has no name")
        name, keywords = tree.func, tree.keywords
    if not isinstance(name, ast.Name):
        raise _unreadable(text, f"{ast.unparse(name)!r} is not the name of a preset alone")
    fields: dict[str, Any] = {}
    for keyword in keywords:
        if keyword.arg is None:
            raise _unreadable(text, f"'**{ast.unparse(keyword.value)}' is not one argument")
        if keyword.arg in fields:
            raise _unreadable(text, f"{keyword.arg!r} is given twice")
        fields[keyword.arg] = _value(text, keyword.arg, keyword.value)
    try:
        return _with_formats(name.id, fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"recipe text {text!r}: {error}") from error


def to_string(recipe: Recipe) -> str:
    """A text for which `parse` returns an equal recipe.

    The text has the arguments that differ from their defaults.

    Args:
      recipe: a recipe that a preset can make.

    Raises:
      TypeError: if it is no recipe.
      ValueError: if no preset makes this recipe, because its quantizers or its name were changed.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.recipes.to_string(fp8.recipes.delayed(gradient=fp8.E4M3, algorithm="most_recent"))
      "delayed(gradient=E4M3, algorithm='most_recent')"
    """
    check_recipe(recipe)
    fields = _preset_fields(recipe)
    if fields is None:
        known = recipe.name in PRESETS
        raise ValueError(
            f"recipe {recipe.name!r} has no text, because "
            + ("its preset makes other quantizers" if known else "no preset has this name")
            + ". Use fp8.recipes.to_dict(recipe), or a recipe that fp8.recipes.<preset>(...) made."
        )
    defaults = parameters_of(recipe.name)
    given = (f"{n}={value!r}" for n, value in fields.items() if value != defaults[n].default)
    return f"{recipe.name}({', '.join(given)})"


def _with_formats(name: str, fields: dict[str, Any]) -> Recipe:
    """`fp8.recipes.get`, which also takes formats by their names."""
    known = parameters_of(name) if name in PRESETS else {}
    formats = [field for field, parameter in known.items() if parameter.annotation is Format]
    named = {field: _format_named(field, fields[field]) for field in formats if field in fields}
    return make_preset(name, fields | named)


def _format_named(field: str, value: Any) -> Format:
    """The format, or the one with this name."""
    if isinstance(value, Format):
        return value
    if not isinstance(value, str) or value not in _FORMATS:
        raise ValueError(
            f"{field}={value!r} is no format; use one of {[E4M3.name, E5M2.name]}."
            f"{suggest_name(str(value).upper(), _FORMATS)}"
        )
    return _FORMATS[value]


def _value(text: str, field: str, node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        if node.id in _FORMATS:
            return _FORMATS[node.id]
        raise _unreadable(
            text,
            f"{field}={node.id} is no number, True, False or format. Put a string in quotes, "
            f"{field}={node.id!r}.{suggest_name(node.id.upper(), _FORMATS)}",
        )
    with contextlib.suppress(ValueError):  # for all that is no literal
        value = ast.literal_eval(node)
        if isinstance(value, bool | int | float | str):
            return value
    raise _unreadable(
        text,
        f"{field}={ast.unparse(node)} is no literal. Write a number, True, False, a quoted string, "
        "E4M3 or E5M2",
    )


def _unreadable(text: str, why: str) -> ValueError:
    end = "" if why.endswith(("?", ".")) else "."
    return ValueError(
        f"recipe text {text!r}: {why}{end} Write a preset with keyword arguments, for instance "
        f"'blockwise(x_tile_dim=1)'. Presets are {sorted(PRESETS)}."
    )


# Recipes as plain dicts, which JSON and TOML can hold.
#
# A recipe that a preset makes is the preset with its fields. Any other recipe is the table of its
# quantizers. An object is a dict with the name of its class under "class", and its fields.

Classes = dict[str, type]

_QUANTIZERS: Classes = {kind.__name__: kind for kind in (Current, Delayed, Identity, Static)}
_GRANULARITIES: Classes = {kind.__name__: kind for kind in (PerTensor, PerRow, PerBlock)}
_MATMULS, _SIDES = ("fprop", "dgrad", "wgrad"), ("lhs", "rhs")


def to_dict(
    recipe: Recipe, *, quantizers: Mapping[str, type[AbstractQuantizer]] | None = None
) -> dict[str, Any]:
    """A recipe as a plain dict, from which `from_dict` makes an equal recipe.

    The dict holds strings, numbers, bools, lists and dicts only. All fields are written, also those
    with their defaults. So the dict keeps its meaning if a later version has other defaults.

    Args:
      recipe: the recipe.
      quantizers: your own classes of quantizers, by the names that the dict shall have.

    Raises:
      TypeError: if it is no recipe, or has a quantizer of another class.
      ValueError: if a field of a quantizer has no plain form.

    Example:
      >>> import dataclasses
      >>> import jaxfp8 as fp8
      >>> recipe = fp8.recipes.mxfp8()
      >>> fp8.recipes.to_dict(recipe)["preset"], fp8.recipes.to_dict(recipe)["w_tile_dim"]
      ('mxfp8', 1)
      >>> mixed = dataclasses.replace(recipe, wgrad=fp8.recipes.identity().wgrad)
      >>> fp8.recipes.to_dict(mixed)["wgrad"]["lhs"]
      {'class': 'Identity'}
    """
    check_recipe(recipe)
    own = _own_classes(quantizers)
    fields = _preset_fields(recipe)
    if fields is not None:
        named = {n: v.name if isinstance(v, Format) else v for n, v in fields.items()}
        return {"preset": recipe.name, **named}
    names = {kind: name for name, kind in (own | _QUANTIZERS | _GRANULARITIES).items()}
    plain: dict[str, Any] = {"name": recipe.name}
    for matmul in _MATMULS:
        plain[matmul] = {}
        for side in _SIDES:
            quantizer = getattr(getattr(recipe, matmul), side)
            if (kind := type(quantizer)) not in names:
                raise TypeError(
                    f"recipe {recipe.name!r} has quantizers of {kind.__name__}, which is no class "
                    "of fp8.quantizers. Pass your classes by name to to_dict and to from_dict: "
                    f"quantizers={{{kind.__name__!r}: {kind.__name__}}}."
                )
            plain[matmul][side] = _plain(quantizer, side, names)
    again = from_dict(plain, quantizers=quantizers)
    if again != recipe or [r.description for r in again.rows] != [
        r.description for r in recipe.rows
    ]:
        raise ValueError(
            f"recipe {recipe.name!r} has no plain form: from_dict would make {again!r}. Give the "
            "fields of your quantizers plain values: str, int, float, bool, or tuples of these."
        )
    return plain


def from_dict(
    plain: Mapping[str, Any],
    *,
    quantizers: Mapping[str, type[AbstractQuantizer]] | None = None,
) -> Recipe:
    """The recipe that a plain dict describes, for instance a table of `tomllib.load`.

    Args:
      plain: `{"preset": name, field: value, ...}`, or what `to_dict` returns. A format is its name.
        Fields with a default may be missing.
      quantizers: your own classes of quantizers, by their names in the dict.

    Raises:
      TypeError: if `plain` is no dict.
      ValueError: for an unknown name, a missing or an unknown field, or a wrong value.

    Example:
      >>> import tomllib
      >>> import jaxfp8 as fp8
      >>> config = tomllib.loads('''
      ... [recipe]
      ... preset = "delayed"
      ... history_length = 1024
      ... gradient = "E4M3"
      ... ''')
      >>> recipe = fp8.recipes.from_dict(config["recipe"])
      >>> recipe == fp8.recipes.delayed(history_length=1024, gradient=fp8.E4M3)
      True
    """
    if not isinstance(plain, Mapping):
        raise TypeError(
            f"{plain!r} is of type {type(plain).__name__}. from_dict reads a dict, for instance "
            "{'preset': 'current'}. For a string use fp8.recipes.parse."
        )
    classes = _own_classes(quantizers) | _QUANTIZERS
    if "preset" in plain:
        fields = {str(name): value for name, value in plain.items() if name != "preset"}
        name = plain["preset"]
        if not isinstance(name, str):
            raise ValueError(f"preset={name!r} must be a string, for instance 'current'.")
        try:
            return _with_formats(name, fields)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{dict(plain)!r}: {error}") from error
    _check_keys("the recipe", plain, ("name", *_MATMULS), "Or write preset= and its fields.")
    pairs = {}
    for matmul in _MATMULS:
        _check_keys(matmul, plain[matmul], _SIDES)
        pairs[matmul] = {
            side: _object(f"{matmul}.{side}", plain[matmul][side], classes) for side in _SIDES
        }
    try:
        return Recipe(
            name=plain["name"], **{matmul: Operands(**pair) for matmul, pair in pairs.items()}
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"recipe {plain['name']!r}: {error}") from error


def _own_classes(quantizers: Mapping[str, type[AbstractQuantizer]] | None) -> Classes:
    own: Classes = dict(quantizers or {})
    for name, kind in own.items():
        if name in _QUANTIZERS or not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            raise ValueError(
                f"quantizers={{{name!r}: {kind!r}}} must map a new name to a dataclass on "
                f"fp8.quantizers.AbstractQuantizer. Names of jaxfp8 are {sorted(_QUANTIZERS)}."
            )
    return own


def _plain(value: Any, where: str, names: dict[type, str]) -> Any:
    if isinstance(value, Format):
        return value.name
    if isinstance(value, tuple):
        return [_plain(each, where, names) for each in value]
    if type(value) in names:
        fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init)
        # TOML has no null. A missing field gets its default, which is None for `scale_format`.
        given = {n: _plain(v, f"{where}.{n}", names) for n, v in fields if v is not None}
        return {"class": names[type(value)], **given}
    if isinstance(value, np.number):
        value = value.item()
    if not isinstance(value, bool | int | float | str):
        raise ValueError(
            f"{where}={value!r} of type {type(value).__name__} has no plain form. Use str, int, "
            "float, bool, a format, or a tuple of these."
        )
    return value


def _object(where: str, plain: Any, classes: Classes) -> Any:
    if not isinstance(plain, Mapping) or "class" not in plain:
        raise ValueError(
            f"{where}={plain!r} must be a dict with a class, for instance "
            f"{{'class': {next(iter(classes))!r}, ...}}. Classes are {sorted(classes)}."
        )
    name = plain["class"]
    if not isinstance(name, str) or name not in classes:
        cure = "" if _GRANULARITIES.items() <= classes.items() else " Pass your own in quantizers=."
        raise ValueError(
            f"{where} has the unknown class {name!r}; use one of {sorted(classes)}.{cure}"
            f"{suggest_name(name, classes)}"
        )
    kind: Any = classes[name]
    fields = {f.name: f for f in dataclasses.fields(kind) if f.init}
    read = {}
    for field, value in plain.items():
        if field == "class":
            continue
        found = _plain_value(f"{where}.{field}", value)
        if field in fields:
            read[field] = found
        elif found != getattr(kind, field, None):  # a constant now, which dicts of 0.1.0 have
            raise ValueError(
                f"{where} is a {name}, which has no field {field!r}; it has {list(fields)}."
                f"{suggest_name(field, fields)}"
            )
    try:
        return kind(**read)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _plain_value(where: str, plain: Any) -> Any:
    if isinstance(plain, Mapping):
        return _object(where, plain, _GRANULARITIES)
    if isinstance(plain, list | tuple):
        return tuple(_plain_value(where, each) for each in plain)
    return _FORMATS.get(plain, plain) if isinstance(plain, str) else plain


def _check_keys(what: str, plain: Any, keys: tuple[str, ...], more: str = "") -> None:
    """Raise ValueError unless the dict has exactly these keys."""
    if isinstance(plain, Mapping) and set(plain) == set(keys):
        return
    if not isinstance(plain, Mapping):
        raise ValueError(f"{what} is {plain!r}, but it must be a dict with the keys {list(keys)}.")
    missing, unknown = [k for k in keys if k not in plain], [k for k in plain if k not in keys]
    hint = suggest_name(unknown[0], ("preset", *keys)) if unknown else ""
    raise ValueError(
        f"{what} has the keys {list(plain)}. Missing are {missing}, and unknown are {unknown}. "
        f"Write exactly {list(keys)}. {more}{hint}".rstrip()
    )
