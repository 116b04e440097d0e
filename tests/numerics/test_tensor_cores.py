"""Sums of Hopper's tensor cores beside the definition of T-FDPA, written again with integers.

`tests/silicon` compares the same function with MMA-Sim.
"""

from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfp8.numerics._tensor_cores import wgmma

FORMATS = {
    "E4M3": (ml_dtypes.float8_e4m3fn, 3, -6),
    "E5M2": (ml_dtypes.float8_e5m2, 2, -14),
}
multiply = jax.jit(wgmma)


def exponent_of(value, least):
    """That of a finite value that is not 0; `least` for smaller ones."""
    return max(int(np.frexp(np.float64(value))[1]) - 1, least)


def truncated(value, unit):
    """Toward zero, to a multiple of the unit, in exact arithmetic."""
    count = abs(value) // unit
    return count * unit if value >= 0 else -count * unit


def sum_of(a, b, c, lowest):
    """c plus the 32 products of a and b, as arXiv 2511.10909 defines T-FDPA with F = 13."""
    terms = [
        (
            Fraction(float(x)) * Fraction(float(y)),
            exponent_of(x, lowest[0]) + exponent_of(y, lowest[1]),
        )
        for x, y in zip(a, b, strict=True)
        if x != 0 and y != 0
    ]
    if c != 0:
        terms.append((Fraction(float(c)), exponent_of(c, -126)))
    if not terms:
        return np.float32(0)
    total = sum(
        truncated(value, 2 ** Fraction(max(e for _, e in terms) - 13)) for value, _ in terms
    )
    if total == 0:
        return np.float32(0)
    return np.float32(float(truncated(total, 2 ** Fraction(exponent_of(float(total), -126) - 13))))


def values(name, seed, count, *, spread, one_sign, rare):
    dtype, _, _ = FORMATS[name]
    random = np.random.default_rng(seed)
    x = random.standard_normal(count) * 2.0 ** random.integers(-spread, spread + 1, count)
    x = np.abs(x) if one_sign else x
    return np.clip(np.where(random.random(count) < rare, 0, x), -448, 448).astype(dtype)


@given(
    lhs=st.sampled_from([*FORMATS]),
    rhs=st.sampled_from([*FORMATS]),
    seed=st.integers(0, 2**20),
    spread=st.sampled_from([0, 3, 8, 16]),
    one_sign=st.booleans(),
    rare=st.sampled_from([0.0, 0.5, 0.97]),
)
def test_is_the_definition(lhs, rhs, seed, spread, one_sign, rare):
    kind = {"spread": spread, "one_sign": one_sign, "rare": rare}
    a = values(lhs, seed, (2, 96), **kind)
    b = values(rhs, seed + 1, (3, 96), **kind)
    lowest = FORMATS[lhs][2], FORMATS[rhs][2]
    expected = np.zeros((2, 3), np.float32)
    for row in range(2):
        for column in range(3):
            for k in range(0, 96, 32):
                step = slice(k, k + 32)
                expected[row, column] = sum_of(
                    a[row, step], b[column, step], expected[row, column], lowest
                )
    np.testing.assert_array_equal(multiply(a, b), expected)


def test_goes_on_with_an_accumulator():
    a, b = (values("E4M3", n, (4, 64), spread=4, one_sign=False, rare=0.0) for n in (0, 1))
    first = multiply(a[:, :32], b[:, :32])
    np.testing.assert_array_equal(multiply(a[:, 32:], b[:, 32:], first), multiply(a, b))


def test_ones_are_lost():
    """2^14 plus 32 ones: each is truncated away."""
    ones = np.ones((1, 32), ml_dtypes.float8_e4m3fn)
    assert multiply(ones, ones, jnp.full((1, 1), 2.0**14)) == 2.0**14
    assert multiply(ones, ones, jnp.full((1, 1), 2.0**13)) == 2.0**13 + 32


@pytest.mark.parametrize(
    ("bad", "other", "expected"),
    [(np.nan, 1, np.nan), (np.inf, 1, np.inf), (np.inf, 0, np.nan), (-np.inf, 2, -np.inf)],
)
def test_what_is_not_finite(bad, other, expected):
    a, b = (np.ones((1, 32), ml_dtypes.float8_e5m2) for _ in range(2))
    a[0, 3], b[0, 3] = bad, other
    result = np.asarray(multiply(a, b))
    np.testing.assert_array_equal(result, np.full((1, 1), expected, np.float32))
    if np.isnan(expected):
        assert result.view(np.uint32) == 0x7FFFFFFF


def test_a_sum_of_zeros_is_a_positive_zero():
    a = np.full((1, 32), -0.0, ml_dtypes.float8_e4m3fn)
    b = np.ones((1, 32), ml_dtypes.float8_e4m3fn)
    assert np.asarray(multiply(a, b)).view(np.uint32) == 0


@pytest.mark.parametrize(("lhs", "rhs"), [((2, 33), (2, 33)), ((2, 32), (2, 64))])
def test_refuses(lhs, rhs):
    with pytest.raises(ValueError, match="multiples of 32"):
        wgmma(jnp.zeros(lhs, jnp.float8_e4m3fn), jnp.zeros(rhs, jnp.float8_e4m3fn))
