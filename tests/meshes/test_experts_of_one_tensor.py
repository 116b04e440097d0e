"""Experts that are split over devices and mapped by `jax.vmap`, and one tensor for all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from same_bits import assert_same_bits

import jaxfp8 as fp8

EXPERTS, N = 4, 8
RECIPE = fp8.recipes.delayed(history_length=4)


def tensors():
    random = np.random.default_rng(0)
    sizes = np.float32([1, 10, 100, 1000])[:, None, None]
    w = sizes * random.standard_normal((EXPERTS, N, N)).astype(np.float32)
    return jnp.asarray(w), jnp.asarray(random.standard_normal((2, N)).astype(np.float32))


def loss(w, state, x):
    expert = lambda w, state: jnp.sum(fp8.dot(x, w, recipe=RECIPE, state=state))
    return jnp.sum(jax.vmap(expert)(w, state))


@pytest.mark.parametrize("devices", [2, EXPERTS])
@pytest.mark.parametrize("settled", [False, True], ids=["unset", "settled"])
def test_states_are_those_of_one_device(settled, devices):
    mesh = jax.make_mesh((devices,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    split = P("expert")
    on_mesh = jax.shard_map(
        lambda *given: fp8.value_and_grad(loss)(*given)[1:],
        mesh=mesh, in_specs=(split, split, P()), out_specs=split,
    )  # fmt: skip
    w, x = tensors()
    state = jax.vmap(lambda _: fp8.init_state(RECIPE))(jnp.zeros(EXPERTS))
    one_device = jax.jit(fp8.value_and_grad(loss))
    if settled:
        state = fp8.settle(one_device(w, state, x)[2])
    got, wanted = jax.jit(on_mesh)(w, state, x), one_device(w, state, x)[1:]
    assert_same_bits(got, wanted)
    scales = np.asarray(got[1].scale)
    assert len(np.unique(scales[:, 1])) == EXPERTS  # of w
    assert len(np.unique(scales[:, 0])) == 1  # of x
