"""The copies of a gradient that a mesh gathers: matmuls with one scale share a copy."""

import pytest

import jaxfp8 as fp8
from jaxfp8._geometry import TrainingGeometry
from jaxfp8.recipes._recipe import plan_casts

MATMUL = TrainingGeometry.of((((1,), (0,)), ((), ())), 2, 2)


@pytest.mark.parametrize(
    ("recipe", "written", "gathered"),
    [("current", 2, 1), ("delayed", 2, 1), ("rowwise", 2, 2), ("blockwise", 2, 2), ("mxfp8", 2, 2)],
)
def test_a_kernel_that_writes_transposed_copies(recipe, written, gathered):
    """It writes one copy for each matmul. Two copies with one scale would double the bytes."""
    recipe = getattr(fp8.recipes, recipe)()

    def copies(gathered):
        planned = plan_casts(recipe, MATMUL, "g", ("mosaic", "xla"), gathered=gathered)
        return sum(len(each.readers) for each in planned)

    assert (copies(gathered=False), copies(gathered=True)) == (written, gathered)
