import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hard_inputs import DTYPES, mentions

from jaxfp8.numerics._formats import E4M3, E5M2
from jaxfp8.numerics._rounding import _built, _converted, saturating_cast

FORMATS = pytest.mark.parametrize("format", [E4M3, E5M2], ids=repr)
EAGER_AND_JIT = pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
MULTIPLIERS = [1.0, 2.0**-9, 0.1, 448 / 3, 2.0**126, 2.0**-126]


def cast(jit: bool, **options):
    function = lambda x, m, format: saturating_cast(x, m, format, **options)
    return jax.jit(function, static_argnums=2) if jit else function


def boundaries(fmt: str) -> np.ndarray:
    """All values of a format, the midpoints between neighbours, and the float32 neighbours of both;
    both signs.
    """
    values = oracle.values_of(fmt)
    beyond = [values[-1] + (values[-1] - values[-2]) / 2, values[-1] * 2, oracle.FLOAT32_MAX]
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2, beyond]).astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        points = np.concatenate(
            [points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))]
        )
    return np.concatenate([points, -points])


@FORMATS
@EAGER_AND_JIT
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_value(dtype, format, jit):
    x = np.arange(2**16, dtype=np.uint16).view(DTYPES[dtype])
    function = cast(jit)
    for m in MULTIPLIERS:
        actual = function(jnp.asarray(x), jnp.float32(m), format)
        np.testing.assert_array_equal(
            oracle.codes(actual), oracle.cast(x, m, format.name), err_msg=str(m)
        )


@FORMATS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bytes_that_are_built_are_those_of_the_conversion(dtype, format):
    """CPUs convert to FP8, and other platforms build the bytes: this runs both on the CPU."""
    if dtype == "float32":
        bits = np.random.default_rng(0).integers(0, 2**32, 2**18, dtype=np.uint32)
        edges = np.float32([0, -0.0, 2.0**-126, -(2.0**-126), 2.0**-127, np.inf, -np.inf, np.nan])
        x = np.concatenate([bits.view(np.float32), boundaries(format.name), edges, -edges])
    else:
        x = np.arange(2**16, dtype=np.uint16).view(DTYPES[dtype])
    both = [jax.jit(functools.partial(each, format=format)) for each in (_built, _converted)]
    for m in (*MULTIPLIERS, 2.0**127, np.inf, np.nan, -np.nan):
        built, converted = (each(jnp.asarray(x), jnp.float32(m)) for each in both)
        np.testing.assert_array_equal(oracle.codes(built), oracle.codes(converted), err_msg=str(m))


@FORMATS
@EAGER_AND_JIT
def test_boundaries(format, jit):
    x = boundaries(format.name)
    function = cast(jit)
    for m in (1.0, 2.0**-9, 2.0**20):
        with np.errstate(over="ignore", under="ignore"):
            unscaled = x / np.float32(m)
        actual = function(jnp.asarray(unscaled), jnp.float32(m), format)
        np.testing.assert_array_equal(oracle.codes(actual), oracle.cast(unscaled, m, format.name))


@FORMATS
def test_float32_bit_patterns(format):
    x = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    function = cast(True)
    for m in MULTIPLIERS:
        actual = function(jnp.asarray(x), jnp.float32(m), format)
        np.testing.assert_array_equal(
            oracle.codes(actual), oracle.cast(x, m, format.name), err_msg=str(m)
        )


@FORMATS
def test_the_oracle_agrees_with_ml_dtypes(format):
    x = boundaries(format.name)
    x = x[np.abs(x) <= format.max]
    np.testing.assert_array_equal(
        oracle.nearest_codes(x, format.name), x.astype(oracle.DTYPE[format.name]).view(np.uint8)
    )


@FORMATS
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_saturates(format, rounding):
    x = jnp.array([1e9, -1e9, oracle.FLOAT32_MAX, -oracle.FLOAT32_MAX, format.max], jnp.float32)
    key = jax.random.key(0) if rounding == "stochastic" else None
    run = cast(True, rounding=rounding, key=key)
    result = run(x, jnp.float32(2.0**100), format).astype(jnp.float32)
    np.testing.assert_array_equal(result, np.sign(x) * format.max)


@FORMATS
@EAGER_AND_JIT
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_what_is_not_finite(format, jit, rounding):
    key = jax.random.key(0) if rounding == "stochastic" else None
    x = np.array([1.0, np.inf, -2.0, np.nan, -np.inf, 0.5], np.float32)
    result = cast(jit, rounding=rounding, key=key)(jnp.asarray(x), jnp.float32(1.0), format).astype(
        jnp.float32
    )
    np.testing.assert_array_equal(result, np.where(np.isfinite(x), x, np.nan))


@FORMATS
@EAGER_AND_JIT
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_multiplier_that_is_not_finite(format, jit, rounding):
    key = jax.random.key(0) if rounding == "stochastic" else None
    x, m = jnp.array([1.0, 0.0, -0.0, 3.0]), jnp.array([np.nan, np.inf, -np.inf, np.inf])
    result = cast(jit, rounding=rounding, key=key)(x, m, format).astype(jnp.float32)
    np.testing.assert_array_equal(result, np.full(4, np.nan))


# Stochastic rounding


@functools.partial(jax.jit, static_argnums=1)
def stochastic(x, format, seed):
    # rbg compiles in a fraction of threefry's time.
    return saturating_cast(
        x, jnp.float32(1.0), format, rounding="stochastic", key=jax.random.key(seed, impl="rbg")
    )


