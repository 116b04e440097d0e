"""All that must hold before a change is merged: `nox` runs it, `nox -s NAME` one session.

    nox --list                              # names, and what they check
    nox -s newest -- -k scan tests/linen    # what follows -- goes to pytest
    nox -s everything                       # by hand, before a release: every row of every test
    nox -s clients -- tunix                 # by hand, before a release: frameworks that use jaxfp8

Sessions of one Python share an environment below .nox. The first one installs it.
"""

import argparse
import functools
import importlib
import os
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = (
    "lint", "readme", "newest", "optimized", "rounding", "gpu_programs", "tpu_programs", "guests",
    "plugs", "docstrings", "silicon", "loaders", "notebooks", "budget",
)  # fmt: skip
MOST_CPU_MINUTES = 160
"""More than this of all sessions together is an error. On a quiet machine they take 54. They
took 125 on a slow one of the same kind. CONTRIBUTING.md has the budgets on a quiet machine."""
LATEST = ("-q", "--upgrade", "--upgrade-strategy", "eager")  # also in an environment that is there


spent: dict[str, tuple[float, float]] = {}
"""For each session that has run its minutes by the clock, and its CPU minutes."""


def measured(run: Callable[[nox.Session], None]) -> Callable[[nox.Session], None]:
    """The session, with its times in `spent`. What its processes start counts, too."""

    @functools.wraps(run)
    def session_of(session: nox.Session) -> None:
        wall, cpu = time.monotonic(), _cpu_seconds()
        try:
            run(session)
        finally:
            spent[run.__name__] = (time.monotonic() - wall) / 60, (_cpu_seconds() - cpu) / 60
            minutes = "{:.1f} minutes, {:.1f} CPU minutes".format(*spent[run.__name__])
            session.log(f"{run.__name__} took {minutes}")

    return session_of


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


# Environments. pip finds the jax: 0.10.2 is the last one for Python 3.11, others get the newest.
@nox.session(python="3.11")
@measured
def python311(session: nox.Session) -> None:
    """The environment of the oldest jax."""
    session.install(*LATEST, "-e", ".[test,examples,notebooks,plugs,dev]")


@nox.session(python="3.12")
@measured
def python312(session: nox.Session) -> None:
    """The environment of the newest jax. Its wheels compile for chips that are not there."""
    session.install(*LATEST, "-e", ".[test,examples,cuda13,triton,tpu]")


@nox.session(python="3.13")
@measured
def python313(session: nox.Session) -> None:
    """The environment of Python 3.13, and of torch."""
    session.install(*LATEST, "-e", ".[test,triton]")
    # To compile the bytecode of torch takes longer than to import it.
    extras = nox.project.load_toml(ROOT / "pyproject.toml")["project"]["optional-dependencies"]
    session.install("-q", "--no-compile", *extras["silicon"], *extras["loaders"])


OLDEST, NEWEST, NEXT = (
    {"python": False, "requires": [name]} for name in ("python311", "python312", "python313")
)


def python(session: nox.Session, version: str, *arguments: str, **options: Any) -> str:
    """Runs the Python of an environment, and returns its output if `silent=True`."""
    executable = ROOT / ".nox" / version / "bin" / "python"
    return str(session.run(str(executable), *arguments, external=True, **options))


NEEDED = {
    "python311": "equinox",
    "python312": "jax_cuda13_plugin jax_triton libtpu",
    "python313": "mmasim transformers compressed_tensors accelerate safetensors",
}
"""Packages without which tests of an environment are skipped. conftest.py refuses to start."""


def pytest(
    session: nox.Session, version: str, *arguments: str, env: dict[str, str] | None = None
) -> None:
    """Runs pytest on one process more than there are cores.

    Workers wait for their devices and subprocesses a fifth of the time.
    """
    workers = {"PYTEST_XDIST_AUTO_NUM_WORKERS": str((os.cpu_count() or 1) + 1)}
    slowest = "--durations=10"  # shows what a session spends its minutes on
    given = ("-m", "pytest", "-n", "auto", slowest, *arguments, *session.posargs)
    needs = {"JAXFP8_TESTS_NEED": NEEDED.get(version, "")}
    python(session, version, *given, env=workers | needs | (env or {}))


@nox.session(**OLDEST)
@measured
def lint(session: nox.Session) -> None:
    """Lint, format, types, and the lengths of sentences."""
    commands = (
        ("-m", "ruff", "check", "."),
        ("-m", "ruff", "format", "--check", "."),
        ("-m", "mypy"),
        ("docs/words.py",),
    )
    failed = []
    for command in commands:  # all of them, so that one run shows everything that is wrong
        try:
            python(session, "python311", *command)
        except CommandFailed:
            failed.append(" ".join(command))
    if failed:
        session.error(f"failed: {', '.join(failed)}")


