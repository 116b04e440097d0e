"""linen layers with recipes in tiles.

Flax's parameters, the core function's values and gradients, and a loss that falls.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linen_made import made

import jaxfp8 as fp8
from jaxfp8.linen import FP8Dense, FP8DenseGeneral, FP8DotGeneral, FP8Einsum

RECIPES = {
    "blockwise": fp8.recipes.blockwise(),
    "float32 scales": fp8.recipes.blockwise(power_of_two=False, gradient=fp8.E5M2),
    "mxfp8": fp8.recipes.mxfp8(),
    "mxfp8, 2D weights": fp8.recipes.mxfp8(w_tile_dim=2),
}
KERNELS = {"mxfp8, 2D weights": fp8.Kernels("b200", casts="xla", matmuls="cudnn")}
KEY = jax.random.key(0)
X = np.random.default_rng(0).standard_normal(
    (3, 20, 48), np.float32
)  # ragged in tiles of 32, shorter than those of 128


def bf16(t):
    return t.astype(jnp.bfloat16)


def plus(y, bias):
    return y + bias.reshape((1,) * (y.ndim - bias.ndim) + bias.shape)


# flax's layer, ours, and the same by hand: (params, x, recipe and kernels) -> y
LAYERS = {
    "Dense": (
        nn.Dense(40),
        lambda r: FP8Dense(40, **r),
        lambda p, x, r: fp8.dot(x, p["kernel"], **r, bias=p["bias"]),
    ),
    "Dense, no bias": (
        nn.Dense(40, use_bias=False),
        lambda r: FP8Dense(40, use_bias=False, **r),
        lambda p, x, r: fp8.dot(x, p["kernel"], **r),
    ),
    "Dense, bfloat16": (
        nn.Dense(40, dtype=jnp.bfloat16),
        lambda r: FP8Dense(40, dtype=jnp.bfloat16, **r),
        lambda p, x, r: fp8.dot(bf16(x), bf16(p["kernel"]), **r, bias=bf16(p["bias"])),
    ),
    "Dense, plugged": (
        nn.Dense(40),
        lambda r: nn.Dense(40, dot_general_cls=FP8DotGeneral.using(**r)),
        lambda p, x, r: plus(fp8.dot(x, p["kernel"], **r), p["bias"]),
    ),
    "DenseGeneral": (
        nn.DenseGeneral((2, 3), axis=(-2, -1)),
        lambda r: FP8DenseGeneral((2, 3), axis=(-2, -1), **r),
        lambda p, x, r: plus(
            fp8.dot_general(x, p["kernel"], (((1, 2), (0, 1)), ((), ())), **r), p["bias"]
        ),
    ),
    "DenseGeneral, batch": (
        nn.DenseGeneral(5, axis=-1, batch_dims=(0,)),
        lambda r: FP8DenseGeneral(5, axis=-1, batch_dims=(0,), **r),
        lambda p, x, r: plus(fp8.einsum("bsd,bdf->bsf", x, p["kernel"], **r), p["bias"][:, None]),
    ),
    "Einsum": (
        nn.Einsum((48, 2, 24), "bsd,dhk->bshk"),
        lambda r: FP8Einsum((48, 2, 24), "bsd,dhk->bshk", **r),
        lambda p, x, r: plus(fp8.einsum("bsd,dhk->bshk", x, p["kernel"], **r), p["bias"]),
    ),
}


def options(name):
    """The recipe of a name, and its kernels."""
    return {"recipe": RECIPES[name], "kernels": KERNELS.get(name)}


def step(apply):
    """Loss and gradients of parameters and x, compiled."""
    loss = lambda params, x: jnp.mean(jnp.square(apply(params, x).astype(jnp.float32) - 1))
    return jax.jit(jax.value_and_grad(loss, (0, 1)))


def cases():
    """A layer hands its recipe on to the function.

    A few pairs show that it does. The other pairs are slow.
    """
    for layer in LAYERS:
        for recipe in RECIPES:
            some = (layer, recipe) in {
                ("Dense", "blockwise"),
                ("Einsum", "mxfp8"),
            }
            marks = () if some else (pytest.mark.slow,)
            yield pytest.param(layer, recipe, id=f"{layer}-{recipe}", marks=marks)


@pytest.mark.parametrize(("layer", "recipe"), list(cases()))
def test_a_layer_is_the_function_with_flax_s_parameters(layer, recipe):
    theirs, ours, by_hand = LAYERS[layer]
    model = ours(options(recipe))
    params = made(theirs, X)["params"]
    assert jax.eval_shape(model.init, KEY, X) == jax.eval_shape(theirs.init, KEY, X)  # no state
    got = step(lambda params, x: model.apply({"params": params}, x))(params, X)
    by_function = step(lambda params, x: by_hand(params, x, options(recipe)))(params, X)
    jax.tree.map(np.testing.assert_array_equal, got, by_function)
    if layer != "Dense":
        return
    # And it is close to what flax computes.
    exact = step(lambda params, x: theirs.apply({"params": params}, x))(params, X)
    distance = lambda a, b: np.linalg.norm((a - b).ravel()) / np.linalg.norm(b.ravel())
    both = jax.device_get((got[1], exact[1]))
    assert max(jax.tree.leaves(jax.tree.map(distance, *both))) < 0.1


@pytest.mark.parametrize(
    "recipe", ["mxfp8", *(pytest.param(n, marks=pytest.mark.slow) for n in RECIPES if n != "mxfp8")]
)
def test_a_loss_falls(recipe):
    """Ten steps of gradient descent, as far as without FP8."""

    class Model(nn.Module):
        recipe: fp8.Recipe
        kernels: fp8.Kernels | None = None

        @nn.compact
        def __call__(self, x):
            how = {"recipe": self.recipe, "kernels": self.kernels}
            return FP8Dense(40, **how)(nn.tanh(FP8Dense(64, **how)(x)))

    target = np.sin(X[..., :40])

    params = made(Model(fp8.recipes.identity()), X)["params"]

    def train(**how):
        model = Model(**how)

        def loss(params):
            return jnp.mean(jnp.square(model.apply({"params": params}, X) - target))

        def one(params, _):
            value, grads = jax.value_and_grad(loss)(params)
            return jax.tree.map(lambda p, g: p - g, params, grads), value

        return jax.jit(lambda params: jax.lax.scan(one, params, length=10)[1])(params)

    losses, exact = train(**options(recipe)), train(recipe=fp8.recipes.identity())
    assert losses[-1] < 0.8 * losses[0]
    np.testing.assert_allclose(losses, exact, rtol=0.02)
