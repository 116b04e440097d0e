"""What `fp8.plan.roofline` and the choice of backends know of grouped matmuls."""

import dataclasses

import numpy as np
import pytest

import jaxfp8 as fp8
from jaxfp8.kernels.grouped_matmul._groups import _tile_count
from jaxfp8.plan._backends import grouped_backends, tile_rows

SHAPE = (32768, 4096, 2048)


def estimate(groups, recipe=None, shape=SHAPE, chip="h200", **of):
    recipe = recipe or fp8.recipes.blockwise()
    return fp8.plan.roofline(shape, recipe=recipe, kernels=fp8.Kernels(chip, **of), groups=groups)


def test_bf16_reads_each_matrix_once():
    m, k, n = SHAPE
    for groups in (1, 8, 64):
        found = estimate(groups)
        assert found.fprop.bf16.bytes == 2 * (m * k + groups * k * n + m * n)
        assert found.fprop.bf16.flops == 2 * m * k * n
        assert found.wgrad.bf16.bytes == 2 * (m * k + groups * k * n + m * n)


def test_operations_are_those_of_the_rows_and_half_a_tile_for_each_group():
    m, k, n = SHAPE
    for groups in (8, 64):
        assert estimate(groups).fprop.recipe.flops == 2 * (m + groups * 64) * k * n


def test_more_groups_gain_less():
    gains = [estimate(groups).speedup for groups in (4, 16, 64)]
    assert gains == sorted(gains, reverse=True)


def test_the_loop_reads_the_matrix_of_a_group_for_each_tile():
    m, k, n = SHAPE
    loop = estimate(8, matmuls="xla")
    steps = m // tile_rows(m, 8, 128) + 8
    assert loop.fprop.recipe.bytes > steps * k * n
    assert loop.fprop.how.endswith("in a loop")


def test_the_table_names_the_groups():
    assert str(estimate(8)).startswith("[32768, 4096] @ [8, 4096, 2048], blockwise on h200")


@pytest.mark.parametrize("groups", [0, -1, 2.0, "8", True])
def test_wrong_numbers_of_groups_are_refused(groups):
    with pytest.raises(ValueError, match="groups="):
        estimate(groups)


def test_a_number_of_groups_may_be_numpy_s():
    assert estimate(np.int64(8)) == estimate(8)


@pytest.mark.parametrize("side", [None, 32, 128])
@pytest.mark.parametrize("groups", [1, 8, 256])
def test_rows_of_a_tile_hold_whole_tiles_of_values_and_waste_little(groups, side):
    for average in (512, 4096, 32768):
        rows = tile_rows(groups * average, groups, side)
        assert rows % (side or 1) == 0
        assert rows <= 1024
        # the worst sizes, over the tokens: the bound of padding
        assert _tile_count(groups * average, groups, rows) * rows <= 1.26 * groups * average


def test_rows_of_a_tile():
    assert [tile_rows(65536, 8, 128), tile_rows(65536, 64, None), tile_rows(8, 8, 32)] == [
        1024, 256, 32
    ]  # fmt: skip


def test_backends_by_name_and_by_chip():
    recipe = fp8.recipes.rowwise(high_precision_wgrad=True)
    found = grouped_backends("h200", None, None, recipe, SHAPE, 8)
    assert found.fprop[0] == "mosaic"
    assert found.wgrad == ("xla",)
    assert grouped_backends("h200", "xla", "reference", recipe, SHAPE, 8).fprop == ("reference",)
    assert grouped_backends(None, None, None, recipe, SHAPE, 8).fprop == ("xla",)
    assert grouped_backends("b200", None, None, fp8.recipes.mxfp8(), SHAPE, 8).fprop[0] == "cudnn"


def test_kernels_multiply_experts_on_a_tpu_7x():
    """They take no scales of tiles, and no other TPU multiplies E4M3."""
    recipes = fp8.recipes
    kernel, loop = ("ragged_dot", "xla"), ("xla",)
    in_place = ("mosaic_tpu", *kernel)
    found = {
        chip: grouped_backends(chip, None, None, recipes.current(), SHAPE, 8)[:3]
        for chip in ("tpu7x", "v6e", "v5p", "v5e")
    }
    assert found.pop("tpu7x") == (in_place,) * 3
    assert set(found.values()) == {(loop,) * 3}
    high = recipes.rowwise(high_precision_wgrad=True)
    # What reads rows where they are multiplies all three or none.
    mixed = dataclasses.replace(recipes.current(), wgrad=recipes.rowwise().wgrad)
    for recipe, wanted in (
        (recipes.delayed(), (in_place,) * 3),
        (mixed, (kernel,) * 3),
        (recipes.rowwise(), (kernel,) * 3),
        (high, (kernel, kernel, loop)),
        (recipes.blockwise(), (loop,) * 3),
        (recipes.mxfp8(), (loop,) * 3),
        (recipes.identity(), (loop,) * 3),
    ):
        assert grouped_backends("tpu7x", None, None, recipe, SHAPE, 8)[:3] == wanted
    assert grouped_backends("tpu7x", None, "xla", recipes.current(), SHAPE, 8)[:3] == (loop,) * 3


def test_the_roofline_of_experts_on_a_tpu_7x():
    m, k, n = SHAPE
    by_kernel = estimate(8, fp8.recipes.current(), chip="tpu7x")
    by_loop = estimate(8, fp8.recipes.current(), chip="tpu7x", matmuls="xla")
    assert [by_kernel.wgrad.how, by_loop.wgrad.how[-9:]] == ["FP8", "in a loop"]
    assert by_kernel.fprop.recipe.flops == 2 * (m + 8 * 256) * k * n  # a block a group
    assert by_kernel.speedup > by_loop.speedup


def test_groups_of_any_average_size_need_no_second_padding():
    """Blocks of rows are aligned, so the gain grows with the tokens of an expert."""
    shapes = [(8 * average, 4096, 2048) for average in (1088, 1100, 1152)]
    gains = [estimate(8, shape=shape).speedup for shape in shapes]
    assert max(gains) < 1.03 * min(gains)
