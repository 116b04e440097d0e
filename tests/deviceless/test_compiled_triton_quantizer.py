"""The Triton quantizer, compiled for GPUs that are not there.

Nothing spilled, x read once, nothing gathered.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from targets import array, topology
from triton_code import call_of, compiled, moved
from triton_interpreter import needs_triton

import jaxfp8 as fp8
from jaxfp8.programs import wire_report

pytestmark = pytest.mark.deviceless

QUANTIZER = "jaxfp8.kernels.quantize._triton"
ROWS, COLUMNS, SQUARES = (fp8.PerBlock(tile) for tile in ((1, 128), (128, 1), (128, 128)))
ROWS_32, COLUMNS_32, SQUARES_32 = (fp8.PerBlock(tile) for tile in ((1, 32), (32, 1), (32, 32)))
E8M0 = {"scale_format": fp8.E8M0}


def quantizer(granularities, format=fp8.E4M3, **how):
    return lambda x: fp8.quantize(
        x, format, granularities, kernels=fp8.Kernels(casts="triton"), **how
    )


# The kernel by itself


KERNELS = {
    "rows": ((ROWS,), jnp.bfloat16, {"power_of_two": True}),
    "both": ((ROWS, COLUMNS), jnp.bfloat16, {"power_of_two": True}),
    "all, float32": ((ROWS, COLUMNS, SQUARES), jnp.float32, {}),
    "32": ((ROWS_32, COLUMNS_32), jnp.bfloat16, E8M0),
    "all 32, float32": ((ROWS_32, COLUMNS_32, SQUARES_32), jnp.float32, {"format": fp8.E5M2}),
    "whole rows": ((fp8.PerAxis(0),), jnp.bfloat16, {}),
    "longest rows": ((fp8.PerAxis(0),), jnp.float32, {}),
}


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        pytest.param(
            name,
            arch,
            marks=[] if arch == 90 or name in ("both", "all 32, float32") else pytest.mark.slow,
        )
        for name in KERNELS
        for arch in (89, 90, 100)
    ],
)
def test_spills_nothing_and_reads_once(name, arch, tmp_path, monkeypatch):
    needs_triton()
    granularities, dtype, how = KERNELS[name]
    x = array(1024, 32768 if name == "longest rows" else 4096, dtype=dtype)
    call = call_of(monkeypatch, QUANTIZER, quantizer(granularities, **how), x)
    block = x.size // call["grid"]
    ptx, opcodes, used = compiled(call, arch, tmp_path, monkeypatch)
    assert {90: ".target sm_90a", 100: ".target sm_100a"}.get(arch, f".target sm_{arch}") in ptx
    assert re.search(r"STACK:0 .*LOCAL:0\b", used), used
    assert not [opcode for opcode in opcodes if opcode.startswith(("LDL", "STL"))]
    threads = 32 * call["warps"]
    # Each value of x comes in once and goes out once in each direction, 16 bytes at a time; scales
    # are what is left.
    assert moved(opcodes, "LDG", threads) == {16: block * x.dtype.itemsize}
    assert moved(opcodes, "STG", threads)[16] == block * len(granularities)
    divisions = set(re.findall(r"\b(?:div|rcp)\.[\w.]+", ptx))
    exact = how.get("power_of_two") or how == E8M0
    assert divisions == (set() if exact else {"div.rn.f32", "rcp.rn.f32"} & divisions), divisions
    assert exact or "div.rn.f32" in divisions


@pytest.mark.parametrize("shape", [(2, 1000, 1000), (2, 999, 1001)], ids=str)
def test_any_shape_is_read_once(shape, tmp_path, monkeypatch):
    needs_triton()
    x = array(*shape)
    call = call_of(monkeypatch, QUANTIZER, quantizer((ROWS, COLUMNS, SQUARES)), x)
    _, opcodes, used = compiled(call, 90, tmp_path, monkeypatch)
    assert sum(moved(opcodes, "LDG", 32 * call["warps"]).values()) == 128 * 128 * 2
    # Where rows and columns begin at odd addresses, each value has one of its own in a register.
    assert shape[-1] % 2 or re.search(r"STACK:0 .*LOCAL:0\b", used), used


# In a program


def compile_on(mesh, spec, function, x, *, inside=False):
    x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        if inside:
            function = jax.shard_map(function, in_specs=spec, out_specs=spec)
        return jax.jit(function).lower(x).compile()


def mesh_of(kind, chip="h200"):
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    return Mesh(
        np.array(topology(chip, "1x1x8").devices).reshape(4, 2),
        ("a", "b"),
        axis_types=(axis_type,) * 2,
    )


LAYOUTS = {
    "tiles by rows": (array(1024, 2048), P("a"), quantizer((ROWS, COLUMNS))),
    "tiles by both, E8M0": (
        array(1024, 2048),
        P("a", "b"),
        quantizer((ROWS_32, COLUMNS_32), **E8M0),
    ),
    "tiles by columns": (array(1024, 2048), P(None, "b"), quantizer((ROWS, COLUMNS, SQUARES))),
    "ragged examples": (array(8, 1000, 2000), P("a"), quantizer((ROWS_32, COLUMNS_32))),
    "ragged": (array(1024, 2000), P(("a", "b")), quantizer((ROWS, COLUMNS))),
    "whole rows": (array(1024, 2000), P(("a", "b")), quantizer(fp8.PerAxis(0))),
}


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param(layout, kind, marks=[] if kind == "auto" or index % 2 else pytest.mark.slow)
        for index, layout in enumerate(LAYOUTS)
        for kind in ("auto", "explicit", "shard_map")
    ],
)
def test_nothing_is_gathered(layout, kind):
    needs_triton()
    x, spec, function = LAYOUTS[layout]
    mesh = mesh_of(kind)
    compiled = compile_on(mesh, spec, function, x, inside=kind == "shard_map")
    assert not wire_report(compiled).transfers, wire_report(compiled)
    assert compiled.as_text().count('custom_call_target="triton_kernel_call') == 1
    for leaf, sharding in zip(
        jax.tree.leaves(compiled.out_info), jax.tree.leaves(compiled.output_shardings), strict=True
    ):
        assert sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim), (leaf.shape, sharding)


def test_what_cuts_tiles_or_rows_is_whole_in_an_auto_mesh_and_refused_by_an_explicit_one():
    needs_triton()
    for x, function in (
        (array(1024, 384), quantizer((ROWS, COLUMNS))),
        (array(1024, 2048), quantizer(fp8.PerAxis(0))),
    ):
        report = wire_report(compile_on(mesh_of("auto"), P("a", "b"), function, x))
        assert {t.kind for t in report.transfers} == {"all-gather"}
        with pytest.raises(NotImplementedError, match="cuts tiles of"):
            compile_on(mesh_of("explicit"), P("a", "b"), function, x)


def test_the_transpose_that_a_matmul_takes_back_is_never_made():
    needs_triton()
    x = array(1024, 2048)
    compiled = compile_on(mesh_of("auto"), P("a"), lambda x: quantizer(COLUMNS)(x).values.T, x)
    assert "transpose(" not in compiled.as_text()


def test_a_gpu_without_fp8_is_refused():
    needs_triton()
    with pytest.raises(NotImplementedError, match="compute capability 80"):
        compile_on(mesh_of("auto", "a100"), P("a"), quantizer(ROWS), array(1024, 2048))
