"""`fp8.plan.roofline(weight_casts=0)` counts about the bytes of a layer with FP8 weights."""

import dataclasses

import jax
import pytest
from program import Program
from targets import array, compile_for
from test_roofline_traffic import IN_TILES, RECIPES, K, M, N, by_xla

import jaxfp8 as fp8
from jaxfp8.ops._quantize_params import _quantize_weight
from jaxfp8.weights import WeightAxes
from jaxfp8.weights._quantized_weight import handle

pytestmark = pytest.mark.deviceless

STATELESS = [name for name in RECIPES if name not in ("identity", "delayed")]
CASES = [(by_xla(chip), name) for chip in ("h200", "b200") for name in STATELESS]
CASES += [(fp8.Kernels("h200"), name) for name in IN_TILES]
DEFAULT = [(by_xla("h200"), "current"), (by_xla("b200"), "rowwise"), (by_xla("h200"), "mxfp8")]


def moved(recipe, kernels):
    """Bytes that the compiled layer reads and writes, forward and backward."""
    weight = jax.eval_shape(
        lambda w: _quantize_weight(w, recipe, WeightAxes(), primary=True), array(K, N)
    )

    def step(x, weight, g):
        def layer(x, original):
            held = dataclasses.replace(weight, original=original)
            return fp8.dot(x, held, recipe=recipe, kernels=kernels)

        y, pull_back = jax.vjp(layer, x, handle(weight))
        return y, *pull_back(g)

    options = kernels.compiler_options(recipe)
    compiled = compile_for(kernels.chip, step, array(M, K), weight, array(M, N), options=options)
    program = Program(compiled.as_text())
    return program.traffic(program.entry)


@pytest.mark.parametrize(
    ("kernels", "name"),
    [
        pytest.param(*case, id=f"{case[0]}-{case[1]}", marks=() if case in DEFAULT else
                     pytest.mark.slow)
        for case in CASES
    ],
)  # fmt: skip
def test_bytes(kernels, name):
    recipe = RECIPES[name]()
    how = {"recipe": recipe, "kernels": kernels}
    held = fp8.plan.roofline((M, K, N), **how, weight_casts=0)
    assert held.total.recipe.bytes == pytest.approx(moved(recipe, kernels), rel=0.09)
    cast = fp8.plan.roofline((M, K, N), **how)
    assert held.total.recipe.bytes < 0.99 * cast.total.recipe.bytes
