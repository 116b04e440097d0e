"""A layer whose casts are kernels.

The bits of one whose casts are XLA's, gradients and quantizer state included.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import interpreted, needs_mosaic
from same_bits import assert_same_bits

import jaxfp8 as fp8

RECIPES = {
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "careful": fp8.recipes.rowwise(high_precision_wgrad=True),
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
    "mxfp8 2d": fp8.recipes.mxfp8(w_tile_dim=2),
    "static": fp8.recipes.static(x_scale=0.01, w_scale=0.01, g_scale=0.01),
}
FEW = ("delayed", "blockwise")  # the rest differs from them in what tests of the kernels cover
B, S, D, F = 2, 64, 160, 96


def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (B, S, D), (D, F), (B, S, F)
    return [
        jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    ]


def step(recipe, casts, x, w, c, state):
    def loss(params, state):
        y = fp8.dot(*params, recipe=recipe, state=state, kernels=fp8.Kernels(casts=casts))
        return jnp.sum((y * c).astype(jnp.float32))

    return fp8.value_and_grad(loss)((x, w), state)


@needs_mosaic
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in RECIPES]
)
def test_same_bits(name):
    recipe, (x, w, c) = RECIPES[name], arrays()
    state = fp8.init_state(recipe)
    for _ in range(2 if recipe.rows else 1):  # the second step finds its scales set
        mine = interpreted(lambda state=state: step(recipe, "mosaic", x, w, c, state))
        theirs = step(recipe, "xla", x, w, c, state)
        assert_same_bits(mine, theirs)
        state = theirs[2]
    if recipe.rows:
        assert np.all(np.asarray(state.scale) > 0)


@needs_mosaic
def test_experts_have_states_of_their_own():
    recipe, (x, w, c) = RECIPES["delayed"], arrays()
    state = fp8.init_state(recipe)
    experts = jax.tree.map(
        lambda leaf: jnp.stack([leaf, leaf]), (w[:, :64].T.reshape(64, D).T, state)
    )
    ws = experts[0] * jnp.array([1, 8], jnp.bfloat16)[:, None, None]

    def together(casts):
        def loss(params, state):
            x, w = params
            dot = lambda x, w, s: fp8.dot(
                x, w, recipe=recipe, state=s, kernels=fp8.Kernels(casts=casts)
            )
            return jnp.sum((jax.vmap(dot)(x, w, state) * c[..., :64]).astype(jnp.float32))

        return fp8.value_and_grad(loss)((x, ws), experts[1])

    mine, theirs = interpreted(lambda: together("mosaic")), together("xla")
    assert_same_bits(mine, theirs)
    assert np.asarray(theirs[2].amax_history)[..., -1].shape[0] == 2


def test_a_name_is_checked():
    x, w, _ = arrays()
    with pytest.raises(ValueError, match="'tritn'"):
        fp8.dot(x, w, recipe=RECIPES["current"], kernels=fp8.Kernels(casts="tritn"))


@needs_mosaic
@pytest.mark.slow
def test_a_weight_of_heads():
    """Contracted along the first of three axes.

    Swapping the last two would help nobody, and changes nothing.
    """
    recipe, (x, _, _) = RECIPES["current"], arrays()
    w = jax.random.normal(jax.random.key(1), (D, 32, 64), jnp.bfloat16)

    def run(casts):
        def loss(x, w):
            y = fp8.einsum(
                "bsd,dhk->bshk",
                x,
                w,
                recipe=recipe,
                kernels=fp8.Kernels(casts=casts),
            )
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return jax.value_and_grad(loss, argnums=(0, 1))(x, w)

    assert_same_bits(interpreted(lambda: run("mosaic")), run("xla"))
