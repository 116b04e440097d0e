"""Every feature compiles for a TPU 7x. Matmuls of tensors and rows read FP8, and no cast is lost.

`python benchmarks/programs/tpu_features.py` prints the table for all chips.
"""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
import tpu_program
from tpu_matmuls import Feature, array, dense, fake, one, preset
from tpu_targets import topology

import jaxfp8 as fp8

pytestmark = [pytest.mark.tpu, pytest.mark.usefixtures("standard_promotion")]

ROWS = tpu_program.features()
QUICK = {
    "recipe: delayed()",
    "recipe: rowwise()",
    "recipe: mxfp8()",
    "recipe: current(gradient_rounding=stochastic)",
    "jax: donated arguments, delayed",
    "optim: adamw, BFloat16()",
    "optim: master weights, Float16()",
}
MULTIPLY = ("recipe:", "op:", "jax:", "linen:", "nnx:", "convert:", "diagnostics:", "mesh:")
NEEDS_TRITON = "optim: fused_adamw, Int8()"  # a kernel for GPUs; on TPUs XLA does its work


def devices():
    return list(topology("tpu7x").devices)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ROWS],
)
def test_a_feature_compiles(name):
    if name == NEEDS_TRITON:
        pytest.importorskip("jax_triton")
    row = tpu_program.measure(ROWS[name](devices()), devices(), control=False)
    assert not row["float64"]
    assert (row["matmuls"] > 0) >= name.startswith(MULTIPLY)
    if not tpu_program.TILES.search(name):
        assert row["fp8"] == row["matmuls"]


def test_quick_rows_are_rows():
    assert set(ROWS) > QUICK | {NEEDS_TRITON}


def test_a_matmul_in_bfloat16_is_seen():
    def function(x, w):
        with jax.named_scope("jaxfp8.fprop"):
            return x @ w

    row = tpu_program.measure(
        Feature(function, (array(128, 128), array(128, 256))), devices(), control=False
    )
    assert (row["fp8"], row["matmuls"]) == (0, 1)


def test_a_float64_is_seen():
    text = "HloModule m\n\nENTRY %main () -> f64[] {\n  ROOT %c = f64[] constant(1)\n}\n"
    assert tpu_program.read(text).float64 == 1


@pytest.mark.parametrize(
    "make",
    [one(dense, preset("current")), one(fake, fp8.E4M3, fp8.PerTensor())],
    ids=["matmuls", "fake_quantize"],
)
def test_no_cast_is_folded_away(make):
    feature = make(devices())
    casts = tpu_program.read(tpu_program.lower(feature, devices()).compile().as_text()).casts
    assert casts
    assert not tpu_program.folded(feature, devices(), casts)
    lost = min(casts)
    assert tpu_program.folded(feature, devices(), casts - Counter({lost: 1})) == [str(lost)]


def test_barriers_follow_casts():
    lowered = tpu_program.lower(
        Feature(lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32), (array(8, 128),)),
        devices(),
    )
    assert tpu_program.add_barriers(lowered) == 1
    operations = re.findall(r" = stablehlo\.(\w+)", lowered.as_text())
    assert operations == ["convert", "optimization_barrier", "convert"]
