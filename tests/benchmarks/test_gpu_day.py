"""The command for the first half hour on a GPU: what it starts, ends, keeps and reports.

Most parts here are tiny programs in place of the real ones.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from quick_flags import quick_flags

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "gpu"
# The table of parts, and what runs in place of `python benchmarks/gpu/day.py`.
TABLE = f"""
import sys
sys.path.insert(0, {str(FOLDER)!r})
import day, day_parts
find_gpu, day.find_gpu = day.find_gpu, lambda: None  # there is none here

def part(name, code, seconds=30.0, more=(), **fields):
    command = (code,) if code.endswith(".py") else ("-c", code)
    command = *command, "{{folder}}", name, *more
    return day_parts.Part(name=name, command=command, seconds=seconds, decides="all", **fields)
"""
# What a part begins with: `write(*statuses)` writes its results.
BEGIN = """
import json, os, pathlib, subprocess, sys, time
folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
with open(folder / "ran", "a") as ran: ran.write(name + " ")
def write(*statuses, finished="Finished"):
    rows = [{"path": name, "status": status, "reason": "why"} for status in statuses]
    (folder / f"{name}.json").write_text(json.dumps({"rows": rows, "finished": finished}))
"""


def start(folder, parts, *words, **fields):
    """Starts the command with these parts, {name: (code, arguments of the part)}."""
    listed = "".join(
        f"part({name!r}, {code if code.endswith('.py') else BEGIN + code!r}, **{how!r}), "
        for name, (code, how) in parts.items()
    )
    code = f"{TABLE}\nday_parts.of_day = lambda **_: ({listed})\nsys.exit(day.main(sys.argv[1:]))"
    begin = [sys.executable, "-c", code, "--folder", str(folder), *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(begin, stdin=pipe, stdout=pipe, stderr=pipe, text=True, **fields)


def run(folder, parts, *words, **fields):
    """Its exit status and its output."""
    process = start(folder, parts, *words, **fields)
    out, error = process.communicate("typed")
    return process.returncode, out + error


def outcomes(folder):
    state = json.loads((folder / "day.json").read_text())
    return {name: part["outcome"] for name, part in state["parts"].items()}


def ran(folder):
    return (folder / "ran").read_text().split()


def alive(pid):
    """Whether a process runs. One that is dead may have nobody who takes its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_for(condition):
    for _ in range(300):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it did not happen in 30 s")


def test_a_second_call_continues(tmp_path):
    """A part starts only if its whole limit fits, and no part runs twice."""
    parts = {name: ("time.sleep(1); write('ok')", {"seconds": 7.5}) for name in "abc"}
    for number, left in enumerate(("b, c", "c", None), 1):
        status, text = run(tmp_path, parts, "--minutes", "0.14")
        assert ran(tmp_path) == ["a", "b", "c"][:number]
        assert status == (4 if left else 0), text
        assert (f"Left: {left}. " in text) == bool(left)
    assert outcomes(tmp_path) == dict.fromkeys("abc", "passed")
    assert run(tmp_path, parts, "--again", "b") == (0, text.replace("c:", "b:").replace("/c", "/b"))
    assert ran(tmp_path) == ["a", "b", "c", "b"]
    assert (tmp_path / "b.json.1").exists()
    assert [*outcomes(tmp_path)] == ["a", "b", "c"]
    parts["b"] = ("os.kill(os.getppid(), 9)", parts["b"][1])
    assert run(tmp_path, parts, "--again", "b")[0] == -9
    assert [*outcomes(tmp_path)] == ["a", "c"]  # the next call runs it


