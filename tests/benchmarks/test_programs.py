"""The counter of programs counts right, and the benchmark runs. No number is judged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from quick_flags import flags, quick_flags

ROOT = Path(__file__).parents[2]
TRIPS = 7
# A loop of 7 turns. Each turn reads a slice of 8 floats, writes it to a stack, and has a
# conditional with one kernel in its first branch.
TINY = """
HloModule tiny

%sliced (p0: f32[7,8], p1: s32[]) -> f32[7,8] {
  %p0 = f32[7,8]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,8]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,8}
  %sine = f32[1,8]{1,0} sine(%slice)
  %zeros = f32[7,8]{1,0} broadcast(%zero), dimensions={}
  ROOT %update = f32[7,8]{1,0} dynamic-update-slice(%zeros, %sine, %p1, %zero)
}

%warm (w: f32[8]) -> f32[8] {
  %w = f32[8]{0} parameter(0)
  ROOT %negated = f32[8]{0} negate(%w)
}

%cold (c: f32[8]) -> f32[8] {
  %c = f32[8]{0} parameter(0)
  %twice = f32[8]{0} add(%c, %c)
  ROOT %squared = f32[8]{0} multiply(%twice, %twice)
}

%body (carry: (s32[], f32[7,8], f32[8])) -> (s32[], f32[7,8], f32[8]) {
  %carry = (s32[], f32[7,8], f32[8]) parameter(0)
  %at = s32[] get-tuple-element(%carry), index=0
  %stack = f32[7,8]{1,0} get-tuple-element(%carry), index=1
  %x = f32[8]{0} get-tuple-element(%carry), index=2
  %begun = ((f32[7,8], s32[]), f32[7,8], u32[]) fusion-start(%stack, %at), calls=%sliced
  %fused = f32[7,8]{1,0} fusion-done(%begun)
  %one = s32[] constant(1)
  %next = s32[] add(%at, %one)
  %chosen = f32[8]{0} conditional(%at, %x, %x), branch_computations={%warm, %cold}
  ROOT %out = (s32[], f32[7,8], f32[8]) tuple(%next, %fused, %chosen)
}

%condition (state: (s32[], f32[7,8], f32[8])) -> pred[] {
  %state = (s32[], f32[7,8], f32[8]) parameter(0)
  %now = s32[] get-tuple-element(%state), index=0
  %end = s32[] constant(7)
  ROOT %less = pred[] compare(%now, %end), direction=LT
}