@nox.session(python=False)
@measured
def readme(session: nox.Session) -> None:
    """README's test command, word for word, in a copy: the default suite on the oldest jax."""
    text = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"<!-- the tests -->\n```bash\n(.*?)```", text, re.DOTALL)
    known = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = session.run(*known, external=True, silent=True, log=False)
    with tempfile.TemporaryDirectory() as folder:
        # As a new user has it: what git does not know of is not there.
        for name in filter(None, str(names).split("\0")):
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, Path(folder) / name)
        with session.chdir(folder):
            oldest = "import sys; assert sys.version_info[:2] == (3, 11), sys.version"
            session.run("python", "-c", oldest, external=True)  # README's `python`
            session.run("bash", "-ec", command, external=True)


@nox.session(**OLDEST, default=False)
@measured
def oldest(session: nox.Session) -> None:
    """Every row of the default suite on the oldest jax. `readme` runs the same."""
    pytest(session, "python311")


@nox.session(**NEWEST, default=False)
@measured
def everything(session: nox.Session) -> None:
    """Every row of `tests/` that needs no GPU, on the newest jax. It takes hours.

    `guests` and `plugs` run what it skips.
    """
    pytest(session, "python312", "-m", "not gpu")


DEFAULT_MARKS = (
    "not slow and not deviceless and not gpu and not tpu and not silicon and not loaders"
)
DEFAULT_ROWS = ("-m", DEFAULT_MARKS, "--one-row-in", "80")
# XLA's optimizations may change bits. The arithmetic is in these rooms, and others stand on them.
# Kernels are interpreted on CPUs, so it is not XLA that compiles them for users. With optimizations
# a program takes twice as long to compile.
ARITHMETIC = (
    "tests/contracts", "tests/golden", "tests/numerics", "tests/ops", "tests/optim",
    "tests/quantizers", "tests/state", "tests/tensors", "tests/weights",
)  # fmt: skip


@nox.session(**NEWEST)
@measured
def newest(session: nox.Session) -> None:
    """The default suite on the newest jax, but for `optimized`; some rows of each test.

    Benchmarks run on the oldest jax, in `readme`, and compile for GPUs in `gpu_programs`.
    """
    without = [f"--ignore={room}" for room in (*ARITHMETIC, "tests/benchmarks")]
    quick = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    pytest(session, "python312", *DEFAULT_ROWS, *without, env=quick)


@nox.session(**NEWEST)
@measured
def optimized(session: nox.Session) -> None:
    """The arithmetic on the newest jax, with XLA's optimizations; some rows of each test."""
    rooms = () if session.posargs else ARITHMETIC
    pytest(session, "python312", *DEFAULT_ROWS, *rooms, env={"XLA_FLAGS": ""})


@nox.session(**NEWEST)
@measured
def rounding(session: nox.Session) -> None:
    """Programs compiled for an H200, run on the CPU: do matmuls read FP8? Every recipe."""
    select = ("-m", "deviceless and not slow", "-k", "on_gpus")
    # NumPy computes the matmuls. Its threads would wait for each other, beside those of pytest.
    alone = {"OPENBLAS_NUM_THREADS": "1"}
    pytest(session, "python312", *select, "tests/deviceless", env=alone)


@nox.session(**NEWEST)
@measured
def gpu_programs(session: nox.Session) -> None:
    """Programs compiled for H200 and B200: kernels, registers, bytes, collectives; some rows."""
    select = ("-m", "deviceless and not slow", "-k", "not on_gpus", "--one-row-in", "72")
    by_file = ("--dist", "loadfile")  # the tests of a file read the same programs
    rooms = () if session.posargs else ("tests/deviceless", "tests/kernels", "tests/benchmarks")
    pytest(session, "python312", *by_file, *select, *rooms)


@nox.session(**NEWEST)
@measured
def tpu_programs(session: nox.Session) -> None:
    """Programs compiled for TPUs: do matmuls read FP8, do casts round, what is sent; some rows."""
    rooms = () if session.posargs else ("tests/tpu",)
    pytest(session, "python312", "--dist", "loadfile", "-m", "tpu and not slow", *rooms)


@nox.session(**NEWEST)
@measured
def guests(session: nox.Session) -> None:
    """flax's own tests of dense layers and attention, with our layers."""
    show = "import flax; print(flax.__version__)"
    version = python(session, "python312", "-c", show, silent=True).strip()
    folder = session.create_tmp()  # only the sdist has the tests
    sdist = ("--no-deps", "--no-binary", "flax", "-d", folder, f"flax=={version}")
    python(session, "python312", "-m", "pip", "download", "-qq", *sdist)
    found = Path(folder) / f"flax-{version}.tar.gz"
    pytest(session, "python312", "-rP", "--flax-sdist", str(found), "tests/guests")


@nox.session(**OLDEST)
@measured
def plugs(session: nox.Session) -> None:
    """Our layers in equinox. Where it is missing, other sessions skip the tests."""
    pytest(session, "python311", "tests/plugs/test_equinox_plug.py")


