"""The examples of a mesh, a pipeline and many processes show the losses of a run without them."""

import json
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from launch import kill, run, run_together, start_together

pytest.importorskip("matplotlib", reason="the examples need pip install 'jaxfp8[examples]'")
pytest.importorskip("rich", reason="the examples need pip install 'jaxfp8[examples]'")

STEPS = 3
FEW = "--steps", STEPS, "--batch", 4
# Programs fuse otherwise, and round to bf16 at other places (2^-8); a value near a tie of FP8 then
# moves by 2^-4. What is left of it in a mean over a thousand tokens; Adam's first steps make it
# grow.
BF16_ROUNDING = 2e-3


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Output and results of train_sharded.py on eight devices."""
    folder = tmp_path_factory.mktemp("sharded")
    finished = run("train_sharded.py", *FEW, "--json", "result.json", cwd=folder)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout, json.loads((folder / "result.json").read_text())


@pytest.mark.slow  # comms/test_gathered_operands.py has the gather of one weight
def test_a_sharded_run_gathers_its_weights_as_bytes(sharded):
    output, result = sharded
    assert result["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
    assert len(result["losses"]) == STEPS
    assert result["losses"][-1] < result["losses"][0] - 0.5
    for loss in result["losses"]:
        assert f"{loss:.4f}" in output
    gathered = re.findall(r"^all-gather +(\w+)", output, re.MULTILINE)
    assert gathered == ["uint8"], output


@pytest.mark.slow
def test_two_processes_of_four_devices_show_the_losses_of_one_with_eight(sharded, tmp_path):
    arguments = *FEW, "--json", "result.json"
    first, second = run_together(
        "train_multihost.py", *arguments, processes=2, cwd=tmp_path, seconds=180
    )
    assert "2 processes, 8 devices" in first
    assert "loss" not in second  # one of them tells
    losses = json.loads((tmp_path / "result.json").read_text())["losses"]
    # Another library adds up what two processes exchange, in another order.
    np.testing.assert_allclose(losses, sharded[1]["losses"], rtol=1e-5)


@pytest.mark.slow
def test_a_pipeline_shows_the_losses_and_scales_of_one_device(tmp_path):
    finished = run("train_pipeline.py", "--steps", 2, "--json", "result.json", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["mesh"] == {"pipe": 4, "data": 2}
    ours, plain = result["pipeline"], result["one device"]
    np.testing.assert_allclose(ours["losses"], plain["losses"], rtol=BF16_ROUNDING)
    # An amax is one element, not a mean: roundings of bf16 that turn into those of FP8 move it by a
    # tenth. A scale of all stages would be ten times that of the last.
    np.testing.assert_allclose(ours["scales"], plain["scales"], rtol=0.3)
    of_gradients = np.array(ours["scales"])[::2, 2]  # of each stage's first layer
    assert np.all(of_gradients[:-1] > 1.3 * of_gradients[1:]), of_gradients
    for stage in range(4):
        assert re.search(rf"^ +{stage}( +\d\.\d+e-\d\d){{6}}$", finished.stdout, re.MULTILINE), (
            finished.stdout
        )


@pytest.mark.slow
def test_a_process_that_fails_ends_the_others(tmp_path):
    with pytest.raises(AssertionError, match="--mesh data=3 has 3 devices, there are 8"):
        run_together(
            "train_multihost.py", "--mesh", "data=3", processes=2, cwd=tmp_path, seconds=60
        )


def training(folder):
    """Two processes in the midst of training.

    Gloo's processes wait 30 s for each other. On a busy machine one may compile for longer than the
    other, so there are three attempts.
    """
    for attempt in range(3):
        cwd = folder / str(attempt)
        cwd.mkdir()
        started = start_together("train_multihost.py", "--steps", 10**6, processes=2, cwd=cwd)
        log, deadline = cwd / "process0.log", time.monotonic() + 180
        while "step   2" not in log.read_text() and time.monotonic() < deadline:
            if any(process.poll() is not None for process in started):
                break
            time.sleep(0.1)
        if [process.poll() for process in started] == [
            None,
            None,
        ] and "step   2" in log.read_text():
            return started
        kill(started)
        logs = "".join(each.read_text() for each in cwd.glob("process*.log"))
        assert "Gloo context initialization failed" in logs, logs
    raise AssertionError(f"Gloo's processes did not meet:\n{logs}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signalled", "seconds"),
    [
        ([0, 1], 10),
        ([0], 10),
        ([1], 60),  # a heartbeat is missed first
    ],
)
def test_sigterm_ends_all_processes(tmp_path, signalled, seconds):
    """While they train: the first steps are done, and there are enough of them for hours."""
    started = training(tmp_path)
    try:
        for i in signalled:
            started[i].send_signal(signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in started) and time.monotonic() < deadline:
            time.sleep(0.1)
    finally:
        codes = kill(started)
    for i, code in enumerate(codes):
        assert code == 143 if i in signalled else code not in (None, 0), codes


@pytest.mark.slow
def test_sigterm_ends_a_process_that_waits_for_others(tmp_path):
    # the last counts
    started = start_together("train_multihost.py", "--num-processes", 3, processes=2, cwd=tmp_path)
    try:
        for process in started:
            handler = 1 << signal.SIGTERM - 1  # of those that the process catches
            deadline = time.monotonic() + 60
            while not handler & caught(process.pid):
                assert time.monotonic() < deadline, "no handler within a minute"
                time.sleep(0.1)
        time.sleep(2)  # they wait for the third
        for process in started:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(timeout=10) for process in started]
    finally:
        kill(started)
    assert codes == [143, 143]


def caught(pid):
    """The signals that a process has handlers for, as Linux tells it."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "example"),
    [
        pytest.param(recipe, example, id=f"{recipe}, {example}")
        for recipe in ("rowwise", "mxfp8", "current", "blockwise")
        for example in ("sharded", "pipeline")
    ],
)
def test_every_recipe_shows_the_losses_of_one_device(recipe, example, tmp_path):
    # Fewer microbatches than stages: some have nothing to do for most of the time.
    words = ("--compare",) if example == "sharded" else ("--microbatches", 2)
    arguments = "--recipe", recipe, "--steps", 2, "--json", "result.json", *words
    finished = run(f"train_{example}.py", *arguments, cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    if example == "sharded":
        ours, theirs = result["losses"], result["one_device_losses"]
    else:
        ours, theirs = result["pipeline"]["losses"], result["one device"]["losses"]
    np.testing.assert_allclose(ours, theirs, rtol=BF16_ROUNDING)


def test_states_of_several_processes_are_checked(tmp_path):
    """No process holds all values of a state that is split over a pipeline."""
    script = Path(__file__).parent / "restored_by_processes.py"
    for written in run_together(script, processes=2, cwd=tmp_path, seconds=180):
        assert "refused True" in written
        assert "warned 1 unset True in place True" in written
        assert "checked (4, 3)" in written
