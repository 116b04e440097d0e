"""Hopper's block-scaled matmul, compiled for an H200 that is not there.

FP8 tensor cores, nothing spilled or in bfloat16.
"""

import dataclasses
import functools
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import needs_mosaic
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from program import Program
from targets import array, dense_step, topology

import jaxfp8 as fp8
from jaxfp8.kernels.scaled_matmul.hopper._scaling import Scaling, T
from jaxfp8.kernels.scaled_matmul.hopper._tiling import CHOICES

pytestmark = [pytest.mark.deviceless, needs_mosaic]

BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


def compile_on_h200(function, *arguments, **options):
    mesh = Mesh(np.array(topology("h200").devices), ("d",), axis_types=(AxisType.Auto,))
    lie = NamedSharding(mesh, P())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lie), arguments)
    with jax.set_mesh(mesh):
        return jax.jit(function, **options).lower(*placed).compile()


def matmul_of(tiling, formats, out_dtype, scaling, k, add_to=None, m=512):
    from jaxfp8.kernels.scaled_matmul.hopper._matmul import Matmul

    dtypes = tuple(jnp.dtype(format.dtype) for format in formats)
    return Matmul(
        batch=2, m=m, n=512, k=k, formats=dtypes, out_dtype=out_dtype, tiling=tiling,
        scaling=scaling, add_to=add_to,
    )  # fmt: skip


