"""Statistics of a cast equal those that NumPy counts, in float64, from the rules of the oracle."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest

import jaxfp8 as fp8

M, K, N = 40, 160, 136  # the last tiles are ragged
LIMIT = {"E4M3": 464.0, "E5M2": 61440.0}
FPROP, WGRAD, BOTH = ("fprop",), ("wgrad",), ("fprop", "wgrad")
# The copies of x [M, K]: which matmuls read each, and along which axes and in which tile.
COPIES = {
    "current": {BOTH: None},
    "delayed": {BOTH: None},
    "static": {BOTH: None},
    "rowwise": {FPROP: (0,), WGRAD: (1,)},
    "blockwise": {FPROP: ((1, 128), "power_of_two"), WGRAD: ((128, 1), "power_of_two")},
    "blockwise, float32": {FPROP: ((1, 128), "float32"), WGRAD: ((128, 1), "float32")},
    "square": {BOTH: ((128, 128), "power_of_two")},
    "mxfp8": {FPROP: ((1, 32), "rceil"), WGRAD: ((32, 1), "rceil")},
    "mxfp8, floor": {FPROP: ((1, 32), "floor"), WGRAD: ((32, 1), "floor")},
}
SCALE = 0.0123
RECIPES = {
    "current": fp8.recipes.current(),
    "delayed": fp8.recipes.delayed(),
    "static": fp8.recipes.static(x_scale=SCALE, w_scale=1.0, g_scale=1.0),
    "rowwise": fp8.recipes.rowwise(),
    "blockwise": fp8.recipes.blockwise(),
    "blockwise, float32": fp8.recipes.blockwise(power_of_two=False),
    "square": fp8.recipes.blockwise(x_tile_dim=2, w_tile_dim=1),
    "mxfp8": fp8.recipes.mxfp8(),
    "mxfp8, floor": fp8.recipes.mxfp8(scale_rounding="floor"),
}


def hard(dtype, *, finite):
    """[M, K] with many magnitudes in a tile, outliers, zeros, subnormals, and all-zero tiles."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(M, K)) * np.exp2(rng.integers(-14, 4, (M, K)))
    x[rng.random(x.shape) < 0.1] = 0
    x[3, 5], x[7, 150] = 3e4, -6e4
    x[9] = 0
    x[12:14, :32] = 0
    x[20, :7] = [1e-38, -1e-39, 3e-45, 1e-37, 1.2e-38, 0.0, -0.0]
    if not finite:
        x[30, 3], x[31, 140], x[31, 141] = np.inf, -np.inf, np.nan
    with np.errstate(over="ignore", under="ignore"):
        return x.astype(dtype)


def by_oracle(x, how, fmt, recipe, stored):
    """Stored codes, and the scale of each value, in float64."""
    if recipe == "static" or stored is not None:
        scale = np.float32(SCALE if stored is None else stored)
        m = np.float32(1) / scale if stored is None else oracle.inverse(scale)
        return oracle.cast(x, m, fmt), np.full(x.shape, scale, np.float64)
    if how is None or not isinstance(how[0], tuple):
        codes, scale = oracle.quantize(x, fmt, how, power_of_two=recipe == "rowwise")
        return codes, np.broadcast_to(np.float64(scale), x.shape)
    tile, rule = how
    codes, scale = oracle.quantize_tiles(x, fmt, tile, rule)
    if scale.dtype == np.uint8:
        scale = np.where(scale == 255, np.nan, np.ldexp(1.0, scale.astype(np.int64) - 127))
    return codes, oracle.spread(np.float64(scale), x.shape, tile)


def counts(x, codes, scale, how, fmt):
    """The figures of `CastRow`, counted in float64."""
    size = np.abs(oracle.to_float32(x).astype(np.float64))
    finite = np.isfinite(size)
    nonzero = finite & (size > 0)
    with np.errstate(invalid="ignore"):
        saturated = finite & (size > LIMIT[fmt] * scale)
    used = np.where(nonzero, size, 0)  # the largest value of each cell, at each of its values
    if how is None:
        used = np.full(x.shape, used.max())
    elif isinstance(how[0], tuple):
        used = oracle.spread(oracle.tile_amax(used, how[0]), x.shape, how[0])
    else:
        used = np.broadcast_to(oracle.amax(used, how), x.shape)
    scales = scale[(used > 0) & ~np.isnan(scale)]
    return {
        "amax": size.max() if finite.all() else np.inf,
        "scale_min": scales.min(),
        "scale_max": scales.max(),
        "saturated": saturated.sum() / x.size,
        "underflowed": (nonzero & (codes & 0x7F == 0)).sum() / nonzero.sum(),
        "nonfinite": (~finite).sum(),
        "values": x.size,
        "calls": 1,
    }


