"""Recipes as plain dicts, which JSON and TOML can hold.

A recipe that a preset makes is the preset with its fields. Any other recipe is the table of its
quantizers. An object is a dict with the name of its class under "class", and its fields.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxfp8.numerics._formats import Format
from jaxfp8.numerics._granularity import PerRow, PerTensor
from jaxfp8.numerics._per_block import PerBlock
from jaxfp8.quantizers._base import AbstractQuantizer
from jaxfp8.quantizers._current import Current
from jaxfp8.quantizers._delayed import Delayed
from jaxfp8.quantizers._identity import Identity
from jaxfp8.quantizers._static import Static
from jaxfp8.recipes._operands import Operands
from jaxfp8.recipes._preset_fields import as_number, foreign_quantizers, preset_fields
from jaxfp8.recipes._presets import check_recipe, nearest
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.recipes._text import FORMATS, with_formats

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
      {'class': 'Identity', 'granularity': {'class': 'PerTensor'}}
    """
    check_recipe(recipe)
    own = _own_classes(quantizers)
    fields = preset_fields(recipe)
    if fields is not None:
        named = {n: v.name if isinstance(v, Format) else v for n, v in fields.items()}
        return {"preset": recipe.name, **named}
    if foreign := foreign_quantizers(recipe, {*_QUANTIZERS.values(), *own.values()}):
        raise TypeError(
            f"recipe {recipe.name!r} has quantizers of {foreign[0].__name__}, which is no class of "
            "fp8.quantizers. Pass your classes by name to to_dict and to from_dict: "
            f"quantizers={{{foreign[0].__name__!r}: {foreign[0].__name__}}}."
        )
    names = {kind: name for name, kind in (own | _QUANTIZERS | _GRANULARITIES).items()}
    plain: dict[str, Any] = {"name": recipe.name}
    for matmul in _MATMULS:
        pair = getattr(recipe, matmul)
        plain[matmul] = {side: _plain(getattr(pair, side), side, names) for side in _SIDES}
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
            return with_formats(name, fields)
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
    """A value of a field in its plain form."""
    if isinstance(value, Format):
        return value.name
    if isinstance(value, tuple):
        return [_plain(each, where, names) for each in value]
    if type(value) in names:
        fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init)
        # TOML has no null. A missing field gets its default, which is None for `scale_format`.
        given = {n: _plain(v, f"{where}.{n}", names) for n, v in fields if v is not None}
        return {"class": names[type(value)], **given}
    try:
        return as_number(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"{where}={value!r} of type {type(value).__name__} has no plain form. Use str, int, "
            "float, bool, a format, or a tuple of these."
        ) from None


def _object(where: str, plain: Any, classes: Classes) -> Any:
    """The object that a dict with a "class" describes."""
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
            f"{nearest(name, classes)}"
        )
    kind: Any = classes[name]
    fields = {f.name: f for f in dataclasses.fields(kind) if f.init}
    read = {}
    for field, value in plain.items():
        if field == "class":
            continue
        if field not in fields:
            raise ValueError(
                f"{where} is a {name}, which has no field {field!r}; it has {list(fields)}."
                f"{nearest(field, fields)}"
            )
        read[field] = _value(f"{where}.{field}", value)
    try:
        return kind(**read)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _value(where: str, plain: Any) -> Any:
    """The value of a field from its plain form."""
    if isinstance(plain, Mapping):
        return _object(where, plain, _GRANULARITIES)
    if isinstance(plain, list | tuple):
        return tuple(_value(where, each) for each in plain)
    return FORMATS.get(plain, plain) if isinstance(plain, str) else plain


def _check_keys(what: str, plain: Any, keys: tuple[str, ...], more: str = "") -> None:
    """Raise ValueError unless the dict has exactly these keys."""
    if isinstance(plain, Mapping) and set(plain) == set(keys):
        return
    if not isinstance(plain, Mapping):
        raise ValueError(f"{what} is {plain!r}, but it must be a dict with the keys {list(keys)}.")
    missing, unknown = [k for k in keys if k not in plain], [k for k in plain if k not in keys]
    hint = nearest(unknown[0], ("preset", *keys)) if unknown else ""
    raise ValueError(
        f"{what} has the keys {list(plain)}. Missing are {missing}, and unknown are {unknown}. "
        f"Write exactly {list(keys)}. {more}{hint}".rstrip()
    )
