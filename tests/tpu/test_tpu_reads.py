"""In programs for a TPU 7x a cast and the amax of its tensor are one fusion: one read of it."""

import jax
import jax.numpy as jnp
import pytest
from tpu_targets import array, compile_for

import jaxfp8 as fp8

pytestmark = pytest.mark.tpu

X, W, G = array(2048, 1024), array(1024, 4096), array(2048, 4096)


def report_of(recipe, forward, *, settled=True):
    """`tpu_cycles` of y, dx and dw, and of the next state, for a given gradient of y."""
    state = jax.eval_shape(lambda: fp8.init_state(recipe))
    state = fp8.settle(state) if settled else state

    def step(x, w, g, state):
        def loss(params, state):
            return jnp.sum(forward(recipe, state, *params) * g)

        return fp8.value_and_grad(loss)((x, w), state)

    return fp8.programs.tpu_cycles(compile_for("tpu7x", step, X, W, G, state))


def layer(recipe, state, x, w):
    return fp8.dot(x, w, recipe=recipe, state=state)


def after_gelu(recipe, state, x, w):
    return layer(recipe, state, jax.nn.gelu(x), w)


@pytest.mark.parametrize("forward", [layer, after_gelu])
def test_a_tensor_is_read_once(forward):
    report = report_of(fp8.recipes.delayed(), forward)
    assert not report.only("amax").rows
    assert report.only("cast").rows


@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise"])
def test_amaxes_that_a_cast_needs_come_first(recipe):
    """Control: their reads are seen, so the test above can fail."""
    report = report_of(getattr(fp8.recipes, recipe)(), layer, settled=False)
    assert len([row for row in report.only("amax").rows if row.cycles > 5000]) == 3
