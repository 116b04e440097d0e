"""JAX's own switches do not change a train step: all recipes, in linen and in nnx.

`jax_numpy_dtype_promotion="strict"` and `jax_numpy_rank_promotion="raise"` are on in every test. So
the step that the others are compared with runs without these two.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense
from jaxfp8.nnx import FP8Linear, FP8State

X = np.random.default_rng(0).standard_normal((4, 32), np.float32)
# The random bits of the first layer change nothing but the gradient of its own kernel.
RECIPES = {
    "stochastic": fp8.recipes.delayed(gradient_rounding="stochastic"),
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
    "static": fp8.recipes.static(x_scale=0.01, w_scale=0.01, g_scale=1e-4),
    "identity": fp8.recipes.identity(),
}
SWITCHES = {
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "check_tracer_leaks": jax.checking_leaks,
    "enable_x64": lambda: jax.enable_x64(True),
    "rbg": lambda: jax.default_prng_impl("rbg"),
    "unsafe_rbg": lambda: jax.default_prng_impl("unsafe_rbg"),
    "disable_jit": jax.disable_jit,
}
SLOW = {"unsafe_rbg", "disable_jit"}  # much as rbg; every operation is a program


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        for name, recipe in RECIPES.items():
            x = FP8Dense(32, recipe=recipe, name=name)(x)
        return jnp.mean(x**2)


class NNXModel(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        for name, recipe in RECIPES.items():
            setattr(self, name, FP8Linear(32, 32, recipe=recipe, rngs=rngs))

    def __call__(self, x):
        for name in RECIPES:
            x = getattr(self, name)(x)
        return jnp.mean(x**2)


def in_linen(params=None):
    """The parameters of `init`, and what a step from `params` gives: loss, gradients, new state."""
    model = LinenModel()
    variables = model.init(jax.random.key(0), X)

    @jax.jit
    def step(params, state, key, x):
        apply = lambda params, state, x: model.apply(
            {"params": params, COLLECTION: state}, x, rngs={"fp8": key}
        )
        return fp8.value_and_grad(apply)(params, state, x)

    fresh = variables["params"]
    return fresh, step(params or fresh, variables[COLLECTION], jax.random.key(1), X)


def in_nnx(params=None):
    graph, fresh, *rest = nnx.split(NNXModel(), nnx.Param, FP8State, ...)

    @jax.jit
    def step(params, rest, x):
        model = nnx.merge(graph, params, *rest)
        loss, grads = fp8.nnx.value_and_grad(NNXModel.__call__)(model, x)
        return loss, grads, nnx.state(model, FP8State)

    return nnx.to_pure_dict(fresh), step(nnx.State(params) if params else fresh, rest, X)


@functools.cache
def without(face):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return face()


@pytest.mark.parametrize("face", [in_linen, in_nnx])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in SWITCHES]
)
def test_a_step_is_the_same(name, face):
    params, expected = without(face)
    with SWITCHES[name]():
        fresh, found = face(params)
    if name == "disable_jit":  # XLA does not fuse, so sums have other last bits
        jax.tree.map(assert_close, (fresh, found), (params, expected))
        return
    if "rbg" in name:  # other random bits
        found[1]["stochastic"]["kernel"] = expected[1]["stochastic"]["kernel"]
    else:
        assert_same_bits(fresh, params)
    assert_same_bits(found, expected)


def assert_close(found, expected):
    most = np.max(np.abs(expected))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * most)


@pytest.mark.parametrize("channel", [None, "gradient"])
def test_debug_nans_names_the_operation(channel):
    """As docs/diverged.md says. JAX repeats the step op by op, so it sees marks of unset scales."""
    model = FP8Dense(32, recipe=RECIPES["delayed"], state_channel=channel)
    variables = jax.jit(model.init)(jax.random.key(0), X)

    @jax.jit
    def step(params, state, x):
        def loss(params, state, x):
            return jnp.sum(jnp.log(-jnp.abs(model.apply({"params": params, COLLECTION: state}, x))))

        if channel is None:
            return fp8.value_and_grad(loss)(params, state, x)
        return jax.value_and_grad(loss, argnums=(0, 1))(params, state, x)

    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="encountered in log"):
        step(variables["params"], variables[COLLECTION], X)
