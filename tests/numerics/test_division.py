import functools

import jax
import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxfp8 as fp8
from jaxfp8.numerics._exact import _divide_on_tpu, divide, divide_in_integers
from jaxfp8.numerics._scale import ScaleRule, inverse

MANTISSAS = (np.arange(2**23, dtype=np.uint32) | 0x3F800000).view(np.float32)  # [1, 2), all of them
LARGEST, TINY = np.float32(oracle.FLOAT32_MAX), np.float32(oracle.TINY)


# Eagerly each operation is a program, for each shape.
at_once = jax.jit(
    lambda divide, numerator, denominator: divide(numerator, denominator), static_argnums=(0, 1)
)
WAYS = pytest.mark.parametrize("divide", [divide, divide_in_integers], ids=["float64", "integers"])


def long_division(numerator: int, denominator: np.ndarray) -> np.ndarray:
    """24-bit integers over 24-bit integers, to 24 significant bits, ties to even.

    In int64, so nothing is rounded twice.
    """
    shifted = numerator << 38
    quotient, remainder = shifted // denominator, shifted % denominator  # 2^37 < quotient < 2^39
    drop = np.where(quotient >> 38 > 0, 15, 14)
    kept, rest = quotient >> drop, quotient & ((1 << drop) - 1)
    half = 1 << (drop - 1)
    up = (rest > half) | ((rest == half) & ((remainder > 0) | (kept & 1 == 1)))
    return np.ldexp((kept + up).astype(np.float64), drop - 38)


def by_long_division(numerator: float, mantissas: np.ndarray) -> np.ndarray:
    significand = (mantissas.view(np.uint32) & 0x7FFFFF | 0x800000).astype(np.int64)
    top, exponent = np.frexp(numerator)
    return np.ldexp(long_division(int(top * 2**24), significand), int(exponent) - 1)


@pytest.mark.parametrize("numerator", [1.0, 448.0])
def test_numpy_divides_as_by_hand(numerator):
    """NumPy's division is IEEE's. By hand 8 million quotients take a second."""
    some = MANTISSAS[::31]
    np.testing.assert_array_equal(np.float32(numerator) / some, by_long_division(numerator, some))


@WAYS
# 57344 has the mantissa of 448.
@pytest.mark.parametrize("numerator", [1.0, 448.0, pytest.param(57344.0, marks=pytest.mark.slow)])
def test_every_mantissa(numerator, divide):
    actual = np.asarray(at_once(divide, numerator, MANTISSAS))
    # Both are finite, and assert_array_equal takes a second for 8 million values.
    assert (actual == np.float32(numerator) / MANTISSAS).all()


@functools.cache
def fractions(numerator: float) -> tuple[np.ndarray, np.ndarray]:
    bits = np.random.default_rng(1).integers(0x00800000, 0x7F800000, 2000, dtype=np.uint32)
    denominators = bits.view(np.float32)
    expected = [
        min(max(oracle.exact_quotient(numerator, float(d)), 2.0**-126), 2.0**126)
        for d in denominators
    ]
    return denominators, np.array(expected, np.float32)


@WAYS
@pytest.mark.parametrize(
    "numerator", [1.0, 448.0, 57344.0, 3.0, 0.1, oracle.FLOAT32_MAX, oracle.TINY]
)
def test_fractions(numerator, divide):
    numerator = float(np.float32(numerator))
    denominators, expected = fractions(numerator)
    np.testing.assert_array_equal(at_once(divide, numerator, denominators), expected)


@WAYS
@given(
    st.floats(width=32, min_value=float(TINY), allow_infinity=False),
    st.sampled_from([-64, -1, 0, 3]),
)
def test_exponent(divide, denominator, exponent):
    exact = oracle.exact_quotient(448, denominator) * 2.0**exponent
    got = float(at_once(divide, 448.0 * 2.0**exponent, np.float32(denominator)))
    assert got == min(max(exact, 2.0**-126), 2.0**126)


