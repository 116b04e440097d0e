import functools

import hard_tiles
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hard_inputs import DTYPES, SHAPE, hard_arrays
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jaxfp8 as fp8
from jaxfp8._quantized_tensor import validate

FORMATS = pytest.mark.parametrize("format", [fp8.E4M3, fp8.E5M2], ids=repr)
POWER_OF_TWO = pytest.mark.parametrize(
    "power_of_two", [False, True], ids=["float32", "power_of_two"]
)
GRANULARITIES = {None: fp8.PerTensor(), (0,): fp8.PerAxis(0), (1,): fp8.PerAxis(-1)}


def assert_equals_oracle(q, x, kept, *, power_of_two, message=""):
    codes, scale = oracle.quantize(np.asarray(x), q.format.name, kept, power_of_two=power_of_two)
    np.testing.assert_array_equal(np.asarray(q.scale), scale, err_msg=message, strict=True)
    np.testing.assert_array_equal(oracle.codes(q.values), codes, err_msg=message, strict=True)
    payload = np.asarray(q.values).astype(np.float32)
    assert (np.isfinite(payload) == np.isfinite(oracle.to_float32(x))).all(), message


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def jitted(x, format, granularity, power_of_two):
    return fp8.quantize(x, format, granularity, power_of_two=power_of_two)


# Eagerly each operation is compiled alone, for each shape: what asks nothing of that runs as one
# program.
NAMES = "power_of_two", "scale_format", "scale_rounding"
quantize_at_once = jax.jit(fp8.quantize, static_argnums=(1, 2), static_argnames=NAMES)
dequantize_at_once = jax.jit(fp8.QuantizedTensor.dequantize)


# Bit for bit


RULES = [(None, False), (None, True), ((0,), False), ((1,), True)]
HARD = [
    pytest.param(
        dtype,
        *rule,
        format,
        # E5M2 with each dtype and each rule once.
        marks=pytest.mark.slow if format == fp8.E5M2 and i % 3 != j % 3 else (),
    )
    for i, dtype in enumerate(DTYPES)
    for j, rule in enumerate(RULES)
    for format in (fp8.E4M3, fp8.E5M2)
]


@pytest.mark.parametrize(("dtype", "kept", "power_of_two", "format"), HARD, ids=str)
def test_hard_arrays(dtype, kept, power_of_two, format):
    granularity = GRANULARITIES[kept]
    for name, x in hard_arrays(DTYPES[dtype]).items():
        ways = {"jit": jitted(x, format, granularity, power_of_two)}
        # Eagerly each operation is a program, for each dtype.
        if (dtype, format) == ("float32", fp8.E4M3) and name in ("a_row_of_each", "wide"):
            ways["eager"] = fp8.quantize(x, format, granularity, power_of_two=power_of_two)
        for way, q in ways.items():
            assert q.dtype == x.dtype
            assert_equals_oracle(q, x, kept, power_of_two=power_of_two, message=f"{name}, {way}")


