"""nnx layers with recipes in tiles.

Flax's parameters, the core function's values and gradients, and a loss that falls.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfp8 as fp8
from jaxfp8.nnx import FP8DotGeneral, FP8Einsum, FP8Linear, FP8LinearGeneral, FP8State

RECIPES = {
    "blockwise": fp8.recipes.blockwise(),
    "float32 scales": fp8.recipes.blockwise(power_of_two=False, gradient=fp8.E5M2),
    "mxfp8": fp8.recipes.mxfp8(),
    "mxfp8, 2D weights": fp8.recipes.mxfp8(w_tile_dim=2),
}
KERNELS = {"mxfp8, 2D weights": fp8.Kernels("b200", casts="xla", matmuls="cudnn")}
# ragged in tiles of 32, shorter than those of 128
X = np.random.default_rng(0).normal(size=(3, 20, 48)).astype(np.float32)


def rngs():
    return nnx.Rngs(0)


def plus(y, bias):
    return y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)


# flax's layer, ours, and the same by hand: (params, x, recipe and kernels) -> y
LAYERS = {
    "Linear": (
        lambda: nnx.Linear(48, 40, rngs=rngs()),
        lambda r: FP8Linear(48, 40, **r, rngs=rngs()),
        lambda p, x, r: fp8.dot(x, p["kernel"], **r, bias=p["bias"]),
    ),
    "Linear, no bias": (
        lambda: nnx.Linear(48, 40, use_bias=False, rngs=rngs()),
        lambda r: FP8Linear(48, 40, use_bias=False, **r, rngs=rngs()),
        lambda p, x, r: fp8.dot(x, p["kernel"], **r),
    ),
    "Linear, plugged": (
        lambda: nnx.Linear(48, 40, rngs=rngs()),
        lambda r: nnx.Linear(48, 40, dot_general=FP8DotGeneral(**r), rngs=rngs()),
        lambda p, x, r: plus(fp8.dot(x, p["kernel"], **r), p["bias"]),
    ),
    "LinearGeneral": (
        lambda: nnx.LinearGeneral((20, 48), (2, 3), axis=(-2, -1), rngs=rngs()),
        lambda r: FP8LinearGeneral((20, 48), (2, 3), axis=(-2, -1), **r, rngs=rngs()),
        lambda p, x, r: plus(
            fp8.dot_general(x, p["kernel"], (((1, 2), (0, 1)), ((), ())), **r), p["bias"]
        ),
    ),
    "Einsum": (
        lambda: nnx.Einsum("bsd,dhk->bshk", (48, 2, 24), (2, 24), rngs=rngs()),
        lambda r: FP8Einsum("bsd,dhk->bshk", (48, 2, 24), (2, 24), **r, rngs=rngs()),
        lambda p, x, r: plus(fp8.einsum("bsd,dhk->bshk", x, p["kernel"], **r), p["bias"]),
    ),
}


def options(name):
    """The recipe of a name, and its kernels."""
    return {"recipe": RECIPES[name], "kernels": KERNELS.get(name)}


def cases():
    """A layer hands its recipe on to the function.

    A few pairs show that it does. The other pairs are slow.
    """
    for layer in LAYERS:
        for recipe in RECIPES:
            some = (layer, recipe) in {
                ("Linear", "blockwise"),
                ("LinearGeneral", "mxfp8"),
            }
            marks = () if some else (pytest.mark.slow,)
            yield pytest.param(layer, recipe, id=f"{layer}-{recipe}", marks=marks)


def square(y):
    return jnp.mean(jnp.square(y - 1))


@pytest.mark.parametrize(("layer", "recipe"), list(cases()))
def test_a_layer_is_the_function_with_flax_s_parameters(layer, recipe):
    theirs, ours, by_hand = LAYERS[layer]
    how = options(recipe)
    model, plain = ours(how), theirs()
    params = lambda model: nnx.to_pure_dict(nnx.state(model, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, params(model), params(plain))
    assert not nnx.state(model, FP8State)
    value, grads = nnx.jit(nnx.value_and_grad(lambda model, x: square(model(x))))(model, X)
    by_hand = jax.value_and_grad(lambda p, x, by_hand=by_hand: square(by_hand(p, x, how)))
    by_function = jax.jit(by_hand)(params(plain), X)
    jax.tree.map(np.testing.assert_array_equal, (value, nnx.to_pure_dict(grads)), by_function)
    np.testing.assert_array_equal(
        nnx.jit(fp8.nnx.value_and_grad(lambda model, x: square(model(x))))(model, X)[0], value
    )


@pytest.mark.slow  # layers are the functions
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_loss_falls(recipe):
    """Ten steps of gradient descent, as far as without FP8."""
    target = jnp.sin(X[..., :40])

    class Model(nnx.Module):
        def __init__(self, rngs, **how):
            self.up = FP8Linear(48, 64, **how, rngs=rngs)
            self.down = FP8Linear(64, 40, **how, rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.tanh(self.up(x)))

    def train(**how):
        model, losses = Model(nnx.Rngs(0), **how), []

        @nnx.jit
        def step(model):
            value, grads = nnx.value_and_grad(
                lambda model: jnp.mean(jnp.square(model(X) - target))
            )(model)
            params = nnx.state(model, nnx.Param)
            nnx.update(model, jax.tree.map(lambda p, g: p - g, params, grads))
            return value

        for _ in range(10):
            losses.append(step(model))
        return jnp.stack(losses)

    losses, exact = train(**options(recipe)), train(recipe=fp8.recipes.identity())
    assert losses[-1] < 0.8 * losses[0]
    np.testing.assert_allclose(losses, exact, rtol=0.02)
