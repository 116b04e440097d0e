"""`save_fp8_residuals`: the backward pass casts nothing a second time."""

import jax
import jax.numpy as jnp
import pytest

import jaxfp8 as fp8

RECIPES = {
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "rowwise_hp_wgrad": fp8.recipes.rowwise(high_precision_wgrad=True),
    "static": fp8.recipes.static(x_scale=0.1, w_scale=0.1, g_scale=0.1),
}
# x and w once (or once for each matmul that reads other rows of it), g likewise.
CASTS = {"delayed": 3, "current": 3, "rowwise": 6, "rowwise_hp_wgrad": 4, "static": 3}
POLICIES = {
    "none": lambda block: block,
    "fp8": lambda block: jax.checkpoint(block, policy=fp8.save_fp8_residuals()),
    "everything": jax.checkpoint,
}
LAYERS = 2


def program(recipe, policy):
    """The traced step of LAYERS blocks whose nonlinearity needs y again in the backward pass."""
    state = fp8.init_state(recipe)
    w = jnp.ones((LAYERS, 4, 4))

    def loss(w, s, x):
        for i in range(LAYERS):
            x = POLICIES[policy](lambda w, s, x: jnp.tanh(fp8.dot(x, w, recipe=recipe, state=s)))(w[i], s, x)
        return jnp.sum(x)

    return jax.make_jaxpr(fp8.value_and_grad(loss))(w, state, jnp.ones((8, 4)))


def casts(jaxpr):
    """The number of casts to FP8, in all subprograms."""
    is_cast = lambda e: e.primitive.name == "convert_element_type" and e.params["new_dtype"].name.startswith("float8")
    parameters = [p for e in jaxpr.eqns for p in jax.tree.leaves(list(e.params.values()), is_leaf=lambda n: hasattr(n, "eqns"))]
    return sum(map(is_cast, jaxpr.eqns)) + sum(casts(p) for p in parameters if hasattr(p, "eqns"))


def branches(recipe):
    return 2 if recipe.rows else 1  # with and without unset scales


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_second_cast(recipe):
    expected = CASTS[recipe] * LAYERS * branches(RECIPES[recipe])
    assert casts(program(RECIPES[recipe], "none")) == expected
    assert casts(program(RECIPES[recipe], "fp8")) == expected


@pytest.mark.parametrize("recipe", RECIPES)
def test_plain_remat_casts_again(recipe):
    """The count can fail."""
    assert casts(program(RECIPES[recipe], "everything")) > CASTS[recipe] * LAYERS * branches(RECIPES[recipe])


def test_a_linear_block_keeps_no_unquantized_activation():
    """What is saved for a block whose y nobody needs again: its FP8 operands, scales and amaxes."""
    recipe = fp8.recipes.current()
    block = jax.checkpoint(lambda x, w: fp8.dot(jnp.sin(x), w, recipe=recipe), policy=fp8.save_fp8_residuals())
    kept = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(block, *args)[1], jnp.ones((8, 4)), jnp.ones((4, 4))))
    names = [f"{aval.dtype}{list(aval.shape)}" for aval in kept if aval.ndim]
    arguments = ["float32[4, 4]", "float32[8, 4]"]
    assert sorted(names) == sorted(["float8_e4m3fn[4, 4]", "float8_e4m3fn[8, 4]", *(a for a in arguments if a in names)])
