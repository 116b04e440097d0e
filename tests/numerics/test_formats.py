import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from hard_inputs import mentions

from jaxfp8.numerics._formats import E4M3, E5M2, E8M0, VALUE_FORMATS, format_of


@pytest.mark.parametrize("format", VALUE_FORMATS, ids=repr)
def test_limits(format):
    values = oracle.values_of(format.name)
    assert format.max == values[-1] == oracle.LARGEST[format.name]
    normal = 2.0**format.min_exponent
    np.testing.assert_array_equal(
        np.diff(values[values <= normal]), normal * 2.0**-format.mantissa_bits
    )
    assert np.diff(values)[-1] == 2.0 ** (np.frexp(format.max)[1] - 1 - format.mantissa_bits)


@pytest.mark.parametrize("format", [E4M3, E5M2, E8M0], ids=repr)
def test_format_of(format):
    assert format_of(format.dtype) is format
    assert repr(format) == format.name


@pytest.mark.parametrize("dtype", [jnp.float32, ml_dtypes.float8_e4m3fnuz, "int8"])
def test_format_of_another_dtype(dtype):
    with pytest.raises(ValueError, match=mentions("dtype", jnp.dtype(dtype).name, "use one of")):
        format_of(dtype)
