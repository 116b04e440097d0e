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


@pytest.mark.parametrize("named", [(), None])
def test_what_types_tell_needs_no_name(named):
    """x varies along "data" and w does not: no stage."""
    recipe = fp8.recipes.current()
    want = jax.jit(lambda x, w: value_and_grads(x, w, recipe=recipe))(X, W)
    run = lambda x, w: value_and_grads(x, w, recipe=recipe, reduce_axes=named)
    lie = P(("data", "tensor")), P()
    step = jax.shard_map(run, mesh=mesh("data", "tensor"), in_specs=lie, out_specs=(lie[0], *lie))
    for mine, theirs in zip(jax.jit(step)(X, W), want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6 * np.abs(theirs).max())


def test_a_part_says_its_axis_itself():
    """Without types, the amax of a sharded w that a state follows spans its shards."""
    recipe = fp8.recipes.delayed()
    state = fp8.init_state(recipe)

    def local(x, w, state):
        loss = lambda w, state: jnp.sum(
            fp8.dot(x, w, recipe=recipe, state=state, rhs_shard=fp8.sharding.Shard(0, "fsdp"))
        )
        state = fp8.value_and_grad(loss, reduce_axes=("data",))(w, state)[-1]
        return jax.tree.map(lambda leaf: leaf[None, None], state)

    step = jax.shard_map(
        local, mesh=mesh("data", "fsdp"), in_specs=(P("data"), P("fsdp"), P()), out_specs=P("data", "fsdp"),
        check_vma=False,
    )  # fmt: skip
    rising = np.arange(64 * 16, dtype=np.float32).reshape(64, 16)
    amaxes = jax.jit(step)(X, rising, state).amax_history[..., 1, -1]  # of w on each device
    np.testing.assert_array_equal(amaxes, np.full((2, 2), 64 * 16 - 1))


def test_wrong_names():
    dot = lambda **named: fp8.dot(X, W, recipe=fp8.recipes.current(), **named)
    with pytest.raises(TypeError, match=r"reduce_axes='data'.*write \('data',\)"):
        dot(reduce_axes="data")
    with jax.set_mesh(mesh("data", "tensor")), pytest.raises(fp8.FP8StateError, match=r"'dat'.*'data'"):
        dot(reduce_axes=("dat",))
    with jax.set_mesh(mesh("data", "tensor")), pytest.raises(fp8.FP8StateError, match=r"'dat'.*'data'"):
        fp8.value_and_grad(lambda w, s: jnp.sum(w), reduce_axes=("dat",))(W, fp8.init_state(fp8.recipes.delayed()))
    dot(reduce_axes=("data",))  # no mesh: a layer made for one, as flax initializes it