ENTRY %main (a: s32[], b: f32[7,8], d: f32[8]) -> f32[8] {
  %a = s32[] parameter(0)
  %b = f32[7,8]{1,0} parameter(1)
  %d = f32[8]{0} parameter(2)
  %start = (f32[8]{0}, f32[16]{0}) all-gather-start(%d), dimensions={0}
  %done = f32[16]{0} all-gather-done(%start)
  %first = (s32[], f32[7,8], f32[8]) tuple(%a, %b, %d)
  %loop = (s32[], f32[7,8], f32[8]) while(%first), condition=%condition, body=%body, TRIPS
  ROOT %result = f32[8]{0} get-tuple-element(%loop), index=2
}
""".replace("TRIPS", f'backend_config={{"known_trip_count":{{"n":"{TRIPS}"}}}}')


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    for folder in ("benchmarks/programs", "tests/deviceless"):
        monkeypatch.syspath_prepend(ROOT / folder)


def test_a_loop_counts_as_often_as_it_turns():
    from program import Program

    program = Program(TINY)
    assert program.launches("warm") == 1
    assert program.launches("body") == 3  # a fusion, the counter, and the warm branch
    assert program.launches(program.entry) == 1 + TRIPS * 3  # and a gather, which has two lines


def test_a_slice_counts_and_not_its_array():
    from _bytes import moved
    from program import Program

    program, row = Program(TINY), 8 * 4
    assert moved(program, "warm") == 2 * row
    turn = (row + 4 + row) + (4 + 4 + 4) + 2 * row  # in the order of the kernels of `body`
    assert moved(program, "body") == turn
    assert moved(program, program.entry) == (row + 2 * row) + TRIPS * turn
    # In one instruction, the fusion moves the same.
    whole = TINY.replace(
        "%begun = ((f32[7,8], s32[]), f32[7,8], u32[]) fusion-start",
        "%begun = f32[7,8]{1,0} fusion",
    )
    whole = "".join(line for line in whole.splitlines(True) if "%fused = " not in line)
    assert moved(Program(whole.replace("%begun", "%fused")), "body") == turn


def test_an_unknown_loop_is_an_error():
    from program import Program

    program = Program(TINY.replace("known_trip_count", "other"))
    with pytest.raises(ValueError, match="how often the loop loop turns"):
        program.launches(program.entry)


def test_a_scan_counts_as_often_as_its_length():
    from program import Program

    def scanned(x):
        return jax.lax.scan(lambda c, x: (jnp.sin(c @ c) + x, c), jnp.ones((8, 8)), x)

    x = jax.ShapeDtypeStruct((TRIPS * 10, 8, 8), jnp.float32)
    program = Program(jax.jit(scanned).lower(x).compile().as_text())
    ((_, loop, _),) = [found for found in program.runs(program.entry) if found[1].op == "while"]
    body = loop.attributes.split("body=%")[1].split(",")[0]
    assert program.launches(body) >= 2
    outside = len([i for i in program.computations[program.entry].values() if i.is_kernel])
    assert program.launches(program.entry) == outside + TRIPS * 10 * program.launches(body)


def rows_of(tmp_path, *words):
    result = tmp_path / "result.json"
    script = [sys.executable, ROOT / "benchmarks/programs/programs.py"]
    sizes = ["--blocks", "1", "--repeats", "1"]
    if "--model" not in words:
        sizes += ["--features", "32", "--tokens", "32"]
    given = flags() if {"--target", "--model"} & {*words} else quick_flags()
    run = subprocess.run(
        [*script, *sizes, "--json", result, *words],
        env=os.environ | {"XLA_FLAGS": given}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    text = result.read_text()
    written = json.loads(text)
    assert str(tmp_path) not in text
    assert {"jax", "jaxlib", "flax", "optax"} <= {*written["versions"]}
    rows = {row["recipe"]: row for row in written["rows"]}
    assert all(f"| {name} |" in run.stdout for name in rows)
    for row in rows.values():
        parts = [row[f"{part}_seconds"]["median"] for part in ("trace", "lower", "compile")]
        assert all(part > 0 for part in parts)
        assert row["total_seconds"]["median"] == pytest.approx(sum(parts), abs=0.01)
        assert row["instructions"] > row["kernels"] > 0
    return rows


@pytest.mark.slow
def test_the_casts_of_a_program_are_counted(tmp_path):
    result = tmp_path / "result.json"
    script = [sys.executable, ROOT / "benchmarks/programs/cast_instructions.py"]
    run = subprocess.run(
        [*script, "--recipes", "current", "mxfp8", "--json", result],
        env=os.environ | {"XLA_FLAGS": quick_flags()}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    current, mxfp8 = json.loads(result.read_text())["rows"]
    assert 3 <= current["casts_per_layer"] < mxfp8["casts_per_layer"]  # one for x, w and g at least
    # A conversion, and two bounds.
    assert 3 < current["instructions_of_a_cast"]["min"] < mxfp8["instructions_of_a_cast"]["min"]
    assert all(0 < row["share_of_the_program"] < 1 for row in (current, mxfp8))


@pytest.mark.slow
def test_runs_and_writes_its_table(tmp_path):
    rows = rows_of(tmp_path, "--stacks", "scanned", "--recipes", "bf16", "delayed")
    assert [*rows] == ["bf16", "delayed"]
    assert rows["delayed"]["instructions"] > rows["bf16"]["instructions"]
    assert all(row["bytes"] is None for row in rows.values())


@pytest.mark.deviceless
def test_compiles_for_h200(tmp_path):
    words = ["--target", "h200", "--stacks", "unrolled", "--recipes", "bf16", "current"]
    rows = rows_of(tmp_path, *words)
    assert rows["current"]["kernels"] > rows["bf16"]["kernels"]
    assert all(row["bytes"] > 0 for row in rows.values())


@pytest.mark.deviceless
def test_compiles_blocks_with_kernels(tmp_path):
    rows = rows_of(tmp_path, "--model", "blocks", "--recipes", "bf16", "blockwise+kernels")
    in_bf16, in_fp8 = rows.values()
    assert in_bf16["bytes"] < in_fp8["bytes"]
    for row in rows.values():
        assert 0 < row["small"] == sum(row["small_kernels"].values()) < row["kernels"]
        assert 0 < row["different_but_for_constants"] <= row["different"] <= row["fusions"]
