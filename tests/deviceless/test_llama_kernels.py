"""The kernels that a step of the scanned layers of Llama starts, beside those of bf16.

The figures: benchmarks/programs/programs.py --model llama.
"""

import llama
import pytest
from program import Program

pytestmark = pytest.mark.deviceless

MESH = 2, 4
# Kernels of delayed scaling over those of bf16. FP8 shards of two weights are transposed for their
# gather, in each layer and pass. bf16 transposes all stacked weights once.
MOST = {"auto": 1.67, "manual": 1.66}
# The all-reduces of amaxes, and how often each runs. In `shard_map` amaxes leave the loop before
# they are reduced. The forward pass has no amax, because its casts need none.
MAXIMA = {"auto": [llama.LAYERS], "manual": [1]}


def program(name, **how):
    step = llama.compile_step(llama.RECIPES[name], *MESH, remat=llama.KEEP_PRODUCTS, **how)
    return Program(step.as_text())


@pytest.mark.parametrize("mesh", MOST)
def test_delayed(mesh):
    delayed, bf16 = (program(name, manual=mesh == "manual") for name in ("delayed", "bf16"))
    ratio = delayed.launches(delayed.entry) / bf16.launches(bf16.entry)
    assert ratio <= MOST[mesh] + 0.005
    assert [found.times for found in delayed.maxima(delayed.entry)] == MAXIMA[mesh]


def test_residuals():
    """A loop that keeps FP8 residuals saves no stored scale, and one array of amaxes a matmul."""
    step = llama.compile_step(llama.RECIPES["delayed"], *MESH, remat=llama.KEEP_RESIDUALS)
    delayed = Program(step.as_text())
    (body,) = {
        computation
        for computation, instruction, _ in delayed.runs(delayed.entry)
        if instruction.is_fp8_matmul and "jaxfp8.fprop" in instruction.attributes
    }
    saved = [
        instruction.type
        for instruction in delayed.instructions(body)
        if f"f32[{llama.LAYERS}" in instruction.type and instruction.is_kernel
    ]
    assert len(saved) == len(llama.WEIGHTS), saved
    assert all(f"f32[{llama.LAYERS},3]" in type for type in saved), saved
