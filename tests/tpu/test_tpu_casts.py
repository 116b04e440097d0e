"""Casts in programs for TPUs, run on the CPU: payloads and scales are those of the rules."""

import functools

import cells
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from casts import cast_in
from hard_inputs import DTYPES, cast_inputs, hard_arrays
from hard_tiles import (
    assert_dequantizes,
    assert_equals_oracle,
    hard_amaxes,
    hard_tiles,
)
from tpu_targets import array, compile_for

import jaxfp8 as fp8
from jaxfp8.kernels.cast._api import cast_copies
from jaxfp8.numerics._exact import divide
from jaxfp8.numerics._rounding import saturating_cast
from jaxfp8.numerics._scale import ScaleRule
from jaxfp8.programs import run_on_cpu

pytestmark = pytest.mark.tpu

CHIPS = pytest.mark.parametrize(
    "chip", ["tpu7x", *(pytest.param(c, marks=pytest.mark.slow) for c in ("v6e", "v5p", "v5e"))]
)
FORMATS = (fp8.E4M3, fp8.E5M2)


def on_tpu(chip, function, *arguments, seen=None):
    return run_on_cpu(compile_for(chip, function, *arguments), *arguments, seen=seen)


def assert_same_bits(ours, theirs, what=""):
    ours, theirs = (np.asarray(x) for x in (ours, theirs))
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), what
    unsigned = f"u{ours.dtype.itemsize}"
    np.testing.assert_array_equal(ours.view(unsigned), theirs.view(unsigned), err_msg=str(what))


MULTIPLIERS = (1.0, 0.1, 2.0**-9, 2.0**126)


@CHIPS
def test_every_value(chip):
    """The payload, and the payload widened in the program that made it."""
    xs = [cast_inputs(format) for format in FORMATS]

    def function(multipliers, *xs):
        return [
            [(q := saturating_cast(x, m, f)), q.astype(jnp.bfloat16), q.astype(jnp.float32)]
            for x, f in zip(xs, FORMATS, strict=True)
            for m in multipliers
        ]

    found = on_tpu(chip, function, [jnp.float32(m) for m in MULTIPLIERS], *map(jnp.asarray, xs))
    kinds = [(x, f, m) for x, f in zip(xs, FORMATS, strict=True) for m in MULTIPLIERS]
    for (x, format, m), (values, *widened) in zip(kinds, found, strict=True):
        expected = oracle.cast(x, m, format.name)
        np.testing.assert_array_equal(oracle.codes(values), expected)
        for wide in widened:
            np.testing.assert_array_equal(
                np.asarray(wide, np.float32), expected.view(format.dtype).astype(np.float32)
            )


def test_subnormal_numbers_are_compared():
    """A CPU reads them as zero by itself. So the comparison is looked for in the program."""
    cast = lambda x, m: saturating_cast(x, m, fp8.E4M3)
    text = compile_for("tpu7x", cast, array(256, 128), array(dtype=jnp.float32)).as_text()
    assert f"constant({oracle.TINY:.9g})" in text


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_a_multiplier_that_is_not_finite(format):
    """It makes NaN of each value, of zeros too."""
    x = jnp.asarray(cast_inputs(format)[:: 2**7])
    bad = jnp.array([jnp.inf, -jnp.inf, jnp.nan], jnp.float32)
    cast = lambda x, bad: jax.vmap(lambda m: saturating_cast(x, m, format))(bad)
    assert set(np.unique(oracle.codes(on_tpu("tpu7x", cast, x, bad)))) == {format.nan_byte}


@CHIPS
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_tensors_and_rows(chip, dtype):
    arrays = hard_arrays(DTYPES[dtype])
    kinds = [
        (fp8.E4M3, kept, power_of_two) for kept in (None, (0,)) for power_of_two in (False, True)
    ] + [(fp8.E5M2, (1,), False)]

    def one(x):
        return [
            fp8.quantize(
                x,
                format,
                fp8.PerTensor() if kept is None else fp8.PerAxis(*kept),
                power_of_two=power_of_two,
            )
            for format, kept, power_of_two in kinds
        ]

    found = on_tpu(chip, jax.vmap(one), jnp.asarray(np.stack([*arrays.values()])))
    for (format, kept, power_of_two), q in zip(kinds, found, strict=True):
        for n, (name, x) in enumerate(arrays.items()):
            codes, scale = oracle.quantize(x, format.name, kept, power_of_two=power_of_two)
            np.testing.assert_array_equal(oracle.codes(q.values[n]), codes, name)
            assert_same_bits(q.scale[n], scale, (name, format, kept, power_of_two))


RULES = {
    "float32": ScaleRule(),
    "power_of_two": ScaleRule(power_of_two=True),
    "rceil": ScaleRule(scale_format=fp8.E8M0),
    "floor": ScaleRule(scale_format=fp8.E8M0, scale_rounding="floor"),
}
TILE_KINDS = {
    (1, 128): (("power_of_two", fp8.E4M3), ("float32", fp8.E5M2)),
    (128, 128): (("power_of_two", fp8.E4M3),),
    (1, 32): (("rceil", fp8.E4M3), ("floor", fp8.E5M2)),
    (32, 32): (("rceil", fp8.E5M2),),
}


