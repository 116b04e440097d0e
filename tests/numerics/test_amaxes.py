import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8.numerics import _amax
from jaxfp8.numerics._amax import amax
from jaxfp8.numerics._granularity import PerAxis, PerTensor

ROWS = 16 * 512
PAIRS = {
    "matrix": ((ROWS, 3), PerAxis(0), PerAxis(1)),
    "batch and tokens": ((2, ROWS // 4, 3), PerAxis(0, 1), PerAxis(2)),
    "experts": ((2, ROWS // 4, 3), PerAxis(0, 1), PerAxis(0, 2)),
    "parts of rows": ((ROWS // 4, 256), PerAxis(0), PerAxis(-1)),
}


def hard(shape, dtype):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    x[..., 5, 0], x[..., 700, 1], x[..., -1, 2] = np.nan, -np.inf, 1e-39
    x[..., 9, :] = 0
    return jnp.asarray(x, dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(
            name,
            dtype,
            marks=() if name == "matrix" or dtype == jnp.bfloat16 else pytest.mark.slow,
        )
        for name in PAIRS
        for dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
    ],
)
def test_one_read_finds_the_same_bits(name, dtype):
    shape, rows, columns = PAIRS[name]
    x, together = hard(shape, dtype), _amax.rows_read_together(shape[-2])
    assert together >= 4

    @jax.jit
    def run(x):
        apart = [amax(x, granularity) for granularity in (rows, columns)]
        return _amax._rows_and_columns(x, columns, together), apart

    for each, alone in zip(*run(x), strict=True):
        np.testing.assert_array_equal(each, alone, strict=True)


@pytest.mark.parametrize("name", PAIRS)
def test_it_is_chosen_for_cuda(name):
    shape, *both = PAIRS[name]
    for granularities in (both, both[::-1]):
        text = jax.export.export(
            jax.jit(lambda x, g=granularities: list(_amax.amaxes(x, g).values())),
            platforms=["cuda"],
        )(jax.ShapeDtypeStruct(shape, jnp.bfloat16)).mlir_module()
        assert "optimization_barrier" in text


@pytest.mark.parametrize(
    ("shape", "granularities"),
    [
        ((ROWS, 3), [PerAxis(0)]),
        ((ROWS, 3), [PerAxis(0), PerTensor()]),
        ((ROWS + 1, 3), [PerAxis(0), PerAxis(1)]),
        ((ROWS, 0), [PerAxis(0), PerAxis(1)]),
        ((2, ROWS, 3), [PerAxis(0, 1), PerAxis(0, 1)]),
        ((ROWS, 2, 3), [PerAxis(0), PerAxis(1, 2)]),
    ],
)
def test_others_are_found_apart(shape, granularities):
    function = lambda x: list(_amax.amaxes(x, granularities).values())
    exported = jax.export.export(jax.jit(function), platforms=["cuda"])
    text = exported(jax.ShapeDtypeStruct(shape, jnp.bfloat16)).mlir_module()
    assert "optimization_barrier" not in text


def test_shards_of_a_manual_mesh():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = hard((ROWS, 3), jnp.bfloat16)
    both = (PerAxis(0), PerAxis(1))

    def local(x):
        found = _amax._rows_and_columns(x, both[1], 16)
        return found[0], jax.lax.pmax(found[1], "data")

    specs = jax.P("data"), jax.P()
    split = jax.shard_map(local, mesh=mesh, in_specs=jax.P("data"), out_specs=specs)
    found, whole = jax.jit(lambda x: (split(x), [amax(x, each) for each in both]))(x)
    for each, alone in zip(found, whole, strict=True):
        np.testing.assert_array_equal(np.asarray(each), alone)
