"""From float32 parameters to weights and optimizer state, and back to float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim_cases import KINDS, params32
from same_bits import assert_same_bits

from jaxfp8.optim import BFloat16Plus, Float32, init_master_weights, master_weights
from jaxfp8.optim import with_master_weights as with_masters
from jaxfp8.optim._masters import _rounded_to_24_bits, round_to_bfloat16

pytestmark = pytest.mark.usefixtures("standard_promotion")


def ties():
    """Float32 values of which every second is a tie between two bfloat16 values."""
    return jax.lax.bitcast_convert_type(
        0x3F800000 + 0x8000 * jnp.arange(64, dtype=jnp.uint32), jnp.float32
    )


@pytest.mark.parametrize("kind", ["float32", "bfloat16 + 16"])
def test_masters_start_at_the_float32_values(kind):
    params = params32() | {"ties": ties()}
    weights, opt_state = init_master_weights(
        with_masters(optax.sgd(0.1), master=KINDS[kind]), params
    )
    assert_same_bits(master_weights(opt_state, weights), params)
    assert_same_bits(weights, jax.tree.map(round_to_bfloat16, params))


def test_masters_of_24_bits_start_at_the_nearest():
    params = params32() | {"ties": ties() + 2.0**-17}
    tx = with_masters(optax.sgd(0.1), master=BFloat16Plus(bits=8))
    weights, opt_state = init_master_weights(tx, params)
    nearest = jax.tree.map(_rounded_to_24_bits, params)
    assert_same_bits(master_weights(opt_state, weights), nearest)
    assert_same_bits(weights, jax.tree.map(round_to_bfloat16, nearest))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dtype_and_leaves_that_stay(kind, dtype):
    params = params32() | {"step": jnp.int32(1), "old": jnp.ones(2, jnp.bfloat16), "none": None}
    paths = []

    def keep(path, x):
        paths.append(path)
        return x.ndim < 2

    tx = with_masters(optax.sgd(0.1), master=KINDS[kind])
    weights, opt_state = init_master_weights(tx, params, dtype=dtype, keep_float32=keep)
    assert paths == ["dense/bias", "dense/kernel", "scale"]
    assert jax.tree.map(lambda x: x.dtype, weights) == {
        "dense": {"kernel": dtype, "bias": jnp.float32},
        "scale": jnp.float32,
        "step": jnp.int32,
        "old": jnp.bfloat16,
        "none": None,
    }
    assert weights["scale"] is params["scale"]
    masters = master_weights(opt_state, weights)
    assert jax.tree.map(jnp.shape, masters) == jax.tree.map(jnp.shape, params)


def test_the_wrapped_optimizer_starts_at_the_float32_values():
    """Some optimizers keep a copy of the parameters."""
    keep = optax.GradientTransformation(lambda params: params, lambda u, s, p=None: (u, s))
    _, opt_state = init_master_weights(with_masters(keep, master=BFloat16Plus()), params32())
    assert_same_bits(opt_state.inner, params32())


def test_inside_of_other_transformations():
    tx = optax.chain(optax.clip(1.0), with_masters(optax.adam(0.1), master=BFloat16Plus(bits=8)))
    weights, opt_state = init_master_weights(tx, params32())
    nearest = jax.tree.map(_rounded_to_24_bits, params32())
    assert_same_bits(master_weights(opt_state, weights), nearest)
    assert jax.tree.structure(opt_state) == jax.tree.structure(tx.init(weights))


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_owns_its_arrays(kind):
    params = params32()
    tx = with_masters(optax.adamw(0.1), master=KINDS[kind])
    weights, opt_state = init_master_weights(tx, params)
    for leaf in jax.tree.leaves(opt_state):
        leaf.delete()
    jax.block_until_ready(jax.tree.map(jnp.sum, (params, weights)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_is_that_of_init(kind):
    tx = with_masters(optax.adamw(0.1), master=KINDS[kind])
    weights, opt_state = init_master_weights(tx, params32())
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert shapes(opt_state) == shapes(tx.init(weights))
    jitted = jax.jit(lambda params: init_master_weights(tx, params))(params32())
    assert_same_bits(jitted, (weights, opt_state))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float8_e4m3fn, np.int8])
def test_dtype_must_be_low_precision(dtype):
    with pytest.raises(ValueError, match=r"use jnp\.bfloat16 or jnp\.float16"):
        init_master_weights(with_masters(optax.sgd(0.1), master=Float32()), params32(), dtype=dtype)


@pytest.mark.parametrize("count", [0, 2])
def test_exactly_one_state(count):
    tx = optax.chain(optax.clip(1.0), *[with_masters(optax.sgd(0.1), master=Float32())] * count)
    weights = jax.tree.map(round_to_bfloat16, params32())
    with pytest.raises(ValueError, match=f"has {count} states of with_master_weights"):
        master_weights(tx.init(weights), weights)
    with pytest.raises(ValueError, match=f"has {count} states of with_master_weights"):
        init_master_weights(tx, params32())
