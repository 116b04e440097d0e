"""A resumed run ends like an uninterrupted one. A run that cannot be resumed gives one line."""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from damaged_runs import (
    DAMAGES,
    HALF,
    STEPS,
    description,
    empty,
    halved,
    newest,
    noise,
    without,
)
from launch import EXAMPLES, environment, load

from jaxfp8.recipes._presets import PRESETS

pytest.importorskip("matplotlib", reason="the examples need pip install 'jaxfp8[examples]'")
pytest.importorskip("rich", reason="the examples need pip install 'jaxfp8[examples]'")
pytestmark = pytest.mark.usefixtures("standard_promotion")  # flax's norms and optax promote

SMALL = ["--width", 32, "--layers", 1]
RECIPES = {
    "delayed": [],
    "current": ["--recipe", "current"],
    "rowwise": ["--recipe", "rowwise"],
    "rowwise, wgrad": ["--recipe", "rowwise", "--set", "high_precision_wgrad=true"],
    "blockwise": ["--recipe", "blockwise"],
    "mxfp8": ["--recipe", "mxfp8"],
    "mxfp8, 2D": ["--recipe", "mxfp8", "--set", "w_tile_dim=2"],
    "static": ["--recipe", "static", *(f"--set={name}_scale=0.01" for name in "xwg")],
    "identity": ["--recipe", "identity"],
}
QUICK = (("delayed", "linen"),)


@pytest.fixture(scope="module")
def text():
    """Less than the standard library: reading it takes longer than six steps."""
    words = np.random.default_rng(0).integers(97, 123, 200_000, np.uint8)
    return words.tobytes()


@pytest.fixture(scope="module")
def example(text, tmp_path_factory):
    module = load("train_gpt.py")
    file = tmp_path_factory.mktemp("text") / "text"
    file.write_bytes(text)
    module.main = _with(module.main, *SMALL, "--data", file, "--steps", STEPS, "--save-every", HALF)
    return module


def _with(main, *first):
    """Arguments that are given later count."""
    return lambda *arguments: main([*map(str, first), *map(str, arguments)])


def finished(example, folder, *arguments):
    """What a run wrote as JSON."""
    files = ("--json", folder / "result.json", "--plot", folder / "curve.png")
    example.main(*arguments, *files)
    return json.loads((folder / "result.json").read_text())


def of(recipe, framework):
    return [*RECIPES[recipe], "--framework", framework, "--no-compare"]


@pytest.fixture(scope="module")
def uninterrupted(example, tmp_path_factory):
    """The directory of a run, which no test may change, and its result."""

    @functools.cache
    def run(recipe, framework):
        folder = tmp_path_factory.mktemp("whole")
        arguments = [*of(recipe, framework), "--checkpoint", folder / "run"]
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return folder / "run", finished(example, folder, *arguments)

    return run


def arrays(path):
    """All that a checkpoint holds but the time that was measured, read without a target."""
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.restore(path / "arrays")
    del saved["seconds"]
    return jax.tree.map(np.asarray, saved)


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert jax.tree.leaves(a)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


def assert_same_run(a, b, steps=STEPS):
    measured = ("seconds", "compile_seconds", "bf16_seconds", "bf16_compile_seconds")
    a, b = ({k: v for k, v in result.items() if k not in measured} for result in (a, b))
    for result in (a, b):
        assert len(result["losses"]) == steps
        assert np.isfinite(result["losses"]).all()
    assert a == b


def interrupt(run):
    """The directory of one run as a process leaves it that was killed during its last save."""
    unfinished = run / f"{STEPS}.unfinished"
    (run / str(STEPS)).rename(unfinished)
    (unfinished / "description.json").unlink()
    return unfinished


# ---------------------------------------------------------------------------------------- bit-equal
def test_every_preset_has_a_row():
    assert {name.split(",")[0] for name in RECIPES} == set(PRESETS)