@FORMATS
def test_stochastic_leaves_what_is_exact(format):
    values = oracle.values_of(format.name).astype(np.float32)
    x = np.concatenate([values, -values])
    for seed in range(4):
        np.testing.assert_array_equal(
            oracle.codes(stochastic(x, format, seed)), oracle.nearest_codes(x, format.name)
        )


@FORMATS
@pytest.mark.parametrize("dtype", DTYPES)
def test_stochastic_stays_on_the_two_neighbours(format, dtype):
    values = oracle.values_of(format.name)
    x = boundaries(format.name).astype(np.float64)
    x = np.clip(
        np.concatenate([x, np.random.default_rng(0).uniform(-1, 1, 20_000) * format.max]),
        -format.max,
        format.max,
    )
    x = x.astype(DTYPES[dtype])
    magnitude = np.minimum(np.abs(oracle.to_float32(x).astype(np.float64)), format.max)
    low = values[np.searchsorted(values, magnitude, side="right") - 1]
    high = values[np.searchsorted(values, magnitude, side="left")]
    rounded = np.asarray(stochastic(x, format, 1)).astype(np.float64)
    assert ((np.abs(rounded) == low) | (np.abs(rounded) == high)).all()
    np.testing.assert_array_equal(np.signbit(rounded), np.signbit(x.astype(np.float32)))


@FORMATS
def test_stochastic_is_unbiased(format):
    # Fractions of the gap between neighbours, in the subnormal, a low, a middle and the topmost
    # binade.
    values = oracle.values_of(format.name)
    starts = np.array([0, 1, len(values) // 3, len(values) // 2, len(values) - 2])
    fractions = np.array([2.0**-10, 0.1, 0.25, 0.5, 0.75, 1 - 2.0**-10])
    low, gap = values[starts][:, None], (values[starts + 1] - values[starts])[:, None]
    x = (low + fractions * gap).astype(np.float32)
    draws = 40_000
    rounded = np.asarray(stochastic(np.broadcast_to(x, (draws, *x.shape)), format, 2)).astype(
        np.float64
    )
    mean = (rounded.mean(0) - low) / gap
    exact = (x.astype(np.float64) - low) / gap
    # 5 standard deviations of a Bernoulli mean; thirty means and a fixed key.
    np.testing.assert_array_less(np.abs(mean - exact), 5 * np.sqrt(exact * (1 - exact) / draws))


@FORMATS
def test_stochastic_of_tiny_values(format):
    smallest = oracle.values_of(format.name)[1]
    rounded = np.asarray(stochastic(np.full(100_000, -smallest / 8, np.float32), format, 3)).astype(
        np.float64
    )
    assert set(np.unique(rounded)) == {-smallest, 0.0}
    assert abs(rounded.mean() / smallest + 1 / 8) < 0.005
    assert np.signbit(rounded).all()
    # A chance of 2^-60 is none; it must not become certainty.
    assert (
        not np.asarray(stochastic(np.full(100, smallest * 2.0**-60, np.float32), format, 4))
        .astype(np.float32)
        .any()
    )


@FORMATS
@pytest.mark.parametrize("bits", [0, 2**32 - 1])
def test_stochastic_at_both_ends_of_the_dice(format, bits, monkeypatch):
    # What an exact value must not do once in 2^32 draws, no number of draws shows.
    monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype: jnp.full(shape, bits, dtype))
    values = oracle.values_of(format.name).astype(np.float32)
    between = (values[1:] + values[:-1]) / 2
    x = np.concatenate([values, between])
    expected = np.concatenate([values, values[:-1] if bits else values[1:]])
    function = saturating_cast.__wrapped__  # jit has the real dice in its cache
    options = {"rounding": "stochastic", "key": jax.random.key(0)}
    rounded = jax.jit(lambda x: function(x, jnp.float32(1.0), format, **options))(x)
    np.testing.assert_array_equal(np.asarray(rounded).astype(np.float32), expected)


def test_stochastic_follows_its_key():
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    draw = lambda seed: oracle.codes(
        saturating_cast(jnp.asarray(x), m, E4M3, rounding="stochastic", key=jax.random.key(seed))
    )
    m = jnp.float32(1.0)
    jitted = jax.jit(lambda x, key: saturating_cast(x, m, E4M3, rounding="stochastic", key=key))
    first = draw(5)
    np.testing.assert_array_equal(first, draw(5))
    np.testing.assert_array_equal(first, oracle.codes(jitted(x, jax.random.key(5))))
    assert (first != draw(6)).mean() > 0.1


@pytest.mark.parametrize(
    ("rounding", "key", "parts"),
    [
        ("stochastic", None, ("rounding='stochastic'", "key=None", "needs a key=")),
        ("nearest", 0, ("rounding='nearest'", "key=given", "takes none")),
        ("up", None, ("rounding='up'", "use 'nearest' or 'stochastic'")),
        ("up", 0, ("rounding='up'", "use 'nearest' or 'stochastic'")),
    ],
)
def test_misuse(rounding, key, parts):
    key = None if key is None else jax.random.key(key)
    with pytest.raises(ValueError, match=mentions(*parts)):
        saturating_cast(jnp.ones(3), jnp.float32(1.0), E4M3, rounding=rounding, key=key)
