"""A misspelt option, or one that a function does not have, is refused; none is dropped."""

import functools

import jax.numpy as jnp
import pytest
from hard_inputs import mentions

import jaxfp8 as fp8

X, RECIPE = jnp.ones((4, 4)), fp8.recipes.current()
NUMBERS = (((1,), (0,)), ((), ()))
CALLS = {
    "fp8.dot": functools.partial(fp8.dot, X, X, recipe=RECIPE),
    "fp8.dot_general": functools.partial(fp8.dot_general, X, X, NUMBERS, recipe=RECIPE),
    "fp8.einsum": functools.partial(fp8.einsum, "ij,jk->ik", X, X, recipe=RECIPE),
    "fp8.linen.FP8DotGeneral.using": functools.partial(fp8.linen.FP8DotGeneral.using, RECIPE),
    "fp8.nnx.FP8DotGeneral": functools.partial(fp8.nnx.FP8DotGeneral, RECIPE),
    "fp8.nnx.FP8EinsumOp": functools.partial(fp8.nnx.FP8EinsumOp, RECIPE),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_misspelt_option(name):
    with pytest.raises(TypeError, match=mentions(name, "no option w_shrad=3", "w_shard, x_shard")):
        CALLS[name](w_shrad=3)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("fp8.einsum", "bias"),
        ("fp8.nnx.FP8DotGeneral", "prologue"),
        ("fp8.nnx.FP8EinsumOp", "prologue"),
        ("fp8.linen.FP8DotGeneral.using", "prologue"),
        ("fp8.nnx.FP8DotGeneral", "key"),
        ("fp8.nnx.FP8DotGeneral", "out_sharding"),
        ("fp8.nnx.FP8EinsumOp", "key"),
    ],
)
def test_an_option_of_another_function(name, option):
    with pytest.raises(TypeError, match=mentions(name, f"no option {option}=", "its options are")):
        CALLS[name](**{option: X})


def test_an_option_of_a_linen_plug():
    with pytest.raises(TypeError, match=mentions("no option key=", "its options are")):
        fp8.linen.FP8DotGeneral.using(RECIPE, key=X)
