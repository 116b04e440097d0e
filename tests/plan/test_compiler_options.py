"""What XLA is told.

cuBLASLt for FP8 matmuls, rounding as written where no scale suffers, and amaxes that are sent as
they are.
"""

import dataclasses

import pytest

import jaxfp8 as fp8
from jaxfp8.kernels._dispatch import CHIPS

STATIC = {"x_scale": 0.1, "w_scale": 0.1, "g_scale": 0.1}
BY_CUBLASLT = {"xla_gpu_enable_triton_gemm": False}
AS_WRITTEN = {"xla_allow_excess_precision": False}
NOT_COPIED = {"xla_disable_hlo_passes": "all-reduce-contiguous"}  # amaxes that span devices
COMPILER_OPTIONS = {  # recipe -> for GPUs with FP8 matmuls, for those without
    "identity": ({}, {}),
    "delayed": (BY_CUBLASLT | NOT_COPIED, NOT_COPIED),
    "current": (BY_CUBLASLT | NOT_COPIED, NOT_COPIED),
    "static": (BY_CUBLASLT, {}),
    "rowwise": (BY_CUBLASLT | AS_WRITTEN | NOT_COPIED, AS_WRITTEN | NOT_COPIED),
    "blockwise": (AS_WRITTEN, AS_WRITTEN),
    "mxfp8": (AS_WRITTEN, AS_WRITTEN),
}


@pytest.mark.parametrize("chip", CHIPS)
def test_compiler_options(chip):
    for name, (with_units, without) in COMPILER_OPTIONS.items():
        on_a_gpu = with_units if CHIPS[chip].fp8_matmul else without
        expected = on_a_gpu if CHIPS[chip].platform == "cuda" else {}
        recipe = fp8.recipes.get(name, **(STATIC if name == "static" else {}))
        assert fp8.Kernels(chip).compiler_options(recipe) == expected
        # They follow from recipe and chip alone.
        assert fp8.Kernels(chip, casts="xla").compiler_options(recipe) == expected


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_scales_that_bfloat16_holds_may_be_rounded(name):
    """Excess precision is what keeps other scales of whole tensors in float32 on their way to
    cuBLASLt.
    """
    exact = fp8.recipes.get(name, power_of_two=True)
    assert fp8.Kernels("h200").compiler_options(exact) == BY_CUBLASLT | AS_WRITTEN | NOT_COPIED
    mixed = dataclasses.replace(exact, dgrad=fp8.recipes.get(name).dgrad)
    assert fp8.Kernels("h200").compiler_options(mixed) == BY_CUBLASLT | NOT_COPIED


@pytest.mark.parametrize("matmul", ["fprop", "dgrad", "wgrad"])
def test_one_matmul_with_scales_that_bfloat16_rounds(matmul):
    by_float32 = getattr(fp8.recipes.current(), matmul)
    recipe = dataclasses.replace(fp8.recipes.current(power_of_two=True), **{matmul: by_float32})
    assert fp8.Kernels("h200").compiler_options(recipe) == BY_CUBLASLT | NOT_COPIED
