"""`fp8.quantize(x, format, scale=)` with a concrete scale while JAX traces.

A calibrated one, closed over.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hard_inputs import mentions

import jaxfp8 as fp8

X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)), jnp.float32)
ROWS = fp8.PerAxis(0)
SCALE = jnp.asarray([[0.125], [0.25], [0.5], [1.0]], jnp.float32)


def scanned(f):
    return lambda x: jax.lax.scan(
        lambda total, _: (total + f(x), None), jnp.zeros_like(x), None, length=1
    )[0]


def mapped(f):
    return lambda x: jax.vmap(f)(x[None])[0]


def of_gradient(f):
    """The value beside the gradient of another function, through which f is traced."""
    return lambda x: jax.value_and_grad(lambda x: (jnp.sum(x), f(x)), has_aux=True)(x)[0][1]


TRACED = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "jit of checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
    "gradient of checkpoint": lambda f: of_gradient(jax.checkpoint(f)),
    "vmap": mapped,
    "jit of vmap": lambda f: jax.jit(mapped(f)),
    "gradient": of_gradient,
    "scan": scanned,
    "shard_map": lambda f: jax.shard_map(
        f, mesh=jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)),
        in_specs=jax.P(), out_specs=jax.P(),
    ),
}  # fmt: skip


def cast(scale, granularity=None):
    """x with that scale, and back; no gradient goes through it."""
    return lambda x: fp8.quantize(
        jax.lax.stop_gradient(x), fp8.E4M3, granularity, scale=scale
    ).dequantize()


SCALES = {
    "[]": (jnp.float32(0.25), None),
    "[] of NumPy": (np.float32(0.25), None),
    "a number": (0.25, None),
    "rows": (SCALE, ROWS),
    "rows of NumPy": (np.asarray(SCALE), ROWS),
}
# Each kind of scale while jax.jit traces, and jax's, of rows, in every other way that differs.
WAYS = "eager", "jit", "jit of checkpoint", "jit of vmap", "scan", "shard_map"
PAIRS = [
    pytest.param(
        *SCALES[name],
        trace,
        id=f"{name}-{trace}",
        marks=() if trace == "jit" or (trace in WAYS and name == "rows") else pytest.mark.slow,
    )
    for name in SCALES
    for trace in TRACED
]


@functools.cache
def outside(name):
    scale, granularity = SCALES[name]
    return np.asarray(fp8.quantize(X, fp8.E4M3, granularity, scale=scale).dequantize())


@pytest.mark.parametrize(("scale", "granularity", "trace"), PAIRS)
def test_the_same_values_as_outside(scale, granularity, trace):
    # Before, jax.Arrays inside of a trace: TracerBoolConversionError, "Attempted boolean conversion
    # of traced array".
    want = outside("[]" if granularity is None else "rows")
    assert not np.array_equal(want, X)
    np.testing.assert_array_equal(TRACED[trace](cast(scale, granularity))(X), want)


BAD = {
    "zero": 0.0,
    "negative": -1.0,
    "NaN": np.nan,
    "inf": np.inf,
    "too small": 2.0**-127,
    "too large": 2.0**127,
}


KINDS = {"number": float, "NumPy": np.float64, "JAX": jnp.float32}
# Each number of each kind in jit, and one of each kind in every other way.
NO_SCALES = [
    pytest.param(
        bad,
        kind,
        trace,
        marks=() if trace in ("eager", "jit") or bad == "too large" else pytest.mark.slow,
    )
    for bad in BAD
    for kind in KINDS
    for trace in TRACED
]


@pytest.mark.parametrize(("bad", "kind", "trace"), NO_SCALES)
def test_what_is_no_scale(bad, kind, trace):
    # Before, inside of a trace: numbers and NumPy's were taken without a look; x came back as 0,
    # NaN or inf.
    message = mentions("scale=", "must be positive, between 2**-126 and 2**126", "leave it out")
    run = cast(KINDS[kind](BAD[bad]))
    if trace != "eager":
        run = functools.partial(jax.eval_shape, TRACED[trace](run))
    with pytest.raises(ValueError, match=message):
        run(X)


@pytest.mark.parametrize("trace", ["eager", "jit", "checkpoint"])
def test_one_bad_scale_of_several(trace):
    with pytest.raises(ValueError, match=mentions("scale=", "-0.5", "must be positive")):
        TRACED[trace](cast(SCALE.at[2, 0].set(-0.5), ROWS))(X)


@pytest.mark.parametrize("trace", ["eager", "jit", "checkpoint"])
@pytest.mark.parametrize(
    "scale", [jnp.ones((4,)), jnp.zeros((8, 1)), jnp.float32(0.0)], ids=["[4]", "[8, 1]", "[]"]
)
def test_a_wrong_shape_comes_first(scale, trace):
    with pytest.raises(
        ValueError, match=mentions(f"scale has shape {list(scale.shape)}", "needs [4, 1]")
    ):
        TRACED[trace](cast(scale, ROWS))(X)


def test_a_float64_that_float32_cannot_hold():
    with pytest.raises(ValueError, match=mentions("scale=inf", "must be positive")):
        jax.jit(cast(np.float64(1e300)))(X)


class Calibrated:
    """What JAX takes for an array, and NumPy does not."""

    def __init__(self, scale):
        self.scale = scale

    def __jax_array__(self):
        return self.scale


@pytest.mark.parametrize("holder", [nnx.Variable, Calibrated])
def test_a_scale_in_an_object(holder):
    np.testing.assert_array_equal(jax.jit(cast(holder(jnp.float32(0.25))))(X), cast(0.25)(X))
    with pytest.raises(ValueError, match=mentions("scale=-1.0", "must be positive")):
        jax.jit(cast(holder(jnp.float32(-1.0))))(X)
    traced = jax.jit(lambda x, scale: cast(holder(scale))(x))(X, jnp.float32(0.25))
    np.testing.assert_array_equal(traced, cast(0.25)(X))


def test_a_traced_scale_out_of_range_gives_nan():
    run = jax.jit(lambda x, scale: cast(scale)(x))
    np.testing.assert_array_equal(run(X, jnp.float32(0.25)), cast(0.25)(X))
    for bad in (-1.0, 0.0, 2.0**-127, 2.0**127, np.inf, np.nan):
        assert np.isnan(run(X, jnp.float32(bad)).astype(jnp.float32)).all(), bad
    both = jax.vmap(lambda scale: cast(scale)(X))(jnp.float32([0.25, 0.5]))
    np.testing.assert_array_equal(both[1], cast(0.5)(X))


@pytest.mark.parametrize("value", [0.25, -1.0])
def test_a_scale_of_many_hosts(value, monkeypatch):
    """No process can fetch all of it, so that each looks at what it holds."""
    scale = jax.device_put(
        jnp.full((4, 1), value, jnp.float32),
        jax.NamedSharding(
            jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)), jax.P("data")
        ),
    )
    want = None if value < 0 else np.asarray(cast(0.25)(X))
    whole = lambda self: self.shape != (4, 1)
    monkeypatch.setattr(type(scale), "is_fully_addressable", property(whole))
    monkeypatch.setattr(type(scale), "is_fully_replicated", property(whole))
    with pytest.raises(RuntimeError, match="non-addressable"):
        np.asarray(scale)
    if want is None:
        with pytest.raises(ValueError, match=mentions("scale=[[-1.]]", "must be positive")):
            jax.eval_shape(cast(scale, ROWS), X)
    else:
        assert jax.eval_shape(cast(scale, ROWS), X).shape == X.shape
