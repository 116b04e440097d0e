"""What every backend of the cast has to do; a new backend is tested by being in the table."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from casts import cast_one
from hard_inputs import DTYPES, SHAPE, hard_arrays

import jaxfp8 as fp8
from jaxfp8.kernels.cast._api import BACKENDS

HERE = [name for name in BACKENDS if name not in ("mosaic", "triton")]
pytestmark = pytest.mark.parametrize("format", [fp8.E4M3, fp8.E5M2], ids=repr)
of_each = pytest.mark.parametrize("backend", HERE)
# The reference is XLA's code with barriers: where ranks and sizes are at stake, not rounding.
of_each_but_reference = pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=pytest.mark.slow if name == "reference" else ()) for name in HERE],
)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def run(x, multiplier, format, granularity, backend):
    return cast_one(x, multiplier, format, granularity, backends=(backend,))


def assert_equals_oracle(q, x, multiplier, message=""):
    np.testing.assert_array_equal(
        oracle.codes(q.values), oracle.cast(x, multiplier, q.format.name), err_msg=message
    )
    np.testing.assert_array_equal(
        np.asarray(q.scale), oracle.inverse(multiplier), err_msg=message, strict=True
    )
    assert q.dtype == x.dtype


@of_each
@pytest.mark.parametrize("dtype", DTYPES)
def test_per_tensor(backend, format, dtype):
    for name, x in hard_arrays(DTYPES[dtype]).items():
        for multiplier in (1.0, 448 / 3, 2.0**-126, 2.0**126):
            m = np.array(multiplier, np.float32)
            assert_equals_oracle(run(x, m, format, fp8.PerTensor(), backend), x, m, name)


@of_each_but_reference
@pytest.mark.parametrize("kept", [(0,), (1,), (0, 1)], ids=str)
def test_per_axis(backend, format, kept):
    x = hard_arrays(np.float32)["wide"]
    shape = tuple(size if axis in kept else 1 for axis, size in enumerate(SHAPE))
    m = np.exp2(np.random.default_rng(0).uniform(-126, 126, shape)).astype(np.float32)
    assert_equals_oracle(run(x, m, format, fp8.PerAxis(*kept), backend), x, m)


@of_each_but_reference
def test_eager(backend, format):
    x, m = hard_arrays(np.float32)["a_row_of_each"], np.array(3.1, np.float32)
    assert_equals_oracle(
        cast_one(
            jax.device_put(x), jax.device_put(m), format, fp8.PerTensor(), backends=(backend,)
        ),
        x,
        m,
    )


@of_each_but_reference
@pytest.mark.parametrize("shape", [(), (0, 3), (1, 1, 1)], ids=str)
def test_shapes(backend, format, shape):
    x, m = np.full(shape, 1.7, np.float32), np.array(64, np.float32)
    assert_equals_oracle(run(x, m, format, fp8.PerTensor(), backend), x, m)


@of_each
def test_vmap(backend, format):
    x = np.stack([*hard_arrays(np.float32).values()])
    m = np.exp2(np.arange(len(x))).astype(np.float32)
    q = jax.vmap(lambda x, m: run(x, m, format, fp8.PerTensor(), backend))(x, m)
    np.testing.assert_array_equal(
        oracle.codes(q.values), oracle.cast(x, m[:, None, None], format.name)
    )
    np.testing.assert_array_equal(q.scale, oracle.inverse(m))


@of_each
def test_stochastic_rounding(backend, format):
    x, m = np.full((100, 100), 1.1, np.float32), jnp.float32(1.0)
    values = oracle.values_of(format.name)
    above = int(np.searchsorted(values, np.float32(1.1)))
    options = {
        "rounding": "stochastic",
        "key": jax.random.key(0, impl="rbg"),
        "backends": (backend,),
    }
    drawn = np.asarray(
        cast_one(jax.device_put(x), m, format, fp8.PerTensor(), **options).values
    ).astype(np.float64)
    assert set(np.unique(drawn)) == {values[above - 1], values[above]}
    chance = (np.float64(np.float32(1.1)) - values[above - 1]) / (values[above] - values[above - 1])
    assert abs((drawn == values[above]).mean() - chance) < 5 * np.sqrt(
        chance * (1 - chance) / x.size
    )
