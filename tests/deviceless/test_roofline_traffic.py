"""The bytes that `fp8.roofline` counts are those that a compiled layer moves."""

import functools

import jax
import pytest
from program import Program
from targets import array, compile_for, dense_step, state_of

import jaxfp8 as fp8

pytestmark = pytest.mark.deviceless

# large enough for XLA not to split sums, or to keep copies of what it reads twice
M, K, N = 8192, 4096, 14336
PORTABLE = {
    "identity": fp8.recipes.identity,
    "static": functools.partial(fp8.recipes.static, x_scale=0.1, w_scale=0.3, g_scale=0.7),
    "delayed": fp8.recipes.delayed,
    "current": fp8.recipes.current,
    "rowwise": fp8.recipes.rowwise,
    "rowwise, wgrad in high precision": functools.partial(
        fp8.recipes.rowwise, high_precision_wgrad=True
    ),
    "blockwise": fp8.recipes.blockwise,
    "mxfp8": fp8.recipes.mxfp8,
    "mxfp8, w 32x32": functools.partial(fp8.recipes.mxfp8, w_tile_dim=2),
}
BLOCK_SCALED = ("blockwise", "mxfp8", "mxfp8, w 32x32")
CASES = [(chip, name, None) for chip in ("h200", "b200") for name in PORTABLE]
CASES += [("b200", name, "b200") for name in BLOCK_SCALED]
CASES += [("a100", name, None) for name in ("static", "current", "blockwise")]


def plain_step(recipe):
    """Forward and backward with g as it comes: nothing reads y."""

    def step(x, w, g):
        y, pull_back = jax.vjp(functools.partial(fp8.dot, recipe=recipe), x, w)
        return y, *pull_back(g)

    return step


def moved(recipe, chip, m, k, n):
    """Bytes that the compiled layer reads and writes."""
    tensors = array(m, k), array(k, n), array(m, n)
    options = fp8.compiler_options(recipe, chip)
    if not recipe.rows:
        program = Program(
            compile_for(chip, plain_step(recipe), *tensors, options=options).as_text()
        )
        return program.traffic(program.entry)
    program = Program(
        compile_for(chip, dense_step(recipe), *tensors, state_of(recipe), options=options).as_text()
    )
    return program.traffic(program.branches()[0]) - 2 * m * n  # the loss reads y


@pytest.mark.parametrize(("chip", "name", "made_for"), CASES)
def test_bytes(chip, name, made_for):
    recipe = PORTABLE[name](chip=made_for) if made_for else PORTABLE[name]()
    estimate = fp8.roofline((M, K, N), recipe=recipe, chip=chip)
    assert estimate.total.recipe.bytes == pytest.approx(moved(recipe, chip, M, K, N), rel=0.03)


@pytest.mark.parametrize("shape", [(4096, 2056, 1000), (4096, 2048, 1000), (4100, 2048, 1024)])
def test_padding(shape):
    recipe = fp8.recipes.current()
    estimate = fp8.roofline(shape, recipe=recipe, chip="h200")
    assert estimate.total.recipe.bytes == pytest.approx(moved(recipe, "h200", *shape), rel=0.15)


# MiB of a layer [8192, 5120] @ [5120, 13824] when casts ended in a conversion, which XLA folded
# away in tiles.
WITH_CONVERSIONS = {
    "delayed": 1940,
    "current": 2155,
    "rowwise": 4335,
    "blockwise": 3217,
    "mxfp8": 3717,
}


@pytest.mark.parametrize("name", WITH_CONVERSIONS)
def test_rounding_moves_no_byte(name):
    recipe = fp8.recipes.get(name)
    assert moved(recipe, "h200", 8192, 5120, 13824) / 2**20 <= WITH_CONVERSIONS[name] + 0.5