@pytest.mark.parametrize(
    ("recipe", "framework"),
    [
        pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow)
        for row in itertools.product(RECIPES, ("linen", "nnx"))
    ],
)
def test_a_resumed_run_is_the_same_run(example, uninterrupted, tmp_path, recipe, framework):
    (whole, want), cut = uninterrupted(recipe, framework), tmp_path / "cut"
    assert sorted(os.listdir(whole / "FP8")) == [str(HALF), str(STEPS)]
    shutil.copytree(whole, cut)
    unfinished = interrupt(cut / "FP8")
    got = finished(example, tmp_path, *of(recipe, framework), "--checkpoint", cut, "--resume")
    assert_same_run(got, want)
    assert not unfinished.exists()
    ours, theirs = arrays(cut / "FP8" / str(STEPS)), arrays(whole / "FP8" / str(STEPS))
    assert_same_bits(ours, theirs)
    # What is restored is not what every run ends with.
    halfway = arrays(whole / "FP8" / str(HALF))
    moved = lambda part: any(
        x.tobytes() != y.tobytes()
        for x, y in zip(jax.tree.leaves(halfway[part]), jax.tree.leaves(theirs[part]), strict=True)
    )
    assert moved("params")
    assert moved("opt_state")
    assert moved("state") == (recipe == "delayed")


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", ["bf16", "FP8", "neither"])
def test_with_its_twin(example, tmp_path, interrupted):
    want = finished(example, tmp_path)  # saving changes nothing either
    finished(example, tmp_path, "--checkpoint", tmp_path / "run")
    if interrupted == "bf16":  # the first to run
        shutil.rmtree(tmp_path / "run" / "FP8")
    if interrupted != "neither":
        interrupt(tmp_path / "run" / interrupted)
    got = finished(example, tmp_path, "--checkpoint", tmp_path / "run", "--resume")
    assert_same_run(got, want)
    assert len(got["bf16_losses"]) == STEPS


