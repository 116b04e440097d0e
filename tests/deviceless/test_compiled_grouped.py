"""Hopper's grouped matmul, compiled for an H200 that is not there.

FP8 tensor cores, nothing spilled, and one kernel for each of the three matmuls.
"""

import functools
import os
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from interpreter import needs_mosaic
from program import Program
from targets import array, compile_for
from work import host_transfers

import jaxfp8 as fp8
from jaxfp8._quantized_tensor import Cast, Direction
from jaxfp8.kernels.grouped_matmul._groups import Groups
from jaxfp8.kernels.scaled_matmul.hopper._scaling import Scaling, T
from jaxfp8.kernels.scaled_matmul.hopper._tiling import CHOICES
from jaxfp8.prologues._prologue import Gathered

pytestmark = [pytest.mark.deviceless, needs_mosaic]

E, TOKENS, TILES = 4, 700, 9
SCALINGS = {
    "square": Scaling(square=True),
    "columns": Scaling(),
    "at the end": Scaling(at_end=True),
    "fast": Scaling(at_end=True, fast=True),
    "of 32, bytes": Scaling(tile=32, in_bytes=(True, False)),
    "of 32": Scaling(tile=32),
}
CASES = [
    (grouping, name, scaling, out)
    for grouping in ("rows", "groups")
    for name in ("small", "large")
    for scaling in SCALINGS
    for out in ("bfloat16", "float32")
    if not (grouping == "groups" and scaling in ("square", "fast"))
    and not (out == "float32" and scaling != "columns")
]


def compiled_code(folder, grouping, tiling, scaling, out_dtype, steps):
    """What ptxas said of the kernel, and its PTX. A kernel that was compiled is not dumped again:
    `steps` are its own.
    """
    from jaxfp8.kernels.scaled_matmul.hopper._kernel import launch
    from jaxfp8.kernels.scaled_matmul.hopper._matmul import Matmul
    from jaxfp8.kernels.scaled_matmul.hopper._memory import Given
    from jaxfp8.kernels.scaled_matmul.hopper._tiling import GroupSteps, RowTiles

    k, n, rows = T * steps, 512, grouping == "rows"
    m = T * TILES if rows else 384
    e4m3 = jnp.dtype(fp8.E4M3.dtype)
    matmul = Matmul(
        batch=1 if rows else E, m=m, n=n, k=k, formats=(e4m3, e4m3), out_dtype=out_dtype,
        tiling=tiling, scaling=scaling, grouping=grouping, out_rows=TOKENS if rows else None,
    )  # fmt: skip
    of_rhs = E if rows else 1
    cells = 1 if scaling.at_end else k // scaling.tile
    across = (4, cells) if scaling.square else (cells, n)
    leads = (1, E) if rows else (E, E) if scaling.at_end else (1, 1)
    kinds = [jnp.dtype("uint8" if in_bytes else "float32") for in_bytes in scaling.in_bytes]
    scales = (
        array(leads[0], cells, m, dtype=kinds[0]),
        array(leads[1], *across, dtype=kinds[1]),
    )
    one = functools.partial(array, dtype=jnp.dtype("int32"))
    groups = RowTiles(*[one(TILES)] * 4) if rows else GroupSteps(*[one(E)] * 2)
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(folder)
    try:
        given = array(1, m, k, dtype=e4m3), array(of_rhs, n, k, dtype=e4m3), *scales
        compile_for("h200", lambda given: launch(matmul, given), Given(*given, groups=groups))
    finally:
        del os.environ["MOSAIC_GPU_DUMP_TO"]
    (log,), (code,) = Path(folder).glob("*.ptxas"), Path(folder).glob("*.ptx")
    return log.read_text(), code.read_text()


@pytest.mark.parametrize("index", range(len(CASES)))
def test_spills_nothing_and_multiplies_in_fp8(index, tmp_path):
    grouping, name, scaling, out = CASES[index]
    tiling, scaling = CHOICES[name], SCALINGS[scaling]
    log, code = compiled_code(tmp_path, grouping, tiling, scaling, jnp.dtype(out), 40 + index)
    assert set(re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)) == {
        ("0", "0")
    }, log
    assert "serialized" not in log  # what ptxas says where it waits for each wgmma
    (used,) = {int(registers) for registers in re.findall(r"Used (\d+) registers", log)}
    print(CASES[index], used)
    assert used <= 168
    wanted = f"wgmma.mma_async.sync.aligned.m64n{tiling.columns}k32.f32.e4m3.e4m3"
    found = Counter(re.findall(r"wgmma\.mma_async[\w.]+", code))
    assert {*found} == {wanted}


@functools.cache
def layer(name):
    recipe, kernels = fp8.recipes.get(name), fp8.Kernels("h200")

    def step(x, w, g, sizes):
        run = functools.partial(fp8.ragged_dot, recipe=recipe, kernels=kernels)
        y, pull = jax.vjp(lambda x, w: run(x, w, sizes), x, w)
        return y, *pull(g)

    sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
    shapes = (4096, 512), (8, 512, 1024), (4096, 1024)
    options = kernels.compiler_options(recipe)
    return Program(compile_for("h200", step, *(array(*s) for s in shapes), sizes, options=options)
                   .as_text())  # fmt: skip


@pytest.mark.parametrize("name", ["current", "rowwise", "blockwise", "mxfp8"])
def test_each_matmul_is_one_kernel(name):
    program = layer(name)
    assert not host_transfers(program)
    kernels = [each for each in program.kernels(program.entry) if "mosaic_gpu" in each.attributes]
    results = [each.type.split("{")[0] for each in kernels]
    for result in ("bf16[1,4096,1024]", "bf16[1,4096,512]", "bf16[8,512,1024]"):
        assert results.count(result) == 1
    assert not program.other_matmuls(program.entry)
    # x and g are read where they are, and nothing copies a result. In tiles one kernel casts each.
    in_tiles = name in ("blockwise", "mxfp8")
    assert len(kernels) == (6 if in_tiles else 3)


@pytest.mark.parametrize(("dtype", "k"), [("bfloat16", 448), ("float32", 416)])
def test_gathered_rows_of_whole_boxes_compile(dtype, k):
    """Pallas refuses other rows only here: when it compiles for a GPU."""
    cast = Cast(
        format=fp8.E4M3,
        directions=(Direction(fp8.PerBlock((1, 1, 128))), Direction(fp8.PerBlock((1, 128, 1)))),
        rule=fp8.ScaleRule(power_of_two=True),
    )

    from jaxfp8.kernels.quantize import _mosaic

    def run(x, sizes):
        groups = Groups.of(sizes, tokens=TOKENS, tile=T)
        rows = Gathered(groups.tiled(x), x, groups.first_row, groups.live_rows)
        return [copy.scale for copy in _mosaic.cast_copies(rows, cast, None, key=None)[0]]

    given = array(TOKENS, k, dtype=jnp.dtype(dtype)), array(E, dtype=jnp.dtype("int32"))
    assert "mosaic_gpu" in compile_for("h200", run, *given).as_text()
