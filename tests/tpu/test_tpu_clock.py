"""`tpu_cycles` on programs that the compiler of TPUs wrote: loops, and kinds of instructions."""

import jax
import jax.numpy as jnp
import pytest
from tpu_targets import array, compile_for

import jaxfp8 as fp8

pytestmark = pytest.mark.tpu

LAYERS = 6
X, W = array(1024, 2048), array(LAYERS, 2048, 2048)


def layer(x, w):
    return jnp.tanh(x @ w), None


def scanned(x, w):
    return jax.lax.scan(layer, x, w)[0]


def unrolled(x, w):
    for i in range(LAYERS):
        x, _ = layer(x, w[i])
    return x


def gradients(f):
    return jax.grad(lambda w, x: f(x, w).astype(jnp.float32).sum())


@pytest.mark.parametrize("backward", [False, True])
def test_a_scan_has_the_matmuls_of_an_unrolled_loop(backward):
    reports = []
    for f in (scanned, unrolled):
        compiled = compile_for("tpu7x", *((gradients(f), W, X) if backward else (f, X, W)))
        reports.append(fp8.programs.tpu_cycles(compiled))
    runs = [sum(row.times for row in each.only("matmul").rows) for each in reports]
    # The first layer has no dgrad. A scan computes it all the same.
    assert runs == ([3 * LAYERS, 3 * LAYERS - 1] if backward else [LAYERS, LAYERS])
    one, other = (each.by_kind["matmul"] / count for each, count in zip(reports, runs, strict=True))
    assert one == pytest.approx(other, rel=0.15)
    # A SparseCore may transpose the weights for the scan.
    assert {row.kind for each in reports for row in each.unknown} <= {"sparsecore"}


def test_a_layer():
    """Three matmuls, and casts of x and w. The gradient of y is cast where it is computed."""
    recipe = fp8.recipes.delayed()
    state = fp8.settle(jax.eval_shape(lambda: fp8.init_state(recipe)))

    def loss(params, state):
        y = fp8.dot(*params, recipe=recipe, state=state)
        return jnp.square(y.astype(jnp.float32)).sum()

    step = lambda x, w, state: fp8.value_and_grad(loss)((x, w), state)
    compiled = compile_for("tpu7x", step, array(2048, 2048), array(2048, 4096), state)
    report = fp8.programs.tpu_cycles(compiled)
    assert [len(report.only(kind).rows) for kind in ("matmul", "collective")] == [3, 0]
    large = [row for row in report.rows if row.cycles > 10_000]
    kinds = [row.kind for row in large]
    assert kinds.count("cast") >= 2
    assert sum(row.total for row in large) > 0.8 * report.total
    assert not report.unknown


def test_kernels_sorts_and_loops_are_unknown():
    def f(x, w, sizes):
        x = jax.lax.while_loop(lambda x: x[0, 0] < 3, lambda x: jnp.sin(x), x)
        return jax.lax.ragged_dot(jnp.sort(x, axis=0), w, sizes)

    operands = array(1024, 512), array(4, 512, 512), array(4, dtype=jnp.int32)
    unknown = fp8.programs.tpu_cycles(compile_for("tpu7x", f, *operands)).unknown
    assert {"kernel", "loop", "rest"} <= {row.kind for row in unknown}
    assert any(row.op_name.endswith("ragged-dot-none") for row in unknown)
