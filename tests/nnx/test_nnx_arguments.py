"""Other nnx objects among the arguments of `fp8.nnx.value_and_grad`.

What the loss changes in them is kept.
"""

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfp8 as fp8

X = jnp.asarray(np.random.default_rng(0).integers(1, 5, (4, 8)), jnp.float32)


def model(recipe):
    return fp8.nnx.FP8Linear(8, 3, recipe=recipe, rngs=nnx.Rngs(0))


DELAYED, CURRENT = fp8.recipes.delayed(), fp8.recipes.current()


@pytest.mark.parametrize(
    ("recipe", "jit"),
    [
        pytest.param(DELAYED, nnx.jit, id="delayed-jit"),
        pytest.param(CURRENT, nnx.jit, id="current-jit", marks=pytest.mark.slow),
        pytest.param(CURRENT, lambda f: f, id="current-eager"),
        # Eagerly each of its operations is a program.
        pytest.param(DELAYED, lambda f: f, id="delayed-eager", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("standard_promotion")  # flax's metrics
def test_random_streams_and_metrics(recipe, jit):
    drop = nnx.Dropout(0.5)

    def loss_fn(model, rngs, x, *, metric):
        y = model(drop(x, rngs=rngs))
        metric.update(values=jnp.ones(()))
        return jnp.sum(y**2)

    layer, rngs, metric = model(recipe), nnx.Rngs(dropout=7), nnx.metrics.Average()

    @jit
    def step(layer, rngs, metric, x):
        return fp8.nnx.value_and_grad(loss_fn)(layer, rngs, x, metric=metric)

    first, grads = step(layer, rngs, metric, X)
    second, _ = step(layer, rngs, metric, X)
    assert first != second  # another mask
    assert rngs.dropout.count.get_value() == 2
    assert metric.compute() == 1
    assert metric.count.get_value() == 2
    chex.assert_tree_all_finite(grads)