def test_outcomes(tmp_path):
    """An exception and faults both end Python with 1, and only the results tell them apart."""
    watched = tmp_path / "watched.py"
    watched.write_text(f"{BEGIN}\nwrite('ok', finished='Not finished'); os._exit(3)")
    parts = {
        "right": ("write('ok', 'skipped')", {}),
        "wrong": ("write('ok', 'failed'); sys.exit(1)", {}),
        "wrong_and_0": ("write('ok', 'failed')", {}),
        "raises": ("write('ok', 'failed', finished='Not finished'); raise ValueError", {}),
        "raises_at_the_end": ("write('ok'); raise ValueError", {}),
        "writes_nothing": ("", {}),
        "killed": ("write('ok'); os.kill(os.getpid(), 11)", {}),
        "misused": ("write('ok'); sys.exit(2)", {}),
        "all_skipped": ("write('skipped')", {}),
        "rehearsed": ("write('skipped')", {"gpu": False}),
        "watched": (str(watched), {}),
        "no_script": ("write('ok', finished='Not finished'); os._exit(3)", {}),
        "half": (
            "print('[gw0] [ 9%] PASSED a.py::b[c d]')\n(folder / 'half.xml').write_text('<te')",
            {"more": ("--junitxml",)},
        ),
        "endless": ("write('ok', finished='Not finished'); time.sleep(99)", {"seconds": 2.0}),
    }
    expected = {
        "right": ("passed", 0), "wrong": ("found faults", 1), "wrong_and_0": ("found faults", 1),
        "raises": ("crashed", 3), "raises_at_the_end": ("crashed", 3),
        "writes_nothing": ("crashed", 3), "killed": ("crashed", 3), "misused": ("crashed", 3),
        "all_skipped": ("crashed", 3), "rehearsed": ("skipped", 0), "watched": ("cut off", 3),
        "no_script": ("crashed", 3), "half": ("crashed", 3), "endless": ("cut off", 3),
    }  # fmt: skip
    status, text = run(tmp_path, parts)
    assert (status, [*outcomes(tmp_path)]) == (3, [*parts]), text
    assert outcomes(tmp_path) == {name: outcome for name, (outcome, _) in expected.items()}
    for names, wanted in (
        ("right,rehearsed", 0), ("right,wrong", 1), ("wrong,endless", 3), ("right,raises", 3),
    ):  # fmt: skip
        assert run(tmp_path, parts, "--parts", names)[0] == wanted
    assert ran(tmp_path) == [*parts]
    (row,) = json.loads((tmp_path / "half.json").read_text())["rows"]
    assert row == {"test": "a.py::b[c d]", "status": "ok"}
    report = (tmp_path / "report.md").read_text()
    assert "- the part `killed` crashed with the exit status -11: `killed.log`" in report
    assert "- the part `endless` was cut off after 2 s" in report
    assert "- wrong: wrong: why" in report
    assert "`right`" not in report


def test_a_part_that_hangs_is_ended_with_its_children(tmp_path):
    child = "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])"
    write = "(folder / 'pid').write_text(str(child.pid))"
    parts = {
        "hangs": (f"{child}\n{write}\ntime.sleep(99)", {"seconds": 3.0}),
        "leaves": (f"{child}\n{write.replace('pid', 'left', 1)}\nwrite('ok')", {}),
        "next": ("write('ok')", {}),
    }
    status, text = run(tmp_path, parts)
    assert status == 3, text
    assert outcomes(tmp_path) == {"hangs": "cut off", "leaves": "passed", "next": "passed"}
    for name in ("pid", "left"):
        wait_for(lambda name=name: not alive((tmp_path / name).read_text()))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_what_is_done_survives_the_end_of_the_call(how, tmp_path):
    """The part that runs ends with the call, and runs again in the next one."""
    second = """
if (folder / "pids").exists():
    write("ok")
else:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
    (folder / "unfinished").write_text(f"{os.getpid()} {child.pid}")
    (folder / "unfinished").rename(folder / "pids")
    time.sleep(99)
"""
    parts = {"first": ("write('ok')", {}), "second": (second, {"seconds": 60.0})}
    process = start(tmp_path, parts)
    wait_for((tmp_path / "pids").exists)
    pids = (tmp_path / "pids").read_text().split()
    assert all(map(alive, pids))
    process.send_signal(how)
    process.communicate()
    # Nobody can end the children of a part after a SIGKILL.
    ended = pids[:1] if how == signal.SIGKILL else pids
    wait_for(lambda: not any(map(alive, ended)))
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(pids[1]), signal.SIGKILL)
    assert outcomes(tmp_path) == {"first": "passed"}
    assert "| first | passed |" in (tmp_path / "report.md").read_text()
    status, text = run(tmp_path, parts)
    assert status == 0, text
    assert ran(tmp_path) == ["first", "second", "second"]


