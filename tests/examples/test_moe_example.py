"""train_moe.py: the losses of eight devices and of one, the lines about routers, mistakes."""

import importlib
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from launch import EXAMPLES, run

pytest.importorskip("matplotlib", reason="the examples need pip install 'jaxfp8[examples]'")
pytest.importorskip("rich", reason="the examples need pip install 'jaxfp8[examples]'")

STEPS = 4
# Programs fuse in other ways, and round to bf16 at other places. A token near a tie of two experts
# then goes to the other one.
CHANCE = 1e-2
FP8 = 5e-2  # of a model that has learned nothing yet
LOAD = (
    r"^  block(\d)  load: max/mean (\d\.\d\d), least (\d+\.\d)%  dropped (\d+)  "
    r"load-balancing loss (\d\.\d{3})$"
)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Output and results of a short run with --compare."""
    folder = tmp_path_factory.mktemp("moe")
    small = "--layers", 1, "--steps", STEPS, "--validation", 16
    finished = run("train_moe.py", *small, "--compare", "--json", "result.json", cwd=folder)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout, json.loads((folder / "result.json").read_text())


@pytest.mark.slow  # by default the model is traced only, by test_options_reach_the_experts
def test_eight_devices_show_the_losses_of_one_and_of_bf16(compared):
    output, result = compared
    assert result["mesh"] == {"expert": 4, "data": 2}
    runs = result["runs"]
    assert list(runs) == ["blockwise", "one device", "bf16"]
    ours = runs["blockwise"]
    assert len(ours["losses"]) == STEPS
    assert ours["losses"][-1] < ours["losses"][0] - 0.5
    for name, atol in {"one device": CHANCE, "bf16": FP8}.items():
        np.testing.assert_allclose(runs[name]["losses"], ours["losses"], rtol=0, atol=atol)
        gap = ours["val_loss"] - runs[name]["val_loss"]
        assert abs(gap) < atol
        assert f"{runs[name]['val_loss']:15.4f}  {gap:+.4f}" in output
    assert runs["bf16"]["losses"] != ours["losses"]  # or it would be the same model


@pytest.mark.slow
def test_lines_about_routers(compared):
    output, _ = compared
    lines = re.findall(LOAD, output, re.MULTILINE)
    assert [int(line[0]) for line in lines] == [0] * STEPS, output
    for _, ratio, least, dropped, balance in lines:
        assert 1 <= float(ratio) <= 4
        assert 0 <= float(least) <= 12.5
        assert int(dropped) == 0
        assert float(balance) >= 0.9


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("train_moe")


def router(load, dropped=0):
    return SimpleNamespace(load=np.array(load), dropped=dropped, load_balancing_loss=1.0)


def test_an_uneven_load_is_named(script):
    lines = script.describe(
        [
            router([10] * 8),
            router([10] * 6 + [20, 0]),
            router([20, 5, 5, 2, 2, 2, 2, 2], dropped=5),
        ]
    )
    assert [line for line in lines if "warning" in line] == [
        "  warning: block1: uneven load: expert 7 gets no token.",
        "  warning: block2: uneven load: expert 0 gets 4.0 times the mean.",
    ]
    assert "max/mean 2.00, least 0.0%" in lines[1]
    assert "dropped 5" in lines[3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--mesh tensor=8", "--mesh tensor=8: there is no axis 'tensor'; use expert, data."),
        ("--mesh expert=4", "--mesh expert=4 has 4 devices, there are 8"),
        ("--batch 12", "--batch 12 cannot be split evenly over 8 devices; give a multiple of 8."),
        ("--batch 0", "--batch 0 cannot be split evenly over 8 devices"),
        ("--steps 0", "--steps 0: give at least 1"),
        ("--seed -1", "--seed -1: give a number from 0 to 2147483647"),
        ("--validation 9", "--validation 9: give a multiple of 8, at most 1024."),
        ("--capacity-factor 0", "--capacity-factor 0.0: give a finite number above 0"),
        ("--capacity-factor nan", "--capacity-factor nan: give a finite number above 0"),
        ("--recipe fp4", "--recipe fp4: recipe 'fp4' is unknown; use one of"),
        ("--json no/such.json", "--json no/such.json: its folder does not exist"),
        (
            "--set power_of_two=false",
            "--recipe blockwise --set power_of_two=false: recipe 'blockwise' has scales that are "
            "no powers of two.",
        ),
    ],
)
@pytest.mark.usefixtures("standard_promotion")
def test_mistakes(script, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        script.parse(arguments.split())
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith(f"train_moe.py: error: {message}"), err


@pytest.mark.usefixtures("standard_promotion")
def test_options_reach_the_experts(script):
    arguments = "--capacity-factor 1.5 --gradient-in-fp8 --mesh expert=8 --recipe mxfp8"
    _, mesh, model, _ = script.parse(arguments.split())
    assert dict(mesh.shape) == {"expert": 8, "data": 1}
    assert model.recipe.name == "mxfp8"
    assert model.parallel == script.fp8.moe.ExpertParallel(
        axis="expert", tokens=("data", "expert"), capacity_factor=1.5, gradient_sent_in_fp8=True
    )
