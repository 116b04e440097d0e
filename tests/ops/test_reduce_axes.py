"""Inside shard_map with types: what `reduce_axes=` settles that types leave open."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8

rng = np.random.default_rng(0)
X = rng.normal(size=(8, 64)).astype(np.float32)
W = rng.normal(size=(64, 16)).astype(np.float32)


def mesh(*names):
    return jax.make_mesh((2, 2), names, axis_types=(AxisType.Auto,) * 2)


def value_and_grads(x, w, **arguments):
    y, pullback = jax.vjp(lambda x, w: fp8.dot(x, w, **arguments), x, w)
    return y, *pullback(jnp.cos(y))


@pytest.mark.parametrize(("named", "own"), [(("data",), True), (None, False)])
def test_stages_without_state_keep_their_amaxes(named, own):
    """Amaxes 100 times apart. By default types cannot tell a stage from a shard, and the smaller one pays for it."""
    recipe = fp8.recipes.current()
    stages = [(X, W), (X / 100, W / 100)]
    alone = [jax.jit(lambda x, w: value_and_grads(x, w, recipe=recipe))(*stage) for stage in stages]

    def local(x, w):
        return tuple(t[None] for t in value_and_grads(x[0], w[0], recipe=recipe, reduce_axes=named))

    lie = P("pipe", "data"), P("pipe")
    step = jax.shard_map(local, mesh=mesh("pipe", "data"), in_specs=lie, out_specs=(P("pipe", "data"), *lie))
    xs, ws = (np.stack(tensors) for tensors in zip(*stages, strict=True))
    for together, *apart in zip(jax.jit(step)(xs, ws), *alone, strict=True):
        same = [np.allclose(together[i], apart[i], rtol=1e-5, atol=1e-6 * np.abs(apart[i]).max()) for i in (0, 1)]
        assert same == [True, own]


@pytest.mark.parametrize(("named", "whole"), [(("data", "tensor"), True), (None, False)])
def test_rows_that_a_contraction_splits(named, whole):
    """Half of each row of x and of each column of w is large."""
    recipe = fp8.recipes.rowwise()
    x, w = X.copy(), W.copy()
    x[:, :32] *= 64
    w[32:] *= 64
    want = jax.jit(lambda x, w: fp8.dot(x, w, recipe=recipe))(x, w)

    def local(x, w):
        return lax.psum(fp8.dot(x, w, recipe=recipe, reduce_axes=named), "tensor")

    step = jax.shard_map(
        local, mesh=mesh("data", "tensor"), in_specs=(P("data", "tensor"), P("tensor")), out_specs=P("data")
    )
    assert np.allclose(jax.jit(step)(x, w), want, rtol=1e-6, atol=1e-6 * np.abs(want).max()) == whole
