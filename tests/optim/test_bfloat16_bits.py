"""A float32 split into a bfloat16 and a remainder, against NumPy's integers.

`python tests/optim/test_bfloat16_bits.py` compares all 2^32 float32 values.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfp8.optim._masters import _joined, _rounded_to_24_bits, _split, round_to_bfloat16

INFINITY = 0x7F800000
# Of the low 16 bits: ends, ties at 16 and at 24 bits, and their neighbours.
LOW = [0, 1, 0x7F, 0x80, 0x81, 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0x8001, 0x80FF, 0xFF7F]
LOW += [0xFF80, 0xFFFF]


@jax.jit
def everything(bits):
    x = jax.lax.bitcast_convert_type(bits, jnp.float32)
    high, low = _split(x)
    return high, low, _joined(high, low), _rounded_to_24_bits(x), round_to_bfloat16(x)


def check(bits):
    """Compare with integers of 64 bits. `bits` is uint32[N]."""
    bits = np.asarray(bits, np.uint32)
    high, _, back, short, alone = map(np.asarray, everything(bits))
    high, back, short = high.view(np.uint16), back.view(np.uint32), short.view(np.uint32)
    magnitude = (bits & 0x7FFFFFFF).astype(np.uint64)
    sign, number = bits & 0x80000000, magnitude <= INFINITY
    np.testing.assert_array_equal(high, alone.view(np.uint16))
    np.testing.assert_array_equal(
        high[number], (((magnitude + 0x8000) >> 16) | (sign >> 16))[number]
    )
    np.testing.assert_array_equal(back[number], bits[number])
    np.testing.assert_array_equal(short[number], (((magnitude + 0x80) // 256 * 256) | sign)[number])
    # NaN stays NaN, with its sign.
    for pattern, width in ((high.astype(np.uint32) << 16, 16), (back, 32), (short, 24)):
        pattern = pattern[~number]
        assert (pattern & 0x7FFFFFFF > INFINITY).all(), width
        np.testing.assert_array_equal(pattern & 0x80000000, sign[~number])


def test_every_exponent_and_the_ties():
    tops = np.arange(2**16, dtype=np.uint32) << 16  # every sign, exponent and bfloat16 mantissa
    check((tops[:, None] | np.array(LOW, np.uint32)).reshape(-1))


def test_a_sweep():
    check(np.arange(0, 2**32, 65521 // 16, dtype=np.uint64).astype(np.uint32))  # 65521 is prime


@given(st.lists(st.integers(0, 2**32 - 1), min_size=64, max_size=64))
def test_any_bits(bits):
    check(bits)


@given(st.integers(0, INFINITY - 1), st.booleans())
def test_the_weight_is_the_rounding_of_the_master_of_24_bits(magnitude, negative):
    bits = np.full(64, magnitude | negative << 31, np.uint32)
    short = everything(bits)[3]
    high, low = _split(short)
    assert not np.any(np.asarray(low) & 0xFF)
    again = _joined(high, (low >> 8).astype(jnp.uint8).astype(jnp.uint16) << 8)
    np.testing.assert_array_equal(np.asarray(again), np.asarray(short))


@pytest.mark.parametrize(
    ("x", "expected"),
    {
        "tie above an even value": (1 + 2**-8, 1 + 2**-7),  # ties to even would give 1
        "tie above an odd value": (1 + 3 * 2**-8, 1 + 2**-6),
        "negative tie": (-1 - 2**-8, -1 - 2**-7),
        "smallest subnormal": (2.0**-149, 0.0),
        "subnormal": (2.0**-133, 2.0**-133),
        "-0": (-0.0, -0.0),
        "inf": (np.inf, np.inf),
        "largest": (np.finfo(np.float32).max, np.inf),
    }.values(),
)
def test_examples(x, expected):
    mine = np.asarray(round_to_bfloat16(jnp.float32(x))).view(np.uint16)
    assert mine == np.float32(expected).view(np.uint32) >> 16


def test_a_nan_of_all_ones_does_not_become_minus_zero():
    bits = jnp.array([0x7FFFFFFF, 0x7F800001, 0xFF800001], jnp.uint32)
    x = jax.lax.bitcast_convert_type(bits, jnp.float32)
    assert np.isnan(np.asarray(round_to_bfloat16(x)).astype(np.float32)).all()


if __name__ == "__main__":
    for start in range(0, 2**32, 2**24):
        check(np.arange(start, start + 2**24, dtype=np.uint64).astype(np.uint32))
    print("all 2^32 float32 values agree")
