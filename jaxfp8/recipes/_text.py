"""Recipes as text, for command lines: `parse` reads it, and `to_string` writes it."""

import ast
from typing import Any

from jaxfp8.numerics._formats import E4M3, E5M2, E8M0, Format
from jaxfp8.recipes._preset_fields import preset_fields
from jaxfp8.recipes._presets import PRESETS, check_recipe, make, nearest, parameters_of
from jaxfp8.recipes._recipe import Recipe

FORMATS = {format.name: format for format in (E4M3, E5M2, E8M0)}


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
    if not isinstance(text, str):
        raise TypeError(
            f"text={text!r} is of type {type(text).__name__}. parse reads a string, for instance "
            "'blockwise(x_tile_dim=1)'. For a dict use fp8.recipes.from_dict."
        )
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
        return with_formats(name.id, fields)
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
    fields = preset_fields(recipe)
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


def with_formats(name: str, fields: dict[str, Any]) -> Recipe:
    """`fp8.recipes.get`, which also takes formats by their names.

    Example:
      >>> with_formats("current", {"gradient": "E4M3"}).dgrad.lhs.format
      E4M3
    """
    known = parameters_of(name) if name in PRESETS else {}
    read = {}
    for field, value in fields.items():
        if field in known and known[field].annotation is Format:
            value = format_named(field, value)
        read[field] = value
    return make(name, read)


def format_named(field: str, value: Any) -> Format:
    """The format with this name. A format is returned as it is.

    Raises:
      ValueError: if it is no format.

    Example:
      >>> format_named("forward", "E5M2")
      E5M2
    """
    if isinstance(value, Format):
        return value
    if not isinstance(value, str) or value not in FORMATS:
        raise ValueError(
            f"{field}={value!r} is no format; use one of {[E4M3.name, E5M2.name]}."
            f"{nearest(str(value).upper(), FORMATS)}"
        )
    return FORMATS[value]


def _value(text: str, field: str, node: ast.expr) -> Any:
    """The value of an argument."""
    if isinstance(node, ast.Name):
        if node.id in FORMATS:
            return FORMATS[node.id]
        raise _unreadable(
            text,
            f"{field}={node.id} is no number, True, False or format. Put a string in quotes, "
            f"{field}={node.id!r}.{nearest(node.id.upper(), FORMATS)}",
        )
    sign, literal = 1, node
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, literal = -1, node.operand
    if isinstance(literal, ast.Constant):
        value = literal.value
        if sign == 1 and isinstance(value, bool | str):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return sign * value
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
