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
    return w, random.standard_normal((2, N)).astype(np.float32)


def loss(w, state, x):
    expert = lambda w, state: jnp.sum(fp8.dot(x, w, recipe=RECIPE, state=state))
    return jnp.sum(jax.vmap(expert)(w, state))


on_one_device = jax.jit(fp8.value_and_grad(loss))


@pytest.mark.parametrize(
    ("settled", "devices"),
    [
        pytest.param(False, 2, id="unset-2"),
        pytest.param(True, EXPERTS, id="settled-4"),
        pytest.param(False, EXPERTS, id="unset-4", marks=pytest.mark.slow),
        pytest.param(True, 2, id="settled-2", marks=pytest.mark.slow),
    ],
)
def test_states_are_those_of_one_device(settled, devices):
    mesh = jax.make_mesh((devices,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    split = P("expert")
    on_mesh = jax.shard_map(
        lambda *given: fp8.value_and_grad(loss)(*given)[1:],
        mesh=mesh, in_specs=(split, split, P()), out_specs=split,
    )  # fmt: skip
    w, x = tensors()
    state = jax.tree.map(lambda leaf: np.stack([leaf] * EXPERTS), fp8.init_state(RECIPE))
    if settled:
        state = jax.device_get(fp8.settle(on_one_device(w, state, x)[2]))
    got, wanted = jax.jit(on_mesh)(w, state, x), on_one_device(w, state, x)[1:]
    assert_same_bits(got, wanted)
    scales = np.asarray(got[1].scale)
    assert len(np.unique(scales[:, 1])) == EXPERTS  # of w
    assert len(np.unique(scales[:, 0])) == 1  # of x
