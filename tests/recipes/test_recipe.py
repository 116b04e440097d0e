import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hard_inputs import mentions

import jaxfp8 as fp8
from jaxfp8.quantizers import Current, Delayed, Identity
from jaxfp8.recipes._presets import PRESETS

STATIC = {"x_scale": 0.1, "w_scale": 0.2, "g_scale": 0.3}
RECIPES = {name: fp8.recipes.get(name, **(STATIC if name == "static" else {})) for name in PRESETS}
OPERANDS = fp8.Operands(lhs=Identity(), rhs=Identity())


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
    [("delayed", 3, 3), ("current", 0, 3), ("rowwise", 0, 3), ("static", 0, 3), ("identity", 0, 0)],
)
def test_table(name, rows, fp8_matmuls):
    recipe = RECIPES[name]
    assert len(recipe.rows) == rows
    assert recipe.fp8_matmuls == fp8_matmuls
    assert recipe.is_identity == (name == "identity")
    formats = {tensor: {q.value_format for _, q in recipe.uses(tensor)} for tensor in ("x", "w", "g")}
    if fp8_matmuls:
        assert formats == {"x": {fp8.E4M3}, "w": {fp8.E4M3}, "g": {fp8.E4M3 if name == "rowwise" else fp8.E5M2}}


def test_defaults():
    assert RECIPES["delayed"].fprop.lhs == Delayed(
        format=fp8.E4M3, history_length=16, algorithm="max", margin=0, power_of_two=False
    )
    assert RECIPES["delayed"].dgrad.lhs == dataclasses.replace(RECIPES["delayed"].fprop.lhs, format=fp8.E5M2)


def test_high_precision_wgrad():
    recipe = fp8.recipes.rowwise(high_precision_wgrad=True)
    assert recipe.fp8_matmuls == 2
    assert recipe.wgrad == OPERANDS
    assert (recipe.dgrad.lhs.granularity, recipe.dgrad.rhs.granularity) == (fp8.PerRow(), fp8.PerTensor())


def test_rows_of_unequal_quantizers():
    x = [Delayed(format=fp8.E4M3, margin=margin) for margin in (0, 1)]
    recipe = fp8.Recipe(
        name="mine",
        fprop=fp8.Operands(lhs=x[0], rhs=Current(format=fp8.E4M3)),
        dgrad=OPERANDS,
        wgrad=fp8.Operands(lhs=x[1], rhs=Current(format=fp8.E5M2)),
    )
    assert [(row.tensor, row.quantizer) for row in recipe.rows] == [("x", x[0]), ("x", x[1])]
    assert fp8.init_state(recipe).scale.shape == (2,)


def differing_histories():
    lhs, rhs = (Delayed(format=fp8.E4M3, history_length=length) for length in (4, 8))
    return fp8.Recipe(name="mine", fprop=fp8.Operands(lhs=lhs, rhs=rhs), dgrad=OPERANDS, wgrad=OPERANDS)


E5M2 = Current(format=fp8.E5M2)


@pytest.mark.parametrize(
    ("error", "build", "parts"),
    [
        (TypeError, lambda: fp8.recipes.delayed(granularity=fp8.PerRow()), ("granularity",)),
        (TypeError, lambda: fp8.recipes.delayed(fp8.E4M3), ("positional",)),
        (TypeError, lambda: fp8.recipes.current(margin=1), ("margin",)),
        (TypeError, lambda: fp8.recipes.identity(forward=fp8.E4M3), ("forward",)),
        (TypeError, lambda: fp8.recipes.static(x_scale=1.0), ("w_scale", "g_scale")),
        (
            ValueError,
            lambda: fp8.recipes.static(**{**STATIC, "w_scale": 0.0}),
            ("scale=0.0", "between 2**-126 and 2**126"),
        ),
        (ValueError, lambda: fp8.recipes.delayed(history_length=0), ("history_length=0", "at least 1")),
        (ValueError, lambda: fp8.recipes.delayed(algorithm="mean"), ("algorithm='mean'", "'most_recent'")),
        (ValueError, lambda: fp8.recipes.delayed(margin=-1), ("margin=-1", "between 0 and 64")),
        (ValueError, lambda: fp8.recipes.delayed(forward=fp8.E8M0), ("format=E8M0", "use one of")),
        (TypeError, lambda: fp8.recipes.current(power_of_two="yes"), ("power_of_two='yes'", "True or False")),
        (TypeError, lambda: fp8.recipes.rowwise(high_precision_wgrad=1), ("high_precision_wgrad=1", "True or False")),
        (ValueError, lambda: fp8.recipes.current(forward=fp8.E5M2), ("lhs and rhs", "E5M2", "give one of them E4M3")),
        (ValueError, lambda: fp8.Operands(lhs=E5M2, rhs=E5M2), ("lhs and rhs", "E5M2", "give one of them E4M3")),
        (TypeError, lambda: fp8.Operands(lhs=fp8.E4M3, rhs=E5M2), ("lhs=E4M3", "use one of fp8.quantizers")),
        (TypeError, lambda: fp8.Operands(lhs=E5M2, rhs=None), ("rhs=None", "Identity() for none")),
        (
            TypeError,
            lambda: fp8.Recipe(name="a", fprop=OPERANDS, dgrad=OPERANDS, wgrad=None),
            ("wgrad=None", "Operands(lhs="),
        ),
        (
            TypeError,
            lambda: fp8.Recipe(name=3, fprop=OPERANDS, dgrad=OPERANDS, wgrad=OPERANDS),
            ("name=3", "must be a string"),
        ),
        (ValueError, differing_histories, ("history_length", "[4, 8]", "give all Delayed quantizers the same")),
        (ValueError, lambda: fp8.recipes.get("fp8"), ("'fp8'", "use one of", "'delayed'")),
        (TypeError, lambda: fp8.recipes.get("current", margin=1), ("'current'", "['margin']", "'power_of_two'")),
        (TypeError, lambda: fp8.init_state("delayed"), ("recipe='delayed'", "fp8.recipes.delayed()")),
        (TypeError, lambda: fp8.compiler_options("delayed", "h200"), ("recipe='delayed'", "fp8.recipes.delayed()")),
        (ValueError, lambda: fp8.compiler_options(RECIPES["delayed"], "h300"), ("chip='h300'", "use one of")),
    ],
    ids=range(24),
)
def test_misuse(error, build, parts):
    with pytest.raises(error, match=mentions(*parts)):
        build()