@nox.session(**NEXT)
@measured
def docstrings(session: nox.Session) -> None:
    """The examples of all docstrings, and the public names, on Python 3.13."""
    pytest(session, "python313", "--doctest-modules", "jaxfp8")  # without tests/conftest.py
    pytest(session, "python313", "tests/test_public_api.py")


@nox.session(**NEXT)
@measured
def silicon(session: nox.Session) -> None:
    """Kernels with modeled tensor cores, and the models beside MMA-Sim."""
    rooms = () if session.posargs else ("tests/silicon",)
    # A worker imports torch and JAX for seconds, so one more than cores costs more than it saves.
    workers = ("-n", str(os.cpu_count() or 1))
    pytest(session, "python313", *workers, "-m", "silicon and not slow", *rooms)


@nox.session(**NEXT)
@measured
def loaders(session: nox.Session) -> None:
    """Exports in transformers and compressed-tensors, and the rules of vLLM and SGLang."""
    rooms = () if session.posargs else ("tests/loaders",)
    workers = ("-n", str(os.cpu_count() or 1))  # as in `silicon`
    by_file = ("--dist", "loadfile")  # the tests of a file cast the same shapes
    pytest(session, "python313", *workers, *by_file, "-m", "loaders and not slow", *rooms)


@nox.session(**NEXT, default=False)
@measured
def all_loaders(session: nox.Session) -> None:
    """By hand, before a release: every row of `loaders`."""
    workers = ("-n", str(os.cpu_count() or 1))
    pytest(session, "python313", *workers, "-m", "loaders", "tests/loaders")


@nox.session(**OLDEST)
@measured
def notebooks(session: nox.Session) -> None:
    """Every notebook, executed from the beginning."""
    python(session, "python311", "notebooks/execute.py", "--check")


@nox.session(python=False, default=False)
def clients(session: nox.Session) -> None:
    """Other frameworks by their own commands, by hand, before a release. It takes hours.

    `-- tunix levanter` runs these, and without names all of them run. A framework that is not
    installed by pip needs its source tree: `-- maxtext --checkout maxtext=FOLDER`. `--rows REGEX`
    chooses rows, `--list` shows them.
    """
    folder = ROOT / "benchmarks" / "clients"
    sys.path.insert(0, str(folder))
    known = {
        path.stem.removesuffix("_client"): importlib.import_module(path.stem).CLIENT
        for path in sorted(folder.glob("[a-z]*_client.py"))
    }
    parser = argparse.ArgumentParser("nox -s clients --")
    parser.add_argument("names", nargs="*", choices=[*known, []], default=[])
    parser.add_argument("--checkout", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--rows", default="")  # the other options of run.py have no value
    given, rest = parser.parse_known_args(session.posargs)
    checkouts = dict(each.split("=", 1) for each in given.checkout)
    failed = []
    for name in given.names or known:
        python = _environment_of(session, known[name])
        checkout = ("--checkout", checkouts[name]) if name in checkouts else ()
        command = (str(folder / "run.py"), name, "--python", str(python), *checkout)
        command += ("--rows", given.rows, *rest)
        try:
            session.run(str(python), *command, external=True)
        except CommandFailed:
            failed.append(name)
    if failed:
        session.error(f"failed: {', '.join(failed)}")


def _environment_of(session: nox.Session, client: Any) -> Path:
    """The Python of a client's environment, which is made anew if its packages changed."""
    folder = ROOT / ".nox" / f"clients-{client.name}"
    python, stamp = folder / "bin" / "python", folder / "packages.txt"
    packages = "\n".join((*client.packages, "alone", *client.alone))
    if not stamp.exists() or stamp.read_text() != packages:
        shutil.rmtree(folder, ignore_errors=True)
        session.run(f"python{client.python}", "-m", "venv", str(folder), external=True)
        pip = (str(python), "-m", "pip", "install", "-q")
        session.run(*pip, *client.packages, external=True)
        if client.alone:
            session.run(*pip, "--no-deps", *client.alone, external=True)
        session.run(*pip, "-e", str(ROOT), external=True)
        stamp.write_text(packages)
    return python


@nox.session(python=False)
def budget(session: nox.Session) -> None:
    """The minutes of all sessions before it, and an error if they are too many."""
    if not spent:
        session.skip("no session ran before it")
    total = [sum(minutes) for minutes in zip(*spent.values(), strict=True)]
    for name, (wall, cpu) in [*spent.items(), ("all", total)]:
        session.log(f"{name:12} {wall:5.1f} minutes, {cpu:5.1f} CPU minutes")
    if total[1] > MOST_CPU_MINUTES:
        session.error(
            f"The sessions took {total[1]:.0f} CPU minutes, and may take {MOST_CPU_MINUTES}. "
            "Find what costs: pytest --durations=50."
        )
