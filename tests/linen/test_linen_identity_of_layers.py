"""Layers are values: equal arguments make equal layers, so jit traces them once.

Conflicting arguments are refused.
"""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxfp8 as fp8
from jaxfp8.linen import FP8Dense, FP8DenseGeneral, FP8DotGeneral, FP8Einsum

X = jnp.ones((2, 8))
LAYERS = {
    "Dense": lambda **fields: FP8Dense(4, **fields),
    "DenseGeneral": lambda **fields: FP8DenseGeneral(4, **fields),
    "Einsum": lambda **fields: FP8Einsum((8, 4), "bd,dk->bk", **fields),
    "plugged": lambda recipe=None: nn.Dense(
        4, dot_general_cls=FP8DotGeneral.using(recipe or fp8.recipes.delayed())
    ),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_equal_layers_are_traced_once(make):
    assert make() == make()
    assert hash(make()) == hash(make())
    assert make() != make(recipe=fp8.recipes.delayed(margin=1))
    chex.clear_trace_counter()

    @chex.assert_max_traces(n=1)
    def apply(layer, variables):
        return layer.apply(variables, X)

    variables = make().init(jax.random.key(0), X)
    for _ in range(3):
        jax.jit(apply, static_argnums=0)(make(), variables)


def test_clone_takes_another_recipe():
    layer = FP8Dense(4).clone(recipe=fp8.recipes.current())
    assert layer == FP8Dense(4, recipe=fp8.recipes.current())
    assert set(layer.init(jax.random.key(0), X)) == {"params"}  # no state


@pytest.mark.parametrize("layer", [FP8Dense, FP8DenseGeneral])
def test_a_second_plug_is_refused(layer):
    with pytest.raises(ValueError, match="Drop dot_general= and dot_general_cls="):
        layer(4, dot_general_cls=FP8DotGeneral.using(fp8.recipes.current()))


@pytest.mark.parametrize(
    "make",
    [LAYERS["Dense"], LAYERS["DenseGeneral"], LAYERS["Einsum"]],
    ids=["Dense", "DenseGeneral", "Einsum"],
)
def test_a_recipe_by_name_is_refused(make):
    with pytest.raises(
        TypeError,
        match=r"recipe=.delayed. .* a Recipe is needed; write recipe=fp8\.recipes\.delayed",
    ):
        make(recipe="delayed")