def test_a_fault_of_the_report_costs_no_part(tmp_path):
    parts = {"first": ("write('ok')", {}), "second": ("write('ok')", {})}
    (tmp_path / "report.md").mkdir()  # so that it cannot be written
    status, text = run(tmp_path, parts)
    assert status == 3
    assert "IsADirectoryError" in text
    assert outcomes(tmp_path) == dict.fromkeys(parts, "passed")


def test_what_cannot_run_is_refused_first(tmp_path):
    fine = {"fine": ("write('ok')", {})}
    missing = {**fine, "bits": (str(tmp_path / "bits.py"), {})}
    long = {"long": ("write('ok')", {"seconds": 61.0}), **fine}
    sections = {**fine, "step": ("benchmarks/gpu/run.py", {"more": ("--sections", "copies,no")})}
    for parts, words, reason in (
        (missing, [], "bits.py, which does not exist"),
        (long, ["--minutes", "1"], "may take 61 s, but --minutes allows 60 s"),
        (sections, [], "needs sections ['no'], which run.py does not have"),
        (fine, ["--parts", "fine,none"], "there is no part ['none']"),
    ):
        status, text = run(tmp_path / "folder", parts, *words)
        assert (status, reason in text) == (2, True), text
    assert not (tmp_path / "folder" / "ran").exists()
    assert run(tmp_path / "folder", fine)[0] == 0
    status, text = run(tmp_path / "folder", fine, "--dry-run")
    assert (status, "has results of the mode 'GPU'" in text) == (2, True), text
    (tmp_path / "folder" / "day.json").write_text("{")  # damaged
    assert run(tmp_path / "folder", fine)[0] == 2
    assert run(tmp_path / "folder" / "day.json", fine)[0] == 2  # a file where a folder must be


def test_no_gpu_is_refused(tmp_path):
    """Otherwise each part would crash and count as done."""
    code = f"{TABLE}\nday.find_gpu = find_gpu\nsys.exit(day.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "--folder", str(tmp_path)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, "no GPU is visible" in done.stderr) == (2, True), done.stderr
    assert not [*tmp_path.iterdir()]