def compiled_code(folder, tiling, formats, out_dtype, scaling, k, add_to=None, m=512):
    """What ptxas said of the kernel, its PTX, and the program around it.

    A kernel that this process compiled before is not dumped: k is its own.
    """
    from jaxfp8.kernels.scaled_matmul.hopper._kernel import launch
    from jaxfp8.kernels.scaled_matmul.hopper._memory import Given

    matmul = matmul_of(tiling, formats, out_dtype, scaling, k, add_to, m)
    call = lambda *arrays: launch(matmul, Given(*arrays))
    lhs, rhs = (
        array(2, size, k, dtype=dtype) for size, dtype in zip((m, 512), matmul.formats, strict=True)
    )
    cells = 1 if scaling.at_end else k // scaling.tile
    across = ((4, cells) if scaling.tile == T else (k // T, 64)) if scaling.square else (cells, 512)
    kinds = [jnp.dtype(jnp.uint8) if in_bytes else F32 for in_bytes in scaling.in_bytes]
    scales = array(2, cells, m, dtype=kinds[0]), array(2, *across, dtype=kinds[1])
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(folder)
    try:
        if add_to is None:
            program = compile_on_h200(call, lhs, rhs, *scales)
        else:
            donated = {"donate_argnums": 4} if add_to == out_dtype else {}
            program = compile_on_h200(
                call, lhs, rhs, *scales, array(2, m, 512, dtype=add_to), **donated
            )
    finally:
        del os.environ["MOSAIC_GPU_DUMP_TO"]
    (log,), (code,) = Path(folder).glob("*.ptxas"), Path(folder).glob("*.ptx")
    return log.read_text(), code.read_text(), program.as_text()


PLAIN, MIXED, TURNED = (fp8.E4M3, fp8.E4M3), (fp8.E4M3, fp8.E5M2), (fp8.E5M2, fp8.E4M3)
SQUARE, COLUMNS = Scaling(square=True), Scaling()
PRECISE, FAST = Scaling(at_end=True), Scaling(at_end=True, fast=True)
OF_32, SQUARE_OF_32 = Scaling(tile=32), Scaling(tile=32, square=True)
BYTES, SQUARE_BYTES = (
    dataclasses.replace(scaling, in_bytes=(True, False)) for scaling in (OF_32, SQUARE_OF_32)
)
PROMOTED = [name for name in CHOICES if name != "wide"]
CASES = [
    *(
        (name, PLAIN, out, scaling)
        for name in PROMOTED
        for out in (BF16, F32)
        for scaling in (SQUARE, COLUMNS)
    ),
    *(
        ("large", formats, BF16, scaling)
        for formats in (MIXED, TURNED)
        for scaling in (SQUARE, COLUMNS)
    ),
    *((name, PLAIN, BF16, PRECISE) for name in PROMOTED),
    *((name, PLAIN, BF16, FAST) for name in CHOICES),
    *((name, PLAIN, BF16, scaling) for name in PROMOTED for scaling in (OF_32, SQUARE_BYTES)),
    *(
        (name, PLAIN, BF16, dataclasses.replace(OF_32, in_bytes=(True, True)))
        for name in ("decode", "few")
    ),
    *((name, PLAIN, BF16, BYTES) for name in ("small", "large")),
    *(
        (name, MIXED, F32, scaling)
        for name in ("small", "large")
        for scaling in (OF_32, SQUARE_OF_32)
    ),
    *(("large", MIXED, F32, PRECISE), ("large", TURNED, F32, FAST), ("wide", MIXED, F32, FAST)),
]


def test_a_last_group_of_fewer_tiles_makes_no_wgmma_wait(tmp_path):
    """9 tiles along M are a group of 8 and one of 1. A division by 8 or 1 would be a call."""
    log, _, _ = compiled_code(tmp_path, CHOICES["large"], PLAIN, BF16, SQUARE, T * 7, m=9 * 128)
    assert "serialized" not in log


@pytest.mark.parametrize("index", range(len(CASES)))
def test_spills_nothing_and_multiplies_in_fp8(index, tmp_path):
    name, formats, out_dtype, scaling = CASES[index]
    tiling = CHOICES[name]
    log, code, _ = compiled_code(tmp_path, tiling, formats, out_dtype, scaling, T * (8 + index))
    assert set(re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)) == {
        ("0", "0")
    }, log
    assert "serialized" not in log  # what ptxas says where it waits for each wgmma
    (used,) = {int(registers) for registers in re.findall(r"Used (\d+) registers", log)}
    # Of the products of tiles of 32 several may be on their way.
    matmul = matmul_of(tiling, formats, out_dtype, scaling, T)
    assert used <= (matmul.registers if scaling.tile == T else 168)
    # 128 of K are four wgmma of 32, in the formats of the operands and no other.
    kinds = "".join(f".{format.name.lower()}" for format in formats)
    wanted = f"wgmma.mma_async.sync.aligned.m64n{tiling.columns}k32.f32{kinds}"
    found = Counter(re.findall(r"wgmma\.mma_async[\w.]+", code))
    assert {*found} == {wanted}
    turns, rest = divmod(found[wanted], 4 * tiling.rows // 64)
    assert not rest
    assert turns == 1 or scaling.fast  # a short loop of nothing else is unrolled
    # Each sum is added to once for each tile in a step, or only where the tensor cores multiply.
    sums = 0 if scaling.fast else tiling.rows * tiling.columns // 128 * scaling.parts
    assert len(re.findall(r"\b(?:add|fma)(?:\.rn)?\.f32\b", code)) == sums
    # Neighbours share what they copy of lhs.
    assert ("multicast::cluster" in code) == (tiling.cluster == 2)
    # A step of K reads one scale of a square of 128 from global memory; all else comes by TMA.
    if not scaling.at_end:
        assert len(re.findall(r"ld\.global", code)) == (scaling.square and scaling.tile == T)
    assert ".ftz" not in code  # the smallest scale in bytes is a subnormal number


# Instructions of a thread for 128 of K, in a tile of 128 x 128 for two warpgroups: the table of
# `scaled_matmul/hopper/_scaling.py`.
COUNTS = {
    "1x128 @ 128x128": (SQUARE, {"FFMA": 64, "FMUL": 2, "FMNMX": 2, "FADD": 0, "LDS": 2}),
    "1x128 @ 1x128": (COLUMNS, {"FFMA": 64, "FMUL": 64, "FMNMX": 64, "FADD": 0, "LDS": 18}),
    "1x32 @ 32x32": (SQUARE_OF_32, {"FFMA": 256, "FMUL": 32, "FMNMX": 32, "FADD": 0, "LDS": 24}),
    "1x32 @ 1x32": (OF_32, {"FFMA": 256, "FMUL": 256, "FMNMX": 256, "FADD": 0, "LDS": 72}),
    # Sums are promoted without scales, and scaled at the end.
    "rows": (PRECISE, {"FFMA": 0, "FADD": 64, "FMUL": 128, "FMNMX": 128, "LDS": 0}),
}


@pytest.mark.parametrize("name", COUNTS)
def test_the_machine_code_is_that_of_fp8_tensor_cores(name, tmp_path):
    triton = pytest.importorskip("triton", reason="which brings a disassembler")
    scaling, counts = COUNTS[name]
    _, code, _ = compiled_code(
        tmp_path, CHOICES["large"], PLAIN, BF16, scaling, T * (60 + [*COUNTS].index(name))
    )
    (tmp_path / "kernel.ptx").write_text(code)
    run = functools.partial(
        subprocess.run, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    run(["ptxas", "-arch=sm_90a", "-O3", "kernel.ptx", "-o", "kernel.cubin"])
    disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    listing = run([disassembler, "-c", "kernel.cubin"]).stdout
    found = Counter(re.findall(r"\b([A-Z])GMMA\.64x128x(\d+)", listing))
    assert found == {("Q", "32"): 4}  # 128 of K
    assert not re.search(r"\b(?:LDL|STL)\b", listing)  # nor does it spill
    # Products are scaled and added by FFMA, so each sum is rounded once.
    seen = {name: len(re.findall(rf"\b{name}\b", listing)) for name in counts}
    seen["FMUL"] -= 2  # of quotients of indices, once a tile
    assert seen == counts


# C's dtype; where it is that of the result, the result is written over it.
ADDED = [
    ("decode", BF16, BF16, COLUMNS),
    ("small", F32, F32, PRECISE),
    ("large", F32, F32, COLUMNS),
    ("large", BF16, BF16, FAST),
    ("large", BF16, F32, SQUARE),
    ("large", F32, BF16, PRECISE),
    ("large", F32, F32, SQUARE_OF_32),
    ("large", BF16, F32, OF_32),
]


@pytest.mark.parametrize("index", range(len(ADDED)))
def test_adds_without_spilling_and_in_place(index, tmp_path):
    name, out_dtype, add_to, scaling = ADDED[index]
    log, _, program = compiled_code(
        tmp_path, CHOICES[name], PLAIN, out_dtype, scaling, T * (8 + len(CASES) + index), add_to
    )
    assert set(re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)) == {
        ("0", "0")
    }, log
    assert " copy(" not in program
    assert ("output_to_operand_aliasing" in program) == (add_to == out_dtype)


def test_xla_adds_in_cublas():
    """Per tensor and in float32, one kernel reads C and writes the result."""

    def add(lhs, rhs, c):
        return fp8.scaled_matmul(lhs, rhs, add_to=c)

    operands = (
        jax.eval_shape(lambda x: fp8.quantize(x, fp8.E4M3), array(512, 512)) for _ in range(2)
    )
    options = {
        "compiler_options": fp8.Kernels("h200").compiler_options(fp8.recipes.current()),
        "donate_argnums": 2,
    }
    program = Program(
        compile_on_h200(add, *operands, array(512, 512, dtype=F32), **options).as_text()
    )
    (kernel,) = [kernel for kernel in program.kernels(program.entry) if "s8[" in kernel.type]
    assert kernel.is_fp8_matmul
    assert '"beta":1' in kernel.attributes


def layer(recipe):
    kernels = fp8.Kernels(casts="mosaic", matmuls="mosaic")
    dot = functools.partial(fp8.dot, recipe=recipe, kernels=kernels)
    return dense_step(recipe, lambda x, w, state: dot(x, w, state=state))


RECIPES = {
    "blockwise": fp8.recipes.blockwise,
    "hybrid": functools.partial(fp8.recipes.blockwise, gradient=fp8.E5M2),
    "float32 scales": functools.partial(fp8.recipes.blockwise, power_of_two=False),
    "mxfp8": functools.partial(fp8.recipes.mxfp8, w_tile_dim=2),
    "rowwise": fp8.recipes.rowwise,
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_multiplies_nothing_in_bfloat16(name):
    """Three matmuls and the casts of x, w and the gradient, each tensor cast once.

    XLA turns no FP8 values.
    """
    m, k, n = 1024, 512, 768
    recipe = RECIPES[name]()
    compiled = compile_on_h200(layer(recipe), array(m, k), array(k, n), array(m, n), ())
    program = Program(compiled.as_text())
    assert not program.other_matmuls(program.entry)
    assert not re.search(r"\b(dot|convolution)\(", compiled.as_text())
    kernels = program.kernels(program.entry)
    of_mosaic = [i.type for i in kernels if "mosaic_gpu" in i.attributes]
    assert len(of_mosaic) == 6
    assert {type for type in of_mosaic if type.startswith("bf16")} == {
        f"bf16[1,{m},{n}]{{2,1,0}}", f"bf16[1,{m},{k}]{{2,1,0}}", f"bf16[1,{k},{n}]{{2,1,0}}",
    }  # fmt: skip
    copied = [i.type for i in kernels if "mosaic_gpu" not in i.attributes and "f8e" in i.type]
    assert not copied
