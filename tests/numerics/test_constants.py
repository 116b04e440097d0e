"""Casts leave no array of constants in a differentiated loop over layers."""

import jax
import jax.numpy as jnp
import pytest

import jaxfp8 as fp8
from jaxfp8.numerics._exact import constant_like

LAYERS, M, K = 3, 256, 384
RECIPES = {
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "static": fp8.recipes.static(x_scale=0.1, w_scale=0.1, g_scale=0.1),
    "blockwise": fp8.recipes.blockwise(),
    "blockwise, float32 scales": fp8.recipes.blockwise(power_of_two=False),
    "mxfp8": fp8.recipes.mxfp8(),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
@pytest.mark.parametrize("value", [0, 3, 119])
def test_values(dtype, value):
    x = jnp.array([[0, 1, -5]], dtype)
    assert constant_like(x, value).dtype == x.dtype
    assert constant_like(x, value).tolist() == [[value] * 3]


def test_values_do_not_depend_on_x():
    x = jnp.array([jnp.nan, jnp.inf, -0.0, 1e-40])
    assert constant_like(x, -jnp.inf).tolist() == [-jnp.inf] * 4
    assert jnp.all(jnp.isnan(constant_like(x, jnp.nan)))


def constants(jaxpr):
    """The types of large arrays that are handed to all iterations of a loop.

    Activations and gradients are handed from one iteration to the next. They are bfloat16.
    """
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            body = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
            for given, inside in zip(eqn.invars, body.invars, strict=True):
                handed = given.aval.shape == inside.aval.shape and given.aval.size >= K * K
                if handed and given.aval.dtype != jnp.bfloat16:
                    yield given.aval.str_short()
            continue
        for inner in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda n: hasattr(n, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from constants(inner)


@pytest.mark.parametrize(
    ("recipe", "remat"),
    [
        pytest.param(
            recipe,
            remat,
            # With remat of those that differ in kind: of a tensor, of rows and of tiles.
            marks=pytest.mark.slow if remat and recipe not in ("delayed", "mxfp8") else (),
        )
        for recipe in RECIPES
        for remat in (False, True)
    ],
)
def test_loops_get_no_array_of_constants(recipe, remat):
    """JAX moves such an array out of a scan, and hands it to each iteration."""
    recipe = RECIPES[recipe]
    state = fp8.init_state(recipe)

    def layer(h, w):
        return fp8.dot(h, w, recipe=recipe, state=state or None), None

    def loss_fn(w, state, x):
        body = jax.checkpoint(layer, prevent_cse=False) if remat else layer
        return jax.lax.scan(body, x, w)[0][0, 0].astype(jnp.float32)  # no array of ones

    state = fp8.freeze(state) if recipe.rows else ()
    w, x = jnp.ones((LAYERS, K, K), jnp.bfloat16), jnp.ones((M, K), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(jax.grad(loss_fn))(w, state, x).jaxpr
    assert "scan" in str(jaxpr)
    assert not list(constants(jaxpr))
