"""The float32 quotient that only estimates.

However a chip rounds it, the scale has the same bits.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8.numerics import _exact


def quotients_equal(off, monkeypatch):
    """Whether `divide_in_integers` is right although its estimate is `off` ulp more."""
    exact = _exact._estimate

    def estimate(dividend, divisor):
        return (exact(dividend, divisor).view(jnp.int32) + off).view(jnp.float32)

    monkeypatch.setattr(_exact, "_estimate", estimate)
    divide = (
        _exact.divide_in_integers.__wrapped__
    )  # without the cache of jit, which knows the real estimate
    bits = np.random.default_rng(0).integers(0x00800000, 0x7F800000, 20_000).astype(np.int32)
    denominator = np.concatenate(
        [bits.view(np.float32), 2.0 ** np.arange(-126, 128, dtype=np.float32)]
    )
    for numerator in (448.0, 57344.0, 1.0):
        with np.errstate(over="ignore"):
            expected = (numerator / denominator.astype(np.float64)).astype(np.float32)
        expected = np.clip(expected, np.float32(2.0**-126), np.float32(2.0**126))
        if not np.array_equal(np.asarray(divide(numerator, jnp.asarray(denominator))), expected):
            return False
    return True


@pytest.mark.parametrize("off", [-30, -7, -1, 0, 1, 7, 30])
def test_an_estimate_that_is_off_changes_nothing(off, monkeypatch):
    assert quotients_equal(off, monkeypatch)


def test_an_estimate_that_is_far_off_is_noticed(monkeypatch):
    assert not quotients_equal(100, monkeypatch)
