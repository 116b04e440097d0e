"""A recipe on a command line is read as data, and all of it is read."""

import dataclasses

import pytest
from hard_inputs import mentions

import jaxfp8 as fp8

recipes = fp8.recipes


@pytest.mark.parametrize(
    ("text", "recipe"),
    [
        ("current", recipes.current()),
        (" current ( ) ", recipes.current()),
        ("blockwise(x_tile_dim=1)", recipes.blockwise()),
        (
            "blockwise(x_tile_dim=2, w_tile_dim=1, power_of_two=False)",
            recipes.blockwise(x_tile_dim=2, w_tile_dim=1, power_of_two=False),
        ),
        (
            "delayed(history_length=1024, gradient=E4M3)",
            recipes.delayed(history_length=1024, gradient=fp8.E4M3),
        ),
        ("delayed(gradient='E4M3')", recipes.delayed(gradient=fp8.E4M3)),
        ('delayed(algorithm="most_recent",)', recipes.delayed(algorithm="most_recent")),
        (
            "static(x_scale=1e-3, w_scale=2, g_scale=0x10)",
            recipes.static(x_scale=1e-3, w_scale=2, g_scale=16),
        ),
        ("delayed(\n  margin=1,\n)", recipes.delayed(margin=1)),
    ],
)
def test_reads(text, recipe):
    assert recipes.parse(text) == recipe


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ("''", "cannot be read", "'blockwise'")),
        ("curent", ("'curent'", "Did you mean 'current'?", "'rowwise'")),
        ("Current", ("Did you mean 'current'?",)),
        ("current(margin=1)", ("['margin']", "'power_of_two'")),
        ("mxfp8(tile_dim=2)", ("['tile_dim']", "Did you mean 'w_tile_dim'?")),
        ("current(E4M3)", ("'E4M3' has no name",)),
        ("current(**{'forward': E4M3})", ("is not one argument",)),
        ("current(*[1])", ("has no name",)),
        ("current(forward=E4M3, forward=E4M3)", ("forward",)),
        ("current(forward=e4m3)", ("forward=e4m3", "Did you mean 'E4M3'?")),
        ("current(forward='e4m3')", ("forward='e4m3'", "Did you mean 'E4M3'?")),
        ("current(forward=1)", ("forward=1", "['E4M3', 'E5M2']")),
        ("current(forward=E8M0)", ("E8M0", "use one of")),
        ("current(power_of_two=1)", ("power_of_two=1", "True or False")),
        ("current(power_of_two=-True)", ("power_of_two=-True", "no literal")),
        ("current(power_of_two=None)", ("power_of_two=None", "no literal")),
        ("delayed(algorithm=max)", ("algorithm=max", "algorithm='max'")),
        ("delayed(history_length=2**10)", ("history_length=2 ** 10", "no literal")),
        ("delayed(history_length=-1)", ("history_length=-1", "at least 1")),
        ("delayed(history_length=16.0)", ("history_length=16.0", "integer")),
        ("delayed(history_length=1j)", ("history_length=1j", "no literal")),
        ("delayed(margin=[1])", ("margin=[1]", "no literal")),
        ("static(x_scale=1.0)", ("w_scale", "g_scale")),
        ("static(x_scale=inf, w_scale=1, g_scale=1)", ("x_scale=inf",)),
        ("static(x_scale=1e999, w_scale=1, g_scale=1)", ("x_scale=inf", "between")),
        ("fp8.recipes.current()", ("'fp8.recipes.current'", "name of a preset alone")),
        ("current()()", ("'current()'",)),
        ("current; import os", ("cannot be read",)),
        ("__import__('os')", ("has no name",)),
        ("current(forward=__import__('os'))", ("no literal",)),
        ("current(\x00)", ("cannot be read",)),
        ("current(", ("cannot be read",)),
        ("(" * 500 + ")" * 500, ("cannot be read",)),
        ("current(margin=" + "-" * 5000 + "1)", ("cannot be read",)),
        ("current(margin=" + "9" * 5000 + ")", ("cannot be read",)),
        ("3", ("'3'",)),
        ("current, current", ("name of a preset alone",)),
    ],
    ids=lambda value: None if isinstance(value, tuple) else value[:40],
)
def test_refuses(text, parts):
    with pytest.raises(ValueError, match=mentions(repr(text), *parts)):
        recipes.parse(text)


@pytest.mark.parametrize("name", ["mine", "current"])
def test_a_recipe_of_no_preset_has_no_text(name):
    recipe = dataclasses.replace(recipes.current(), name=name, wgrad=recipes.identity().wgrad)
    with pytest.raises(ValueError, match=mentions("to_dict(recipe)", repr(name))):
        recipes.to_string(recipe)
