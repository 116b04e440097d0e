"""What XLA makes of an update with master weights for an H200."""

import jax
import jax.numpy as jnp
import optax
import pytest
from targets import array, compile_for

from jaxfp8.optim import BFloat16Plus, Float16, Float32, with_master_weights

pytestmark = [pytest.mark.deviceless, pytest.mark.usefixtures("standard_promotion")]
N = 1024


def fusions_of(master):
    """The lines of the entry that call a fusion, and the bytes of temporary arrays."""
    tx = with_master_weights(optax.sgd(1e-3), master=master)

    def step(grads, opt_state, params):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    weight = array(N, N)
    compiled = compile_for("h200", step, weight, jax.eval_shape(tx.init, weight), weight)
    lines = [line for line in compiled.as_text().splitlines() if " fusion(" in line]
    return lines, compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize(
    "master", [Float32(), BFloat16Plus(), BFloat16Plus(bits=8)], ids=["32", "16", "8"]
)
def test_an_update_on_gpus_is_one_kernel(master):
    """No float32 array is written, except a float32 master weight."""
    lines, temporary = fusions_of(master)
    (line,) = lines
    result = line.split(" fusion(")[0]
    assert (f"f32[{N},{N}]" in result) == (master == Float32())
    assert temporary < N


def test_float16_is_rounded_on_gpus_before_the_weight_is():
    """XLA has not folded float32 -> float16 -> float32 away: the weight is read from float16."""
    lines, temporary = fusions_of(Float16())
    (values,) = [line.split()[0] for line in lines if f"= f16[{N},{N}]" in line]
    (weight,) = [line for line in lines if f"= u16[{N},{N}]" in line]
    assert f"({values}," in weight
    assert temporary < N * N * jnp.dtype(jnp.float16).itemsize
