"""What each format of moments stores, in how many bytes, and how far it is from float32."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optim_cases import bytes_of

from jaxfp8.optim import FP8, BFloat16, ExpandedFP8, Float16, Float32, Int8

pytestmark = pytest.mark.usefixtures("standard_promotion")
# The largest error of a value, relative to the value or, for linear steps, to its group.
FORMATS = {
    "float32": (Float32(), 4),
    "bfloat16": (BFloat16(), 2),
    "float16": (Float16(), 2),
    "fp8": (FP8(), 1),
    "int8": (Int8(), 1 + 4 / 128),
    "linear": (Int8(companding=False), 1 + 4 / 128),
    "expanded": (ExpandedFP8(), 1 + 8 / 128),
}
FIRST, SECOND = list(FORMATS), ["float32", "bfloat16", "float16", "int8", "expanded"]


def draw(seed, shape=(8, 256), decades=2.0):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * 10 ** rng.uniform(-decades, 0, shape)).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("format", "signed"))
def pack(format, x, *, signed=True, key=None):
    return format.pack(jnp.asarray(x), None, signed=signed, key=key)


@functools.partial(jax.jit, static_argnames=("names", "signed"))
def _read(x, names, signed):
    formats = {name: FORMATS[name][0] for name in names}
    return {
        name: format.unpack(format.pack(x, None, signed=signed, key=None))
        for name, format in formats.items()
    }


def read(x, names=FIRST, *, signed=True):
    """What each format reads again of an array, by one program."""
    found = _read(np.asarray(x, np.float32), tuple(names), signed)
    return {name: np.asarray(each, np.float64) for name, each in found.items()}


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_of_a_value(name):
    format, wanted = FORMATS[name]
    stored = jax.eval_shape(functools.partial(pack, format), draw(0, (64, 256)))
    assert bytes_of(stored) == pytest.approx(wanted * 64 * 256, abs=4)


@pytest.mark.parametrize(
    ("name", "of_value", "of_group"),
    [("bfloat16", 2**-8, 0), ("float16", 2**-11, 0), ("fp8", 2**-4, 2**-19),
     ("int8", 0, 1 / 127), ("linear", 0, 0.5001 / 127), ("expanded", 0.2, 0)],
)  # fmt: skip
def test_error_of_a_first_moment(name, of_value, of_group):
    x = draw(1)
    error = np.abs(read(x)[name] - x)
    groups = np.abs(x).reshape(8, 2, 128).max(-1).repeat(128, -1).reshape(x.shape)
    if name == "fp8":
        groups = np.abs(x).max()
    assert np.all(error <= 1.001 * (of_value * np.abs(x) + of_group * groups))


@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("decades", [1.0, 4.0])
def test_a_second_moment_above_zero_stays_above_zero(name, decades):
    """Float16 needs the range 2^-40; the formats of groups keep every value."""
    x = np.square(draw(2, decades=decades))
    stored = read(x, SECOND, signed=False)[name]
    assert np.all(stored >= 0)
    kept = x > (x.max() * 2.0**-39 if name == "float16" else 0)
    assert np.all(stored[kept] > 0)


def test_int8_of_a_second_moment_is_close_in_its_root():
    """An error of 1/510 of the root of the largest value of its group, or the smallest step."""
    x = np.square(draw(3))
    found = read(x, SECOND, signed=False)["int8"]
    largest = x.reshape(8, 2, 128).max(-1).repeat(128, -1).reshape(x.shape)
    assert np.all(np.abs(np.sqrt(found) - np.sqrt(x)) <= 1.001 * np.sqrt(largest) / 255)


@pytest.mark.parametrize("signed", [True, False], ids=["first", "second"])
def test_int8_stores_the_nearest_value(signed):
    """Of all that it can store: a square of 127 steps, or a fourth power of 255."""
    x = draw(4, (4, 128), decades=6.0)
    x = x if signed else np.square(x)
    n = np.abs(x).astype(np.float64) / np.abs(x).max(-1, keepdims=True)
    values = np.linspace(0, 1, 128) ** 2 if signed else np.linspace(0, 1, 256) ** 4
    nearest = np.argmin(np.abs(n[..., None] - values), -1)
    wanted = nearest * np.sign(x) if signed else np.maximum(nearest, 2)
    assert np.array_equal(pack(Int8(), x, signed=signed).roots, wanted)


def test_fp8_is_the_cast_of_ml_dtypes():
    x = draw(5)
    stored = pack(FP8(), x)
    multiplier = np.float32(448) / np.abs(x).max()
    wanted = (x * multiplier).astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(np.asarray(stored.values).view(np.uint8), wanted.view(np.uint8))


def test_an_expansion_is_finer_than_fp8():
    """A group whose values are within a factor of 4 has an error far below that of FP8."""
    x = np.random.default_rng(6).uniform(1, 4, (8, 256)).astype(np.float32)
    worst = {name: np.max(np.abs(found / x - 1)) for name, found in read(x).items()}
    assert worst["expanded"] < 0.3 * worst["fp8"]


@pytest.mark.parametrize("signed", [True, False], ids=["first", "second"])
def test_powers_of_an_expansion(signed):
    """A group has the power that makes its range that of E4M3, within bounds on both sides."""
    octaves = np.array([0, 1e-3, 2e-3, 0.1, 0.225, 0.5, 1, 4, 14.5, 20, 60, 100, 120])
    x = np.exp2(-octaves[:, None] * np.linspace(0, 1, 128)).astype(np.float32)
    stored = pack(ExpandedFP8(), x, signed=signed)
    spread = np.maximum(octaves, np.log2(1 + 2**-10))
    wanted = np.log2(448 * 2**9 / 3) / spread
    np.testing.assert_allclose(np.asarray(stored.power)[:, 0], wanted, rtol=1e-3)
    # Half a step of FP8 is 1/16 of a value, and up to 1/6 of the smallest ones. The root is finer
    # by the power, or coarser. Logarithms of float32 round.
    found = np.asarray(jax.jit(ExpandedFP8().unpack)(stored), np.float64)
    error = np.abs(found / x - 1)
    assert np.all(error.max(1) <= ((4 / 3) ** (1 / wanted) - 1) / 2 + 1e-6)
    assert np.all(np.median(error, 1) <= ((9 / 8) ** (1 / wanted) - 1) / 2 + 1e-6)


@pytest.mark.parametrize("shape", [(), (1,), (130,), (3, 5), (0, 4), (2, 3, 129)], ids=str)
def test_every_shape(shape):
    x = np.ones(shape, np.float32)
    of_scalars = ("float32", "bfloat16", "float16", "fp8")  # for others they are small arrays
    for name, found in read(x, FIRST if shape else of_scalars).items():
        assert np.allclose(found, x, rtol=1e-6), name  # the largest value of its group


@pytest.mark.parametrize("name", ["int8", "linear", "expanded"])
@pytest.mark.parametrize("signed", [True, False], ids=["first", "second"])
def test_bits_do_not_depend_on_the_program(name, signed):
    """A row with one group is a shape in which XLA moves constants from values to groups."""
    if name == "linear" and not signed:
        return
    format = FORMATS[name][0]
    x = draw(8, (64, 128))
    stored = pack(format, x if signed else np.square(x), signed=signed)
    assert np.array_equal(format.unpack(stored), jax.jit(format.unpack)(stored))


def test_zeros_and_tiny_values():
    for value in (0.0, 1e-40):
        for name, found in read(np.full((8, 256), value)).items():
            assert np.all(np.abs(found) <= 1e-38), name


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_seen(name, bad):
    x = draw(7)
    x[3, 17] = bad
    found = read(x)[name]
    assert not np.isfinite(found[3, 17])
    others = np.delete(x, 3, 0), np.delete(found, 3, 0)
    # FP8 has one scale: that of the finite values.
    np.testing.assert_allclose(others[1], others[0], rtol=0.3, atol=0.02 * np.abs(others[0]).max())


@given(st.integers(0, 2**32 - 1), st.floats(1e-30, 1e30))
def test_groups_scale_with_their_values(seed, factor):
    """Codes of integers do not depend on a power of two in front of a group."""
    x = draw(seed, (2, 128))
    power = np.float32(2.0 ** np.floor(np.log2(factor)))
    with np.errstate(over="ignore", under="ignore"):
        scaled = x * power
    if not np.all(np.isfinite(scaled)) or np.abs(scaled).min() < 1e-37:
        return
    assert np.array_equal(pack(Int8(), x).roots, pack(Int8(), scaled).roots)


@pytest.mark.parametrize("format", [BFloat16("stochastic"), FP8(rounding="stochastic")])
def test_stochastic_rounding_has_no_bias_and_reads_its_key(format):
    x = np.full(2**16, 1 + 2**-10, np.float32)
    x[0] = 1.5
    one, again, other = (pack(format, x, key=jax.random.key(seed)) for seed in (0, 0, 1))
    unpack = jax.jit(format.unpack)
    found, repeated, changed = (np.asarray(unpack(each)) for each in (one, again, other))
    assert np.array_equal(found, repeated)
    assert not np.array_equal(found, changed)
    assert len(np.unique(found[1:])) == 2
    steps = np.ptp(found[1:])
    assert abs(found[1:].mean() - x[1]) < 4 * steps / 2 / np.sqrt(x.size)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Int8(group=1), "group=1 must be an integer of at least 2"),
        (lambda: ExpandedFP8(min_size=-1), "min_size=-1"),
        (lambda: FP8(rounding="up"), "rounding='up'"),
        (lambda: BFloat16("down"), "rounding='down'"),
        (lambda: BFloat16("nearest"), "never decay.*Use 'dithered'"),
    ],
)
def test_bad_formats(make, message):
    with pytest.raises(ValueError, match=message):
        make()
