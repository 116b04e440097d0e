"""Hopper's matmul of tiles of 32 (MXFP8), interpreted.

A float64 product of what the operands stand for, and no races.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts.test_scaled_matmul_backends import distance, product
from contracts.test_scaled_matmul_tiles import MATRICES, made, tensor, tensors
from interpreter import interpreted, needs_mosaic
from kernels.scaled_matmul.test_mosaic_matmul import (
    CLOSE,
    ROUNDED,
    integers,
    mosaic,
    run,
    tiled,
    tilings,
)

import jaxfp8 as fp8

pytestmark = needs_mosaic
M, K, N = 136, 272, 200  # ragged in tiles of 128 and of 32
slow = functools.partial(pytest.param, marks=pytest.mark.slow)

# shapes, tiles, dimension numbers, scales
FORMS = {
    "fprop": ((M, K), (K, N), (1, 32), (32, 32), MATRICES, "E8M0"),
    "fprop 1D": ((M, K), (K, N), (1, 32), (32, 1), MATRICES, "E8M0"),
    "few rows": ((3, 70), (70, 40), (1, 32), (32, 1), MATRICES, "E8M0"),
    "dgrad": ((M, N), (K, N), (1, 32), (32, 32), (((1,), (1,)), ((), ())), "float32"),
    "wgrad": ((150, 40), (150, 72), (32, 1), (32, 1), (((0,), (0,)), ((), ())), "float32"),
    "2D @ 1D": ((40, 100), (100, 72), (32, 32), (32, 1), MATRICES, "power of two"),
    "experts": (
        (2, 40, 130),
        (2, 130, 72),
        (1, 32),
        (32, 32),
        (((2,), (1,)), ((0,), (0,))),
        "E8M0",
    ),
    "tiles of 64": ((8, 200), (200, 40), (1, 64), (64, 1), MATRICES, "float32"),
    "two contracted": (
        (3, 150, 40),
        (3, 150, 72),
        (32, 1),
        (32, 1),
        (((1, 0), (1, 0)), ((), ())),
        "E8M0",
    ),
    "two kept": ((40, 130), (130, 3, 24), (1, 32), (32, 1, 1), MATRICES, "E8M0"),
    "tiles of 128 in bytes": ((40, 200), (200, 72), (1, 128), (128, 128), MATRICES, "E8M0"),
}
DEFAULT = ("fprop", "few rows", "wgrad")


@pytest.mark.parametrize("form", [form if form in DEFAULT else slow(form) for form in FORMS])
def test_forms(form):
    *parts, dimension_numbers, scales = FORMS[form]
    lhs, rhs = tensors(parts[:2], parts[2:], scales)
    y = run(lhs, rhs, dimension_numbers)
    exact = product(lhs, rhs, dimension_numbers)
    assert (y.shape, y.dtype) == (exact.shape, jnp.float32)
    assert distance(y, exact) <= CLOSE


@pytest.mark.slow
def test_formats_and_results():
    tiles = fp8.PerBlock((1, 32)), fp8.PerBlock((32, 32))
    lhs, rhs = (
        tensor(0, (40, 200), tiles[0], "E8M0"),
        tensor(1, (200, 72), tiles[1], "E8M0", format=fp8.E5M2),
    )
    y = run(lhs, rhs, out=jnp.bfloat16)
    assert y.dtype == jnp.bfloat16
    assert distance(y, product(lhs, rhs)) <= ROUNDED


@pytest.mark.parametrize(
    ("name", "rhs_tile"),
    [
        ((name, tile) if (name, tile[1]) == ("large", 32) else slow(name, tile))
        for name in tilings()
        if name != "wide"
        for tile in ((32, 32), (32, 1))
    ],
)
def test_every_tiling_has_the_exact_bits(name, rhs_tile):
    lhs, rhs = integers(0, (264, 384), (1, 32)), integers(1, (384, 200), rhs_tile)
    np.testing.assert_array_equal(interpreted(tiled(name), lhs, rhs), product(lhs, rhs))


def bytes_of(byte, shape):
    return np.full(shape, byte, np.uint8)


# The smallest byte of which a CPU sees a normal number; what byte 0 becomes is below.
@pytest.mark.parametrize(("left", "right"), [(1, 247), slow(247, 1), slow(254, 1)])
def test_bytes_at_the_ends(left, right):
    random = np.random.default_rng(0)
    values = [random.integers(-8, 9, shape) for shape in ((4, 64), (64, 5))]
    lhs = made(values[0], bytes_of(left, (4, 2)), fp8.PerBlock((1, 32)), True)
    rhs = made(values[1], bytes_of(right, (2, 5)), fp8.PerBlock((32, 1)), True)
    np.testing.assert_array_equal(run(lhs, rhs), product(lhs, rhs))


def test_every_byte_becomes_its_power_of_two():
    from jaxfp8.kernels.scaled_matmul.hopper._scaling import float32_of_bytes

    found = np.asarray(jax.jit(float32_of_bytes)(jnp.arange(256, dtype=jnp.uint8)))
    np.testing.assert_array_equal(
        found[:255].view(np.uint32), np.ldexp(np.float32(1), np.arange(-127, 128)).view(np.uint32)
    )
    assert np.isnan(found[255])


@pytest.mark.parametrize("tile", [(32, 32), (32, 1)], ids=["square", "columns"])
def test_nan_scales_show_where_they_are_and_huge_ones_times_zero_are_zero(tile):
    cells = fp8.PerBlock(tile).scale_shape((64, 40))
    scales = bytes_of(250, (8, 2)), bytes_of(250, cells)
    scales[0][3, 1] = scales[1][1, -1] = 255
    lhs = made(np.zeros((8, 64)), scales[0], fp8.PerBlock((1, 32)), True)
    y = run(lhs, made(np.ones((64, 40)), scales[1], fp8.PerBlock(tile), True))
    want = np.zeros((8, 40))
    want[3], want[:, 32 if tile[1] == 32 else 39 :] = np.nan, np.nan
    np.testing.assert_array_equal(y, want)


@pytest.mark.slow
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_wrong_scale_shows(side, axis):
    operands = tensors(((40, 130), (130, 72)), ((1, 32), (32, 32)), "E8M0")
    wrong = list(operands)
    wrong[side] = dataclasses.replace(
        operands[side], scale=jnp.roll(operands[side].scale, 1, axis=axis)
    )
    assert distance(run(*wrong), product(*operands)) > 0.1


@pytest.mark.slow  # with E8M0 also in contracts/test_scaled_matmul_add_to.py
def test_vmap():
    kinds = (((9, 150), fp8.PerBlock((1, 32))), ((150, 40), fp8.PerBlock((32, 32))))
    experts = [
        [tensor(2 * i + side, *kind, "E8M0") for side, kind in enumerate(kinds)] for i in range(2)
    ]
    stacked = [
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_side)
        for of_side in zip(*experts, strict=True)
    ]
    for y, (lhs, rhs) in zip(
        interpreted(jax.jit(jax.vmap(mosaic)), *stacked), experts, strict=True
    ):
        assert distance(y, product(lhs, rhs)) <= CLOSE
