"""`fused_adamw` on the chip: its kernel takes the steps of the plain optimizer on a CPU."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxfp8.optim import BFloat16Plus, ExpandedFP8, Int8, adamw, fused_adamw, with_master_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("gpu", "standard_promotion"),
    pytest.mark.skipif(importlib.util.find_spec("jax_triton") is None, reason="needs jax-triton"),
]

# The kernel takes matrices of whole groups. XLA updates the vector.
SHAPES = {"matrix": (512, 1024), "vector": (513,)}
STEPS = 3


def steps(tx, dtype, device):
    """Weights and states after some steps, and the program of a step."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    draw = np.random.default_rng(0)
    tree = lambda: {name: draw.standard_normal(s).astype(dtype) for name, s in SHAPES.items()}
    with jax.default_device(device):
        params = jax.device_put(tree(), device)
        state, compiled = jax.jit(tx.init)(params), None
        for _ in range(STEPS):
            grads = jax.device_put(tree(), device)
            compiled = compiled or jax.jit(step).lower(params, state, grads).compile()
            params, state = compiled(params, state, grads)
    return jax.tree.map(np.asarray, (params, state)), compiled


@pytest.mark.parametrize("master", [None, BFloat16Plus(bits=8)], ids=str)
@pytest.mark.parametrize("moments", [Int8(), ExpandedFP8()], ids=str)
def test_its_steps_are_those_of_the_plain_optimizer_on_a_cpu(moments, master, gpu, cpu):
    dtype = jnp.float32 if master is None else jnp.bfloat16
    plain = adamw(1e-2, weight_decay=0.1, mu=moments, nu=moments)
    plain = plain if master is None else with_master_weights(plain, master=master)
    fused = fused_adamw(1e-2, weight_decay=0.1, moments=moments, master=master)
    (params, state), compiled = steps(fused, dtype, gpu)
    assert "triton" in compiled.as_text(), "XLA did the update"
    (wanted, kept), _ = steps(plain, dtype, cpu)
    assert jax.tree.structure(state) == jax.tree.structure(kept)
    # A chip may contract a product and a sum. Then a moment is rounded to the next code. In E4M3
    # that is up to an eighth away, and a weight moves by as much of a step of 1e-2.
    for name in SHAPES:
        mine, other = (np.asarray(tree[name], np.float64) for tree in (params, wanted))
        off = np.abs(mine - other) - 2.0**-8 * np.abs(other)
        assert (off > 1e-4).mean() <= 1e-4
        assert off.max() <= STEPS * 1e-2 / 8
    # If the smallest value of a group of ExpandedFP8 is rounded to the next code, the group gets
    # another power at the next step, and with it other codes. On an H200 0.4 % of codes differed,
    # and 46 % of powers by more than 1e-5.
    share, rtol = (3e-2, 5e-2) if isinstance(moments, ExpandedFP8) else (1e-3, 1e-5)
    for mine, other in zip(jax.tree.leaves(state), jax.tree.leaves(kept), strict=True):
        if mine.dtype.itemsize == 1:
            same = mine == other
        else:
            same = np.isclose(np.float64(mine), np.float64(other), rtol=rtol, atol=1e-12)
        assert (~same).mean() <= share, (mine.dtype, mine.shape, (~same).mean())
