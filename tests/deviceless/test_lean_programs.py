"""The small kernels of delayed scaling, for scales and states, in programs compiled for an H200."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from fusions import fusions_of
from program import Program, size_of
from targets import array, program_for, state_of

import jaxfp8 as fp8
from jaxfp8.state._together import _MOST_STACKED

pytestmark = pytest.mark.deviceless

SIDE = 512
FEW, MANY = 4, _MOST_STACKED  # layers: one stack of states each
RECIPE = fp8.recipes.delayed()


@functools.cache
def program_of(layers: int) -> Program:
    """A step with settled states and gradients of all weights."""

    def loss_fn(weights, state, x):
        for w, own in zip(weights, state, strict=True):
            x = jax.nn.relu(fp8.dot(x, w, recipe=RECIPE, state=own))
        return jnp.sum(x.astype(jnp.float32) ** 2)

    weights, state = [array(SIDE, SIDE)] * layers, [state_of(RECIPE)] * layers
    step = fp8.value_and_grad(loss_fn)
    options = fp8.Kernels("h200").compiler_options(RECIPE)
    return program_for("h200", step, weights, state, array(SIDE, SIDE), options=options)


def small_kernels(program: Program) -> Counter[str]:
    """Kernels that write little and do not finish an amax, by kind."""
    kinds: Counter[str] = Counter()
    for kernel in program.kernels(program.entry):
        operations = program.inside(program.entry, kernel) if kernel.op == "fusion" else [kernel]
        finishes_amax = kernel.type.startswith("bf16[]") and any(
            each.op == "reduce" for each in operations
        )
        if size_of(kernel.type) < 2**16 and not finishes_amax:
            kinds[re.sub(r"[.\d]+$", "", kernel.name)] += 1
    return kinds


def test_more_layers_need_no_more_kernels_for_scales():
    few, many = (small_kernels(program_of(layers)) for layers in (FEW, MANY))
    assert few.total() <= 12, few
    assert many.total() <= few.total(), (few, many)


def test_equal_layers_are_equal_kernels():
    """The first and the last layer differ from the others. All others have the same kernels."""
    few, many = (fusions_of(program_of(layers)) for layers in (FEW, MANY))
    assert many.fusions > few.fusions + 4 * (MANY - FEW)
    assert many.different == few.different


def test_the_matmuls_read_scales_where_they_were_written():
    """One kernel writes all scales, each to memory of its own. No kernel copies them."""
    program = program_of(MANY)
    matmuls, writers = program.fp8_matmuls(program.entry), set()
    for matmul in matmuls:
        scales = [
            name
            for name in matmul.operands
            if program.computations[program.entry][name].type.startswith("f32[")
        ]
        for name in scales:
            part = program.source(program.entry, name)
            assert part.op == "get-tuple-element", part
            writers.add(part.operands[0])
    assert len(matmuls) == 3 * MANY - 1  # the gradient of the first input is not needed
    assert len(writers) == 1, writers


def test_fusions_are_compared():
    """Names do not count. A constant, a slice, an operation and what a reduction combines do."""
    body = """
%NAME (a: f32[4]) -> f32[2] {
  %a.NAME = f32[4]{0} parameter(0), metadata={op_name="NAME"}
  %c.NAME = f32[4]{0} constant(CONSTANT)
  %z.NAME = f32[] constant(0)
  %r.NAME = f32[] reduce(%c.NAME, %z.NAME), dimensions={0}, to_apply=%COMBINER
  %w.NAME = f32[4]{0} broadcast(%r.NAME), dimensions={}
  %b.NAME = f32[4]{0} OPERATION(%a.NAME, %w.NAME)
  ROOT %s.NAME = f32[2]{0} slice(%b.NAME), slice={[SLICE]}
}
"""
    combiner = """
%NAME (l: f32[], r: f32[]) -> f32[] {
  %l.NAME = f32[] parameter(0)
  %r.NAME = f32[] parameter(1)
  ROOT %o.NAME = f32[] OPERATION(%l.NAME, %r.NAME)
}
"""
    words = "NAME", "CONSTANT", "OPERATION", "SLICE", "COMBINER"
    rows = [
        ("first", "{1, 2}", "add", "0:2", "larger"),
        ("same", "{1, 2}", "add", "0:2", "larger"),
        ("constant", "{1, 3}", "add", "0:2", "larger"),
        ("slice", "{1, 2}", "add", "2:4", "larger"),
        ("operation", "{1, 2}", "multiply", "0:2", "larger"),
        ("combiner", "{1, 2}", "add", "0:2", "summed"),
    ]
    text, entry = "HloModule m\n", "ENTRY %main (x: f32[4]) -> f32[2] {\n"
    entry += "  %x = f32[4]{0} parameter(0)\n"
    for name, operation in (("larger", "maximum"), ("summed", "add")):
        text += combiner.replace("NAME", name).replace("OPERATION", operation)
    for row in rows:
        of = body
        for word, by in zip(words, row, strict=True):
            of = of.replace(word, by)
        text += of
        entry += f"  %f.{row[0]} = f32[2]{{0}} fusion(%x), kind=kLoop, calls=%{row[0]}\n"
    assert fusions_of(Program(text + entry + "}\n")) == (6, 5, 3)
