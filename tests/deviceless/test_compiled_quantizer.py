"""The Mosaic quantizer, compiled for a GPU that is not there.

Nothing spilled, x read once, nothing gathered.
"""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casts import cast_in
from interpreter import needs_mosaic
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from targets import topology

import jaxfp8 as fp8
from jaxfp8.programs import wire_report

pytestmark = [pytest.mark.deviceless, needs_mosaic]

ROWS, COLUMNS, SQUARES = (fp8.PerBlock(tile) for tile in ((1, 128), (128, 1), (128, 128)))
MX_BOTH, MX_SQUARES = (fp8.PerBlock((1, 32)), fp8.PerBlock((32, 1))), fp8.PerBlock((32, 32))
BOTH = (ROWS, COLUMNS)
FLOAT32, POWERS, MX = {}, {"power_of_two": True}, {"scale_format": fp8.E8M0}
SHAPE = 1024, 2048


def compile_on(
    mesh, spec, granularities, dtype=jnp.bfloat16, rule=POWERS, *, inside=False, shape=SHAPE
):
    def run(x):
        return fp8.quantize(x, fp8.E4M3, granularities, kernels=fp8.Kernels(casts="mosaic"), **rule)

    x = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        if inside:
            run = jax.shard_map(run, in_specs=spec, out_specs=spec)
        return jax.jit(run).lower(x).compile()


def one(chip):
    return Mesh(np.array(topology(chip).devices), ("d",), axis_types=(AxisType.Auto,))


def compiled_code(folder, chip, granularities, dtype, rule, m=256):
    """What ptxas said of the kernel, and its PTX.

    A kernel that this process compiled before is not dumped: m is its own.
    """
    with dumped(folder):
        compile_on(one(chip), P(), granularities, dtype, rule, shape=(m, 256))
    (log,), (code,) = Path(folder).glob("*.ptxas"), Path(folder).glob("*.ptx")
    return log.read_text(), code.read_text()


@contextlib.contextmanager
def dumped(folder):
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(folder)
    try:
        yield
    finally:
        del os.environ["MOSAIC_GPU_DUMP_TO"]


SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
BRINGS_A_TILE = re.compile(r"cp\.async\.bulk\.tensor\.[2-5]d\.shared::\w+\.global")


def check(log, code, granularities):
    assert set(SPILLS.findall(log)) == {("0", "0")}, log
    # A block of threads brings its tile in once, and nothing else comes from global memory.
    assert len(BRINGS_A_TILE.findall(code)) == 1
    assert "ld.global" not in code
    # Values go out once in each direction; scales too: of 1x128 a line, of 1x32 four of them, of
    # 128x128 one by one thread.
    single = granularities.count(SQUARES)
    lines = 0 if single else sum(granularity in BOTH for granularity in granularities)
    boxes = len(granularities) + (len(granularities) - single - lines)
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.global\.shared", code)) == boxes
    assert len(re.findall(r"cp\.async\.bulk\.global\.shared", code)) == lines
    assert len(re.findall(r"st\.global", code)) == single


CASES = [
    *(
        (granularities, dtype, rule)
        for granularities in (BOTH, (SQUARES,))
        for dtype in (jnp.bfloat16, jnp.float32)
        for rule in (POWERS, FLOAT32)
    ),
    (MX_BOTH, jnp.bfloat16, MX),
    (MX_BOTH, jnp.float32, MX),
    ((MX_SQUARES,), jnp.bfloat16, MX),
    ((SQUARES,), jnp.bfloat16, MX),
]


# Ragged arrays have narrower boxes, and registers for them are the same: one of each kind of tile.
@pytest.mark.parametrize(
    ("index", "ragged"),
    [(index, 0) for index in range(len(CASES))] + [(index, 32) for index in (0, 4, 8, 10)],
)
def test_reads_once_and_spills_nothing(index, ragged, tmp_path):
    check(
        *compiled_code(tmp_path, "h200", *CASES[index], m=128 * (2 + index) + ragged),
        CASES[index][0],
    )


