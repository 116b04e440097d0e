"""What a trained layer reads and writes on a GPU.

In the steady state each tensor once, and nothing in float32.
"""

import functools
import math
import re

import pytest
from program import SHAPE, Program
from targets import array, compile_for, dense_step, state_of

import jaxfp8 as fp8

pytestmark = pytest.mark.deviceless

M, K, N = 1024, 512, 256
TENSORS = {"x": (M, K), "w": (K, N), "g": (M, N)}
RECIPES = {
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
    "static": fp8.recipes.static(x_scale=0.1, w_scale=0.3, g_scale=0.7),
    "rowwise": fp8.recipes.rowwise(),
    "rowwise, wgrad in high precision": fp8.recipes.rowwise(high_precision_wgrad=True),
}


@functools.cache
def trained(name, chip, settled=True):
    recipe = RECIPES[name]
    state = state_of(recipe, settled=settled)
    arguments = *(array(*shape) for shape in TENSORS.values()), state
    return compile_for(
        chip, dense_step(recipe), *arguments, options=fp8.Kernels(chip).compiler_options(recipe)
    )


@functools.cache
def program(name, chip, settled=True):
    return Program(trained(name, chip, settled).as_text())


@pytest.mark.parametrize("chip", ["h200", "b200"])
@pytest.mark.parametrize("tensor", TENSORS)
def test_delayed_scaling_reads_a_tensor_once(tensor, chip):
    settled, unsettled = (program("delayed", chip, settled) for settled in (True, False))
    parameter = "bf16[{},{}]".format(*TENSORS[tensor])
    (kernel,) = settled.readers(settled.entry, parameter)
    assert re.search(r"\(.*u8\[", kernel.type)  # the cast, and beside it in the same kernel
    assert re.search(r"\b(bf16|f32|u16)\[\d*\]", kernel.type)  # the amax, or its first stage
    assert len(unsettled.readers(unsettled.entry, parameter)) == 2


def test_an_amax_that_is_collected_costs_no_traffic():
    # On Blackwell, where no transposes stand between, the steady state moves what static scaling
    # does.
    delayed, static = program("delayed", "b200"), program("static", "b200")
    warm = delayed.traffic(delayed.entry)
    assert warm == pytest.approx(static.traffic(static.entry), rel=0.01)


@pytest.mark.parametrize("chip", ["h200", "b200"])
@pytest.mark.parametrize("name", RECIPES)
def test_no_float32_copy_of_an_operand(name, chip):
    compiled, text = trained(name, chip), program(name, chip)
    smallest = min(map(math.prod, TENSORS.values()))
    for kernel in text.kernels(text.entry):
        for dtype, shape in SHAPE.findall(kernel.type):
            size = math.prod(int(n) for n in shape.split(",") if n)
            assert dtype not in ("f32", "u32", "s32") or size < smallest, kernel
    # Room for: two layouts of each tensor in FP8, two results in bfloat16 (unscaled, of rowwise),
    # workspaces of 4 MiB.
    room = (
        2 * sum(map(math.prod, TENSORS.values()))
        + 2 * 2 * max(map(math.prod, TENSORS.values()))
        + 3 * 2**22
        + 2**20
    )
    assert compiled.memory_analysis().temp_size_in_bytes <= room


def test_quotients_are_float64():
    # XLA compiles a float32 division to div.full.f32, which is not correctly rounded. A quotient in
    # float64 is rounded to float32 by an operation that XLA cannot drop.
    text = program("delayed", "h200")
    divisions = 0
    for computation in text.computations.values():
        for instruction in computation.values():
            if instruction.op == "divide":
                divisions += 1
                assert instruction.type.startswith("f64"), instruction
                users = [user for user in computation.values() if instruction.name in user.operands]
                assert all(user.op == "reduce-precision" for user in users), users
    assert divisions
