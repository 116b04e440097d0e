import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hard_inputs import DTYPES, hard_arrays

from jaxfp8.numerics._amax import amax
from jaxfp8.numerics._granularity import PerAxis, PerTensor

GRANULARITIES = {None: PerTensor(), (0,): PerAxis(0), (1,): PerAxis(-1), (0, 1): PerAxis(0, 1)}


@pytest.mark.parametrize("kept", GRANULARITIES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_amax(dtype, kept):
    function = lambda x: amax(x, GRANULARITIES[kept])
    jitted = jax.jit(function)
    for name, x in hard_arrays(DTYPES[dtype]).items():
        expected = oracle.amax(x, kept)
        for transformed in (function, jitted):
            actual = transformed(jnp.asarray(x))
            assert actual.dtype == jnp.float32
            counted = np.where(np.asarray(actual) < oracle.TINY, np.float32(0), actual)
            np.testing.assert_array_equal(counted, expected, err_msg=name, strict=True)


@pytest.mark.parametrize("size", [1, 1024, 4096, 65536, 100_003])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_one_bad_element_is_never_lost(size, bad, transform):
    # XLA:CPU's maximum keeps NaN among 1,024 elements and loses it among 4,096.
    function = transform(lambda x: amax(x, PerTensor()))
    for position in {0, size // 3, size - 1}:
        x = np.ones(size, np.float32)
        x[position] = bad
        assert function(x) == np.inf


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis(0)], ids=repr)
def test_empty(shape, granularity):
    result = amax(jnp.zeros(shape), granularity)
    assert result.shape == granularity.scale_shape(shape)
    np.testing.assert_array_equal(result, 0.0)


def test_scalar():
    assert amax(jnp.float32(-3.0), PerTensor()) == 3.0
