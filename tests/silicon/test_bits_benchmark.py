"""`benchmarks/gpu/bits.py`, which has no GPU here: its matmuls, predictions and verdicts."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from quick_flags import quick_flags

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))
import bits_cases
import predicted
import target as targets
from interpreter import needs_mosaic
from silicon import modeled
from silicon.operands import same_bits

import jaxfp8 as fp8

pytestmark = pytest.mark.silicon
OURS = {of.name: of for of in bits_cases.matmuls("h200") if of.exact}
THEIRS = [of for of in bits_cases.matmuls("b200") if not of.inside]


@needs_mosaic
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "1x128 @ 1x128, wgrad" else pytest.mark.slow)
        for name in OURS
    ],
)
def test_our_kernels_give_what_it_predicts(name):
    """With its operands, by the interpreter. On a GPU it asks for the same of the chip."""
    of = OURS[name]
    given = bits_cases.operands(of, 100, one_sign=True)
    run = bits_cases.function(of, fp8.Kernels(matmuls="mosaic"))
    got = modeled.bits(jax.jit(run), *jax.device_put(given))
    same_bits(got, bits_cases.predict(of, given, "h200"))


def test_what_it_calls_exact():
    for chip in ("h200", "b200"):
        for of in bits_cases.matmuls(chip):
            given = bits_cases.operands(of, 100, one_sign=False)
            true = bits_cases.exact(of, given)
            wanted = bits_cases.predict(of, given, chip)
            assert np.linalg.norm(wanted - true) < 2e-3 * np.linalg.norm(true)


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_a_prediction_in_parts_is_that_of_the_whole(rows, monkeypatch):
    (of,) = THEIRS
    given = bits_cases.operands(of, 100, one_sign=False)
    pairs = [predicted.matrix(q, of.last, of.rule) for q in given]
    whole = predicted.predicted(*zip(*pairs, strict=True), of.rule, predicted.tcgen05)
    monkeypatch.setattr(bits_cases, "ROWS_AT_ONCE", rows)
    same_bits(bits_cases.predict(of, given, "b200"), whole)


def test_operands_of_one_sign():
    of = OURS["tensor"]
    for one_sign in (False, True):
        for q in bits_cases.operands(of, 100, one_sign=one_sign):
            assert (np.asarray(q.values, np.float32) < 0).any() != one_sign


def test_one_other_bit_is_a_fault_of_our_kernels():
    true = np.random.default_rng(0).standard_normal((4, 5))
    wanted = true.astype(np.float32)
    assert bits_cases.compare(wanted, wanted, true, same_bits=True)["status"] == "ok"
    other = wanted.copy()
    other[2, 3] = np.nextafter(other[2, 3], np.float32(9))
    found = bits_cases.compare(other, wanted, true, same_bits=True)
    assert (found["status"], found["different"]) == ("failed", 1)
    assert "(2, 3)" in found["reason"]
    # The error of a library may be a few times that of the prediction, but not more, and not NaN.
    wanted = (true * (1 + 1e-4)).astype(np.float32)
    for size, status in ((2.0, "ok"), (5.0, "failed"), (np.nan, "failed")):
        got = (true * (1 - size * 1e-4)).astype(np.float32)
        assert bits_cases.compare(got, wanted, true, same_bits=False)["status"] == status


@pytest.mark.parametrize("one_sign", [False, True])
@pytest.mark.parametrize("asked", bits_cases.RULES)
@pytest.mark.parametrize("given", bits_cases.RULES)
def test_a_library_by_another_rule_fails(asked, given, one_sign, monkeypatch):
    """The result of one rule, where another one is asked for: on a GPU that is a finding."""
    of = dataclasses.replace(THEIRS[0], rule=bits_cases.RULES[asked])
    values = bits_cases.operands(of, 100, one_sign=one_sign)
    other = dataclasses.replace(of, rule=bits_cases.RULES[given])
    result = bits_cases.predict(other, values, "h200")
    monkeypatch.setattr(bits_cases, "compiled", lambda *_: lambda *_: result)
    gpu = dataclasses.replace(targets.cpu(), chip="h200")
    row = bits_cases.row(of, gpu, 100, one_sign=one_sign, compile_only=False)
    assert row["nearest"] == given
    assert row["status"] == ("ok" if asked == given else "failed")


@pytest.mark.slow
def test_dry_run(tmp_path):
    path = tmp_path / "bits.json"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": quick_flags()}
    command = [
        sys.executable,
        bits_cases.__file__.replace("bits_cases", "bits"),
        "--dry-run",
        "--json",
        path,
    ]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    result = json.loads(path.read_text())
    assert result["finished"] == "Finished"
    assert {row["status"] for row in result["rows"]} == {"ok", "skipped"}
    # A CPU adds in float32, which is no fault of it.
    assert {row["nearest"] for row in result["rows"] if row["status"] == "ok"} == {"exact"}
    assert all(row["reason"] for row in result["rows"] if row["status"] == "skipped")
    assert all(row["different"] for row in result["rows"] if row["status"] == "ok")  # on a CPU
