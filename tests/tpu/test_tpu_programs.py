"""`assert_fp8_gemms` and the memory of a program, on programs that the compiler of TPUs wrote."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tpu_targets import TOPOLOGIES, array, compile_for, topology

import jaxfp8 as fp8
from jaxfp8.kernels._dispatch import CHIPS
from jaxfp8.programs._fp8_gemms import _MULTIPLIES_E4M3, _find_gemms
from jaxfp8.programs._memory import _buffers_of

pytestmark = pytest.mark.tpu

E4M3, E5M2, BFLOAT16 = fp8.E4M3.dtype, fp8.E5M2.dtype, jnp.bfloat16


def multiply(x, w):
    with jax.named_scope("jaxfp8.fprop"):
        return jax.lax.dot(x, w, preferred_element_type=jnp.float32)


# The chip, the dtypes, rows of x, and the matmuls in FP8 and in high precision.
MATMULS = {
    "E4M3": ("tpu7x", E4M3, E4M3, 256, (1, 0)),
    "a gradient": ("tpu7x", E5M2, E4M3, 256, (1, 0)),
    "one operand": ("tpu7x", BFLOAT16, E4M3, 256, (0, 1)),
    "E4M3 on v6e": ("v6e", E4M3, E4M3, 256, (0, 1)),
    "E5M2 on v6e": ("v6e", E5M2, E5M2, 256, (1, 0)),
    "E4M3 on v5p": ("v5p", E4M3, E4M3, 256, (0, 1)),
    "E4M3 on v5e": ("v5e", E4M3, E4M3, 256, (0, 1)),
    "a row, which becomes a sum": ("tpu7x", E4M3, E4M3, 1, (0, 0)),
}


@pytest.mark.parametrize("row", MATMULS)
def test_matmuls(row):
    chip, lhs, rhs, rows, expected = MATMULS[row]
    compiled = compile_for(chip, multiply, array(rows, 512, dtype=lhs), array(512, 256, dtype=rhs))
    gemms = _find_gemms(compiled)
    assert (len(gemms.fp8), len(gemms.high_precision)) == expected
    if expected == (1, 0):
        fp8.programs.assert_fp8_gemms(compiled)


@pytest.mark.parametrize(("dtype", "expected"), [(E4M3, (1, 0)), (BFLOAT16, (0, 1))])
def test_ragged_dot(dtype, expected):
    def grouped(x, w, sizes):
        with jax.named_scope("jaxfp8.fprop"):
            return jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)

    arrays = array(512, 256, dtype=dtype), array(4, 256, 256, dtype=dtype)
    gemms = _find_gemms(compile_for("tpu7x", grouped, *arrays, array(4, dtype=jnp.int32)))
    assert (len(gemms.fp8), len(gemms.high_precision)) == expected


def test_a_convolution_of_the_model_is_no_matmul():
    layer = nn.Conv(64, (3, 3), dtype=jnp.bfloat16)
    x = array(8, 16, 16, 32)
    params = jax.eval_shape(layer.init, jax.random.key(0), x)
    compiled = compile_for("tpu7x", layer.apply, params, x)
    assert " convolution(" in compiled.as_text()
    assert _find_gemms(compiled) == ((), ())


def test_live_bytes_are_those_that_xla_allocates():
    """Two arrays of 100 MiB, too large for the memory on the chip."""

    def both(x):
        return jnp.multiply(*jax.lax.optimization_barrier((jnp.tanh(x), jnp.sin(x))))

    compiled = compile_for("tpu7x", both, array(8192, 32, 100, dtype=jnp.float32))
    found = _buffers_of(compiled.as_text())
    live = sum(buffer.bytes for buffer in found.live(found.peak))
    assert live == 2 * 4 * 8192 * 32 * 100
    assert live <= compiled.memory_analysis().temp_size_in_bytes <= 1.05 * live


@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_what_jax_calls_a_chip(chip):
    (kind,) = {device.device_kind for device in topology(chip).devices}
    assert _MULTIPLIES_E4M3[kind] == CHIPS[chip].fp8_matmul


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v6e", "v5p", "v5e"])
def test_tpus_without_fp8_multiply_pairs_of_e5m2(chip):
    """E4M3 is widened inside of the matmul, so it is as slow as bfloat16. E5M2 is not."""

    def cycles(dtype):
        operands = [array(4096, 4096, dtype=dtype)] * 2
        text = compile_for(chip, multiply, *operands).as_text()
        return sum(map(int, re.findall(r'estimated_cycles":"(\d+)"', text)))

    bfloat16 = cycles(BFLOAT16)
    assert cycles(E4M3) > 0.95 * bfloat16
    assert cycles(E5M2) < {"v6e": 0.8, "v5p": 0.55, "v5e": 0.55}[chip] * bfloat16


def test_memory_report():
    """It compiles the step for the device that its types name."""
    recipe = fp8.recipes.current()

    def step(w, x):
        loss = lambda w: jnp.sum(jnp.square(fp8.dot(x, w, recipe=recipe)).astype(jnp.float32))
        return jax.value_and_grad(loss)(w)

    here = jax.sharding.SingleDeviceSharding(topology("v5e").devices[0])
    w, x = (
        jax.ShapeDtypeStruct(shape, BFLOAT16, sharding=here) for shape in ((512, 2048), (8, 512))
    )
    rows = {row.kind: row for row in fp8.memory_report(step, w, x).rows}
    assert rows["weights"].fp8 == rows["gradients"].fp8 == 2 * 512 * 2048


def test_an_optimizer_reads_weights_as_they_are():
    # XLA would compute transposed gradients, and transpose weights and moments for AdamW.
    recipe, tx = fp8.recipes.delayed(), optax.adamw(1e-4)
    d, f = 512, 1024

    @functools.partial(jax.checkpoint, policy=fp8.save_fp8_residuals())
    def block(x, w, state):
        dot = functools.partial(fp8.dot, recipe=recipe)
        normed = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True))
        hidden = jax.nn.silu(dot(normed, w["gate"], state=state["gate"]))
        hidden *= dot(normed, w["up"], state=state["up"])
        return x + dot(hidden, w["down"], state=state["down"])

    def loss(params, states, x):
        for each in zip(params, states, strict=True):
            x = block(x, *each)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    def step(params, moments, states, x):
        _, grads, states = fp8.value_and_grad(loss)(params, states, x)
        updates, moments = tx.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, states

    shapes = {"gate": (d, f), "up": (d, f), "down": (f, d)}
    params = [{name: array(*shape) for name, shape in shapes.items()}] * 3
    state = fp8.settle(jax.eval_shape(lambda: fp8.init_state(recipe)))
    states = [dict.fromkeys(shapes, state)] * 3
    moments = jax.eval_shape(tx.init, params)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        text = compile_for("tpu7x", step, params, moments, states, array(1024, d)).as_text()
    transposed = rf"= bf16\[(?:{d},{f}|{f},{d})\]\{{0,1:\S+ "
    assert re.search(rf"= bf16\[{d},{f}\]\{{1,0:\S+ parameter", text)
    assert not re.findall(rf"{transposed}(?:copy|fusion)\(", text)


def gradient_of_weight(x, w):
    return jax.grad(lambda w: jnp.sum(fp8.dot(x, w, recipe=fp8.recipes.current())))(w)


def test_weights_of_64_bits_have_gradients():
    with jax.enable_x64(True):
        operands = array(64, 32, dtype=jnp.float64), array(32, 16, dtype=jnp.float64)
        compile_for("tpu7x", gradient_of_weight, *operands)


def test_a_forward_pass_is_exported():
    forward = jax.jit(lambda x, w: fp8.dot(x, w, recipe=fp8.recipes.current()))
    jax.export.export(forward, platforms=["tpu"])(array(8, 16), array(16, 32))


def test_a_backward_pass_is_exported():
    """With the argument that docs/limits.md names, because of the constraint on its layout."""
    check = jax.export.DisabledSafetyCheck.custom_call("LayoutConstraint")
    exported = jax.export.export(
        jax.jit(gradient_of_weight), platforms=["cpu", "tpu"], disabled_checks=[check]
    )(array(8, 16), array(16, 32))
    x, w = jnp.ones((8, 16), jnp.bfloat16), jnp.ones((16, 32), jnp.bfloat16)
    np.testing.assert_array_equal(exported.call(x, w), gradient_of_weight(x, w))


def test_a_weight_is_cast_before_wgrad():
    """Otherwise XLA may copy the weight: it fuses an optimizer's step into wgrad, in place."""

    def lowered(gradient, platform):
        traced = jax.jit(gradient).trace(array(8, 16), array(16, 32))
        return traced.lower(lowering_platforms=(platform,)).as_text()

    def of_frozen(x, w):  # nothing writes w, and a scan would copy it for the barrier
        return jax.grad(lambda x: jnp.sum(fp8.dot(x, w, recipe=fp8.recipes.current())))(x)

    together = r"optimization_barrier .* : tensor<16x32xf8E4M3FN>, tensor<8x32xf8E5M2>"
    assert re.search(together, lowered(gradient_of_weight, "tpu"))
    assert not re.search(together, lowered(gradient_of_weight, "cpu"))
    assert not re.search(together, lowered(of_frozen, "tpu"))


def test_features_with_heads_take_no_longer_than_flat_ones():
    """Row-major copies of [tokens, heads, features of a head] would take 14 % longer."""
    b, t, d, h, e = 4, 512, 1024, 8, 128
    recipe = fp8.recipes.current()

    def cycles(project):
        loss = lambda x, w: jnp.sum(jnp.square(project(x, w).astype(jnp.float32)))
        program = compile_for("tpu7x", jax.grad(loss, (0, 1)), array(b, t, d), array(d, h, e))
        return fp8.programs.tpu_cycles(program).total

    with_heads = cycles(lambda x, w: fp8.einsum("btd,dhe->bthe", x, w, recipe=recipe))
    flat = cycles(lambda x, w: fp8.dot(x, w.reshape(d, h * e), recipe=recipe))
    assert with_heads < 1.06 * flat
