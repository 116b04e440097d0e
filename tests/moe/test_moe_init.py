"""`init` of a layer of experts runs without a mesh, with every recipe that the layer takes."""

import jax
import jax.numpy as jnp
import pytest

import jaxfp8 as fp8

RECIPES = {
    "blockwise, float32 scales": fp8.recipes.blockwise(power_of_two=False),
    "rowwise, high_precision_wgrad": fp8.recipes.rowwise(high_precision_wgrad=True),
    "blockwise, square tiles of x": fp8.recipes.blockwise(x_tile_dim=2, w_tile_dim=1),
}


@pytest.mark.parametrize("name", RECIPES)
def test_init_with_a_recipe_that_is_sent_in_high_precision(name):
    parallel = fp8.moe.ExpertParallel(axis="expert", sent_in_fp8=False)
    layer = fp8.linen.FP8MoE(
        experts=4, hidden=16, k=2, recipe=RECIPES[name], parallel=parallel, dtype=jnp.bfloat16
    )
    variables = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((8, 32), jnp.bfloat16))
    assert variables["params"]["w_in"]["kernel"].shape == (4, 32, 32)
