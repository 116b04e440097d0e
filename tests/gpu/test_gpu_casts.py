"""Casts on the chip have the oracle's bits, by every backend that says it can."""

import functools
import itertools

import jax
import numpy as np
import oracle
import pytest
from casts import cast_in, cast_one
from hard_inputs import DTYPES, hard_arrays
from hard_tiles import TILES, assert_dequantizes, assert_equals_oracle, hard_tiles

import jaxfp8 as fp8
from jaxfp8.kernels.cast import _api as cast
from jaxfp8.kernels.grouped_matmul._groups import Groups
from jaxfp8.numerics._scale import ScaleRule
from jaxfp8.prologues._prologue import Gathered

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

RULES = {
    "float32": ScaleRule(),
    "power_of_two": ScaleRule(power_of_two=True),
    "rceil": ScaleRule(scale_format=fp8.E8M0),
    "floor": ScaleRule(scale_format=fp8.E8M0, scale_rounding="floor"),
}
FORMATS = {"E4M3": fp8.E4M3, "E5M2": fp8.E5M2}


KINDS = tuple(itertools.product(RULES, FORMATS))
# GPU time is short, and compiling counts. So one program has all kinds, and there are two shapes.
SHAPES = [(1024, 2048), (303, 300)]


def all_kinds(x, granularities, kinds, backend):
    """For each kind, (rule, format), that the backend can do.

    The copies of x, and what they dequantize to. One program.
    """

    def one(x, rule, format):
        how = {"rule": RULES[rule], "backends": (backend,)}
        copies, _ = cast.cast_copies(x, cast_in(FORMATS[format], *granularities, **how))
        return [(q, q.dequantize()) for q in copies]

    able, reasons = [], []
    for kind in kinds:
        try:
            jax.eval_shape(functools.partial(one, rule=kind[0], format=kind[1]), x)
            able.append(kind)
        except NotImplementedError as reason:
            reasons.append(str(reason))
    if not able:
        pytest.skip(f"{backend}: {reasons[0]}")
    return dict(zip(able, jax.jit(lambda x: [one(x, *kind) for kind in able])(x), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tile", TILES.values(), ids=[*TILES])
@pytest.mark.parametrize("backend", cast.BACKENDS)
def test_hard_tiles(backend, tile, dtype):
    """NaN, inf, zeros, subnormals, and the amaxes at which scales change, padded to whole tiles of
    128.
    """
    x = hard_tiles(tile, DTYPES[dtype], 60)
    x = np.pad(x, [(0, -size % 128) for size in x.shape])
    for (rule, format), copies in all_kinds(x, (fp8.PerBlock(tile),), KINDS, backend).items():
        for q, y in copies:
            assert_equals_oracle(q, x, tile, rule, f"{rule} {format}")
            assert_dequantizes(q, y, x, f"{rule} {format}")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("rules", "tiles"),
    [
        (("power_of_two", "float32"), ((1, 128), (128, 1))),
        (("power_of_two", "float32"), ((128, 128),)),
        (("rceil",), ((1, 32), (32, 1))),
        (("rceil",), ((32, 32),)),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", cast.BACKENDS)
def test_shapes(backend, rules, tiles, shape):
    """Both directions in one call, more tiles than processors, ragged edges."""
    random = np.random.default_rng(0)
    x = np.ldexp(random.standard_normal(shape), random.integers(-20, 20, shape)).astype(
        DTYPES["bfloat16"]
    )
    granularities = tuple(map(fp8.PerBlock, tiles))
    kinds = [(rule, "E4M3") for rule in rules]
    for (rule, _), copies in all_kinds(x, granularities, kinds, backend).items():
        for (q, _), tile in zip(copies, tiles, strict=True):
            assert_equals_oracle(q, x, tile, rule)


def gathered_casts(x, sizes, rule):
    """Bytes and scales of both directions of rows of groups, which Pallas reads where they are."""
    groups = Groups.of(sizes, tokens=x.shape[0], tile=128)
    rows = Gathered(groups.tiled(x), x, groups.first_row, groups.live_rows)
    side = 32 if rule == "rceil" else 128
    both = fp8.PerBlock((1, 1, side)), fp8.PerBlock((1, side, 1))
    how = {"rule": RULES[rule], "transposed": (False, True), "backends": ("mosaic",)}
    copies, _ = cast.cast_copies(rows, cast_in(fp8.E4M3, *both, **how))
    return [(jax.lax.bitcast_convert_type(q.values, np.uint8), q.scale) for q in copies]


@pytest.mark.parametrize("k", [384, 448], ids="K={}".format)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", ["power_of_two", "rceil"])
def test_gathered_rows(rule, dtype, k, gpu, cpu):
    """On the first H200 columns 64 to 127 of each tile of bfloat16 came from wrong places."""
    x = np.random.default_rng(0).standard_normal((700, k)).astype(DTYPES[dtype])
    run = jax.jit(functools.partial(gathered_casts, rule=rule))
    for sizes in ((700, 0, 0, 0, 0, 0), (130, 0, 256, 1, 200, 99), (1, 1, 1, 1, 1, 1)):
        x[sum(sizes) :] = np.nan  # rows of no group, more each time
        given = x, np.array(sizes, np.int32)
        try:
            on_gpu, on_cpu = (run(*jax.device_put(given, device)) for device in (gpu, cpu))
        except NotImplementedError as reason:
            pytest.skip(str(reason))
        jax.tree.map(np.testing.assert_array_equal, on_gpu, on_cpu)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kept", [None, (0,), (1,)], ids=str)
@pytest.mark.parametrize("backend", cast.BACKENDS)
def test_current_scales(backend, kept, dtype):
    """Per tensor and per row: the division, too, is the CPU's."""
    granularity = fp8.PerTensor() if kept is None else fp8.PerAxis(*kept)
    kinds = list(itertools.product(("float32", "power_of_two"), FORMATS))

    def run(x):
        return [
            cast.cast_copies(
                x,
                cast_in(FORMATS[format], granularity, rule=RULES[rule], backends=(backend,)),
            )[0][0]
            for rule, format in kinds
        ]

    program = jax.jit(run)
    for name, x in hard_arrays(DTYPES[dtype]).items():
        try:
            results = program(x)
        except NotImplementedError as reason:
            pytest.skip(f"{backend}: {reason}")
        for (rule, format), q in zip(kinds, results, strict=True):
            codes, scale = oracle.quantize(x, format, kept, power_of_two=rule == "power_of_two")
            np.testing.assert_array_equal(
                np.asarray(q.scale), scale, err_msg=f"{name} {rule} {format}"
            )
            np.testing.assert_array_equal(
                oracle.codes(q.values), codes, err_msg=f"{name} {rule} {format}"
            )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", cast.BACKENDS)
def test_known_scales(backend, dtype, format):
    run = jax.jit(
        lambda x, m: cast_one(x, m, FORMATS[format], fp8.PerTensor(), backends=(backend,))
    )
    for name, x in hard_arrays(DTYPES[dtype]).items():
        for multiplier in (1.0, 448 / 3, 2.0**-126, 2.0**126):
            m = np.array(multiplier, np.float32)
            try:
                q = run(x, m)
            except NotImplementedError as reason:
                pytest.skip(f"{backend}: {reason}")
            np.testing.assert_array_equal(
                oracle.codes(q.values), oracle.cast(x, m, format), err_msg=name
            )
            np.testing.assert_array_equal(np.asarray(q.scale), oracle.inverse(m), err_msg=name)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("backend", cast.BACKENDS)
def test_every_bfloat16(backend, format):
    """All of them, so all ties: rounded to even, clipped, NaN if not finite."""
    x = np.arange(2**16, dtype=np.uint16).view(DTYPES["bfloat16"]).reshape(256, 256)
    run = jax.jit(
        lambda x, m: cast_one(x, m, FORMATS[format], fp8.PerTensor(), backends=(backend,))
    )
    m = np.array(1, np.float32)
    try:
        q = run(x, m)
    except NotImplementedError as reason:
        pytest.skip(f"{backend}: {reason}")
    np.testing.assert_array_equal(oracle.codes(q.values), oracle.cast(x, m, format))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "granularity", [fp8.PerTensor(), fp8.PerBlock((1, 128)), fp8.PerBlock((128, 128))], ids=repr
)
def test_fake_quantize(granularity, dtype, format, gpu, cpu):
    """What is quantized and dequantized in one program, under XLA's default options, is rounded as
    on the CPU.
    """
    x = np.random.default_rng(0).standard_normal((256, 384)).astype(DTYPES[dtype])
    run = jax.jit(lambda x: fp8.fake_quantize(x, FORMATS[format], granularity, power_of_two=True))
    on_gpu, on_cpu = (np.asarray(run(jax.device_put(x, device))) for device in (gpu, cpu))
    np.testing.assert_array_equal(on_gpu, on_cpu)
    assert (on_cpu != x).mean() > 0.5
