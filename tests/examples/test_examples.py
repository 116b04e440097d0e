"""The examples run as users run them, and tell users what is wrong with a command line."""

import json
import os
import platform
import re
import time

import jax
import numpy as np
import pytest
from launch import EXAMPLES, ROOT, load, run

pytest.importorskip("matplotlib", reason="the examples need pip install 'jaxfp8[examples]'")
pytest.importorskip("rich", reason="the examples need pip install 'jaxfp8[examples]'")

FIELDS = [
    "bf16_compile_seconds", "bf16_losses", "bf16_seconds", "bf16_val_loss", "compile_seconds",
    "data", "framework", "jax", "losses", "parameters", "python", "recipe", "recipe_fields",
    "seconds", "seed", "sha256", "steps", "val_loss",
]  # fmt: skip


@pytest.fixture(scope="module")
def train_gpt():
    return load("train_gpt.py")


def test_train_gpt_compares_with_bf16_by_default(tmp_path):
    finished = run("train_gpt.py", "--steps", 3, "--json", "result.json", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert sorted(result) == FIELDS
    assert (result["recipe"], result["steps"], result["seed"], result["framework"]) == ("delayed", 3, 0, "linen")
    assert (result["python"], result["jax"]) == (platform.python_version(), jax.__version__)
    assert result["parameters"] == pytest.approx(1e6, rel=0.1)
    assert len(result["sha256"]) == 64
    assert len(result["losses"]) == len(result["bf16_losses"]) == 3
    # Not 0, or both would be the same model. In three steps without warm-up Adam divides rounding by rounding.
    assert 0 < abs(result["val_loss"] - result["bf16_val_loss"]) < 0.2
    assert min(result["seconds"], result["bf16_seconds"]) > 0
    assert (tmp_path / "train_gpt.png").read_bytes().startswith(b"\x89PNG")
    for shown in ("tokens/s", "validation loss", "gap", f"{result['val_loss']:.4f}", f"{result['bf16_val_loss']:.4f}"):
        assert shown in finished.stdout


@pytest.mark.slow
def test_train_gpt_in_nnx_alone_on_a_file(tmp_path):
    (tmp_path / "text").write_bytes(np.random.default_rng(0).integers(97, 123, 2_000_000, np.uint8).tobytes())
    arguments = "--framework nnx --recipe rowwise --set high_precision_wgrad=true --no-compare --steps 2 --data text"
    finished = run("train_gpt.py", *arguments.split(), "--json", "result.json", "--plot", "curve.png", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert sorted(result) == FIELDS
    assert result["recipe_fields"] == {"high_precision_wgrad": True}
    assert result["bf16_val_loss"] is None
    assert result["bf16_seconds"] is None
    assert result["bf16_losses"] is None
    assert "gap" not in finished.stdout
    assert (tmp_path / "curve.png").exists()


def test_train_gpt_names_a_missing_file(tmp_path):
    finished = run("train_gpt.py", "--data", "missing.txt", cwd=tmp_path)
    assert finished.returncode == 2
    assert "--data missing.txt: there is no such file" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--recipe fp4", r"recipe 'fp4' is unknown; use one of \['blockwise', 'current', 'delayed'"),
        ("--set marginn=1", "marginn"),
        ("--set margin", "invalid recipe_field value: 'margin'"),
        ("--recipe static", "x_scale"),
        ("--framework torch", "'torch'"),
        ("--steps 0", "--steps 0: give at least 1"),
        ("--save-every 0", "--save-every 0: give at least 1"),
        ("--resume", "--resume: it needs the directory of the run; add --checkpoint DIR"),
        ("--chip abacus", "abacus"),
        ("--json no/such/folder.json", "no/such/folder.json: its folder does not exist"),
        (
            "--data pyproject.toml",
            r"pyproject.toml: [\d,]+ bytes of text, [\d,]+ are needed; give a larger --data FILE",
        ),
    ],
)
def test_a_bad_argument_is_named(train_gpt, arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match="2"):
        train_gpt.parse(arguments.split())
    error = capsys.readouterr().err
    assert re.search(message, error), error


def test_without_sources_data_is_the_cure(train_gpt, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "__file__", str(tmp_path / "os.pyc"))
    with pytest.raises(SystemExit, match="2"):
        train_gpt.parse([])
    assert f"standard library in {tmp_path}: 0 bytes of text" in capsys.readouterr().err


def test_validation_text_is_fixed_and_apart(train_gpt):
    text, again = train_gpt.load_text(None), train_gpt.load_text(None)
    np.testing.assert_array_equal(text.validation, again.validation)
    assert text.validation[:, 1:].size >= 64 * 1024
    training = text.train.tobytes()
    # A window may stand in two modules (licences do); most must not.
    assert sum(window.tobytes() in training for window in text.validation) < 0.1 * len(text.validation)


@pytest.mark.usefixtures("standard_promotion")  # flax.linen.LayerNorm promotes
@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_twins_start_from_the_same_parameters(train_gpt, framework, standard_promotion):
    recipe = train_gpt.fp8.recipes.delayed()
    ours, theirs = (train_gpt.FRAMEWORKS[framework](used, seed=3) for used in (recipe, None))
    assert (ours.fp8_layers, theirs.fp8_layers) == (4 * train_gpt.LAYERS, 0)
    assert jax.tree.structure(ours.params) == jax.tree.structure(theirs.params)
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_train_step_learns_on_one_page(tmp_path, recipe):
    finished = run("train_step.py", recipe, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    losses = [float(line.split()[-1]) for line in finished.stdout.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0] / 2
    assert len((EXAMPLES / "train_step.py").read_text().splitlines()) <= 64


@pytest.mark.slow
def test_the_default_run_meets_its_marks(tmp_path):
    start = time.perf_counter()
    finished = run("train_gpt.py", "--json", "result.json", cwd=tmp_path)
    seconds = time.perf_counter() - start
    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["bf16_val_loss"] <= 2.5
    assert abs(result["val_loss"] - result["bf16_val_loss"]) <= 0.01
    assert seconds < 180
