"""`fused_adamw` without a GPU: it is `adamw` with master weights, and refuses what it cannot do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from same_bits import assert_same_bits
from triton_interpreter import needs_triton

import jaxfp8.optim
from jaxfp8.optim import (
    FP8,
    BFloat16Plus,
    ExpandedFP8,
    Float16,
    Float32,
    Int8,
    adamw,
    fused_adamw,
    with_master_weights,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")


def params(dtype):
    draw = np.random.default_rng(0)
    shapes = {"large": (64, 128), "ragged": (64, 130), "small": (128,)}
    return {name: jnp.asarray(draw.normal(size=shape), dtype) for name, shape in shapes.items()}


def train(tx, start, state=None, steps=3):
    state = tx.init(start) if state is None else state

    @jax.jit
    def step(params, state, seed):
        draw = jax.random.normal(jax.random.key(seed), (64, 130))
        grads = jax.tree.map(lambda p: draw.reshape(-1)[: p.size].reshape(p.shape), params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for seed in range(steps):
        start, state = step(start, state, seed)
    return start, state


@pytest.mark.parametrize("master", [None, BFloat16Plus(bits=8), BFloat16Plus()], ids=str)
@pytest.mark.parametrize("moments", [Int8(), ExpandedFP8()], ids=str)
def test_on_a_cpu_it_is_the_plain_optimizer(moments, master):
    """Same weights, same state: after two steps the other one goes on."""
    needs_triton()
    rate = optax.linear_schedule(1e-2, 1e-3, 10)
    decays = lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    plain = adamw(rate, weight_decay=0.1, mask=decays, mu=moments, nu=moments)
    plain = plain if master is None else with_master_weights(plain, master=master)
    fused = fused_adamw(rate, weight_decay=0.1, mask=decays, moments=moments, master=master)
    start = params(jnp.float32 if master is None else jnp.bfloat16)
    mine, theirs = train(fused, start, steps=2), train(plain, start, steps=2)
    assert_same_bits(mine, theirs)
    assert_same_bits(train(plain, *mine), train(fused, *theirs))


def test_inside_other_transformations():
    """MultiSteps selects updates."""
    needs_triton()
    start = params(jnp.float32)
    grads = jax.tree.map(jnp.ones_like, start)
    tx = optax.MultiSteps(fused_adamw(1e-2), 2)
    updates, state = tx.update(grads, tx.init(start), start)
    assert_same_bits(optax.apply_updates(start, updates), start)
    updates, _ = tx.update(grads, state, start)
    assert np.all(optax.apply_updates(start, updates)["large"] != start["large"])


@pytest.mark.parametrize("master", [None, BFloat16Plus(bits=8)], ids=str)
def test_a_skipped_step_changes_nothing(master):
    needs_triton()
    tx = fused_adamw(1e-2, master=master)
    start, state = train(tx, params(jnp.float32 if master is None else jnp.bfloat16))
    bad = jax.tree.map(lambda p: jnp.full(p.shape, jnp.nan), start)
    finite = jax.tree.reduce(jnp.logical_and, jax.tree.map(lambda g: jnp.isfinite(g).all(), bad))
    updates, after = jax.jit(tx.update)(bad, state, start, skip=~finite)
    assert_same_bits((optax.apply_updates(start, updates), after), (start, state))
    good = jax.tree.map(jnp.ones_like, start)
    mine, theirs = (tx.update(good, state, start, **how) for how in ({"skip": False}, {}))
    weights = [optax.apply_updates(start, updates) for updates, _ in (mine, theirs)]
    assert_same_bits((weights[0], mine[1]), (weights[1], theirs[1]))


def test_skip_is_one_bool():
    start = params(jnp.float32)
    tx = fused_adamw(1e-2)
    with pytest.raises(ValueError, match="must be one bool"):
        tx.update(start, jax.eval_shape(tx.init, start), start, skip=np.array([True]))


def test_empty_arrays_and_numbers():
    needs_triton()
    start = {"none": jnp.zeros((0, 128)), "n": jnp.float32(1), "w": jnp.ones((4, 128))}
    tx = fused_adamw(1e-2, moments=Int8(min_size=0))
    updates, state = tx.update(start, tx.init(start), start)
    assert optax.apply_updates(start, updates)["n"] < 1
    assert state.inner[0].mu["n"].dtype == jnp.float32


def test_scaled_afterwards_it_fails_loudly():
    needs_triton()
    start = params(jnp.float32)
    tx = optax.chain(fused_adamw(1e-2), optax.scale(0.5))
    updates, _ = tx.update(start, tx.init(start), start)
    with pytest.raises(ValueError, match="Overwrite"):
        optax.apply_updates(start, updates)


@pytest.mark.parametrize(
    ("options", "mentions"),
    [
        ({"moments": Int8(64)}, "group=128"),
        ({"moments": Int8(companding=False)}, "companding"),
        ({"moments": FP8()}, "FP8"),
        ({"master": Float32()}, "Float32"),
        ({"master": Float16()}, "Float16"),
        ({"b1": jnp.float32(0.9)}, "Python number"),
    ],
    ids=str,
)
def test_what_the_kernel_cannot_do_is_refused(options, mentions):
    with pytest.raises(ValueError, match=mentions):
        fused_adamw(1e-3, **options)


def test_without_the_package_it_names_the_extra(monkeypatch):
    import sys

    for module in ("jaxfp8.kernels._triton_call", "jaxfp8.kernels.adamw._triton"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    start = params(jnp.float32)
    tx = jaxfp8.optim.fused_adamw(1e-3)
    with pytest.raises(NotImplementedError, match=r"pip install 'jaxfp8\[triton\]'"):
        jax.eval_shape(tx.update, start, jax.eval_shape(tx.init, start), start)


def test_without_params_it_says_what_it_needs():
    tx = fused_adamw(1e-3)
    start = params(jnp.float32)
    with pytest.raises(ValueError, match="params=None"):
        tx.update(start, jax.eval_shape(tx.init, start))
