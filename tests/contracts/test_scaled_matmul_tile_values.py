"""Scaled matmuls of operands in tiles, at the ends of float32: scales, values, inf and NaN."""

import numpy as np
import pytest
from contracts.test_scaled_matmul_backends import CLOSE, distance, product
from contracts.test_scaled_matmul_tiles import SCALES, made, multiply, quantize, some

import jaxfp8 as fp8


def filled(value, shape, dtype=np.float32):
    return np.full(shape, value, dtype)


# Scales of lhs and rhs at the ends of their range, whose product is an ordinary number.
EXTREMES = {
    "float32, powers of two": (filled(2.0**120, (4, 2)), filled(2.0**-124, (2, 5))),
    "float32": (filled(1.1 * 2.0**120, (4, 2)), filled(1.3 * 2.0**-124, (2, 5))),
    "float32, the other way": (filled(1.1 * 2.0**-124, (4, 2)), filled(1.3 * 2.0**118, (2, 5))),
    "float32 and powers of two": (filled(1.1 * 2.0**120, (4, 2)), filled(2.0**-126, (2, 5))),
    "E8M0, byte 0": (filled(0, (4, 2), np.uint8), filled(247, (2, 5), np.uint8)),
    "E8M0, largest": (filled(247, (4, 2), np.uint8), filled(0, (2, 5), np.uint8)),
    "both smallest": (filled(2.0**-63, (4, 2)), filled(1.1 * 2.0**-62, (2, 5))),
}


@pytest.mark.parametrize(
    ("extreme", "scales", "backend"), list(some(EXTREMES, ["those"], fast=("those",)))
)
def test_extreme_scales(extreme, scales, backend):
    """Values of 2 to 100.

    Under the smallest scale they are normal numbers still, under the largest one finite.
    """
    random = np.random.default_rng(0)
    values = [
        np.copysign(random.integers(2, 100, shape), random.standard_normal(shape))
        for shape in ((4, 64), (64, 5))
    ]
    lhs, rhs = (
        made(v, s, fp8.PerBlock(tile), s.dtype == np.uint8 or bool(np.all(np.frexp(s)[0] == 0.5)))
        for v, s, tile in zip(values, EXTREMES[extreme], ((1, 32), (32, 1)), strict=True)
    )
    y = multiply(lhs, rhs, backend)
    assert np.isfinite(y).all()
    assert distance(y, product(lhs, rhs)) <= CLOSE


@pytest.mark.parametrize(
    ("largest", "scales", "backend"), list(some((np.finfo(np.float32).max, 3e38)))
)
def test_the_largest_numbers_times_zero(largest, scales, backend):
    """A power-of-two scale rounds the largest float32 up to 2^128, which no factor of a product may
    become.
    """
    x = np.full((3, 64), largest, np.float32)
    x[1] = [1, -1] * 32
    lhs = quantize(x, fp8.E4M3, fp8.PerBlock((1, 32)), **SCALES[scales])
    w = np.zeros((64, 33), np.float32)
    w[5, 1], w[40, 1] = 1e-9, 3e-9
    rhs = quantize(w, fp8.E4M3, fp8.PerBlock((32, 32)), **SCALES[scales])
    y = multiply(lhs, rhs, backend)
    np.testing.assert_array_equal(np.delete(np.asarray(y), 1, axis=1), 0.0)
    np.testing.assert_allclose(y[::2, 1], 4e-9 * largest, rtol=0.07)


@pytest.mark.parametrize(("bad", "scales", "backend"), list(some((np.nan, np.inf))))
def test_what_is_not_finite_shows(bad, scales, backend):
    """In the rows and columns that read its tile, and nowhere else."""
    x, w = np.ones((4, 70), np.float32), np.ones((70, 70), np.float32)
    x[1, 66], w[40, 3] = bad, bad
    lhs = quantize(x, fp8.E4M3, fp8.PerBlock((1, 32)), **SCALES[scales])
    rhs = quantize(w, fp8.E4M3, fp8.PerBlock((32, 32)), **SCALES[scales])
    finite = np.isfinite(multiply(lhs, rhs, backend))
    want = np.ones((4, 70), bool)
    want[1] = False
    want[:, : 32 if scales == "E8M0" else 4] = False  # a NaN scale speaks for its whole tile
    if scales != "E8M0":
        want[[0, 2, 3], :3] = True
    np.testing.assert_array_equal(finite, want)