@CHIPS
@pytest.mark.parametrize(
    "tile",
    [pytest.param(t, marks=pytest.mark.slow if t == (32, 32) else ()) for t in TILE_KINDS],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_tiles(chip, tile, dtype):
    x = hard_tiles(tile, DTYPES[dtype], 8 if tile[0] > 32 else 40)
    kinds = TILE_KINDS[tile]

    def function(x):
        casts = (cast_in(f, fp8.PerBlock(tile), rule=RULES[rule]) for rule, f in kinds)
        copies = [cast_copies(x, cast)[0][0] for cast in casts]
        return [(q, q.dequantize()) for q in copies]

    for (q, y), (rule, format) in zip(on_tpu(chip, function, jnp.asarray(x)), kinds, strict=True):
        assert_equals_oracle(q, x, tile, rule, f"{rule} {format}")
        assert_dequantizes(q, y, x, f"{rule} {format}")


@CHIPS
def test_quotients(chip):
    """Those of integers are those of float64."""
    amaxes = hard_amaxes(np.float32)
    drawn = np.random.default_rng(0).integers(0x00800000, 0x7F800000, 2**14, dtype=np.uint32)
    amaxes = np.concatenate([amaxes[amaxes >= oracle.TINY], drawn.view(np.float32)])
    numerators = 1.0, 448.0, 57344.0
    amaxes = amaxes.astype(np.float32)
    function = lambda x: [divide(numerator, x) for numerator in numerators]
    quotients = on_tpu(chip, function, jnp.asarray(amaxes))
    for numerator, found in zip(numerators, quotients, strict=True):
        exact = np.clip(numerator / amaxes.astype(np.float64), 2.0**-126, 2.0**126)
        assert_same_bits(found, exact.astype(np.float32))


@CHIPS
@pytest.mark.parametrize(
    "format", [fp8.E4M3, pytest.param(fp8.E5M2, marks=pytest.mark.slow)], ids=repr
)
def test_stochastic_rounding(chip, format):
    """One key has the same bytes on each chip."""
    x, key = jnp.asarray(cast_inputs(format)[::7]), jax.random.key(5)

    def function(x, key):
        values = saturating_cast(x, jnp.float32(1.0), format, rounding="stochastic", key=key)
        return values, values.astype(jnp.bfloat16)

    values, wide = on_tpu(chip, function, x, key)
    expected = jax.jit(function)(x, key)[0]
    np.testing.assert_array_equal(oracle.codes(values), oracle.codes(expected))
    np.testing.assert_array_equal(np.asarray(wide, np.float32), np.asarray(expected, np.float32))


@CHIPS
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.slow)])
def test_casts_that_are_widened(chip, dtype):
    """`fake_quantize` with its gradient, and `dequantize`, of each recipe."""
    functions = [
        functools.partial(function, cells.SETUPS[name])
        for function in cells.CASTS.values()
        for name in ("current", "rowwise", "mxfp8")
    ]
    function = lambda x: [f(x) for f in functions]
    x, _, _ = cells.arrays(dtype)
    found, expected = on_tpu(chip, function, x), jax.jit(function)(x)
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert_same_bits(ours, theirs)


def slow(name):
    return pytest.param(name, marks=pytest.mark.slow)


@CHIPS
@pytest.mark.parametrize(
    "name", ["delayed", slow("current"), "rowwise", slow("blockwise"), "mxfp8"]
)
def test_matmuls_of_a_layer_read_the_tensors_of_the_cpu(chip, name):
    setup, matmuls = cells.SETUPS[name], cells.Matmuls()
    state, *tensors = cells.state_for(setup), *cells.arrays()
    function = functools.partial(cells.layer, setup)
    (_, y), (dx, dw), new = on_tpu(chip, function, state, *tensors, seen=matmuls)
    assert {matmul.name for matmul in matmuls} == {"fprop", "dgrad", "wgrad"}
    for matmul in matmuls:
        expected = cells.expected_operands(
            setup.recipe, matmul.name, dict(zip("xwg", tensors, strict=True)), state
        )
        for operand, scale, q in zip(matmul.operands, matmul.scales, expected, strict=True):
            assert sorted(operand.shape) == sorted(q.shape)
            # Tiles are multiplied in bfloat16. Others reach the matrix unit in FP8.
            assert (operand.dtype == q.values.dtype) == (setup.recipe.tile is None)
            assert not cells.differs(operand, scale, q), matmul.name
    (_, cpu_y), cpu_gradients, cpu_new = jax.jit(function)(state, *tensors)
    jax.tree.map(assert_same_bits, new, cpu_new)
    # The order of sums differs. Outside of tiles, a result is rounded before and after the scale.
    bound = 2**-8 if setup.recipe.tile is None else 1e-4
    for ours, theirs in zip((y, dx, dw), (cpu_y, *cpu_gradients), strict=True):
        ours, theirs = (np.asarray(v, np.float32) for v in (ours, theirs))
        assert np.linalg.norm(ours - theirs) < bound * np.linalg.norm(theirs)
