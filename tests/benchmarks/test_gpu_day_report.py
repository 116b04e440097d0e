"""The report of the first half hour on a GPU, which is written from JSON files alone."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


def report_of(folder):
    command = [sys.executable, FOLDER / "day.py", "--report-only", "--folder", folder]
    subprocess.run(command, check=True)
    return (folder / "report.md").read_text()


def test_report_of_an_h200(tmp_path):
    """The results of one H200, which were made before this report."""
    for path in (FOLDER / "results").glob("h200*.json"):
        shutil.copy(path, tmp_path)
    report = report_of(tmp_path)
    lines = report.splitlines()
    assert any("NVIDIA H200 (h200)" in line and "580.159.04" in line for line in lines)
    (faster,) = (line for line in lines if "`delayed`" in line and "faster" in line)
    assert 'fp8.Kernels("h200", casts="mosaic", matmuls="xla")` is faster than the choice' in faster
    assert "1.07 (Llama 3 8B)" in faster
    assert "XLA alone" not in faster  # its quartiles overlap with those of the choice
    for row in (
        "| cast 1x128 and 128x1, 8192x8192, of the copy | mosaic, the fastest | 0.80 | 0.54 | not",
        "| cast rows, 8192x8192, of the copy | triton, the fastest | 0.85 | 0.95 | met |",
        "| matmul tiles of 128, mosaic, 8192x8192x8192, fprop, of cuBLASLt's FP8 | mosaic | 0.85 | "
        "0.79 | not met |",
        "| layers, Llama 3 8B, delayed, of bf16 | chosen | 1.75 | 1.35 | not met |",
        "| layers, Llama 3 8B, blockwise, of bf16 | chosen | 1.55 | 1.07 | not met |",
        "| experts, 8 experts of 4096x4096x2048, current, of bf16 | chosen | 1.60 | 0.95 | not met",
    ):
        assert row in report, row
    assert (
        "h200_checks: checks, 40 experts of 24x256x128, forward and backward, mxfp8: dis" in report
    )
    assert "the choice of `blockwise` must be withdrawn from every automatic choice" in report
    assert "h200: casts, 1x128, 8192x8192: triton 58.4 µs (10 rounds), mosaic 60.9" in report
    assert "- h200, casts, 131072x8192: all (40)" in report
    assert "adamw" not in report
    (tmp_path / "h200_checks.json").unlink()
    assert "Every part that ran has held." in report_of(tmp_path)


def timed(section, contender, microseconds, rounds=10, **fields):
    low, high = (1e-6 * (microseconds + change) for change in (-1, 1))
    seconds = {"median": 1e-6 * microseconds, "quartiles": [low, high], "rounds": rounds}
    names = {"section": section, "group": "8x8", "operation": "fprop", "contender": contender}
    return names | {"status": "ok", "seconds": seconds, "tflops": 1.0, **fields}


def write(folder, name, rows, **fields):
    result = {"machine": None, "finished": "Finished", "rows": rows, **fields}
    (folder / f"{name}.json").write_text(json.dumps(result))


def test_choices_of_a_report(tmp_path):
    """A backend must be faster by more than the quartiles, and right."""
    cast = {"chosen": "xla", "floor_bytes": 8, "share_of_copy": 0.9}
    matmul = {"chosen": "mosaic"}
    rows = [
        timed("casts", "xla", 10, **cast, named={"casts": "xla"}),
        timed("casts", "mosaic", 5, **cast, named={"casts": "mosaic"}),
        timed("casts", "triton", 9, **cast, named={"casts": "triton"}),
        timed("matmuls", "rows, xla", 10, **matmul, named={"matmuls": "xla"}),
        timed("matmuls", "rows, mosaic", 20, **matmul, named={"matmuls": "mosaic"}),
        timed("layers", "current", 30, speedup={"median": 1.7}),
        timed("layers", "current, by hand", 20, named={"casts": "mosaic", "matmuls": "cudnn"}),
        timed("layers", "current, another", 20),
        timed("layers", "current, another, by hand", 19, named={"casts": "mosaic"}),
        timed("steps", "current", 30, rounds=2),
        timed("steps", "current, by hand", 20, rounds=2, named={"casts": "mosaic"}),
    ]
    wrong = {"section": "checks", "group": "9x9", "operation": "rows", "contender": "triton"}
    wrong |= {"status": "failed", "reason": "3 bytes differ", "named": {"casts": "triton"}}
    write(tmp_path, "all", rows, machine=None)
    (tmp_path / "day.json").write_text('{"mode": "GPU", "parts": {}}')
    report = report_of(tmp_path)
    changes = re.findall(r"^- .*is faster.*$", report, re.MULTILINE)
    begin = '- all: {}: `fp8.Kernels("None", {})` is faster than the choice{}: {} (8x8)'
    right = [
        begin.format("casts, fprop", 'casts="mosaic"', ', casts="xla"', "2.00"),
        begin.format("matmuls, fprop, rows", 'matmuls="xla"', ', matmuls="mosaic"', "2.00"),
        begin.format("layers, `current`", 'casts="mosaic", matmuls="cudnn"', "", "1.50"),
        begin.format("steps, `current`", 'casts="mosaic"', "", "1.50") + ", 2 rounds",
    ]
    assert changes == right
    assert report.index("decides nothing") < report.index(right[-1])
    assert "| cast fprop, 8x8, of the copy | xla, chosen | 0.85 | 0.90 | met |" in report
    assert "| layers, 8x8, current, of bf16 | chosen | 1.65 | 1.70 | met |" in report
    write(tmp_path, "all", [*rows, wrong, wrong | {"named": {"casts": "mosaic"}}])
    report = report_of(tmp_path)
    assert right[0].replace(": 2.00", ", but one of its checks failed: 2.00") in report
    assert right[1] in report
    assert '- **casts="triton" (triton) must be withdrawn from every automatic choice**' in report
    bits = {"path": "QGMMA", "status": "failed", "outputs": 1000, "different": 7, "reason": "no"}
    errors = {"distance": 1e-4, "error": 0.0125, "error_of_prediction": 0.0144}
    library = bits | {"path": "xla", "status": "ok", "nearest": "never promoted", **errors}
    write(tmp_path, "bits", [bits, library], finished="Not finished")
    report = report_of(tmp_path)
    assert "- bits: QGMMA: no" in report
    assert "- bits: xla" not in report  # the order of a library's sums is no promise
    assert "| xla | ok | 1000 | 7 | 0.0001 | 0.013 | 0.014 | never promoted |" in report
    assert "- bits: the run did not finish" in report


def test_no_report_of_nothing(tmp_path):
    command = [sys.executable, FOLDER / "day.py", "--report-only", "--folder", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "has no results in JSON" in done.stderr
