"""The benchmark of experts runs. No number is judged."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_contender_has_a_row():
    small = ["--experts", "3", "--tokens", "40", "--features", "32", "--repeats", "1"]
    script = ROOT / "benchmarks/cpu/experts_on_cpu.py"
    out = subprocess.run(
        [sys.executable, script, *small], check=True, capture_output=True, text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    ).stdout.splitlines()  # fmt: skip
    rows = [line.split() for line in out[2:]]
    assert [row[0] for row in rows] == [
        "jax.lax.ragged_dot,", "current", "rowwise", "blockwise", "mxfp8"
    ]  # fmt: skip
    assert all(float(row[-5]) > 0 for row in rows)  # the median time
