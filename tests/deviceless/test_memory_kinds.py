"""Bytes of a train step on an H200: a scan over layers, with and without rematerialization.

Compiled, not run.
"""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from pages import ROOT, fences, marked
from targets import state_of, topology

import jaxfp8 as fp8
from jaxfp8.diagnostics._memory_report import memory_report

pytestmark = [pytest.mark.deviceless, pytest.mark.usefixtures("standard_promotion")]

L, B, D = 6, 512, 256  # layers, rows of the batch, features
X, W, MASK = L * B * D, L * D * D, L * B * D  # of values that a scan stacks; ReLU keeps a mask
# Bytes of residuals: in FP8, and in bfloat16, whose weights are arguments.
KEPT = {
    "no": (X + W + MASK, 2 * X + MASK),
    "all": (2 * X, 2 * X),
    "save_fp8_residuals": (X, 2 * X),  # weights are cast again, see its `weights=False`
}


@pytest.mark.parametrize("remat", KEPT)
def test_residuals_of_a_scan(remat):
    recipe, tx = fp8.recipes.delayed(), optax.adamw(1e-3)
    policy = fp8.save_fp8_residuals() if remat == "save_fp8_residuals" else None

    def loss(w, state, x):
        def layer(x, ws):
            w, state = ws
            return jax.nn.relu(fp8.dot(x, w, recipe=recipe, state=state)), None

        body = layer if remat == "no" else jax.checkpoint(layer, policy=policy)
        y, _ = jax.lax.scan(body, x, (w, state))
        return jnp.mean(y.astype(jnp.float32) ** 2)

    def step(w, opt_state, state, x):
        value, grads, state = fp8.value_and_grad(loss)(w, state, x)
        updates, opt_state = tx.update(grads, opt_state, w)
        return value, optax.apply_updates(w, updates), opt_state, state

    w, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((L, D, D), (B, D)))
    given = w, jax.eval_shape(tx.init, w), state_of(recipe, L, settled=False), x
    there = jax.sharding.SingleDeviceSharding(topology("h200").devices[0])
    given = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=there), given)
    report = memory_report(jax.jit(step, donate_argnums=(0, 1, 2)), *given)
    assert report.twin is not None
    assert report.fp8["residuals"] == pytest.approx(KEPT[remat][0], rel=0.01)
    assert report.twin["residuals"] == pytest.approx(KEPT[remat][1], rel=0.01)
    assert report.fp8["gradients"] == report.twin["gradients"] == 2 * W
    assert report.fp8["weights"] == 2 * W
    assert report.fp8["moments"] == 2 * 2 * W + 4


def test_the_table_of_the_page():
    """The first code of docs/memory.md, with types on an H200, gives the table below it."""
    code = next(fences((ROOT / "docs" / "memory.md").read_text(), "python")).code
    before, compiling = code.split("types = jax.eval_shape(start)\n")
    namespace = {}
    exec(before, namespace)
    there = jax.sharding.SingleDeviceSharding(topology("h200").devices[0])
    namespace["types"] = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=there),
        jax.eval_shape(namespace["start"]),
    )
    exec(compiling, namespace)
    printed, found = (
        [re.split(r"\s{2,}", line) for line in text.splitlines()]
        for text in (marked("memory on an H200"), str(namespace["report"]))
    )
    assert printed[0] == found[0]
    for page, now in zip(printed[1:], found[1:], strict=True):
        assert page[0] == now[0]
        numbers = [[float(cell.strip("<")) for cell in line[1:3]] for line in (page, now)]
        # Compilers differ in temporaries.
        assert numbers[1] == pytest.approx(numbers[0], rel=0.02, abs=0.2)
