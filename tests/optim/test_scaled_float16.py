"""Float16 with one scale: nothing overflows, and the largest value is high in the range."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxfp8.optim._masters import _from_scaled_float16, _to_scaled_float16

LARGEST = float(np.finfo(np.float32).max)
encode = jax.jit(lambda x: _to_scaled_float16(x, None))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=8, max_size=8))
def test_nothing_overflows_and_11_bits_stay(numbers):
    x = np.array(numbers, np.float32)
    x[np.abs(x) < 2.0**-110] = 0  # near the subnormal numbers of float32 the scale ends
    x = np.clip(x, -65504 * 2.0**112, 65504 * 2.0**112)  # rounded to 11 bits, others may be 2^128
    values, scale = encode(x)
    assert np.isfinite(np.asarray(values)).all()
    assert np.frexp(float(scale))[0] == 0.5  # a power of two
    largest = np.abs(x).max()
    if largest:
        # Above 65504 the scale is the next one, with which 65505 is 32752.
        assert 32752 <= np.abs(np.asarray(values)).max() <= 65504
    back = np.asarray(_from_scaled_float16(values, scale))
    spacing = np.maximum(np.abs(x), largest * 2.0**-29) * 2.0**-11
    assert (np.abs(back - x) <= spacing).all()


@pytest.mark.parametrize(
    ("largest", "value"),
    [
        (65504.0, 65504.0),
        (65505.0, 32752.0),
        (1.0, 2.0**15),
        (LARGEST, 2.0**15),
        (2.0**-126, 2.0**0),
        (2.0**-111, 2.0**15),
    ],
)
def test_the_largest_value(largest, value):
    values, scale = encode(np.array([largest, 0], np.float32))
    assert float(values[0]) == value
    assert np.isfinite(float(scale))


def test_zeros_have_the_scale_one():
    values, scale = encode(np.zeros(3, np.float32))
    assert float(scale) == 1
    assert not np.any(np.asarray(values))


def test_an_empty_array():
    values, scale = encode(np.zeros((0, 3), np.float32))
    assert values.shape == (0, 3)
    assert float(scale) == 1


def test_non_finite_values_stay_and_have_no_effect_on_the_scale():
    values, scale = encode(np.array([np.inf, -np.inf, np.nan, 1.0], np.float32))
    back = np.asarray(_from_scaled_float16(values, scale))
    np.testing.assert_array_equal(back, [np.inf, -np.inf, np.nan, 1.0])
    values, scale = encode(np.array([np.nan], np.float32))
    assert float(scale) == 1


def test_no_compiler_drops_the_rounding():
    text = jax.jit(lambda x: _from_scaled_float16(*_to_scaled_float16(x, None))).lower(
        jax.ShapeDtypeStruct((8,), np.float32)
    )
    assert "optimization_barrier" in text.as_text()


def in_stages(x, scale, **options):
    """x [8, N] of two stages, each split over four devices; scale [2] of the stages."""
    mesh = jax.make_mesh((2, 4), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)

    def encode(x, scale):
        values, scale = _to_scaled_float16(x, scale[0])
        return values, scale[None]

    specs = (P(("stage", "data")), P("stage"))
    return jax.jit(jax.shard_map(encode, mesh=mesh, in_specs=specs, out_specs=specs, **options))(
        x, scale
    )


def test_inside_shard_map_the_axes_of_the_old_scale_keep_their_own():
    x = np.arange(1, 33, dtype=np.float32).reshape(8, 4)
    values, scale = in_stages(x, np.ones(2, np.float32))
    for half in range(2):
        alone, its = encode(x[4 * half : 4 * half + 4])
        assert scale[half] == its
        np.testing.assert_array_equal(values[4 * half : 4 * half + 4], alone)


def test_shard_map_without_types_is_an_error():
    with pytest.raises(ValueError, match="check_vma=True"):
        in_stages(np.ones((8, 4), np.float32), np.ones(2, np.float32), check_vma=False)
