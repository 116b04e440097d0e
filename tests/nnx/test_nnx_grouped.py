"""`nnx.FP8GroupedLinear`: experts with a kernel, a bias and a state each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxfp8 as fp8
from jaxfp8.nnx import FP8GroupedLinear

K, N = 32, 24
SIZES = np.array([7, 0, 12], np.int32)


def rows():
    return np.random.default_rng(0).normal(size=(24, K)).astype(np.float32)


@pytest.mark.parametrize("bias", [True, False])
def test_is_ragged_dot_of_its_parameters(bias):
    recipe = fp8.recipes.mxfp8()
    layer = FP8GroupedLinear(3, K, N, recipe=recipe, use_bias=bias, rngs=nnx.Rngs(0))
    dot = jax.jit(functools.partial(fp8.ragged_dot, recipe=recipe))
    want = dot(rows(), layer.kernel[...], SIZES, bias=layer.bias[...] if bias else None)
    got = nnx.jit(lambda layer, *arrays: layer(*arrays))(layer, rows(), SIZES)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("each", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_step_moves_the_states_of_groups_with_rows(each):
    layer = FP8GroupedLinear(
        3, K, N, recipe=fp8.recipes.delayed(), state_per_group=each, rngs=nnx.Rngs(0)
    )
    optimizer = nnx.Optimizer(layer, optax.sgd(0.5), wrt=nnx.Param)

    @nnx.jit
    def step(layer, optimizer, x, sizes):
        run = fp8.nnx.value_and_grad(lambda layer: jnp.mean((layer(x, sizes) - 1.0) ** 2))
        value, grads = run(layer)
        optimizer.update(layer, grads)
        return value

    losses = [float(step(layer, optimizer, rows(), SIZES)) for _ in range(5)]
    assert losses[-1] < losses[0]
    scale = np.asarray(layer.ragged_dot.state.get_value().scale)
    assert scale.shape == ((3, 3) if each else (3,))
    if each:
        assert (scale[[0, 2]] > 0).all()
        assert not scale[1].any()


def test_stochastic_rounding_needs_a_stream():
    recipe = fp8.recipes.blockwise(gradient_rounding="stochastic")
    layer = FP8GroupedLinear(3, K, N, recipe=recipe, rngs=nnx.Rngs(0))
    grad = nnx.jit(nnx.grad(lambda layer: jnp.sum(layer(rows(), SIZES) ** 2)))
    grads = [grad(layer).kernel[...] for _ in range(2)]
    assert (np.asarray(grads[0]) != np.asarray(grads[1])).any()
    with pytest.raises(ValueError, match="no stream"):
        FP8GroupedLinear(3, K, N, recipe=recipe, rngs=nnx.Rngs(params=0))


def test_convert_leaves_it_as_it_is():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.experts = FP8GroupedLinear(3, K, K, recipe=fp8.recipes.blockwise(), rngs=rngs)
            self.out = nnx.Linear(K, N, rngs=rngs)

        def __call__(self, x):
            return self.out(self.experts(x, SIZES))

    _, coverage = fp8.convert(
        Model(nnx.Rngs(0)), fp8.recipes.current(), inputs=(jnp.ones((24, K)),)
    )
    assert coverage["experts"].reason == "an FP8 layer already"