@pytest.mark.slow
def test_killed_while_it_renames(example, text, tmp_path):
    """A process that ends at once, instead of the rename that makes the last checkpoint."""
    (tmp_path / "text").write_bytes(text)
    script = f"""
import os, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import train_gpt
rename = os.rename
def deadly(source, target, **more):
    if str(target).endswith("FP8/{STEPS}"):
        os._exit(9)
    rename(source, target, **more)
os.rename = deadly
train_gpt.main(sys.argv[1:])
"""
    given = [
        *SMALL,
        "--data",
        tmp_path / "text",
        "--steps",
        STEPS,
        "--save-every",
        HALF,
        "--no-compare",
    ]
    given += ["--checkpoint", tmp_path / "run"]
    killed = subprocess.run(
        [sys.executable, "-c", script, *map(str, given)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == 9, killed.stderr
    left = sorted(os.listdir(tmp_path / "run" / "FP8"))
    assert left == [str(HALF), f"{STEPS}.unfinished"]
    got = finished(example, tmp_path, *given, "--resume")
    assert sorted(os.listdir(tmp_path / "run" / "FP8")) == [str(HALF), str(STEPS)]
    assert len(got["losses"]) == STEPS


def test_a_finished_run_continues_with_more_steps(example, uninterrupted, tmp_path, capsys):
    """As the same run would that was interrupted before: the schedule is that of its start."""
    saved, _ = uninterrupted("delayed", "linen")
    of_run, results = [*of("delayed", "linen"), "--resume", "--steps", STEPS + 2], []
    for last in (STEPS, HALF):
        cut = shutil.copytree(saved, tmp_path / str(last))
        if last == HALF:
            shutil.rmtree(cut / "FP8" / str(STEPS))
        results.append(finished(example, tmp_path, *of_run, "--checkpoint", cut))
        output = capsys.readouterr().out
        assert f"learning rate: it falls for {STEPS} steps, and then stays\n" in output
        assert output.endswith(
            f"picture: {tmp_path / 'curve.png'}\nresults: {tmp_path / 'result.json'}\n"
            f"checkpoints: {cut}\n"
        )
    assert results[0]["schedule_steps"] == STEPS
    assert_same_run(*results, STEPS + 2)
    ends = [arrays(tmp_path / str(last) / "FP8" / str(STEPS + 2)) for last in (STEPS, HALF)]
    assert_same_bits(*ends)


# ----------------------------------------------------------------------------------------- refusals
@pytest.fixture(scope="module")
def saved(uninterrupted):
    """A directory with the checkpoints of a finished run; tests copy it."""
    return uninterrupted("delayed", "linen")[0]


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def contents(path):
    """Every file below, by its bytes."""
    files = [path] if path.is_file() else path.rglob("*")
    digest = lambda file: hashlib.sha256(file.read_bytes()).hexdigest()
    return {file: digest(file) if file.is_file() else None for file in files}


def refused(example, capsys, monkeypatch, directory, *arguments):
    """The line on stderr; asserts that it is one, and that nothing in the directory changed."""
    monkeypatch.chdir(directory.parent if directory.parent.is_dir() else "/")
    before = contents(directory)
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        example.main("--no-compare", "--checkpoint", directory, *arguments)
    assert exit.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("train_gpt.py: error: ")
    assert contents(directory) == before
    return lines[0]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_directory_is_refused(example, run, capsys, monkeypatch, damage):
    change, message = DAMAGES[damage]
    change(run)
    line = refused(example, capsys, monkeypatch, run, "--resume")
    assert re.search(message, line), line


class Stopped(Exception):
    pass


@pytest.fixture(scope="module")
def opened(example, saved):
    """The checkpoints of `saved` as the example opens them, and the tree that it restores into."""

    def stop(self, like):
        raise Stopped(self, like)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(example.Checkpoints, "restore", stop)
        with (
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
            pytest.raises(Stopped) as stopped,
        ):
            example.main("--no-compare", "--checkpoint", saved, "--resume")
    return stopped.value.args


def within(example, run, opened):
    return example.Checkpoints(run / "FP8", opened[0].run, HALF)


@pytest.mark.parametrize("leaf", ["scale", pytest.param("amax_history", marks=pytest.mark.slow)])
def test_a_nan_in_the_quantizer_state_is_named(example, run, opened, capsys, monkeypatch, leaf):
    """Saved as everything else is, digest included: `fp8.check_state` finds it."""
    checkpoints, like = within(example, run, opened), opened[1]
    restored = checkpoints.restore(like)
    states, structure = jax.tree.flatten(restored["state"], is_leaf=lambda x: hasattr(x, leaf))
    array = getattr(states[0], leaf)
    states[0] = dataclasses.replace(states[0], **{leaf: array.at[..., -1].set(np.nan)})
    shutil.rmtree(newest(run))
    checkpoints.save(STEPS, restored | {"state": jax.tree.unflatten(structure, states)})
    line = refused(example, capsys, monkeypatch, run, "--resume")
    assert re.search(rf"FP8StateError: \d+ faults? in the quantizer .*{leaf}.*nan", line), line


@pytest.mark.parametrize("harm", [without, halved, noise])
def test_harm_to_any_file_is_found(example, saved, opened, tmp_path, harm):
    """One line says which, and Orbax is not let near it: its threads would add tracebacks."""
    files = [file.relative_to(saved) for file in newest(saved).rglob("*") if file.is_file()]
    for i, file in enumerate(files):
        run = shutil.copytree(saved, tmp_path / str(i))
        harm(run / file)
        name = "/".join(file.parts[2:])
        with pytest.raises(example.CheckpointError, match=f"resumed: {name}.* Move it away"):
            within(example, run, opened).check()
    assert len(files) > 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "current"], "recipe 'delayed', not 'current';"),
        (["--set", "margin=1"], r"set {}, not {'margin': 1};"),
        (["--framework", "nnx"], "framework 'linen', not 'nnx';"),
        (["--seed", 1], "seed 0, not 1;"),
        (["--chip", "h200"], "chip 'cpu', not 'h200';"),
        (["--width", 64], "width 32, not 64;"),
        (["--layers", 2], "layers 1, not 2;"),
        (["--learning-rate", 1e-3], "learning_rate 0.002, not 0.001;"),
        (["--layers", 2, "--seed", 2], "layers 1, not 2, seed 0, not 2;"),
    ],
)
def test_another_run_is_refused(example, run, capsys, monkeypatch, arguments, message):
    line = refused(example, capsys, monkeypatch, run, "--resume", *arguments)
    assert f"FP8/6: it was saved with {message}" in line
    assert line.endswith("Repeat them with --resume, or give another --checkpoint.")


