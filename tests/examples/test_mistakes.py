"""A mistake in a command line is one line on standard error, and exit code 2.

What was given, and what to write.
"""

import importlib
import json
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from launch import EXAMPLES, environment, load

from jaxfp8.recipes._presets import PRESETS

pytest.importorskip("matplotlib", reason="the examples need pip install 'jaxfp8[examples]'")
pytest.importorskip("rich", reason="the examples need pip install 'jaxfp8[examples]'")

STATIC = "--set x_scale=0.01 --set w_scale=0.01"
SCRIPTS = ("train_gpt", "train_sharded", "train_pipeline")


@pytest.fixture
def mistake(tmp_path, capsys, monkeypatch):
    """The line that a script ends with, in a folder with a folder `made`, a file `file`, and a text
    of three bytes.
    """
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made").mkdir()
    (tmp_path / "file").write_text("kept")
    (tmp_path / "short").write_text("abc")

    def line(script, *arguments):
        module = load("train_gpt.py") if script == "train_gpt" else importlib.import_module(script)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            module.parse([*arguments])
        assert ended.value.code == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1, err
        assert err.startswith(f"{script}.py: error: ")
        assert (tmp_path / "file").read_text() == "kept"
        return err

    return line


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--recipe fp4",
            r"--recipe fp4: recipe 'fp4' is unknown; use one of "
            r"\['blockwise', 'current', 'delayed'",
        ),
        ("--set margin", "argument --set: margin: give FIELD=VALUE, as in --set margin=1"),
        ("--set =1", "argument --set: =1: give FIELD=VALUE"),
        (
            "--set algorithm=max",
            "algorithm=max: 'max' is no JSON; .* --set 'algorithm=\"most_recent\"'",
        ),
        ("--set margin=", "argument --set: margin=: '' is no JSON"),
        ("--set marginn=1", r"--set marginn=1: .* no fields \['marginn'\]; it has \['forward', "),
        (
            '--set margin="1"',
            "--recipe delayed --set margin=\"1\": margin='1' must be an integer from 0 to 64",
        ),
        ("--set margin=true", "margin=True must be an integer"),
        ("--set power_of_two=1", "power_of_two=1 must be True or False"),
        ('--set gradient="E3M4"', r"format='E3M4' cannot hold values; use one of \[E4M3, E5M2\]"),
        ("--set margin=1 --set margin=2", "--set margin: it is given more than once; give it once"),
        (
            "--recipe static",
            "--recipe static: it needs x_scale, w_scale, g_scale; add, for example, --set "
            "x_scale=0.015 ",
        ),
        (f"--recipe static {STATIC}", "it needs g_scale; add, for example, --set g_scale=5e-08"),
        (
            f"--recipe static {STATIC} --set g_scale=0",
            "g_scale=0 must be a positive number between",
        ),
        ("--json made", "--json made: it is a directory; give a file, as in --json made/result"),
        (
            "--json no/such.json",
            "--json no/such.json: its folder does not exist; make it first: mkdir -p no",
        ),
        ("--json file/x.json", "--json file/x.json: its folder does not exist"),
        (
            "--json /proc/none.json",
            "--json /proc/none.json: it cannot be written (.*); give a file that you may write",
        ),
        (
            f"--json {'x' * 300}",
            "it cannot be written (File name too long)".replace("(", r"\(").replace(")", r"\)"),
        ),
        ("--steps 0", "--steps 0: give at least 1"),
        ("--steps few", "argument --steps: invalid int value: 'few'"),
    ],
)
def test_in_every_script(mistake, script, arguments, message):
    line = mistake(script, *arguments.split())
    assert re.search(message, line), line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--framework torch", "argument --framework: invalid choice: 'torch'"),
        ("--save-every 0", "--save-every 0: give at least 1"),
        ("--layers 0", "--layers 0: give at least 1"),
        ("--sample 0", "--sample 0: give at least 1"),
        (
            "--width 100",
            "--width 100: a head of attention is 32 wide; give a multiple of it, as in --width 96",
        ),
        ("--width 0", "--width 0: .* as in --width 32"),
        ("--width -64", "--width -64: .* as in --width 32"),
        ("--learning-rate 0", "--learning-rate 0.0: give a finite number above 0"),
        ("--learning-rate nan", "--learning-rate nan: give a finite number above 0"),
        ("--temperature inf", "--temperature inf: give a finite number above 0"),
        ("--seed -1", "--seed -1: give a number from 0 to 2147483647"),
        ("--resume", "--resume: it needs the directory of the run; add --checkpoint DIR"),
        ("--chip abacus", "--chip abacus: chip='abacus' is unknown; use "),
        ("--plot made", "--plot made: it is a directory"),
        ("--plot no/such.png", "--plot no/such.png: its folder does not exist"),
        (
            "--plot curve.xyz",
            "--plot curve.xyz: matplotlib draws no .xyz pictures; give a name in .png",
        ),
        ("--plot curve", "--plot curve: matplotlib draws no pictures without a suffix"),
        ("--data missing.txt", "--data missing.txt: this is not a file"),
        (
            "--data short",
            "--data short: 3 bytes of text, at least 4 are needed; give a larger --data FILE",
        ),
    ],
)
def test_in_train_gpt(mistake, arguments, message):
    line = mistake("train_gpt", *arguments.split())
    assert re.search(message, line), line


