"""Measures the power of the tests: plants faults in copies of the repository, and runs tests there.

    python tests/mutations/run.py --check --working-tree
    python tests/mutations/run.py --jobs 2 --results runs/mutations.json
    python tests/mutations/run.py --only state-fork-adds optim-least-spread
    python tests/mutations/run.py --summary before.json after.json

`--check` runs no tests. It checks that each text of the tables occurs once in the package, and that
each fault parses and changes a statement. The tables are those of the working tree, but the package
is that of HEAD, so add `--working-tree` after an edit. Without `--check`, each fault is planted in
a copy of the commit, and pytest runs its default selection in three stages:

    room        the tests of the room that holds the fault
    contracts   tests/golden and tests/contracts
    importers   tests/meshes for rooms that meshes change, then the tests of the rooms that import
                this room directly, the lowest first

The first test that fails kills the fault. A file that cannot be imported kills it, too. A fault
survives if all stages pass. All stages together have `--limit` CPU seconds. After that the fault is
cut off, and the results name the test under way.

`--results` names a JSON file. A fault with a result of this commit and this environment there is
skipped, so a run that was interrupted can go on. With `--confirm`, the test that killed a fault
also runs without it, and a test that fails there is reported as broken.

Tests of kernels in Pallas and Triton are skipped before jax 0.11, so plant faults in kernels with
the newest jax.

The faults are in `faults/*.toml`. `fault_table.py` explains the format. `draw.py` draws others at
random. This script is run by hand, and no CI runs it: a fault takes up to five minutes.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import queue
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import watch
from fault_table import (
    HERE,
    ROOT,
    TABLES,
    Fault,
    Sources,
    planted,
    problems_of,
    read_faults,
    read_sources,
    room_of,
)
from results import Results, line_of, summary
from stages import stages_of

WALL = 5  # times the limit, by the clock: a test may hang
PASSED, FAILED, INTERRUPTED, NO_TESTS = 0, 1, 2, 5  # exit statuses of pytest


class Stopped(Exception):
    """The run was interrupted."""


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout


def files_of_working_tree() -> list[Path]:
    names = git("ls-files", "-co", "--exclude-standard").decode().splitlines()
    return [path for name in names if (path := ROOT / name).is_file()]


def name_of(commit: str | None) -> str:
    """The full name of a commit, or a hash of the working tree."""
    if commit is not None:
        return git("rev-parse", "--verify", f"{commit}^{{commit}}").decode().strip()
    digest = hashlib.sha256()
    for path in files_of_working_tree():
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return f"working tree {digest.hexdigest()[:16]}"


def make_copy(commit: str | None, folder: Path) -> None:
    """A copy without git, so that nothing has to be removed from the repository afterwards."""
    folder.mkdir(parents=True)
    if commit is not None:
        with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as archive:
            archive.extractall(folder, filter="data")
        return
    for path in files_of_working_tree():
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)


@dataclasses.dataclass
class Copy:
    """A copy of the repository, in which one fault at a time is planted."""

    folder: Path
    cache: Path
    stop: threading.Event

    @contextlib.contextmanager
    def with_fault(self, fault: Fault, sources: Sources) -> Iterator[str]:
        path, source = planted(fault, sources)
        self._write(path, source)
        try:
            yield path
        finally:
            self._write(path, sources[path])

    def _write(self, path: str, source: str) -> None:
        file = self.folder / "jaxfp8" / path
        file.write_text(source, encoding="utf-8")
        # Python compares only times in seconds and sizes. A fault may have neither of its own.
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()

    def pytest(self, paths: list[str], limit: float) -> tuple[int | None, float, dict[str, str]]:
        """The exit status of pytest, or None if it was cut off; its seconds; notes of `watch.py`.

        CPU seconds, so that other work on the machine cuts off no fault.
        """
        notes, log = self.folder.with_suffix(".notes"), self.folder.with_suffix(".log")
        notes.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "--no-header"]
        command += ["-p", "watch", "-p", "no:cacheprovider", *paths]
        environment = os.environ | {
            "CI": "1",  # hypothesis draws the same examples each time
            "JAX_COMPILATION_CACHE_DIR": str(self.cache),
            "PYTHONPATH": os.pathsep.join([str(self.folder), str(HERE)]),
            watch.COPY: str(self.folder.resolve()),
            watch.NOTES: str(notes),
        }
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            status, seconds = self._wait(process, limit)
        found = json.loads(notes.read_text()) if notes.exists() else {}
        if status == watch.WRONG_PACKAGE:
            raise RuntimeError(found.get("why", f"{self.folder} was not tested"))
        if status not in (0, FAILED, INTERRUPTED, NO_TESTS, None) and "why" not in found:
            lines = log.read_text(errors="replace").strip().splitlines()
            found["why"] = lines[-1][:300] if lines else ""
        return status, seconds, found

    def _wait(self, process: subprocess.Popen[bytes], limit: float) -> tuple[int | None, float]:
        end = time.monotonic() + WALL * limit
        try:
            while not (ended := self._has_ended(process)):
                if self.stop.is_set():
                    raise Stopped
                if _seconds_of(process.pid) > limit or time.monotonic() > end:
                    break
                time.sleep(0.1)
        finally:
            # Before the process is reaped, no other process can have its number.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        return process.returncode if ended else None, usage.ru_utime + usage.ru_stime

    @staticmethod
    def _has_ended(process: subprocess.Popen[bytes]) -> bool:
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, process.pid, how) is not None


def _seconds_of(pid: int) -> float:
    """CPU seconds of a process and of its children that have ended; 0 without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return 0.0
    fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def result_of(fault: Fault, copy: Copy, sources: Sources, limit: float) -> dict[str, Any]:
    stages: dict[str, float] = {}
    found: dict[str, Any] = {"outcome": "survived"}
    with copy.with_fault(fault, sources) as path:
        for name, paths in stages_of(room_of(path), sources, copy.folder / "tests").items():
            status, seconds, notes = copy.pytest(paths, limit - sum(stages.values()))
            if status is not None and status < 0 and "failed" not in notes:
                # Something else may have ended the process, such as a lack of memory.
                status, again, notes = copy.pytest(paths, limit - sum(stages.values()))
                seconds += again
            stages[name] = round(seconds, 1)
            under_way = notes.get("under_way") or paths[0]
            if status is None and "failed" not in notes:
                found = {"outcome": "cut off", "stage": name, "under_way": under_way}
                break
            if status not in (PASSED, NO_TESTS):
                test, when = notes.get("failed"), notes.get("when")
                why = notes.get("why", "")
                if test is None:  # pytest or the process broke
                    test, when = under_way, f"exit status {status}"
                found = {"outcome": "killed", "stage": name, "test": test, "when": when, "why": why}
                break
    seconds = round(sum(stages.values()), 1)
    return found | {"seconds": seconds, "seconds_of_stages": stages}


