"""The grouped kernel of experts gives the predicted bits, as `test_bits_of_kernels.py` has it."""

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))
import predicted
from interpreter import needs_mosaic
from kernels.grouped_matmul.grouped_cases import GEOMETRY, RECIPES, operands
from silicon import mmasim_cores, modeled
from silicon.operands import same_bits

from jaxfp8.kernels.scaled_matmul._call import MatmulCall

pytestmark = [pytest.mark.silicon, needs_mosaic]
SIZES, TOKENS, WIDTH = (130, 0, 60, 10), 220, 96
RULES = {"float32_scales": predicted.tiles(128), "mxfp8": predicted.tiles(32)}


def some(*names):
    """The first name by default; the others are slow."""
    return [names[0], *(pytest.param(name, marks=pytest.mark.slow) for name in names[1:])]


@pytest.mark.parametrize("name", some("float32_scales", "mxfp8", "rowwise", "current"))
def test_experts_by_rows(name):
    """Each row of a group times its matrix; zeros for rows of no group."""
    lhs, rhs, groups = given("fprop", name)
    got = modeled.bits(grouped("fprop"), lhs, rhs, groups)
    wanted = np.zeros((TOKENS, WIDTH), np.float32)
    places = (np.asarray(x) for x in (groups.matrix, groups.first_row, groups.live_rows))
    for tile, (matrix, first, rows) in enumerate(zip(*places, strict=True)):
        one = of_stack(lhs, tile), of_stack(rhs, matrix)
        wanted[first : first + rows] = of_group(name, *one, (True, False))[:rows]
    same_bits(got, wanted)


@pytest.mark.parametrize("name", some("current", "float32_scales"))
def test_experts_by_groups(name):
    """The gradients of matrices: the rows of each group are its K."""
    lhs, rhs, groups = given("wgrad", name)
    got = modeled.bits(grouped("wgrad"), lhs, rhs, groups)
    assert got.shape == (len(SIZES), 136, WIDTH)
    for group, (first, count) in enumerate(zip(groups.first_tile, groups.tiles, strict=True)):
        if not count:
            assert not got[group].any()
            continue
        one = [rows_of_stack(q, int(first), int(count)) for q in (lhs, rhs)]
        same_bits(got[group], of_group(name, *one, (False, False)))


def given(matmul, name):
    """Operands of a recipe, made in one program. They are on the host."""
    made = jax.jit(lambda: operands(matmul, RECIPES[name], SIZES, TOKENS, 136, WIDTH))
    return jax.device_get(made())


def grouped(matmul):
    from jaxfp8.kernels.grouped_matmul import _mosaic

    call = MatmulCall(geometry=GEOMETRY[matmul], out_dtype=jnp.dtype(jnp.float32))
    return jax.jit(lambda *given: _mosaic.grouped_matmul(*given, call))


def of_stack(stack, index):
    return jax.tree.map(lambda leaf: leaf[index], stack)


def rows_of_stack(stack, first, count):
    """Tiles of rows below each other, as one matrix. One scale holds for all, or one for each."""
    part = jax.tree.map(lambda leaf: leaf[first : first + count], stack)
    join = lambda x: x.reshape(-1, *x.shape[2:])
    scale = join(part.scale) if part.granularity.in_tiles else part.scale[0]
    return dataclasses.replace(part, values=join(part.values), scale=scale)


def of_group(name, lhs, rhs, last):
    """The prediction for two matrices; `last` says whether K is the last axis of each."""
    rule = RULES.get(name, predicted.FULL)
    pairs = [predicted.matrix(q, at, rule) for q, at in zip((lhs, rhs), last, strict=True)]
    return predicted.predicted(*zip(*pairs, strict=True), rule, mmasim_cores.hopper)
