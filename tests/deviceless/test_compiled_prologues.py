"""A prologue in a kernel, compiled for an H200.

Each of its arrays is brought in once, and h is never written.
"""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import needs_mosaic
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from prologues import PROLOGUES, moved, shapes_of, trained
from targets import array, program_for, topology

import jaxfp8 as fp8
from jaxfp8.programs import wire_report

pytestmark = [pytest.mark.deviceless, needs_mosaic]

M, K, N = 1024, 512, 256
# Passes over an array [M, K] in bfloat16 that the kernel's prologue saves in a training step: h is
# not written, nor read. Scales of all of h need its amaxes first: of two arrays it is then written
# as before, of one it is made twice.
SAVED = [
    (fp8.recipes.delayed(), "swiglu", 2),
    (fp8.recipes.static(x_scale=0.1, w_scale=0.1, g_scale=0.1), "rms_norm", 2),
    (fp8.recipes.blockwise(), "swiglu", 2),
    (fp8.recipes.current(), "rms_norm", 1),
    pytest.param(fp8.recipes.rowwise(), "swiglu", 0, marks=pytest.mark.slow),
]


def quantize_in_one(name, *arrays, **how):
    return fp8.quantize(arrays, fp8.E4M3, prologue=PROLOGUES[name], **how)


def devices(shape="1x1x1", kind=AxisType.Auto):
    found = np.array(topology("h200", shape).devices)
    return Mesh(
        found.reshape(4, 2) if found.size == 8 else found[:, None],
        ("a", "b"),
        axis_types=(kind,) * 2,
    )


@pytest.mark.parametrize(
    ("recipe", "name", "passes"), SAVED, ids=lambda value: getattr(value, "name", str(value))
)
def test_bytes_of_a_training_step(recipe, name, passes):
    two, one = (
        trained(recipe, name, "mosaic", fused=fused, sizes=(M, K, N)) for fused in (False, True)
    )
    assert moved(two) - moved(one) == pytest.approx(passes * 2 * M * K, abs=0.1 * M * K)


@pytest.mark.parametrize("name", PROLOGUES)
def test_xla_rounds_what_it_fuses(name):
    """Else its casts would see another h than kernels.

    It drops conversions to bfloat16 and back.
    """
    program = program_for(
        "h200",
        lambda *a: quantize_in_one(name, *a, scale=0.5),
        *(array(*s) for s in shapes_of(name, M, K)),
    )
    written = [kernel for kernel in program.kernels(program.entry) if f"[{M},{K}]" in kernel.type]
    # the payload, built as a byte
    assert [kernel.type.split("[")[0] for kernel in written] == ["u8"]
    assert any(
        i.op == "convert" and i.type.startswith(f"bf16[{M},{K}]")
        for i in program.inside(program.entry, written[0])
    )


SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
BRINGS_A_TILE = re.compile(r"cp\.async\.bulk\.tensor\.[2-5]d\.shared::\w+\.global")
ROWS, COLUMNS, SQUARES = (fp8.PerBlock(tile) for tile in ((1, 128), (128, 1), (128, 128)))


@pytest.mark.parametrize("granularities", [(ROWS, COLUMNS), (SQUARES,)], ids=["both", "squares"])
@pytest.mark.parametrize("name", PROLOGUES)
def test_each_tile_comes_once_and_h_is_made_once(name, granularities, tmp_path):
    shapes = shapes_of(name, M, K)
    run = lambda *arrays: quantize_in_one(
        name, *arrays, granularity=granularities, kernels=fp8.Kernels(casts="mosaic")
    )
    mesh = devices()
    # a kernel that this process compiled before is not dumped
    rows = 256 if len(granularities) == 2 else 384
    arrays = [
        jax.ShapeDtypeStruct(
            (rows, *shape[1:]) if len(shape) > 1 else shape,
            jnp.bfloat16,
            sharding=NamedSharding(mesh, P()),
        )
        for shape in shapes
    ]
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(tmp_path)
    try:
        with jax.set_mesh(mesh):
            jax.jit(run).lower(*arrays).compile()
    finally:
        del os.environ["MOSAIC_GPU_DUMP_TO"]
    (log,), (code,) = (list(tmp_path.glob(f"*.{kind}")) for kind in ("ptxas", "ptx"))
    assert set(SPILLS.findall(log.read_text())) == {("0", "0")}
    text = code.read_text()
    assert len(BRINGS_A_TILE.findall(text)) == sum(len(shape) == 2 for shape in shapes)
    assert "ld.global" not in text
    # 128 threads make 128 x 128 values, half of them in each turn of a loop: 64 a thread, whatever
    # the number of directions. One exponential and one reciprocal each, which are the instructions
    # of XLA's own kernels.
    for instruction in ("ex2.approx.ftz.f32", "rcp.approx.f32"):
        assert len(re.findall(re.escape(instruction), text)) == (64 if name == "swiglu" else 0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("swiglu", AxisType.Explicit),
        *(("rms_norm", kind) for kind in (AxisType.Auto, AxisType.Explicit, "shard_map")),
    ],
    ids=str,
)
def test_nothing_is_gathered(name, kind):
    mesh = devices("1x1x8", AxisType.Auto if kind == "shard_map" else kind)
    # RMSNorm sums rows, so that a device has all of a row.
    spec, gain = (P("a", "b"), None) if name == "swiglu" else (P(("a", "b")), P())
    run = lambda *arrays: quantize_in_one(
        name, *arrays, granularity=(ROWS, COLUMNS), kernels=fp8.Kernels(casts="mosaic")
    )
    specs = tuple(spec if len(shape) == 2 else gain for shape in shapes_of(name, M, K))
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, lie))
        for shape, lie in zip(shapes_of(name, M, K), specs, strict=True)
    ]
    if kind == "shard_map":
        run = jax.shard_map(run, in_specs=specs, out_specs=spec)
    with jax.set_mesh(mesh):
        assert not wire_report(jax.jit(run).lower(*arrays).compile()).transfers


def test_a_row_on_two_devices_is_summed_over_them():
    mesh = devices("1x1x8", AxisType.Explicit)
    x, gain = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, lie))
        for shape, lie in (((M, K), P("a", "b")), ((K,), P()))
    )
    run = lambda *arrays: quantize_in_one(
        "rms_norm", *arrays, granularity=(ROWS, COLUMNS), kernels=fp8.Kernels(casts="mosaic")
    )
    with jax.set_mesh(mesh):
        (transfer,) = wire_report(jax.jit(run).lower(x, gain).compile()).transfers
    assert (transfer.kind, transfer.bytes) == ("all-reduce", 4 * M // 4)