def confirmed(result: dict[str, Any], copy: Copy, limit: float) -> dict[str, Any]:
    """The result, or "broken test" if the test that killed the fault fails without it.

    It is not confirmed if the test cannot end in time, or if it is a file without tests.
    """
    if result["outcome"] != "killed":
        return result
    status, _, notes = copy.pytest([result["test"]], limit)
    if status in (PASSED, NO_TESTS, None):
        return result | {"confirmed": status == PASSED}
    return result | {"outcome": "broken test", "why": notes.get("why", "")}


def run_all(
    faults: list[Fault], sources: Sources, arguments: argparse.Namespace, results: Results
) -> None:
    waiting: queue.SimpleQueue[Fault] = queue.SimpleQueue()
    for fault in faults:
        waiting.put(fault)
    stop = threading.Event()
    errors: list[BaseException] = []

    def work(copy: Copy) -> None:
        try:
            while not stop.is_set():
                fault = waiting.get_nowait()
                result = result_of(fault, copy, sources, arguments.limit)
                if arguments.confirm:
                    result = confirmed(result, copy, arguments.limit)
                results.add(fault, result, arguments.limit)
                print(line_of(fault.id, result), flush=True)
        except (queue.Empty, Stopped):
            pass
        except BaseException as error:
            errors.append(error)
            stop.set()

    def interrupt(*_: Any) -> None:
        stop.set()

    # A shell that starts a job in the background lets it ignore SIGINT, so both are set here.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    cache = arguments.cache or Path(tempfile.gettempdir()) / "jaxfp8-mutations-cache"
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="jaxfp8-mutations-") as folder:
        copies = [
            Copy(Path(folder) / f"copy{number}", cache.resolve(), stop)
            for number in range(min(arguments.jobs, len(faults)))
        ]
        for copy in copies:
            make_copy(arguments.commit, copy.folder)
        threads = [threading.Thread(target=work, args=(copy,)) for copy in copies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    if stop.is_set():
        raise SystemExit("Interrupted. Run the same command again to go on.")


def environment() -> str:
    """What decides which tests are skipped."""
    versions = [f"python {platform.python_version()}"]
    for package in ("jax", "flax", "jax-cuda13-plugin", "jax-triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join([*versions, f"XLA_FLAGS={os.environ.get('XLA_FLAGS', '')}"])


def sources_of(commit: str | None) -> Sources:
    if commit is None:
        return read_sources(ROOT / "jaxfp8")
    with tempfile.TemporaryDirectory(prefix="jaxfp8-mutations-") as folder:
        make_copy(commit, Path(folder) / "copy")
        return read_sources(Path(folder) / "copy" / "jaxfp8")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--commit", default="HEAD", help="what is tested; default: HEAD")
    source.add_argument(
        "--working-tree", dest="commit", action="store_const", const=None,
        help="test the files as they are, with changes that are not committed",
    )  # fmt: skip
    parser.add_argument(
        "--table", type=Path, nargs="+", default=TABLES, metavar="FILE", help="tables of faults"
    )
    parser.add_argument("--only", nargs="+", metavar="ID", help="the faults to plant; default: all")
    parser.add_argument("--check", action="store_true", help="only check the table")
    parser.add_argument("--jobs", type=int, default=1, help="faults at once; default: 1")
    parser.add_argument(
        "--limit", type=float, default=300, help="CPU seconds a fault; default: 300"
    )
    parser.add_argument("--confirm", action="store_true", help="run each killer without its fault")
    parser.add_argument(
        "--cache", type=Path, help="what all runs compile; default: a folder in temp"
    )
    parser.add_argument(
        "--results", type=Path, default=Path("runs/mutations.json"), metavar="FILE",
        help="default: runs/mutations.json",
    )  # fmt: skip
    parser.add_argument("--summary", type=Path, nargs="+", metavar="FILE", help="compare results")
    arguments = parser.parse_args()
    if arguments.summary and len(arguments.summary) > 2:
        parser.error(f"--summary takes one or two files, got {len(arguments.summary)}.")
    if arguments.jobs < 1:
        parser.error(f"--jobs={arguments.jobs} must be 1 or more.")
    return arguments


def main() -> None:
    arguments = parsed()
    if arguments.summary:
        print(summary(arguments.summary))
        return
    faults = read_faults(arguments.table)
    if arguments.only:
        if unknown := set(arguments.only) - {fault.id for fault in faults}:
            raise SystemExit(f"--only: no fault is called {sorted(unknown)}. See the tables.")
        faults = [fault for fault in faults if fault.id in arguments.only]
    if arguments.commit is not None:
        arguments.commit = name_of(arguments.commit)  # HEAD may move during the run
    sources = sources_of(arguments.commit)
    if problems := problems_of(faults, sources):
        raise SystemExit("\n".join(problems))
    print(f"{len(faults)} faults fit {arguments.commit or 'the working tree'}.", flush=True)
    if arguments.check:
        return
    commit = arguments.commit or name_of(None)
    results = Results(arguments.results, commit=commit, environment=environment())
    confirm = arguments.confirm
    left = [fault for fault in faults if not results.has(fault, arguments.limit, confirm=confirm)]
    if len(left) < len(faults):
        print(f"{len(faults) - len(left)} of them have results in {arguments.results}.", flush=True)
    if left:
        run_all(left, sources, arguments, results)


if __name__ == "__main__":
    main()
