"""A layer whose casts are kernels, compiled for an H200.

Each tensor is cast once, and XLA transposes nothing.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import needs_mosaic
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from targets import dense_step, state_of, topology

import jaxfp8 as fp8

pytestmark = [pytest.mark.deviceless, needs_mosaic]

TOKENS, D, F = 1024, 512, 2048
KERNEL = "mosaic_gpu"


def program(recipe, **kernels):
    mesh = Mesh(np.array(topology("h200").devices), ("d",), axis_types=(AxisType.Auto,))

    def dot(x, w, state):
        return fp8.dot(x, w, recipe=recipe, state=state, kernels=fp8.Kernels(**kernels))

    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P()))
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((TOKENS, D), (D, F), (TOKENS, F))
    ]
    state = state_of(recipe)
    with jax.set_mesh(mesh):
        step = jax.jit(
            dense_step(recipe, dot), compiler_options=fp8.Kernels("h200").compiler_options(recipe)
        )
        return step.lower(*jax.tree.map(place, (*arrays, state))).compile().as_text()


def big_fp8_transposes(text):
    """Instructions outside of kernels that write a turned copy of FP8 values of a whole operand."""
    bodies = dict(re.findall(r"^%?(\S+) \([^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    return [
        line.strip()
        for body in bodies.values()
        for line in body.splitlines()
        if re.search(r"= f8e\dm\d\w*\[\d+,\d+\]\S* (transpose|copy)\(", line)
    ]


@pytest.mark.parametrize(
    "recipe",
    [fp8.recipes.current(), fp8.recipes.rowwise(), fp8.recipes.delayed()],
    ids=lambda recipe: recipe.name,
)
def test_copies_lie_as_their_matmuls_read_them(recipe):
    assert big_fp8_transposes(program(recipe, casts="xla"))  # what the kernels save
    text = program(recipe, casts="mosaic")
    assert not big_fp8_transposes(text)
    assert text.count(f'custom_call_target="{KERNEL}') == 3
    assert text.count("__cublas$lt$matmul$f8") == 3


def test_scales_of_weights_lie_as_their_matmuls_read_them():
    text = program(fp8.recipes.blockwise(), casts="mosaic", matmuls="mosaic")
    assert text.count(f'custom_call_target="{KERNEL}') == 6
    # One scale for each tile of 128 x 128. fprop reads them by columns of w, and dgrad by rows.
    scales = re.compile(r"= f32\[(?:1,)?(?:4,16|16,4)\]\S* (\w+)\(")
    assert not {"transpose", "copy", "fusion"} & {*scales.findall(text)}