SLOW = pytest.mark.slow
ALIKE = ("blockwise, float32", "mxfp8, floor")  # other scales, which the statistics only read
DTYPES = np.float32, ml_dtypes.bfloat16, np.float16


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(
            name, dtype, marks=() if i % 3 == (i // 3 + j) % 3 and name not in ALIKE else SLOW
        )
        for i, name in enumerate(RECIPES)
        for j, dtype in enumerate(DTYPES)
    ],
)
def test_equals_numpy(name, dtype):
    recipe, state, stored = RECIPES[name], None, None
    w = np.ones((K, N), dtype)
    if name == "delayed":  # a stored scale that is too small for the outliers
        stored = np.float32(0.37)
        state = dataclasses.replace(fp8.init_state(recipe), scale=np.full(3, stored))

    @jax.jit  # one program for all values
    def step(x, w, state):
        def loss(arrays, state):
            y = fp8.dot(*arrays, recipe=recipe, state=state, name="layer")
            return jnp.sum(y.astype(jnp.float32))

        if state is None:
            return jax.grad(loss)((x, w), None)
        return fp8.value_and_grad(loss)((x, w), state)

    for finite in (True, False):
        x = hard(dtype, finite=finite)
        with fp8.diagnostics.collect() as records:
            step(x, w, state)
        rows = fp8.diagnostics.summary(records).rows
        rows = {row.matmuls: row for row in rows if row.tensor == "x"}
        assert rows.keys() == COPIES[name].keys()
        for matmuls, how in COPIES[name].items():
            codes, scale = by_oracle(x, how, "E4M3", name, stored)
            expected = counts(x, codes, scale, how, "E4M3")
            found = {figure: getattr(rows[matmuls], figure) for figure in expected}
            assert found == pytest.approx(expected, rel=0, abs=0, nan_ok=True), finite
            assert expected["underflowed"] > 0
        if name in ("static", "delayed", "mxfp8, floor"):
            assert expected["saturated"] > 0


@pytest.mark.parametrize("format", [fp8.E4M3, fp8.E5M2], ids=repr)
def test_limit(format):
    """Above the limit, a format without an upper end would have a value that is nearer."""
    limit = LIMIT[format.name]
    x = jnp.array([limit, np.nextafter(np.float32(limit), np.float32(np.inf)), -format.max])
    lhs, rhs = (fp8.quantizers.Static(format=each, scale=1.0) for each in (format, fp8.E4M3))
    operands = fp8.recipes.Operands(lhs=lhs, rhs=rhs)
    recipe = fp8.Recipe(name="mine", fprop=operands, dgrad=operands, wgrad=operands)
    with fp8.diagnostics.collect() as records:
        fp8.dot(x, jnp.ones((3, 2)), recipe=recipe, name="layer")
    row = fp8.diagnostics.summary(records).rows[0]
    assert (row.tensor, row.saturated, row.amax) == ("x", 1 / 3, float(x[1]))


# A scale that is stored or not, and one that is a float32 or an E8M0.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ("delayed", "static", "square", "mxfp8") else SLOW)
        for n in RECIPES
    ],
)
def test_zeros_and_nothing(name):
    recipe = RECIPES[name]
    state = fp8.init_state(recipe) if recipe.rows else None
    with fp8.diagnostics.collect() as records:
        fp8.dot(jnp.zeros((4, 8)), jnp.ones((8, 2)), recipe=recipe, state=state, name="zeros")
    row = fp8.diagnostics.summary(records).rows[0]
    assert (row.amax, row.saturated, row.underflowed, row.nonfinite, row.values) == (0, 0, 0, 0, 32)
    assert np.isnan([row.scale_min, row.scale_max]).all()
