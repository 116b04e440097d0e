import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hard_inputs import DTYPES

from jaxfp8.numerics._exact import to_float32

SIXTEEN_BITS = np.arange(2**16, dtype=np.uint16)


def assert_same_bits(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    np.testing.assert_array_equal(actual[~nan].view(np.uint32), expected[~nan].view(np.uint32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_every_value(dtype, transform):
    x = SIXTEEN_BITS.view(DTYPES[dtype])
    assert_same_bits(transform(to_float32)(x), oracle.to_float32(x))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_float32(transform):
    # Every exponent, both signs; all around the smallest normal number.
    near = (0x00800000 + np.arange(-3, 4)).astype(np.uint32)
    bits = np.concatenate(
        [
            SIXTEEN_BITS.astype(np.uint32) << 16,
            (SIXTEEN_BITS.astype(np.uint32) << 16) + 1,
            near,
            near | 1 << 31,
        ]
    )
    x = bits.view(np.float32)
    assert_same_bits(transform(to_float32)(x), oracle.to_float32(x))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_float64(transform):
    x = np.array(
        [
            1e300,
            -1e300,
            3.5e38,
            oracle.FLOAT32_MAX,
            1e-300,
            -1e-40,
            0.0,
            -0.0,
            1.1,
            np.inf,
            -np.inf,
            np.nan,
        ]
    )
    with jax.enable_x64(True):
        actual = transform(to_float32)(jnp.asarray(x))
        assert actual.dtype == jnp.float32
        assert_same_bits(actual, oracle.to_float32(x))
    assert np.isfinite(np.asarray(actual)[:9]).all()