def test_a_file_in_the_place_of_the_default_folder(mistake, tmp_path):
    (tmp_path / "runs").write_text("words")
    assert (
        "--plot runs/train_gpt.png: the folder runs/ cannot be made (File exists); give another "
        "--plot." in mistake("train_gpt")
    )


@pytest.mark.parametrize("empty", ["--json", "--plot", "--checkpoint", "--data"])
def test_empty_names(mistake, empty):
    assert empty in mistake("train_gpt", empty, "")


def test_without_sources_data_is_the_cure(mistake, tmp_path, monkeypatch):
    monkeypatch.setattr("os.__file__", str(tmp_path / "os.pyc"))
    assert f"standard library in {tmp_path}: 0 bytes of text" in mistake("train_gpt")
    assert f"standard library in {tmp_path}: 0 bytes of text" in mistake("train_sharded")


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (
            "train_sharded",
            "--mesh data=2",
            "--mesh data=2 has 2 devices, there are 8; the product of the sizes",
        ),
        ("train_sharded", "--mesh data=16", "--mesh data=16 has 16 devices, there are 8"),
        (
            "train_sharded",
            "--mesh data=2,data=4",
            "--mesh data=2,data=4: data is given more than once",
        ),
        (
            "train_sharded",
            "--mesh data=8,",
            "--mesh data=8,: an axis is empty; drop the extra comma",
        ),
        (
            "train_sharded",
            "--mesh model=8",
            "--mesh model=8: there is no axis 'model'; use data, fsdp, tensor.",
        ),
        (
            "train_sharded",
            "--mesh data",
            "--mesh data: data needs a size of at least 1, as in data=2.",
        ),
        ("train_sharded", "--mesh data=x", "--mesh data=x: data needs a size of at least 1"),
        ("train_sharded", "--mesh data=-8", "--mesh data=-8: data needs a size of at least 1"),
        ("train_sharded", f"--mesh data={'9' * 5000}", "data needs a size of at least 1"),
        (
            "train_sharded",
            "--batch 6",
            "--batch 6 cannot be split evenly over 4 devices; give a multiple of 4.",
        ),
        ("train_sharded", "--batch 0", "--batch 0 cannot be split evenly over 4 devices"),
        (
            "train_sharded",
            "--mesh fsdp=4,data=2 --recipe blockwise",
            "shards of 64, which cut the tiles of 128 of --recipe blo",
        ),
        ("train_pipeline", "--mesh pipe=3", "--mesh pipe=3 has 3 devices, there are 8"),
        (
            "train_pipeline",
            "--mesh fsdp=8",
            "--mesh fsdp=8: there is no axis 'fsdp'; use pipe, data.",
        ),
        (
            "train_pipeline",
            "--mesh pipe=2,data=4",
            "--batch 2: give a multiple of data=4, over which it is split.",
        ),
        ("train_pipeline", "--microbatches 0", "--microbatches 0: give at least 1"),
    ],
)
def test_of_meshes(mistake, script, arguments, message):
    assert message in mistake(script, *arguments.split())


