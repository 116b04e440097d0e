import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import jaxfp8 as fp8
from jaxfp8.quantizers import Current, Delayed, Identity
from jaxfp8.recipes._presets import PRESETS

STATIC = {"x_scale": 0.1, "w_scale": 0.2, "g_scale": 0.3}
RECIPES = {name: fp8.recipes.get(name, **(STATIC if name == "static" else {})) for name in PRESETS}
OPERANDS = fp8.recipes.Operands(lhs=Identity(), rhs=Identity())


@pytest.mark.parametrize("name", RECIPES)
def test_is_a_value(name):
    recipe = RECIPES[name]
    assert recipe.name == name
    assert recipe == dataclasses.replace(recipe)
    assert hash(recipe) == hash(dataclasses.replace(recipe))
    assert jax.jit(lambda x, recipe: x, static_argnums=1)(jnp.ones(()), recipe) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.name = "another"
    assert not any(w.value_format == fp8.E5M2 for _, w in recipe.uses("w"))


@pytest.mark.parametrize(
    ("name", "rows", "fp8_matmuls"),
    [
        ("delayed", 3, 3),
        ("current", 0, 3),
        ("rowwise", 0, 3),
        ("blockwise", 0, 3),
        ("mxfp8", 0, 3),
        ("static", 0, 3),
        ("identity", 0, 0),
    ],
)
def test_table(name, rows, fp8_matmuls):
    recipe = RECIPES[name]
    assert len(recipe.rows) == rows
    assert recipe.fp8_matmuls == fp8_matmuls
    assert recipe.is_identity == (name == "identity")
    formats = {
        tensor: {q.value_format for _, q in recipe.uses(tensor)} for tensor in ("x", "w", "g")
    }
    if fp8_matmuls:
        only_e4m3 = name in ("rowwise", "blockwise", "mxfp8")
        assert formats == {
            "x": {fp8.E4M3},
            "w": {fp8.E4M3},
            "g": {fp8.E4M3 if only_e4m3 else fp8.E5M2},
        }
    assert recipe.tile == {"blockwise": 128, "mxfp8": 32}.get(name)
    assert (
        recipe.fprop.in_tiles
        == recipe.dgrad.in_tiles
        == recipe.wgrad.in_tiles
        == (recipe.tile is not None)
    )
    # Numbers only: what computes them is `fp8.Kernels`.
    assert {field.name for field in dataclasses.fields(recipe)} == {
        "name", "fprop", "dgrad", "wgrad",
    }  # fmt: skip


def test_defaults():
    assert RECIPES["delayed"].fprop.lhs == Delayed(
        format=fp8.E4M3, history_length=16, algorithm="max", margin=0, power_of_two=False
    )
    assert RECIPES["delayed"].dgrad.lhs == dataclasses.replace(
        RECIPES["delayed"].fprop.lhs, format=fp8.E5M2
    )


def one_quantizer(recipe, tensor):
    (quantizer,) = {quantizer for _, quantizer in recipe.uses(tensor)}  # the same for both matmuls
    return quantizer


def test_defaults_of_blockwise():
    recipe = RECIPES["blockwise"]
    x = Current(format=fp8.E4M3, granularity=fp8.PerBlock((1, 128)), power_of_two=True)
    w = dataclasses.replace(x, granularity=fp8.PerBlock((128, 128)))
    assert [one_quantizer(recipe, tensor) for tensor in "xwg"] == [x, w, x]


@pytest.mark.parametrize(
    ("fields", "tensor", "changes"),
    [
        ({"gradient": fp8.E5M2}, "g", {"format": fp8.E5M2}),
        ({"x_tile_dim": 2, "w_tile_dim": 1}, "x", {"granularity": fp8.PerBlock((128, 128))}),
        ({"x_tile_dim": 2, "w_tile_dim": 1}, "w", {"granularity": fp8.PerBlock((1, 128))}),
        ({"w_tile_dim": 1, "g_tile_dim": 2}, "g", {"granularity": fp8.PerBlock((128, 128))}),
        *(({"power_of_two": False}, tensor, {"power_of_two": False}) for tensor in "xwg"),
    ],
    ids=str,
)
def test_fields_of_blockwise(fields, tensor, changes):
    expected = dataclasses.replace(one_quantizer(RECIPES["blockwise"], tensor), **changes)
    assert one_quantizer(fp8.recipes.blockwise(**fields), tensor) == expected


def test_defaults_of_mxfp8():
    recipe = RECIPES["mxfp8"]
    every = Current(
        format=fp8.E4M3,
        granularity=fp8.PerBlock((1, 32)),
        power_of_two=True,
        scale_format=fp8.E8M0,
        scale_rounding="rceil",
    )
    assert [one_quantizer(recipe, tensor) for tensor in "xwg"] == [every] * 3
    floor = dataclasses.replace(every, scale_rounding="floor")
    assert [
        one_quantizer(fp8.recipes.mxfp8(scale_rounding="floor"), tensor) for tensor in "xwg"
    ] == [floor] * 3
    square = dataclasses.replace(every, granularity=fp8.PerBlock((32, 32)))
    assert [one_quantizer(fp8.recipes.mxfp8(w_tile_dim=2), tensor) for tensor in "xwg"] == [
        every,
        square,
        every,
    ]


def test_presets_of_tiles_are_values():
    build = [
        fp8.recipes.blockwise,
        functools.partial(fp8.recipes.blockwise, power_of_two=False),
        functools.partial(fp8.recipes.blockwise, gradient=fp8.E5M2),
        functools.partial(fp8.recipes.blockwise, w_tile_dim=1),
        fp8.recipes.mxfp8,
        functools.partial(fp8.recipes.mxfp8, scale_rounding="floor"),
        functools.partial(fp8.recipes.mxfp8, w_tile_dim=2),
    ]
    assert len({make() for make in (*build, *build)}) == len(build)
    for make in build:
        assert make() == make()
        assert hash(make()) == hash(make())
        assert not jax.tree.leaves(fp8.init_state(make()))  # nothing to remember


@pytest.mark.parametrize(
    "fields", [{}, {"power_of_two": True}, {"power_of_two": False}, {"gradient": fp8.E5M2}], ids=str
)
def test_high_precision_wgrad(fields):
    recipe = fp8.recipes.rowwise(high_precision_wgrad=True, **fields)
    assert recipe.fp8_matmuls == 2
    x = Current(
        format=fp8.E4M3,
        granularity=fp8.quantizers.PerRow(),
        power_of_two=fields.get("power_of_two", True),
    )
    assert recipe.fprop == fp8.recipes.Operands(lhs=x, rhs=x)
    # dgrad reads w with one scale, by the same rule as its rows.
    g = dataclasses.replace(x, format=fields.get("gradient", fp8.E4M3))
    w = dataclasses.replace(x, granularity=fp8.PerTensor())
    assert recipe.dgrad == fp8.recipes.Operands(lhs=g, rhs=w)
    assert recipe.wgrad == OPERANDS


def test_rows_of_unequal_quantizers():
    x = [Delayed(format=fp8.E4M3, margin=margin) for margin in (0, 1)]
    recipe = fp8.Recipe(
        name="mine",
        fprop=fp8.recipes.Operands(lhs=x[0], rhs=Current(format=fp8.E4M3)),
        dgrad=OPERANDS,
        wgrad=fp8.recipes.Operands(lhs=x[1], rhs=Current(format=fp8.E5M2)),
    )
    assert [(row.tensor, row.quantizer) for row in recipe.rows] == [("x", x[0]), ("x", x[1])]
    assert fp8.init_state(recipe).scale.shape == (2,)