def test_fewer_steps_than_are_done_are_refused(example, run, capsys, monkeypatch):
    line = refused(example, capsys, monkeypatch, run, "--resume", "--steps", 5)
    assert line.endswith(f"--steps 5: the run in {run} has done 6 steps; give --steps 6 or more.")


def test_other_data_is_refused(example, run, text, tmp_path, capsys, monkeypatch):
    (tmp_path / "other").write_bytes(text[::-1])
    line = refused(example, capsys, monkeypatch, run, "--resume", "--data", tmp_path / "other")
    ours, theirs = (hashlib.sha256(each).hexdigest() for each in (text, text[::-1]))
    assert f"data '{ours}', not '{theirs}'" in line


def test_other_settings_are_refused(example, run, capsys, monkeypatch):
    """Those that are no arguments too."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Other(example.Settings):
        clip_norm: float = 2.0

    monkeypatch.setattr(example, "Settings", Other)
    line = refused(example, capsys, monkeypatch, run, "--resume")
    assert "it was saved with clip_norm 1.0, not 2.0;" in line


def test_a_model_of_other_shapes_is_refused(example, run, opened):
    """Where the description of the run says nothing of it."""
    checkpoints, like = within(example, run, opened), opened[1]
    params = like["params"]
    wider = params | {"head": {"kernel": jnp.zeros((64, 256))}}
    with pytest.raises(example.CheckpointError, match=r"\[32, 256\], in .* float32\[64, 256\]"):
        checkpoints.restore(like | {"params": wider})
    with pytest.raises(example.CheckpointError, match=r"'more'\] is absent, in .* float32\[3\]"):
        checkpoints.restore(like | {"params": params | {"more": jnp.zeros(3)}})


@pytest.mark.parametrize("step", [None, HALF, STEPS])
def test_a_run_is_not_written_over(example, run, capsys, monkeypatch, step):
    """Nor one with a damaged checkpoint."""
    if step:
        empty(run / "FP8" / str(step))
    line = refused(example, capsys, monkeypatch, run)
    assert "it holds a run already" in line
    assert line.endswith("add --resume to continue it, or give a new directory.")


@pytest.mark.parametrize("arguments", [[], ["--resume"]])
def test_a_directory_that_cannot_be_written_to(example, run, capsys, monkeypatch, arguments):
    if not arguments:
        empty(run)

    def denied(dir):
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr("tempfile.TemporaryFile", denied)  # root may write to any
    line = refused(example, capsys, monkeypatch, run, *arguments)
    assert "it cannot be written to (PermissionError: " in line
    assert line.endswith("give a directory that you may write to.")


def test_a_directory_that_cannot_be_made(example, run, capsys, monkeypatch):
    file = description(run)
    assert "it cannot be written to" in refused(example, capsys, monkeypatch, file / "below" / "it")


def test_a_save_that_fails_is_named(example, run, opened):
    checkpoints, like = within(example, run, opened), opened[1]
    with pytest.raises(example.CheckpointError, match=r"FP8/6: it could not be saved .*--resume"):
        checkpoints.save(STEPS, like)  # it is there
    assert_same_bits(checkpoints.restore(like), opened[0].restore(like))
