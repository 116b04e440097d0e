"""Loops train as with float32 sums: data-parallel, and with shards of everything (ZeRO)."""

import functools

import gradient_sums as sums
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8
from jaxfp8.comms import AutoScaledFP8, BFloat16Sum, TwoPhaseFP8

D, STEPS, HIDDEN = 4, 60, 128
OPTIMIZER = optax.adam(3e-3)
METHODS = {
    "bfloat16": BFloat16Sum(min_size=0),
    "two phases": TwoPhaseFP8(min_size=0),
    "auto": AutoScaledFP8(min_size=0),
    "auto, all_reduce": AutoScaledFP8(min_size=0, reduction="all_reduce"),
}
pytestmark = pytest.mark.usefixtures("standard_promotion")


def start():
    draw = np.random.default_rng(0)
    return {
        "up": np.float32(draw.normal(size=(16, HIDDEN)) / 4),
        "bias": np.zeros(HIDDEN, np.float32),  # too small for FP8
        "down": np.float32(draw.normal(size=(HIDDEN, 16)) / 11),
    }


def batches():
    rng = np.random.default_rng(1)
    teacher = rng.standard_normal((16, 16)) / 4
    for _ in range(STEPS):
        x = rng.standard_normal((16 * D, 16))
        yield np.float32(x), np.float32(np.sin(x @ teacher))


def loss_of(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"] - y) ** 2)


def float32_sum(grads, axis_name, state):
    return jax.tree.map(lambda g: lax.pmean(g, axis_name), grads), state


@functools.cache
def data_parallel(name, vma):
    """The losses of all steps. `name` is None for sums in float32."""
    method = METHODS.get(name)
    reduce = functools.partial(fp8.comms.all_reduce_gradients, method=method)

    def step(params, opt_state, state, x, y):
        local = lax.pcast(params, "d", to="varying")
        loss, grads = jax.value_and_grad(loss_of)(local, x, y)
        grads, state = (reduce if method else float32_sum)(grads, "d", state=state)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, state, lax.pmean(loss, "d")

    specs = {"in_specs": (P(), P(), P(), P("d"), P("d")), "out_specs": P()}
    step = jax.jit(jax.shard_map(step, mesh=sums.mesh_of(d=D), check_vma=vma, **specs))
    params = start()
    opt_state = OPTIMIZER.init(params)
    state = fp8.comms.init_gradient_sums(params, method) if method else None
    losses = []
    for x, y in batches():
        params, opt_state, state, loss = step(params, opt_state, state, x, y)
        losses.append(float(loss))
    return np.array(losses)


@pytest.mark.parametrize(
    ("name", "vma"),
    [
        ("auto", True),
        *(
            pytest.param(name, vma, marks=pytest.mark.slow)
            for name in METHODS
            for vma in (True, False)
            if (name, vma) != ("auto", True)
        ),
    ],
)
def test_a_data_parallel_loop(name, vma):
    check(data_parallel(name, vma), data_parallel(None, True))


AXES = {"up": 1, "bias": 0, "down": 0}


@functools.cache
def zero(name):
    """Each device stores and updates a shard of each parameter and of its moments."""
    method = METHODS.get(name)
    scatter = functools.partial(fp8.comms.reduce_scatter_gradients, method=method, axis=AXES)

    def float32_scatter(grads, axis_name):
        return jax.tree.map(
            lambda g, axis: lax.psum_scatter(g, axis_name, scatter_dimension=axis, tiled=True) / D,
            grads,
            AXES,
        )

    def step(shards, opt_state, x, y):
        params = jax.tree.map(
            lambda shard, axis: lax.all_gather(shard, "d", axis=axis, tiled=True), shards, AXES
        )
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        grads = (scatter if method else float32_scatter)(grads, "d")
        updates, opt_state = OPTIMIZER.update(grads, opt_state, shards)
        return optax.apply_updates(shards, updates), opt_state, lax.pmean(loss, "d")

    specs = {"up": P(None, "d"), "bias": P("d"), "down": P("d")}
    params = start()
    opt_state = OPTIMIZER.init(params)
    moments = opt_state[0]._replace(count=P(), mu=specs, nu=specs), opt_state[1]
    mapped = jax.shard_map(
        step,
        mesh=sums.mesh_of(d=D),
        in_specs=(specs, moments, P("d"), P("d")),
        out_specs=(specs, moments, P()),
    )
    step = jax.jit(mapped)
    losses = []
    for x, y in batches():
        params, opt_state, loss = step(params, opt_state, x, y)
        losses.append(float(loss))
    return np.array(losses)


@pytest.mark.parametrize("name", ["two phases", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_zero_loop(name):
    check(zero(name), zero(None))


def check(losses, reference):
    assert reference[-5:].mean() < 0.3 * reference[0]  # it learns
    # The first step of Adam moves by the sign of the gradient, so early losses differ most.
    np.testing.assert_allclose(losses[-10:].mean(), reference[-10:].mean(), rtol=0.03)
    assert not np.array_equal(losses, reference)  # the sum was not in float32
