"""Chips without FP8 matmuls that XLA reaches.

The portable path compiles, or at least lowers, and the count is 0.
"""

import re

import jax
import pytest
from targets import array, compile_for, dense_step, state_of

import jaxfp8 as fp8

RECIPES = ("delayed", "current", "rowwise")
M, K, N = 256, 128, 64


def arguments(recipe):
    return array(M, K), array(K, N), array(M, N), state_of(recipe)


@pytest.mark.deviceless
@pytest.mark.parametrize("name", RECIPES)
def test_a100(name):
    recipe = fp8.recipes.get(name)
    compiled = compile_for(
        "a100",
        dense_step(recipe),
        *arguments(recipe),
        options=fp8.Kernels("a100").compiler_options(recipe),
    )
    fp8.programs.assert_fp8_gemms(compiled, 0)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu"])
@pytest.mark.parametrize("name", RECIPES)
def test_lowering(name, platform):
    recipe = fp8.recipes.get(name)
    lowered = (
        jax.jit(dense_step(recipe)).trace(*arguments(recipe)).lower(lowering_platforms=(platform,))
    )
    text = lowered.as_text()
    dots = re.findall(
        r"stablehlo\.dot_general .*: \(tensor<[\dx]*(\w+)>, tensor<[\dx]*(\w+)>\)", text
    )
    assert len(dots) == 3
    if platform == "tpu":  # TPUs have no float64, and their matmuls read the bare FP8 values
        assert "f64" not in text
        assert all(dtype.startswith("f8E") for pair in dots for dtype in pair), dots
