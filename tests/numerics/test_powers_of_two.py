import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hard_tiles import hard_amaxes
from ml_dtypes import float8_e8m0fnu

from jaxfp8.numerics._exact import factors_of, power_of_two
from jaxfp8.numerics._formats import E4M3, E5M2
from jaxfp8.numerics._scale import _scale_exponent, _to_e8m0

AMAXES = hard_amaxes(np.float32)
AMAXES = AMAXES[AMAXES >= oracle.TINY].astype(np.float32)
EAGER_AND_JIT = pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])


@EAGER_AND_JIT
def test_power_of_two(transform):
    exponents = np.arange(-126, 128, dtype=np.int32)
    np.testing.assert_array_equal(
        transform(power_of_two)(jnp.asarray(exponents)), np.ldexp(np.float32(1), exponents)
    )


def exact_exponent(amax: float, fmt: str, rounding: str) -> int:
    """The exponent of a scale by trying, in fractions."""
    amax, largest = Fraction(float(amax)), Fraction(oracle.LARGEST[fmt])
    binade = Fraction(2) ** (8 if fmt == "E4M3" else 15)
    if rounding == "rceil":
        return next(k for k in range(-160, 160) if largest * Fraction(2) ** k >= amax)
    return next(k for k in range(160, -160, -1) if binade * Fraction(2) ** k <= amax)


@functools.cache
def exact_exponents(fmt: str, rounding: str) -> list[int]:
    return [exact_exponent(amax, fmt, rounding) for amax in AMAXES[::3]]


@EAGER_AND_JIT
@pytest.mark.parametrize("rounding", ["rceil", "floor"])
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=repr)
def test_scale_exponent(format, rounding, transform):
    actual = np.asarray(
        transform(lambda amax: _scale_exponent(amax, format, rounding))(jnp.asarray(AMAXES))
    )
    actual = actual - 127
    np.testing.assert_array_equal(actual[::3], exact_exponents(format.name, rounding))
    byte = oracle.e8m0_bytes(AMAXES, format.name, rounding)
    np.testing.assert_array_equal(np.clip(actual + 127, 0, 254), byte)
    if rounding == "rceil":  # what does not overflow, and would with the next smaller scale
        top = np.ldexp(format.max, actual.astype(np.int64))
        assert ((top >= AMAXES.astype(np.float64)) & (top / 2 < AMAXES.astype(np.float64))).all()


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=repr)
def test_rceil_is_the_power_of_two_rule_wherever_that_is_not_clamped(format):
    multiplier = oracle.multiplier(AMAXES, format.name, power_of_two=True)
    byte = oracle.e8m0_bytes(AMAXES, format.name, "rceil")
    same = oracle.inverse(multiplier) == np.ldexp(1.0, byte.astype(int) - 127)
    assert same[(multiplier < 2.0**126) & (byte > 1)].all()


@EAGER_AND_JIT
def test_to_e8m0(transform):
    exponents = np.array([0, 1, 127, 253, 254, 127], np.int32)
    nan = np.array([False] * 5 + [True])
    result = transform(_to_e8m0)(jnp.asarray(exponents), ~jnp.asarray(nan))
    np.testing.assert_array_equal(np.asarray(result).view(np.uint8), [0, 1, 127, 253, 254, 255])


@EAGER_AND_JIT
def test_factors_of_every_byte(transform):
    scale = jnp.asarray(np.arange(256, dtype=np.uint8).view(float8_e8m0fnu))
    factors = [np.asarray(factor) for factor in transform(factors_of)(scale)]
    assert len(factors) == 2
    product = factors[0].astype(np.float64) * factors[1]
    np.testing.assert_array_equal(product[:255], np.ldexp(1.0, np.arange(255) - 127))
    assert np.isnan(product[255])
    for factor in factors:
        np.testing.assert_array_equal(np.abs(factor[:255]) >= oracle.TINY, True)  # none is flushed


def test_factors_of_float32():
    (factor,) = factors_of(jnp.float32(0.3))
    assert factor == jnp.float32(0.3)