def test_a_line_of_scales_ends_inside_of_its_row():
    """A copy in one dimension does not look where a row ends, on a GPU; interpreted it does.

    So there are whole tiles.
    """
    from jaxfp8._quantized_tensor import Direction
    from jaxfp8.kernels.quantize._mosaic_tiling import _tiling_of
    from jaxfp8.numerics._scale import ScaleRule

    for granularity in (*BOTH, SQUARES, *MX_BOTH, MX_SQUARES):
        tiling = _tiling_of(Direction(granularity), 2)
        _, scale = tiling.written((1, 288, 160), fp8.E4M3, ScaleRule())
        assert scale.shape[1] % (128 // tiling.side) == 0
        assert tiling.whole or scale.shape[2] % 128 == 0


SPANNING = {"rows and columns": (fp8.PerAxis(0), fp8.PerAxis(1)), "tensor": (fp8.PerTensor(),)}


@pytest.mark.parametrize("m", [384, 416])
@pytest.mark.parametrize("name", SPANNING)
def test_scales_that_span_tiles_take_one_kernel_for_all_copies(name, m, tmp_path):
    with dumped(tmp_path):  # kernels in Pallas: XLA finds the amaxes (test_compiled_amaxes.py)
        compile_on(one("h200"), P(), SPANNING[name], shape=(m, 512))
    (log,), (code,) = tmp_path.glob("*.ptxas"), tmp_path.glob("*.ptx")
    assert set(SPILLS.findall(log.read_text())) == {("0", "0")}
    assert len(BRINGS_A_TILE.findall(code.read_text())) == 1


def test_a_known_scale_takes_one_read_for_both_copies_and_the_amax(tmp_path):
    from jaxfp8.kernels.cast._mosaic import copies

    def run(x, multiplier):
        cast = cast_in(fp8.E4M3, *[fp8.PerTensor()] * 2, transposed=(False, True))
        return copies(x, cast, (multiplier, multiplier))

    mesh = one("h200")
    with dumped(tmp_path), jax.set_mesh(mesh):
        place = NamedSharding(mesh, P())
        x, m = (
            jax.ShapeDtypeStruct(shape, dtype, sharding=place)
            for shape, dtype in ((SHAPE, jnp.bfloat16), ((), jnp.float32))
        )
        jax.jit(run).lower(x, m).compile()
    (log,), (code,) = tmp_path.glob("*.ptxas"), tmp_path.glob("*.ptx")
    assert set(SPILLS.findall(log.read_text())) == {("0", "0")}
    assert len(BRINGS_A_TILE.findall(code.read_text())) == 1


def test_on_a_b200(tmp_path):
    """In a process of its own: Mosaic takes the chip of the first kernel for that of all."""
    script = (
        "import test_compiled_quantizer as t; "
        "print(*t.compiled_code({!r}, 'b200', *t.CASES[0]), sep='\\f')"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script.format(str(tmp_path))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    log, code = finished.stdout.split("\f")
    assert "sm_100a" in code
    check(log, code, CASES[0][0])


LAYOUTS = [P("a"), P(None, "b"), P("a", "b"), P(("a", "b"))]


@pytest.mark.parametrize(
    ("spec", "granularities"),
    [*((spec, BOTH) for spec in LAYOUTS), (P("a", "b"), SPANNING["rows and columns"])],
)
@pytest.mark.parametrize("kind", ["auto", "explicit", "shard_map"])
def test_nothing_is_gathered(kind, spec, granularities):
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = Mesh(
        np.array(topology("h200", "1x1x8").devices).reshape(4, 2),
        ("a", "b"),
        axis_types=(axis_type,) * 2,
    )
    compiled = compile_on(mesh, spec, granularities, inside=kind == "shard_map")
    transfers = wire_report(compiled).transfers
    if (
        granularities != BOTH and kind != "shard_map"
    ):  # amaxes that span devices, which in shard_map the caller combines
        transfers = [transfer for transfer in transfers if transfer.kind != "all-reduce"]
        assert all(transfer.bytes < 2**16 for transfer in wire_report(compiled).transfers)
    assert not transfers, wire_report(compiled)
    for leaf, sharding in zip(
        jax.tree.leaves(compiled.out_info), jax.tree.leaves(compiled.output_shardings), strict=True
    ):
        lie = NamedSharding(
            mesh,
            P(
                *(
                    entry if size > 1 else None
                    for entry, size in zip((*spec, None)[:2], leaf.shape, strict=True)
                )
            ),
        )
        assert granularities != BOTH or sharding.is_equivalent_to(lie, 2), (leaf.shape, sharding)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_nothing_is_gathered_where_no_mesh_is_set(kind):
    mesh = Mesh(np.array(topology("h200", "1x1x8").devices), ("a",), axis_types=(kind,))
    x = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16, sharding=NamedSharding(mesh, P("a")))
    run = jax.jit(lambda x: fp8.quantize(x, fp8.E4M3, BOTH, kernels=fp8.Kernels(casts="mosaic")))
    assert not wire_report(run.lower(x).compile()).transfers


@pytest.mark.parametrize(
    ("m", "granularity"), [(256, COLUMNS), (768, SQUARES), (64, MX_BOTH[1])], ids=str
)
def test_fewer_tiles_than_devices(m, granularity):
    """2 or 6 on 4 devices.

    XLA would split them by a part of a mesh axis, of which JAX's specs know nothing.
    """
    mesh = Mesh(
        np.array(topology("h200", "1x1x8").devices).reshape(4, 2),
        ("a", "b"),
        axis_types=(AxisType.Auto,) * 2,
    )
    report = wire_report(compile_on(mesh, P("a"), (granularity,), shape=(m, 256)))
    assert {t.kind for t in report.transfers} == {"all-gather"}


def test_a_part_that_cuts_tiles_is_whole_in_an_auto_mesh_and_refused_by_an_explicit_one():
    shape = 8 * 128, 3 * 128
    auto, explicit = (
        Mesh(
            np.array(topology("h200", "1x1x8").devices).reshape(4, 2),
            ("a", "b"),
            axis_types=(kind,) * 2,
        )
        for kind in (AxisType.Auto, AxisType.Explicit)
    )
    report = wire_report(compile_on(auto, P("a", "b"), BOTH, shape=shape))
    assert {t.kind for t in report.transfers} == {"all-gather"}
    with pytest.raises(NotImplementedError, match="cuts tiles of 128"):
        compile_on(explicit, P("a", "b"), BOTH, shape=shape)
