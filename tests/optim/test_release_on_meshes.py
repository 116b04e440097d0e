"""Released layers on meshes: each layer reduces its gradients. Shards stay where they are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from release_cases import SIGNS, body, loss_of, plain_step, stacked
from same_bits import assert_same_bits

from jaxfp8.optim import master_weights, release

pytestmark = pytest.mark.usefixtures("standard_promotion")
TX = SIGNS
X = jnp.asarray(np.random.default_rng(7).normal(size=(16, 8)), jnp.float32)


def spec_of(x):
    """Matrices [L, K, N] and their state are split along K. Vectors are whole."""
    return P(None, "data") if jnp.ndim(x) == 3 else P()


@functools.cache
def expected(steps):
    stack = release(TX, per_layer=True)
    state = (stacked(), jax.jit(lambda params: stack.init(params).opt_state)(stacked()))
    for _ in range(steps):
        state, _, loss = plain_step(TX, body, state, X)
    params, opt_state = state
    return jax.jit(master_weights)(opt_state, params), loss


def check_close(layers, loss, steps=2):
    theirs, reference = expected(steps)
    layers = jax.device_get(layers)
    layers.check()
    np.testing.assert_allclose(loss, reference, rtol=1e-4)
    mine = jax.jit(lambda layers: master_weights(layers.opt_state, layers.params))(layers)
    for name in theirs:
        # An update is about 2^-7. A gradient near 0 may have another sign on another mesh.
        distance = np.abs(np.asarray(mine[name]) - np.asarray(theirs[name]))
        assert np.mean(distance > 2.0**-10) < 0.02, name
        assert np.any(np.asarray(mine[name]) != np.asarray(stacked()[name]))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_fully_sharded(axis_type):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    stack = release(TX, per_layer=True)

    def f(x, p):
        if axis_type == AxisType.Explicit:  # w is gathered
            p = jax.tree.map(lambda w: jax.sharding.reshard(w, P()), p)
        return body(x, p)

    with jax.set_mesh(mesh):
        layers = jax.jit(stack.init)(jax.tree.map(np.asarray, stacked()))
        layers = jax.tree.map(lambda x: put(np.asarray(x), spec_of(x)), layers)
        specs = jax.tree.map(lambda x: x.sharding, layers)
        run = jax.jit(
            jax.value_and_grad(functools.partial(loss_of, stack.scan, f)), donate_argnums=0
        )
        for _ in range(2):
            loss, layers = run(layers, put(X, P("data")))
        for x, sharding in zip(jax.tree.leaves(layers), jax.tree.leaves(specs), strict=True):
            assert x.sharding.is_equivalent_to(sharding, x.ndim)
        check_close(layers, loss)


@pytest.mark.parametrize(
    ("split", "remat"),
    [
        pytest.param(True, False, id="fully sharded-saved"),  # and its bias is replicated
        pytest.param(False, True, id="replicated-rematerialized", marks=pytest.mark.slow),
        pytest.param(False, False, id="replicated-saved", marks=pytest.mark.slow),
        pytest.param(True, True, id="fully sharded-rematerialized", marks=pytest.mark.slow),
    ],
)
def test_shard_map(split, remat):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    stack = release(TX, per_layer=True)

    def f(x, p):
        if split:
            gather = lambda w: jax.lax.all_gather(w, "data", axis=0, tiled=True)
            p = {**p, "up": gather(p["up"]), "down": gather(p["down"])}
        return body(x, p)

    f = jax.checkpoint(f) if remat else f

    def loss_fn(layers, x):
        return jax.lax.pmean(loss_of(stack.scan, f, layers, x), "data")

    def train(layers, x):
        return jax.value_and_grad(loss_fn)(layers, x)

    layers = jax.jit(stack.init)(stacked())
    specs = jax.tree.map(lambda x: spec_of(x) if split else P(), layers)
    run = jax.jit(
        jax.shard_map(train, mesh=mesh, in_specs=(specs, P("data")), out_specs=(P(), specs))
    )
    for _ in range(2):
        loss, layers = run(layers, X)
    check_close(layers, loss)


def test_shard_map_inside_of_the_gradient():
    """The loss is a shard_map, and the gradient is taken outside of it."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    stack = release(optax.sgd(2.0**-7), per_layer=True)

    def local(layers, x):
        return jax.lax.pmean(loss_of(stack.scan, body, layers, x), "data")

    loss_fn = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    layers = jax.jit(stack.init)(stacked())
    new = jax.jit(jax.grad(loss_fn))(layers, X)
    new.check()
    alone = jax.jit(jax.grad(functools.partial(loss_of, stack.scan, body)))(layers, X)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(
            np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=1e-2, atol=1e-6
        ),
        new.params, alone.params,
    )  # fmt: skip
    assert_same_bits(new.seal, alone.seal)