def neighbours(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.concatenate(
            [values, np.nextafter(values, np.float32(0)), np.nextafter(values, np.float32(np.inf))]
        )


@WAYS
@pytest.mark.parametrize("largest", [448.0, 57344.0])
def test_the_largest_value_times_powers_of_two_and_neighbours(largest, divide):
    centres = np.ldexp(np.float32(largest), np.arange(-120, 112)).astype(np.float32)
    amaxes = neighbours(centres)
    # rounded once more by the comparison in float32
    expected = np.float64(largest) / amaxes.astype(np.float64)
    np.testing.assert_array_equal(
        at_once(divide, largest, amaxes), np.clip(expected, 2.0**-126, 2.0**126).astype(np.float32)
    )
    exact = np.asarray(at_once(divide, largest, centres))
    np.testing.assert_array_equal(np.frexp(exact)[0], 0.5)


@WAYS
@pytest.mark.parametrize("largest", [1.0, 448.0, 57344.0])
def test_clamp(largest, divide):
    limits = np.array([largest * 2.0**-126, min(largest * 2.0**126, float(LARGEST))], np.float32)
    amaxes = neighbours(limits)
    amaxes = np.append(amaxes[np.isfinite(amaxes) & (amaxes >= TINY)], [TINY, LARGEST])
    expected = [
        min(max(oracle.exact_quotient(largest, float(a)), 2.0**-126), 2.0**126) for a in amaxes
    ]
    actual = np.asarray(at_once(divide, largest, amaxes))
    np.testing.assert_array_equal(actual, np.array(expected, np.float32))
    assert actual.min() >= 2.0**-126
    assert actual.max() == 2.0**126


def test_inverse_of_an_inverse_of_an_inverse():
    # State keeps scales: multiplier -> scale (kept) -> multiplier -> scale must come back to what
    # was kept, or the scale of a step would differ from the scale in its state.
    invert = jax.jit(inverse)
    scales = invert(MANTISSAS)
    np.testing.assert_array_equal(invert(invert(scales)), scales)


def test_the_oracle_agrees_with_fractions():
    random = np.random.default_rng(2)
    amaxes = random.integers(0, 0x7F800001, 500, dtype=np.uint32).view(np.float32)
    for fmt in ("E4M3", "E5M2"):
        for options in (
            {},
            {"power_of_two": True},
            {"margin": 3},
            {"margin": 60, "power_of_two": True},
        ):
            exact = [oracle.exact_multiplier(float(a), fmt, **options) for a in amaxes]
            np.testing.assert_array_equal(
                oracle.multiplier(amaxes, fmt, **options), np.array(exact, np.float32)
            )


@pytest.mark.parametrize("ulps", [-31, 31])
def test_an_estimate_that_is_off(ulps, monkeypatch):
    # NVIDIA GPUs divide to within 2 ulp: what the integers correct has to be right whatever the
    # estimate.
    off = lambda dividend, divisor: dividend / divisor + ulps
    monkeypatch.setattr("jaxfp8.numerics._exact._estimate", off)
    denominators = MANTISSAS[::17]
    for numerator in (1.0, 448.0):
        actual = jax.jit(lambda d, n=numerator: divide_in_integers.__wrapped__(n, d))(denominators)
        np.testing.assert_array_equal(actual, np.float32(numerator) / denominators)


def test_tpus_divide_without_float64():
    """A scale that is not known is NaN, and must not become a number."""
    scales = np.array([np.nan, 0.75, 3.0, 2.0**126], np.float32)
    np.testing.assert_array_equal(_divide_on_tpu(1.0, scales), np.float32(1) / scales)
    for of in (lambda x: divide(448.0, x), inverse, lambda x: divide(1.0, x, clamped=False)):
        traced = jax.jit(of).trace(scales)
        assert "f64" not in traced.lower(lowering_platforms=("tpu",)).as_text()
        assert "f64" in traced.lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.parametrize("way", ["multiplier", "scale", "inverse"])
def test_a_reader_in_float64_sees_float32_numbers(way):
    """XLA may drop a conversion to float32 between two others. No quotient may rest on it."""
    amax = np.random.default_rng(0).lognormal(size=4096).astype(np.float32)
    multiplier = np.float32(fp8.E4M3.max) / amax
    read, wanted = {
        "multiplier": (lambda amax: ScaleRule().apply(amax, fp8.E4M3)[0], multiplier),
        "scale": (lambda amax: ScaleRule().apply(amax, fp8.E4M3)[1], np.float32(1) / multiplier),
        "inverse": (inverse, np.float32(1) / amax),
    }[way]
    with jax.enable_x64(True):
        got = np.asarray(jax.jit(lambda amax: read(amax).astype(np.float64))(amax))
    np.testing.assert_array_equal(got, wanted.astype(np.float64))
