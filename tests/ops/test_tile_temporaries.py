"""What matmuls of tiles hold in memory, read in the program that XLA compiles for CPUs.

Nothing that grows with the tiles.
"""

import math
import re

import jax
import jax.numpy as jnp
import pytest

import jaxfp8 as fp8

RECIPES = {
    "blockwise": fp8.recipes.blockwise(),
    "blockwise, float32 scales": fp8.recipes.blockwise(power_of_two=False),
    "mxfp8": fp8.recipes.mxfp8(),
    "mxfp8, 2D weights": fp8.recipes.mxfp8(w_tile_dim=2),
}
INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?\S+ = (\w+)\[([\d,]+)\]\S* ([\w\-]+)\((.*)$", re.MULTILINE
)
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*?\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def on_a_cpu():
    if jax.default_backend() != "cpu":
        pytest.skip("reads the program of XLA:CPU")


def compiled(function, *shapes):
    return (
        jax.jit(function)
        .lower(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
        .compile()
    )


def instructions(text):
    """(dtype, shape, operation, rest) of all instructions, those inside of fusions too."""
    for dtype, shape, operation, rest in INSTRUCTION.findall(text):
        yield dtype, tuple(int(size) for size in shape.split(",")), operation, rest


def some(*few):
    """All recipes. Those that are not named are slow: they have the loops of one that is."""
    return [pytest.param(name, marks=() if name in few else pytest.mark.slow) for name in RECIPES]


LOOPS = "blockwise", "blockwise, float32 scales", "mxfp8"


@pytest.mark.parametrize("cells", [8, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", some(*LOOPS))
def test_nothing_as_large_as_a_product_for_each_tile(recipe, cells):
    recipe = RECIPES[recipe]
    M, K, N = 256, cells * recipe.tile, 384
    program = compiled(lambda x, w: fp8.dot(x, w, recipe=recipe), (M, K), (K, N))
    largest = max(math.prod(shape) for _, shape, _, _ in instructions(program.as_text()))
    # Operands and products; a product for each tile would be cells * M * N.
    assert largest <= max(M * K, K * N, M * N) < cells * M * N
    assert program.memory_analysis().temp_size_in_bytes < 4 * cells * M * N


def outside_fusions(text):
    """Instructions whose results are arrays in memory: of the entry, and of the bodies of loops."""
    inside = set(re.findall(r"calls=%?([\w.\-]+)", text)) | set(
        re.findall(r"to_apply=%?([\w.\-]+)", text)
    )
    for _, name, body in COMPUTATION.findall(text):
        if name not in inside:
            yield from instructions(body)


PLUMBING = ("get-tuple-element", "parameter", "copy", "bitcast", "tuple")  # of loops
PRODUCT = {"fprop": "y", "dgrad": "dx", "wgrad": "dw"}


@pytest.mark.parametrize("name", some(*LOOPS))
def test_no_operand_in_float32(name):
    """Forward and backward of a bfloat16 layer.

    In float32 are y, dx and dw only, before they are rounded (in a loop over tiles the sum and the
    partial product).
    """
    recipe = RECIPES[name]
    M, K, N = 384, 512, 640  # so that x, w and y differ in size

    def step(x, w, g):
        y, backward = jax.vjp(lambda x, w: fp8.dot(x, w, recipe=recipe), x, w)
        return y, backward(g)

    text = compiled(step, (M, K), (K, N), (M, N)).as_text()
    sizes = {M * N: "y", M * K: "dx", K * N: "dw"}
    seen = set()
    for dtype, shape, operation, rest in outside_fusions(text):
        tensor = sizes.get(math.prod(shape))
        if dtype not in ("f32", "s32", "u32") or tensor is None or operation in PLUMBING:
            continue
        scope = re.search(r'op_name="([^"]*)"', rest)[1]
        matmul = re.search(r"jaxfp8\.(\w+)\)*/(?:.*dot_general|while/body/.*add|mul)$", scope)
        seen.add(tensor if matmul and PRODUCT[matmul[1]] == tensor else (tensor, scope))
    assert seen == {"y", "dx", "dw"}


@pytest.mark.parametrize("name", some("blockwise"))
def test_no_operand_in_float32_forward(name):
    M, K, N = 384, 512, 640
    text = compiled(lambda x, w: fp8.dot(x, w, recipe=RECIPES[name]), (M, K), (K, N)).as_text()
    wide = {
        math.prod(shape)
        for dtype, shape, *_ in outside_fusions(text)
        if dtype in ("f32", "s32", "u32")
    }
    assert not wide & {M * K, K * N}