@pytest.mark.parametrize(
    ("recipe", "fsdp"),
    [
        ("blockwise", 2),
        ("blockwise", 4),
        pytest.param("blockwise", 8, marks=pytest.mark.slow),
        pytest.param("mxfp8", 8, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("standard_promotion")
def test_those_meshes_are_refused_whose_shards_cut_tiles(monkeypatch, capsys, recipe, fsdp):
    """What the check refuses the layers refuse too, and what it lets through they take."""
    monkeypatch.syspath_prepend(EXAMPLES)
    script = importlib.import_module("train_sharded")
    sizes = f"fsdp={fsdp},data={8 // fsdp}"
    model = script.GPT(script.fp8.recipes.get(recipe))

    def trace():
        with jax.set_mesh(script.make_mesh(sizes, script.AXES)):
            carry = jax.eval_shape(lambda: script.init(model))
            script.train_step(model).trace(
                *carry, jax.ShapeDtypeStruct((16, script.CONTEXT + 1), np.uint8)
            )

    if cuts := recipe == "blockwise" and fsdp > 2:
        with pytest.raises(ValueError, match="cut the tiles"):
            trace()
    else:
        trace()
    arguments = ["--mesh", sizes, "--recipe", recipe]
    if cuts:
        with pytest.raises(SystemExit):
            script.parse(arguments)
        assert "give fsdp=2 or less, or a recipe with smaller tiles." in capsys.readouterr().err
    else:
        script.parse(arguments)


ALONE = {
    "--coordinator here": (
        "--coordinator here: give HOST:PORT, a free port on the host of process 0."
    ),
    "--coordinator here:there": "--coordinator here:there: give HOST:PORT",
    "--num-processes 0": "--num-processes 0: give at least 1.",
    "--num-processes 2 --process-id 2": "--process-id 2: give a number from 0 to 1.",
    "--recipe static": "--recipe static: it needs x_scale, w_scale, g_scale",
    # the last, because it gets as far as JAX
    "--num-processes 2": (
        "Where JAX knows no cluster, give --coordinator, --num-processes and --process-id."
    ),
}


@pytest.fixture(scope="module")
def alone():
    """Exit code and standard error of each command line, and of Ctrl-C while a script sleeps.

    One process, as most of it is imports.
    """
    script = f"""
import contextlib, io, json, os, signal, sys, time
sys.path.insert(0, {str(EXAMPLES)!r})
import train_multihost
ended = {{}}
for arguments in {[*ALONE]!r}:
    with contextlib.redirect_stderr(io.StringIO()) as written:
        try:
            train_multihost.main(arguments.split())
            code = 0
        except SystemExit as end:
            code = end.code
    ended[arguments] = code, written.getvalue()
print(json.dumps(ended), flush=True)
sys.argv = ["examples/train_multihost.py"]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` makes children ignore it
train_multihost.run_script(lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(60)))
"""
    finished = subprocess.run(
        [sys.executable, "-c", script],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    ended = json.loads(finished.stdout)
    ended["Ctrl-C"] = finished.returncode, finished.stderr
    return ended


@pytest.mark.parametrize("arguments", ALONE)
def test_a_process_alone_says_what_is_wrong(alone, arguments):
    code, written = alone[arguments]
    assert code == 2
    assert written.count("\n") == 1, written
    assert ALONE[arguments] in written


def test_ctrl_c_is_one_line(alone):
    assert alone["Ctrl-C"] == (130, "\ntrain_multihost.py: stopped by Ctrl-C.\n")


def test_every_recipe_has_a_command_line(monkeypatch):
    """With what the error says where a recipe has no default for a field."""
    monkeypatch.syspath_prepend(EXAMPLES)
    script = load("train_gpt.py")
    parser = script.Parser("script", None)
    script.add_recipe(parser)
    for name in PRESETS:
        given = ["--recipe", name]
        try:
            recipe = script.recipe_of(parser.parse_args(given))
        except ValueError as error:
            given += re.findall(
                r"--set=?\s?\S+", str(error).partition("for example,")[2].rstrip(".")
            )
            given = " ".join(given).split()
            recipe = script.recipe_of(parser.parse_args(given))
        assert recipe.name == name
    recipe = script.recipe_of(parser.parse_args(["--set", 'gradient="E4M3"']))
    assert recipe == script.fp8.recipes.delayed(gradient=script.fp8.E4M3)


def test_a_file_that_is_there_stays_as_it_is(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    check_file = importlib.import_module("command_line").check_file
    (tmp_path / "old").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "new")
    for name in ("old", "new", "link"):
        check_file("--json", str(tmp_path / name))
    check_file("--json", "/dev/null")
    assert (tmp_path / "old").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "old"]