@pytest.mark.parametrize("format", [fp8.E4M3, pytest.param(fp8.E5M2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kept", GRANULARITIES, ids=str)
def test_vmap(kept, format):
    arrays = hard_arrays(np.float32)
    together = jax.vmap(lambda x: jitted(x, format, GRANULARITIES[kept], False))(
        np.stack([*arrays.values()])
    )
    together = jax.device_get(together)
    for index, (name, x) in enumerate(arrays.items()):
        q = jax.tree.map(lambda leaf, index=index: leaf[index, ...], together)
        assert_equals_oracle(q, x, kept, power_of_two=False, message=name)


@FORMATS
@POWER_OF_TWO
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_value_as_the_amax_of_its_row(dtype, power_of_two, format):
    x = np.arange(2**16, dtype=np.uint16).view(DTYPES[dtype])[:, None]
    assert_equals_oracle(
        jitted(x, format, fp8.PerAxis(0), power_of_two), x, (0,), power_of_two=power_of_two
    )


BITS = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}


@given(data=st.data())
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bits(dtype, data):
    x = data.draw(hnp.arrays(BITS[dtype], (3, 5))).view(DTYPES[dtype])
    format, kept, power_of_two = data.draw(
        st.sampled_from([(fp8.E4M3, None, False), (fp8.E5M2, (0,), True)])
    )
    q = jitted(x, format, GRANULARITIES[kept], power_of_two)
    assert_equals_oracle(q, x, kept, power_of_two=power_of_two)


@FORMATS
@POWER_OF_TWO
def test_float64(format, power_of_two):
    random = np.random.default_rng(0)
    wide = np.ldexp(random.uniform(-1, 1, SHAPE), random.integers(-300, 300, SHAPE))
    for x in (random.standard_normal(SHAPE), wide, np.full(SHAPE, 1e300), np.full(SHAPE, 1e-300)):
        with jax.enable_x64(True):
            q = jitted(jnp.asarray(x), format, fp8.PerTensor(), power_of_two)
            assert q.dtype == jnp.float64
            assert np.isfinite(dequantize_at_once(q)).all()
            tensors = [q]
            if not power_of_two:
                tensors.append(fp8.quantize(jnp.asarray(x), format))  # eagerly
        for tensor in tensors:
            assert_equals_oracle(tensor, x, None, power_of_two=power_of_two)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 3), (3, 0), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("granularity", [None, fp8.PerAxis(-1)], ids=repr)
def test_shapes(shape, granularity):
    if granularity and not shape:
        pytest.skip("a scalar has no axis")
    x = np.linspace(-3, 5, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    q = jax.jit(fp8.quantize, static_argnums=(1, 2))(x, fp8.E4M3, granularity)
    assert q.granularity == (granularity or fp8.PerTensor())
    assert q.shape == shape
    assert_equals_oracle(q, x, (len(shape) - 1,) if granularity else None, power_of_two=False)


def test_one_scale_an_element():
    x = hard_arrays(np.float32)["wide"]
    assert_equals_oracle(
        quantize_at_once(x, fp8.E4M3, fp8.PerAxis(0, 1)), x, (0, 1), power_of_two=False
    )


# Rules


@FORMATS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("size", [8, 5000])
def test_a_bad_element_leaves_the_others_alone(format, bad, size):
    x = np.linspace(-2, 2, size, dtype=np.float32)
    x[-3] = bad
    q = quantize_at_once(x, format)
    assert q.scale == 1.0
    expected = oracle.nearest_codes(x, format.name)
    expected[-3] = oracle.NAN_CODE[format.name]
    np.testing.assert_array_equal(oracle.codes(q.values), expected)


def test_below_the_limit_of_transformer_engine():
    # 448 / amax overflows below 1.3e-36; theirs then turns finite input into NaN (zeros) and 448
    # times 0 (the rest).
    x = np.array([0.0, 1e-37, -5e-37, 3e-38], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        multiplier = np.float32(448) / np.abs(x).max()
        theirs = np.clip(x * multiplier, -448, 448) * (1 / multiplier)
    assert not np.isfinite(theirs).all()
    q = quantize_at_once(x, fp8.E4M3)
    np.testing.assert_allclose(dequantize_at_once(q), x, rtol=2**-4)


@FORMATS
@POWER_OF_TWO
def test_the_largest_element_keeps_its_size(format, power_of_two):
    x = np.random.default_rng(0).standard_normal((500, 3)).astype(np.float32)
    q = quantize_at_once(x, format, fp8.PerAxis(0), power_of_two=power_of_two)
    largest = np.abs(np.asarray(q.values).astype(np.float32)).max(1)
    assert (
        (largest == format.max).all()
        if not power_of_two
        else ((largest >= format.max / 2) & (largest <= format.max)).all()
    )


def test_bits_do_not_depend_on_what_is_fused_around():
    x = hard_arrays(np.float32)["gaussian"]

    @jax.jit
    def step(x):
        q = fp8.quantize(jnp.tanh(x) * 3, fp8.E4M3)
        return q, jnp.tanh(x) * 3, q.dequantize().sum()

    q, y, _ = step(x)
    assert_equals_oracle(q, np.asarray(y), None, power_of_two=False)


# A scale that is given


def test_scale():
    x = np.array([[1.0, 2.0], [3.0, 1000.0]], np.float32)
    q = fp8.quantize(x, fp8.E4M3, scale=0.5)
    np.testing.assert_array_equal(q.values.astype(jnp.float32), [[2, 4], [6, 448]])
    assert q.scale == 0.5
    rows = fp8.quantize(x, fp8.E4M3, fp8.PerAxis(0), scale=np.array([[1.0], [4.0]]))
    np.testing.assert_array_equal(rows.values.astype(jnp.float32), [[1, 2], [0.75, 256]])


@FORMATS
def test_the_scale_of_one_tensor_serves_another(format):
    x = np.random.default_rng(0).standard_normal((4, 700)).astype(np.float32)
    first = quantize_at_once(x, format, fp8.PerAxis(1))
    second = quantize_at_once(x, format, fp8.PerAxis(1), scale=first.scale)
    np.testing.assert_array_equal(second.values, first.values)
    np.testing.assert_array_equal(second.scale, first.scale)


def test_any_scale_comes_back():
    scales = np.random.default_rng(0).uniform(1, 2, (1, 500)).astype(np.float32)
    q = quantize_at_once(np.ones((3, 500), np.float32), fp8.E4M3, fp8.PerAxis(1), scale=scales)
    np.testing.assert_array_equal(q.scale, scales)


# Signal to noise


def decibels(signal: np.ndarray, approximation: np.ndarray) -> float:
    signal, approximation = (np.asarray(a, np.float64) for a in (signal, approximation))
    return 10 * np.log10(np.sum(signal**2) / np.sum((signal - approximation) ** 2))


@POWER_OF_TWO
@pytest.mark.parametrize(
    ("format", "least"), [(fp8.E4M3, 31), (fp8.E5M2, 25)], ids=["E4M3", "E5M2"]
)
@pytest.mark.parametrize(
    "granularity", [fp8.PerTensor(), pytest.param(fp8.PerAxis(0), marks=pytest.mark.slow)], ids=repr
)
def test_signal_to_noise(granularity, format, least, power_of_two):
    x = np.random.default_rng(0).standard_normal((512, 1024), np.float32)
    ratio = decibels(x, dequantize_at_once(jitted(x, format, granularity, power_of_two)))
    assert least <= ratio < least + 1.5  # a mantissa bit is 6 dB


@pytest.mark.parametrize(
    "tile",
    [
        (1, 128),
        *(pytest.param(t, marks=pytest.mark.slow) for t in ((128, 128), (1, 32), (32, 32))),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("format", "options", "least"),
    [
        (fp8.E4M3, {}, 31),
        (fp8.E4M3, {"power_of_two": True}, 31),
        (fp8.E4M3, {"scale_format": fp8.E8M0}, 31),
        (fp8.E4M3, {"scale_format": fp8.E8M0, "scale_rounding": "floor"}, 30),
        (fp8.E5M2, {}, 25),
        (fp8.E5M2, {"scale_format": fp8.E8M0}, 25),
    ],
    ids=["float32", "power_of_two", "rceil", "floor", "E5M2 float32", "E5M2 rceil"],
)
def test_signal_to_noise_of_tiles(format, options, least, tile):
    x = np.random.default_rng(0).standard_normal((512, 1024), np.float32)
    dequantized = jax.jit(
        lambda x: fp8.quantize(x, format, fp8.PerBlock(tile), **options).dequantize()
    )(x)
    assert least <= decibels(x, dequantized) < least + 2  # a mantissa bit is 6 dB


# Several granularities, and tiles


def test_a_tuple_of_granularities():
    x = hard_arrays(np.float32)["a_row_of_each"]
    granularities = (fp8.PerTensor(), fp8.PerAxis(0), fp8.PerBlock((1, 32)), fp8.PerBlock((32, 1)))
    for format in (fp8.E4M3, fp8.E5M2):
        copies = quantize_at_once(x, format, granularities)
        assert isinstance(copies, tuple)
        for q, granularity in zip(copies, granularities, strict=True):
            alone = quantize_at_once(x, format, granularity)
            assert q.granularity == granularity == alone.granularity
            np.testing.assert_array_equal(oracle.codes(q.values), oracle.codes(alone.values))
            np.testing.assert_array_equal(q.scale, alone.scale)
    (one,) = fp8.quantize(x, fp8.E4M3, (fp8.PerTensor(),))
    assert one.granularity == fp8.PerTensor()


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({}, "float32"),
        ({"power_of_two": True}, "power_of_two"),
        ({"scale_format": fp8.E8M0}, "rceil"),
        ({"scale_format": fp8.E8M0, "power_of_two": True}, "rceil"),
        ({"scale_format": fp8.E8M0, "scale_rounding": "floor"}, "floor"),
    ],
    ids=str,
)
@pytest.mark.parametrize("casts", [None, "xla", "reference"])
def test_tiles(options, rule, casts):
    x = hard_arrays(np.float32)["wide"]
    kernels = fp8.Kernels(casts=casts)
    q = fp8.quantize(x, fp8.E4M3, fp8.PerBlock((1, 32)), kernels=kernels, **options)
    validate(q)
    hard_tiles.assert_equals_oracle(q, x, (1, 32), rule)


def test_float64_in_tiles():
    random = np.random.default_rng(0)
    with jax.enable_x64(True):
        for x in (
            np.ldexp(random.uniform(-1, 1, SHAPE), random.integers(-300, 300, SHAPE)),
            np.full(SHAPE, 1e300),
        ):
            q = quantize_at_once(
                jnp.asarray(x), fp8.E4M3, fp8.PerBlock((1, 32)), scale_format=fp8.E8M0
            )
            hard_tiles.assert_equals_oracle(q, x, (1, 32), "rceil")
            assert np.isfinite(dequantize_at_once(q)).all()


def test_scales_of_tiles_that_are_given():
    x = np.random.default_rng(0).standard_normal((3, 70)).astype(np.float32)
    first = quantize_at_once(x, fp8.E4M3, fp8.PerBlock((1, 32)))
    second = quantize_at_once(x, fp8.E4M3, fp8.PerBlock((1, 32)), scale=first.scale)
    np.testing.assert_array_equal(second.scale, first.scale)
    np.testing.assert_array_equal(oracle.codes(second.values), oracle.codes(first.values))