def test_variables_of_a_part(tmp_path):
    """What the documents say, and nothing of jax in the process that must end in time."""
    code = "(folder / name).write_text(json.dumps(dict(os.environ))); write('ok')"
    parts = {
        "own": (code, {"environment": (("JAX_PLATFORMS", "cuda"),)}),
        "all": (f"{code}; assert os.getcwd() == {str(ROOT)!r}; assert not sys.stdin.read()", {}),
    }
    environment = os.environ | {"PYTHONPATH": "/given", "JAX_COMPILATION_CACHE_DIR": "/given"}
    status, text = run(tmp_path, parts, "--commit", "4b9ad2e", env=environment)
    assert status == 0, text
    own, given = (json.loads((tmp_path / name).read_text()) for name in parts)
    assert given["PYTHONPATH"] == f"{ROOT}{os.pathsep}/given"
    assert given["JAXFP8_COMMIT"] == "4b9ad2e"
    assert given["PYTHONUNBUFFERED"] == "1"
    assert given["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert given["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "cache" / "all")
    assert (own["JAX_PLATFORMS"], given["JAX_PLATFORMS"]) == ("cuda", "cuda,cpu")
    code = f"{TABLE}\nassert 'jax' not in sys.modules\nprint([p.name for p in day_parts.of_day()])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("['truth', 'checks', 'bits', ")


def test_the_day_asks_for_what_there_is():
    """Layers whose names match nothing, or shapes that cannot be read, would show on a GPU only."""
    code = f"""{TABLE}
import autotune, layers, target
parts = {{part.name: part.command for part in day_parts.of_day()}}
words = parts["layers"]
texts = [text for word, text in zip(words, words[1:]) if word == "--match"]
chip = target.Target(chip="h200", device=None)
names = [case.name for case in layers.cases(layers.BLOCKS, chip)]
for text in texts:
    assert any(text in name for name in names), text
assert any(layers.BLOCKS[0].name in text for text in texts)
sys.argv = [*parts["tuning"]]
for shape in autotune.parse().shapes:
    assert len([*map(int, shape.split(","))]) == 3
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("before", "goes_on"), [("passed", False), ("found faults", False), ("cut off", True)]
)
def test_timings_of_an_earlier_try(before, goes_on, tmp_path):
    """autotune skips what its table has, so a whole table must go before a part runs again."""
    for name in ("tuning.json", "tuning_timings.json"):
        (tmp_path / name).write_text("{}")
    code = f"""{TABLE}
import pathlib
day_parts.keep_old(part("tuning", ""), pathlib.Path({str(tmp_path)!r}), {{"outcome": {before!r}}})
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    kept = "tuning_timings.json" if goes_on else "tuning_timings.json.1"
    assert {path.name for path in tmp_path.iterdir()} == {"tuning.json.1", kept}


def test_half_an_hour_in_parts_of_ten_minutes():
    """Of a day and of a rehearsal: each call ends in time, even if all parts need their limits."""
    code = f"""{TABLE}
import json
of_chips = day_parts.of_compile_only(["h100", "h200", "b200"], 9)
print(json.dumps([[p.seconds for p in parts] for parts in (day_parts.of_day(), of_chips)]))
for p in (*day_parts.of_day(), *of_chips):
    if "--minutes" in p.command:
        own = 60 * float(p.command[p.command.index("--minutes") + 1])
        own *= day_parts.CUT_OFF if p.gpu else 1
        assert p.seconds >= own + day_parts.START - 1, p
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    day, chips = json.loads(done.stdout)
    assert sum(day) <= 30 * 60
    assert max(day) < 5 * 60
    assert sum(chips) <= 9 * 60


SOME_TESTS = """
import time, pytest
def test_right(): pass
def test_wrong():
    assert 1 == 2, "two words"
@pytest.mark.skip(reason="no such chip")
def test_left_out(): pass
@pytest.mark.parametrize("x", ["a b"])
def test_row(x): pass
"""


@pytest.mark.parametrize("hangs", [False, True])
def test_tests_become_rows(hangs, tmp_path):
    """Of XML if pytest ends, and else of its log, which has no reasons."""
    path = tmp_path / "test_some.py"
    path.write_text(SOME_TESTS + "def test_late(): time.sleep(99)" * hangs)
    own = ("-v", str(path), "-n", "2", "-p", "no:cacheprovider", "--rootdir", str(tmp_path))
    code = f"""{TABLE}
command = ("-m", "pytest", *{own!r}, "--junitxml={{folder}}/truth.xml")
truth = day_parts.Part(name="truth", command=command, seconds={6.0 if hangs else 60.0}, decides="")
day_parts.of_day = lambda **_: (truth,)
sys.exit(day.main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", code, "--folder", str(tmp_path)]
    # Plugins that are installed take seconds to import.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == (3 if hangs else 1), done.stdout + done.stderr
    assert outcomes(tmp_path) == {"truth": "cut off" if hangs else "found faults"}
    rows = json.loads((tmp_path / "truth.json").read_text())["rows"]
    assert {re.sub(r".*::", "", row["test"]): row["status"] for row in rows} == {
        "test_right": "ok",
        "test_wrong": "failed",
        "test_left_out": "skipped",
        "test_row[a b]": "ok",
    }
    report = (tmp_path / "report.md").read_text()
    assert re.search(
        r"- truth: .*::test_wrong: (Assert.* two words|the file has no reason)", report
    ), report
    assert ("no such chip: all (1)" in report) == (not hangs)


@pytest.mark.slow
def test_dry_run(tmp_path):
    """Every real part, on a CPU."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": quick_flags()}
    command = [sys.executable, "-m", "benchmarks.gpu.day", "--dry-run", "--folder", tmp_path]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = outcomes(tmp_path)
    assert found.pop("truth") == "skipped"
    assert {*found.values()} == {"passed"}
    assert [*found] == [
        "checks", "bits", "casts", "layers", "matmuls", "experts", "step", "tuning",
    ]  # fmt: skip
    report = (tmp_path / "report.md").read_text()
    assert "A dry run with tiny shapes on a CPU." in report
    assert "Every part that ran has held." in report
    assert "xla, chosen" in report
