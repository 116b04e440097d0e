"""The GPU benchmark runs from end to end on a CPU, compiles for chips that are not there, and
notices what goes wrong.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from quick_flags import flags, quick_flags

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"
SECTIONS = ["copies", "checks", "casts", "layers", "steps", "experts", "matmuls"]
TIMED = {"median", "quartiles", "rounds"}


def run(*words, code=None):
    """The finished process. `code` runs in it first, beside the benchmark's own files."""
    given = quick_flags() if "--dry-run" in words else flags()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": given}
    begin = [FOLDER / "run.py"]
    if code is not None:
        begin = [
            "-c",
            f"import sys; sys.path.insert(0, {str(FOLDER)!r})\n{code}\nimport run; "
            "sys.exit(run.main())",
        ]
    return subprocess.run(
        [sys.executable, *begin, *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def rows_of(path):
    return json.loads(path.read_text())["rows"]


def check_result(finished, path):
    """What every dry run writes."""
    assert finished.returncode == 0, finished.stderr
    text = path.read_text()
    result = json.loads(text)
    assert result["finished"] == "Finished"
    assert [*result["section_seconds"]] == SECTIONS
    assert {"jax", "jaxlib", "python"} <= {*result["machine"]["versions"]}
    assert {"device", "chip", "commit", "driver"} <= {*result["machine"]}
    assert str(path.parent) not in text
    for row in result["rows"]:
        assert {"section", "group", "operation", "contender", "status"} <= {*row}
        assert row["status"] in ("ok", "skipped"), row
        if row["status"] == "skipped":
            assert row["reason"], row
        elif row["section"] == "checks":
            assert "chosen" not in row
            assert row.get("different_bytes", 0) == 0, row
            assert row.get("distance", 0) <= row.get("bound", 0), row
        else:
            assert {*row["seconds"]} == TIMED, row
            by_backend = row["section"] in ("casts", "matmuls") and "named" in row
            assert row.get("chosen") == ("xla" if by_backend else None), row
            assert row["seconds"]["median"] > 0, row
            assert "gib_per_s" in row or "tflops" in row, row
            assert ("speedup" in row) == (row["section"] not in ("copies", "casts")), row
    tables = path.with_suffix(".md").read_text()
    assert tables in finished.stdout
    assert all(row["contender"] in tables for row in result["rows"])
    return result["rows"]


@pytest.mark.slow
def test_dry_run(tmp_path):
    path = tmp_path / "result.json"
    names = [
        "copies",
        "bf16",
        "casts: 256x512, copy",
        ", 1x128 and 128x1",
        "tensor, xla",
        "tiny, forward and backward, delayed",
        "train step, delayed",
        "flax",
        "256x512, rows, plain pattern",
        "experts of 40x128x256, forward and backward, b",
    ]
    rows = check_result(
        run("--dry-run", "--json", path, "--markdown", *[f"--match={name}" for name in names]), path
    )
    found = {(row["section"], row["contender"], row["status"]) for row in rows}
    assert {
        ("copies", "copy", "ok"),
        ("checks", "xla", "ok"),
        ("checks", "mosaic", "skipped"),
        ("casts", "xla", "ok"),
        ("casts", "plain pattern", "ok"),
        ("layers", "delayed", "ok"),
        ("layers", "flax", "ok"),
        ("steps", "delayed", "ok"),
        ("steps", "delayed, Pallas casts", "skipped"),
        ("steps", "flax", "ok"),
        ("experts", "blockwise", "ok"),
        ("matmuls", "tensor, xla", "ok"),
    } <= found


@pytest.mark.slow  # compiles all programs
def test_whole_dry_run(tmp_path):
    path = tmp_path / "result.json"
    rows = check_result(run("--dry-run", "--json", path, "--markdown"), path)
    contenders = {}
    for row in rows:
        contenders.setdefault(row["section"], set()).add(row["contender"])
    recipes = {"bf16", "delayed", "current", "rowwise", "flax", "plain pattern"}
    assert contenders["layers"] >= recipes
    assert contenders["steps"] >= recipes
    assert "plain pattern" in contenders["casts"]
    assert "tensor, plain pattern" in contenders["matmuls"]
    assert "plain pattern, jax.lax.ragged_dot" in contenders["experts"]


@pytest.mark.slow
def test_what_fails_is_written_and_ends_nothing_else(tmp_path):
    """A wrong result makes the exit status 1, and a program that cannot be traced does not stop the
    others.
    """
    path = tmp_path / "result.json"
    code = """
import os; os.environ["JAX_PLATFORMS"] = "cpu"
import casts, checks, jax.numpy as jnp
def broken(x): raise RuntimeError("no such kernel")
jnp.negative, checks.CPU_BOUND = broken, -1.0
"""
    words = ["--match=32x48x256 float32, fprop, tensor, xla", "--match=copies"]
    finished = run("--dry-run", "--sections=copies,checks", "--json", path, *words, code=code)
    assert finished.returncode == 1, finished.stderr
    status = {row["contender"]: row["status"] for row in rows_of(path)}
    assert status == {
        "copy": "ok",
        "negation": "failed",
        "tensor, xla": "failed",
        "tensor, xla, fast accumulation": "failed",
    }
    (reason,) = (row["reason"] for row in rows_of(path) if row["contender"] == "negation")
    assert "no such kernel" in reason


@pytest.mark.slow
def test_no_time_left(tmp_path):
    path = tmp_path / "result.json"
    finished = run("--dry-run", "--sections=copies", "--minutes=0.00001", "--json", path, code="""
import os, threading
threading.Timer = lambda *_: type("Never", (), {"start": lambda self: None})()
""")  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert {(row["status"], row["reason"]) for row in rows_of(path)} == {
        ("skipped", "no time left")
    }


@pytest.mark.deviceless
def test_important_cases_compile_first(tmp_path):
    """Those of all sections: kernels, and not XLA's program, of the first shape only."""
    path = tmp_path / "result.json"
    names = ("8192x8192, copy", "4096x4096, copy", "casts: 8192x8192, rows, ")
    words = ["--sections=copies,casts", *[f"--match={name}" for name in names]]
    finished = run("--compile-only=h200", *words, "--json", path)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    rows = [(row["section"], row["group"], row["contender"]) for row in rows_of(path)]
    assert len({*rows}) == len(rows)
    assert {*rows} >= {("casts", "8192x8192", name) for name in ("copy", "xla", "mosaic", "triton")}
    first = [row for row in rows if row[1] == "8192x8192" and row[2] != "xla"]
    assert {section for section, *_ in first} == {"copies", "casts"}
    assert rows[: len(first)] == first
    assert {group for _, group, _ in rows[len(first) :]} == {"8192x8192", "4096x4096"}


@pytest.mark.deviceless
def test_a_rehearsal_does_not_wait_for_a_program(tmp_path):
    """The process ends in time, with what is compiled, and says what is not."""
    path = tmp_path / "result.json"
    code = """
import os; os.environ["JAX_PLATFORMS"], os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "cpu", "1"
import time
import case
compile = case.compile
def slowly(case, lowered, results):
    time.sleep(1000 * (case.contender == "negation"))
    return compile(case, lowered, results)
case.compile = slowly
"""
    words = ["--sections=copies", "--match=8192x8192, copy", "--minutes=0.5"]
    finished = run("--compile-only=h200", *words, "--json", path, code=code)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    found = {row["contender"]: (row["status"], row.get("reason")) for row in rows_of(path)}
    assert found == {"copy": ("compiled", None), "negation": ("skipped", "no time left")}
    assert json.loads(path.read_text())["finished"] == "Finished"


@pytest.mark.slow
def test_compiling_leaves_time_for_all_rounds(tmp_path):
    """On a clock on which each program takes 100 of 600 seconds to lower."""
    path = tmp_path / "result.json"
    code = """
import time, types
import case, suite
passed, lower = [0.0], case.lower
suite.time = types.SimpleNamespace(perf_counter=lambda: time.perf_counter() + passed[0])
def slowly(*arguments):
    passed[0] += 100.0
    return lower(*arguments)
case.lower = slowly
"""
    words = ["--sections=casts", "--match=1x128", "--match=copy", "--minutes=10"]
    finished = run("--dry-run", *words, "--json", path, code=code)
    assert finished.returncode == 0, finished.stderr
    rows = [row for row in rows_of(path) if "needs a GPU" not in row.get("reason", "")]
    ok, late = ([row for row in rows if row["status"] == status] for status in ("ok", "skipped"))
    assert (len(ok), {row["seconds"]["rounds"] for row in ok}) == (5, {2})
    assert {row["reason"] for row in late} == {"no time left"}


@pytest.mark.deviceless
@pytest.mark.parametrize(
    "chip", ["h200", *[pytest.param(chip, marks=pytest.mark.slow) for chip in ("h100", "b200")]]
)
def test_compiles_for(chip, tmp_path):
    """One kernel a repetition where there should be one, FP8 where it should be."""
    path = tmp_path / "result.json"
    names = [
        "4096x4096, copy",
        "4096x4096, 1x128 and 128x1",
        "4096x2112x7168, fprop, tensor",
        "2112x7168, fprop, tiles",
        "64 experts of 512x2048x1024, forward and backward, blockwise",
    ]
    finished = run("--compile-only", chip, "--json", path, *[f"--match={name}" for name in names])
    assert finished.returncode == 0, finished.stdout + finished.stderr
    rows = rows_of(path)
    assert {row["status"] for row in rows} == {"compiled", "skipped"}
    compiled = {
        (row["section"], row["contender"]): row for row in rows if row["status"] == "compiled"
    }
    assert compiled["casts", "copy"]["kernels"] == 1
    assert compiled["casts", "xla"]["named"] == {"casts": "xla"}
    if ("casts", "mosaic") in compiled:  # not before jax 0.11
        assert compiled["casts", "mosaic"]["kernels"] == 1
        assert compiled["casts", "xla"]["chosen"] == "mosaic"
    assert compiled["casts", "xla"]["kernels"] >= 3  # it reads x three times
    assert compiled["matmuls", "tensor, xla"]["fp8_gemms"] == 1
    assert compiled["matmuls", "tensor, xla"]["chosen"] == "xla"
    # The loop over tiles of XLA multiplies in bfloat16 on Hopper.
    assert ("experts", "blockwise, XLA alone") in compiled
    assert ("experts", "blockwise") in compiled
    assert (("matmuls", "tiles of 128, cudnn") in compiled) == (chip == "b200")
    if chip == "b200":
        assert compiled["matmuls", "tiles of 128, cudnn"]["fp8_gemms"] == 1


@pytest.mark.deviceless
def test_train_steps_multiply_in_fp8(tmp_path):
    """All matmuls of a block, 3 for each of its 4 layers. Attention has none outside of cuDNN."""
    path = tmp_path / "result.json"
    names = ["bf16", "delayed", "flax", "plain pattern"]
    matches = [f"--match=tokens, train step, {name}" for name in names]
    finished = run("--compile-only=h200", "--sections=steps", "--json", path, *matches)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    found = {row["contender"]: (row["fp8_gemms"], row["other_gemms"]) for row in rows_of(path)}
    found.pop("delayed, Pallas casts", None)  # not before jax 0.11
    assert found.pop("bf16") == (0, 12)
    assert found == dict.fromkeys(names[1:], (12, 0))


@pytest.mark.slow
def test_each_call_of_a_train_step_continues_the_one_before(tmp_path):
    """The loss of 3 calls falls. The next measurement starts from the same weights."""
    path = tmp_path / "result.json"
    code = """
import os; os.environ["JAX_PLATFORMS"] = "cpu"
import timing
real = timing.chained
def chained(case, program, arguments, calls):
    losses = [float(real(case, program, arguments, n)[1][3]) for n in (1, 3, 1)]
    print("losses", *losses)
    return real(case, program, arguments, calls)
timing.chained = chained
"""
    words = ["--sections=steps", "--match=train step, bf16", "--json", path]
    finished = run("--dry-run", *words, code=code)
    assert finished.returncode == 0, finished.stderr
    (row,) = rows_of(path)
    assert (row["status"], row["calls"]) == ("ok", 3), finished.stdout
    lines = [line.split()[1:] for line in finished.stdout.splitlines() if "losses" in line]
    assert lines
    for first, third, again in lines:
        assert float(third) < float(first) - 0.01
        assert again == first


@pytest.mark.deviceless
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        # transposed copies, turned once
        ("case.row_major = lambda tree: tree", "XLA moved work out of the loop"),
        (
            "case.lax.fori_loop, case.row_major = lambda first, last, turn, results: turn(0, "
            "results), lambda tree: tree",
            "the program has 0 loops",
        ),
    ],
    ids=["work outside", "no loop"],
)
def test_a_program_that_does_something_else_is_no_result(change, reason, tmp_path):
    """The case fails, so that it is not timed."""
    path = tmp_path / "result.json"
    code = f"""
import os; os.environ["JAX_PLATFORMS"], os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "cpu", "1"
import case
{change}
"""
    words = ["--sections=casts", "--match=131072x8192, 1x128 and 128x1, xla"]
    finished = run("--compile-only=h200", *words, "--json", path, code=code)
    assert finished.returncode == 1, finished.stdout + finished.stderr
    (row,) = rows_of(path)
    assert row["status"] == "failed"
    assert reason in row["reason"]
