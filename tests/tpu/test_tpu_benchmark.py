"""`benchmarks/tpu.py` runs, and its second clock reads machine code. No figure is judged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.tpu

ROOT = Path(__file__).parents[2]


def test_both_clocks_of_a_layer(tmp_path):
    written = tmp_path / "result.json"
    command = [sys.executable, ROOT / "benchmarks" / "tpu.py", "--cases", "layer", "--chips"]
    command += ["tpu7x", "--contenders", "bfloat16", "current", "--shape", *["2048"] * 3]
    command += ["--clocks", "--json", written]
    done = subprocess.run(map(str, command), capture_output=True, text=True, check=True)
    rows = {row["contender"]: row for row in json.loads(written.read_text())["rows"]}
    assert [*rows] == ["bfloat16", "current"]
    assert rows["bfloat16"]["kinds"]["matmul"] > rows["current"]["kinds"]["matmul"] > 0
    assert rows["current"]["kinds"]["cast"] > 0
    for row in rows.values():
        assert (row["unknown"], row["on_neither"]) == (0, 0)
        assert row["both"] == row["cycles"] == sum(row["kinds"].values())
        # Nearly all kernels can be read, and the second clock is a bound from below.
        assert row["estimate_only"] < 0.2 * row["cycles"]
        assert 0.2 * row["cycles"] < row["second"] < row["cycles"]
    assert done.stdout.count("| tpu7x |") == 2
