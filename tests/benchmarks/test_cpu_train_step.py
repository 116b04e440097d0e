"""The benchmark runs, every contender, and writes what its README promises. No number is judged."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from quick_flags import quick_flags

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks/cpu/cpu_train_step.py"


@pytest.mark.slow  # compiles fifteen train steps
def test_runs_and_writes_its_table(tmp_path):
    result = tmp_path / "result.json"
    sizes = ["--batch", "8", "--features", "16", "--hidden", "32", "--repeats", "1"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": quick_flags()}
    run = subprocess.run(
        [sys.executable, SCRIPT, *sizes, "--json", result],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    written = json.loads(result.read_text())
    rows = {row["contender"]: row for row in written["rows"]}
    assert rows[written["baseline"]]["ratio"] == 1.0
    ours = [name for name in rows if name.startswith("jaxfp8")]
    assert len(ours) == 9
    assert all(name in run.stdout for name in rows)
    # All train the same model: after a few steps their losses are close. nnx starts from other
    # weights.
    expected = pytest.approx(rows[written["baseline"]]["loss"], rel=0.1)
    assert {name: row["loss"] for name, row in rows.items() if "nnx" not in name} == {
        name: expected for name in rows if "nnx" not in name
    }
    assert str(tmp_path) not in result.read_text()
