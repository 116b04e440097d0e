"""What every backend of the quantizer has to do with tiles.

A new backend is tested by being in the table.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from casts import cast_in
from hard_inputs import DTYPES, hard_arrays
from hard_tiles import TILES, assert_dequantizes, assert_equals_oracle, hard_tiles, scale_of

import jaxfp8 as fp8
from jaxfp8.kernels.cast._api import BACKENDS, cast_copies
from jaxfp8.numerics._scale import ScaleRule

RULES = {
    "float32": ScaleRule(),
    "power_of_two": ScaleRule(power_of_two=True),
    "rceil": ScaleRule(scale_format=fp8.E8M0),
    "floor": ScaleRule(scale_format=fp8.E8M0, scale_rounding="floor"),
}
FORMATS = {"E4M3": fp8.E4M3, "E5M2": fp8.E5M2}
SHAPES = [(128, 128), (256, 1024), (300, 272), (303, 300), (305, 256), (2000, 136)]
# Half of the kinds of a cast, in which each two choices meet; by default on the smaller shapes in
# turn. Every case meets all tiles.
KINDS = [*itertools.product(RULES, FORMATS, ["float32", "bfloat16"])]
HALF = [
    kind for index, kind in enumerate(KINDS) if index % 4 in ((0, 3) if index // 4 % 2 else (1, 2))
]
SMALLER = [shape for shape in SHAPES if np.prod(shape) < 100_000]
DEFAULT = {*zip(itertools.cycle(SMALLER), HALF, strict=False)}
CASES = [
    pytest.param(
        shape,
        *kind,
        id=f"{shape}-{'-'.join(kind)}",
        marks=[] if (shape, kind) in DEFAULT else pytest.mark.slow,
    )
    for kind in HALF
    for shape in SHAPES
]

TWO_RULES = ("float32", "E4M3"), ("rceil", "E4M3")

# What runs on a GPU only is interpreted in tests/kernels/quantize.
HERE = [name for name in BACKENDS if name not in ("mosaic", "triton")]
of_each = pytest.mark.parametrize("backend", HERE)
# The reference is XLA's code with barriers: where no other axis or size of it is at stake.
of_each_but_reference = pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=pytest.mark.slow if name == "reference" else ()) for name in HERE],
)


@functools.partial(jax.jit, static_argnums=(1, 2, 3), static_argnames="dequantized")
def jitted(x, tiles, kinds, backend, dequantized=True):
    """For each kind, (rule, format), and tile: the tensor, and what it dequantizes to.

    One program: compiling is slow.
    """
    copies = {
        (rule, format): cast_copies(
            x,
            cast_in(
                FORMATS[format],
                *map(fp8.PerBlock, tiles),
                rule=RULES[rule],
                backends=(backend,),
            ),
        )[0]
        for rule, format in kinds
    }
    return {
        kind: [(q, q.dequantize() if dequantized else None) for q in qs]
        for kind, qs in copies.items()
    }


def check(x, tiles, kinds, backend, message=""):
    """Everything equals the oracle, bit for bit."""
    for (rule, _), copies in jitted(x, tiles, kinds, backend).items():
        for (q, y), tile in zip(copies, tiles, strict=True):
            assert q.granularity == fp8.PerBlock(tile)
            assert_equals_oracle(q, x, tile, rule, f"{message} {tile} {rule} {q.format}")
            assert_dequantizes(q, y, x, f"{message} {tile} {rule} {q.format}")


def wide(shape, dtype):
    """Values whose magnitude differs from tile to tile, and within."""
    random = np.random.default_rng(0)
    coarse = random.integers(-40, 40, [-(-size // 32) for size in shape])
    exponents = coarse[tuple(np.ix_(*(np.arange(size) // 32 for size in shape)))] + random.integers(
        -6, 6, shape
    )
    return np.ldexp(random.standard_normal(shape), exponents).astype(dtype)


# Bit for bit


@of_each_but_reference
@pytest.mark.parametrize(("shape", "rule", "format", "dtype"), CASES)
def test_shapes(backend, shape, rule, format, dtype):
    if backend == "reference" and (shape, (rule, format, dtype)) not in DEFAULT:
        pytest.skip("the reference is the same code for every shape")
    x = wide(shape, DTYPES[dtype])
    for q, _ in jitted(x, (*TILES.values(),), ((rule, format),), backend, dequantized=False)[
        rule, format
    ]:
        assert_equals_oracle(q, x, q.granularity.tile, rule, str(q.granularity))


@of_each_but_reference
@pytest.mark.parametrize("index", range(len(TILES)), ids=[*TILES])
def test_hard_tiles(backend, index):
    tile = [*TILES.values()][index]
    formats = [*FORMATS, *FORMATS, *FORMATS][index % 2 : index % 2 + 4]
    check(
        hard_tiles(tile, np.float32, {(32, 32): 60, (128, 128): 20}.get(tile)),
        (tile,),
        (*zip(RULES, formats, strict=True),),
        backend,
    )


@of_each_but_reference
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_hard_tiles_in_16_bits(backend, dtype):
    kinds = ("float32", "E4M3"), ("rceil", "E5M2" if dtype == "bfloat16" else "E4M3")
    check(hard_tiles((1, 32), DTYPES[dtype]), ((1, 32), (1, 128), (32, 32)), kinds, backend)


@of_each_but_reference
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", TILES.values(), ids=[*TILES])
def test_hard_tiles_of_every_kind(backend, tile, dtype):
    if backend == "reference":
        pytest.skip("test_hard_tiles runs it")
    check(
        hard_tiles(tile, DTYPES[dtype], most(tile, 300)),
        (tile,),
        (*itertools.product(RULES, FORMATS),),
        backend,
    )


def most(tile, amaxes):
    return amaxes if tile == (128, 128) else None


@of_each
def test_ragged_hard_arrays(backend):
    for name, x in hard_arrays(np.float32).items():  # [11, 130]
        check(x, ((1, 128), (128, 128), (32, 1)), TWO_RULES, backend, name)


@of_each_but_reference
def test_one_bad_element_spoils_its_tile_only(backend):
    x = np.random.default_rng(0).standard_normal((300, 272)).astype(np.float32)
    tiles = (1, 128), (128, 128), (32, 1)
    clean = jitted(x, tiles, TWO_RULES, backend)
    for bad, where in ((np.nan, (0, 0)), (np.inf, (127, 128)), (-np.inf, (299, 271))):
        spoilt = x.copy()
        spoilt[where] = bad
        for kind, copies in jitted(spoilt, tiles, TWO_RULES, backend).items():
            for (q, y), (before, _), tile in zip(copies, clean[kind], tiles, strict=True):
                inside = oracle.spread(~np.isfinite(oracle.tile_amax(spoilt, tile)), x.shape, tile)
                np.testing.assert_array_equal(
                    oracle.codes(q.values)[~inside], oracle.codes(before.values)[~inside]
                )
                assert (scale_of(q) != scale_of(before)).sum() == 1
                assert np.isnan(y[where])


# One way of compiling and another


@of_each_but_reference
@pytest.mark.parametrize(
    "rule",
    [
        "float32",
        pytest.param("power_of_two", marks=pytest.mark.slow),
        "rceil",
        pytest.param("floor", marks=pytest.mark.slow),
    ],
)
def test_eager_equals_jit(backend, rule):
    x, tiles = jax.device_put(hard_arrays(np.float32)["a_row_of_each"]), ((1, 128), (32, 32))
    granularities = map(fp8.PerBlock, tiles)
    eager, _ = cast_copies(
        x, cast_in(fp8.E4M3, *granularities, rule=RULES[rule], backends=(backend,))
    )
    for one, (other, _), tile in zip(
        eager, jitted(x, tiles, ((rule, "E4M3"),), backend)[rule, "E4M3"], tiles, strict=True
    ):
        np.testing.assert_array_equal(oracle.codes(one.values), oracle.codes(other.values))
        np.testing.assert_array_equal(scale_of(one), scale_of(other))
        assert_equals_oracle(one, x, tile, rule)


@of_each_but_reference
@pytest.mark.parametrize(
    ("rule", "pair"), [("power_of_two", ((1, 128), (128, 1))), ("rceil", ((1, 32), (32, 1)))]
)
def test_both_directions_in_one_call_equal_two_calls(backend, rule, pair):
    x, kind = wide((303, 300), np.float32), (rule, "E4M3")
    both = jitted(x, pair, (kind,), backend)[kind]
    for (q, _), tile in zip(both, pair, strict=True):
        ((alone, _),) = jitted(x, (tile,), (kind,), backend)[kind]
        np.testing.assert_array_equal(q.values.view(jnp.uint8), alone.values.view(jnp.uint8))
        np.testing.assert_array_equal(scale_of(q), scale_of(alone))


@of_each
def test_bits_do_not_depend_on_what_is_fused_around(backend):
    @jax.jit
    def step(x):
        y = jnp.tanh(x) * 3
        return jitted(y, ((1, 128), (32, 32)), TWO_RULES, backend), y

    results, y = step(wide((303, 300), np.float32))
    for (rule, _), copies in results.items():
        for q, _ in copies:
            assert_equals_oracle(q, y, q.granularity.tile, rule)


# Ranks and sizes


@of_each
@pytest.mark.parametrize(
    ("shape", "tiles", "rule"),
    [
        ((3, 130, 70), ((1, 128), (128, 128), (128, 1, 128)), "float32"),
        ((2, 3, 33, 129), ((1, 32), (32, 1), (32, 1, 32), (3, 32, 1)), "rceil"),
    ],
    ids=["3D", "4D"],
)
def test_leading_axes(backend, shape, tiles, rule):
    check(wide(shape, np.float32), tiles, ((rule, "E4M3"),), backend)


@of_each_but_reference
def test_vmap(backend):
    x, tiles = wide((5, 40, 70), np.float32), ((1, 32), (32, 32))
    for (rule, _), copies in jax.vmap(lambda x: jitted(x, tiles, TWO_RULES, backend))(x).items():
        for (q, _), tile in zip(copies, tiles, strict=True):
            assert_equals_oracle(q, x, tile, rule)


@of_each_but_reference
def test_one_axis(backend):
    check(wide((300,), np.float32), ((128,), (32,)), (("rceil", "E4M3"),), backend)


@of_each_but_reference
@pytest.mark.parametrize("shape", [(0, 256), (256, 0), (2, 0, 256), (1, 1), (1, 129)], ids=str)
def test_small(backend, shape):
    check(wide(shape, np.float32), (*TILES.values(),), (("rceil", "E4M3"),), backend)


# Stochastic rounding


@of_each
def test_stochastic_rounding(backend):
    x = jax.device_put(np.random.default_rng(0).uniform(0.1, 1, (64, 256)).astype(np.float32))
    key, tiles = jax.random.key(0, impl="rbg"), (fp8.PerBlock((1, 128)), fp8.PerBlock((32, 1)))

    @jax.jit
    def both(x, key):
        how = {"rule": RULES["rceil"], "backends": (backend,)}
        drawn, _ = cast_copies(x, cast_in(fp8.E4M3, *tiles, rounding="stochastic", **how), key=key)
        nearest, _ = cast_copies(x, cast_in(fp8.E4M3, *tiles, **how))
        return [
            (q, near, (q.dequantize() - x).mean()) for q, near in zip(drawn, nearest, strict=True)
        ]

    for q, near, bias in both(x, key):
        np.testing.assert_array_equal(scale_of(q), scale_of(near))
        steps = oracle.codes(q.values).astype(int) - oracle.codes(near.values)
        assert set(np.unique(steps)) == {-1, 0, 1}  # one of the two values around it
        assert abs(float(bias)) < 1e-3  # 16384 errors of about 0.02
