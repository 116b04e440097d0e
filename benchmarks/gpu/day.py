"""Check and time everything on a new GPU, in half an hour that can be divided into calls.

    python -m benchmarks.gpu.day

The same command again continues after the parts that are done. The report is `gpu_day/report.md`.
Two rehearsals run without a GPU: --dry-run, and --compile-only h100,h200,b200. benchmarks/README.md
says what the parts are, and what the exit status means.

Needs: a GPU; with `--compile-only` the wheels of jax[cuda13]; with `--dry-run` nothing.
"""

import argparse
import contextlib
import ctypes
import datetime
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# `python -m` puts only the current folder on the path.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import day_parts
import day_report
import run
from day_parts import CRASHED, CUT, FAULTS, ROOT, Ending, NoResultsError, Part, write

# This process never imports jax: it must end in time, whatever a GPU does.
FOLDER = "gpu_day"
CACHE = "cache"
"""The only folder inside of the folder. `cp gpu_day/*.*` leaves it out."""
UNFINISHED, BROKEN, REFUSED, WRONG = 4, 3, 2, 1  # exit statuses
FIND = 60
"""Seconds in which jax must find the GPU."""
GIVE_UP = 10
"""Seconds to wait for a process that was killed. The driver may hold it for ever."""


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, metavar="DIR",
        help=f"all results (default {FOLDER}, and with a rehearsal's name behind it)",
    )  # fmt: skip
    parser.add_argument(
        "--minutes",
        type=float,
        default=9.0,
        help="of this call; a part starts only if its limit fits (default 9)",
    )
    parser.add_argument("--parts", metavar="NAMES", help="only these, with commas between them")
    parser.add_argument("--again", metavar="NAMES", help="run these again, and no others")
    parser.add_argument("--commit", help="commit of the code, if git is missing")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--dry-run", action="store_true", help="tiny shapes on a CPU; the numbers mean nothing"
    )
    mode.add_argument(
        "--compile-only", metavar="CHIPS", help="compile for these, for instance h100,b200"
    )
    mode.add_argument(
        "--report-only", action="store_true", help="write report.md of the folder's JSON files"
    )
    arguments = parser.parse_args(words)
    if arguments.minutes <= 0:
        parser.error("--minutes must be positive")
    if arguments.parts and arguments.again:
        parser.error("--again names the parts to run; leave --parts out")
    arguments.mode = (
        "dry run" if arguments.dry_run else "compile only" if arguments.compile_only else "GPU"
    )
    rehearsal = "" if arguments.mode == "GPU" else f"_{arguments.mode.replace(' ', '_')}"
    arguments.folder = (arguments.folder or ROOT / (FOLDER + rehearsal)).absolute()
    table = (
        day_parts.of_dry_run()
        if arguments.dry_run
        else day_parts.of_compile_only(arguments.compile_only.split(","), arguments.minutes)
        if arguments.compile_only
        else day_parts.of_day()
    )
    names = [part.name for part in table]
    chosen = (arguments.parts or arguments.again or ",".join(names)).split(",")
    if unknown := sorted({*chosen} - {*names}):
        parser.error(f"there is no part {unknown}; use some of {','.join(names)}")
    arguments.names = names
    arguments.table = [part for part in table if part.name in chosen]
    return arguments


class RefusedError(Exception):
    """A call that cannot do what it is asked. Nothing has run."""


def main(words: Sequence[str] | None = None) -> int:
    started = time.monotonic()
    arguments = parse(words)
    folder = arguments.folder
    try:
        if arguments.report_only:
            day_report.write(folder)
            return 0
        folder.mkdir(parents=True, exist_ok=True)
        state = load(folder, arguments.mode)
        known = {} if arguments.again else state["parts"]
        left = [part for part in arguments.table if part.name not in known]
        check(left, 60 * arguments.minutes)
        if left and arguments.mode == "GPU":
            find_gpu()
    except (RefusedError, NoResultsError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return REFUSED
    # Both must reach the `finally` that ends a part. In the background SIGINT is ignored else.
    # SIGHUP comes when a connection is lost.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    run.prefer_ptxas_of_wheels()
    if arguments.commit:
        os.environ["JAXFP8_COMMIT"] = arguments.commit  # for all parts
    reported = True
    while left:
        part, seconds = left[0], 60 * arguments.minutes - (time.monotonic() - started)
        if part.seconds > seconds + 0.1:  # the call itself takes some milliseconds
            break
        before = state["parts"].pop(part.name, None)
        if before:
            write(folder / "day.json", state)  # now, because this try may be ended
        day_parts.keep_old(part, folder, before)
        say(f"{part.name}: at most {part.seconds:.0f} s, {folder / part.name}.log")
        ending = run_part(part, folder, arguments.mode)
        state["parts"][part.name] = found = day_parts.outcome(part, ending, folder)
        found["ended"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        order = {name: number for number, name in enumerate(arguments.names)}
        in_order = sorted(state["parts"].items(), key=lambda entry: order.get(entry[0], -1))
        write(folder / "day.json", state | {"parts": dict(in_order)})
        say(f"{part.name}: {found['outcome']} after {ending.seconds:.0f} s, {found['counts']}")
        reported = report(folder) and reported
        del left[0]
    say(f"The report is {folder / 'report.md'}.")
    if left:
        names = ", ".join(part.name for part in left)
        say(f"Left: {names}. The same command continues with {left[0].name}.")
        return UNFINISHED
    came = {state["parts"][part.name]["outcome"] for part in arguments.table}
    return BROKEN if came & {CUT, CRASHED} or not reported else WRONG if FAULTS in came else 0


def load(folder: Path, mode: str) -> dict[str, Any]:
    """The content of `day.json`: what is done, and what came of it."""
    path = folder / "day.json"
    if not path.exists():
        return {"mode": mode, "parts": {}}
    state = json.loads(path.read_text())
    if state["mode"] != mode:
        raise RefusedError(
            f"{folder} has results of the mode {state['mode']!r}, but this call has the mode "
            f"{mode!r}. Name another folder by --folder."
        )
    return state


def check(parts: Sequence[Part], seconds: float) -> None:
    """Ends the call if a part can never run, before time of a GPU is spent."""
    for part in parts:
        if part.script is not None and not (ROOT / part.script).exists():
            raise RefusedError(
                f"the part {part.name!r} needs {part.script}, which does not exist. Name the other "
                "parts by --parts."
            )
        words = dict(zip(part.command, part.command[1:], strict=False))
        if part.script == day_parts.RUN and (
            unknown := {*words["--sections"].split(",")} - {*run.SECTIONS}
        ):
            raise RefusedError(
                f"the part {part.name!r} needs sections {sorted(unknown)}, which run.py does not "
                "have. Name the other parts by --parts."
            )
        if part.seconds > seconds and part is parts[0]:  # others are left for later calls
            raise RefusedError(
                f"the part {part.name!r} may take {part.seconds:.0f} s, but --minutes allows "
                f"{seconds:.0f} s. Write a larger --minutes, or name the other parts by --parts."
            )


def find_gpu() -> None:
    """Ends the call if jax sees no GPU: each part would crash, and count as done."""
    command = [sys.executable, "-c", "import jax; jax.devices('gpu')"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FIND, check=False)
    except subprocess.TimeoutExpired:
        raise RefusedError(f"jax found no GPU in {FIND} s. Look at `nvidia-smi`.") from None
    if done.returncode:
        raise RefusedError(
            f"no GPU is visible ({done.stderr.strip().splitlines()[-1]}). --dry-run and "
            "--compile-only rehearse without one."
        )


def run_part(part: Part, folder: Path, mode: str) -> Ending:
    """Runs one part. No process of it is left at the end, whatever happens."""
    start = time.monotonic()
    with (folder / f"{part.name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *part.words(folder)],
            cwd=ROOT,
            env=environment(part, folder, mode),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, which can be killed as a whole
            preexec_fn=die_with_parent() if sys.platform == "linux" else None,
        )
        status = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(part.seconds)
        finally:
            # Children may outlive a process that ended by itself.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GIVE_UP)
    return Ending(status=status, seconds=time.monotonic() - start)


def die_with_parent() -> Callable[[], None]:
    """A function for the child: the kernel kills it when this process dies.

    Without it a killed call leaves a part on the GPU, beside the parts of the next call.
    """
    prctl, death_signal = ctypes.CDLL(None).prctl, 1  # PR_SET_PDEATHSIG of linux/prctl.h
    return lambda: prctl(death_signal, signal.SIGKILL)


def environment(part: Part, folder: Path, mode: str) -> dict[str, str]:
    """The variables of a part's process."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    given = {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        # Each part has its own cache, for --again. So the first run of a program is compiled, and
        # never read from a file: a row then has the figures of a compiled program.
        "JAX_COMPILATION_CACHE_DIR": str(folder / CACHE / part.name),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PLATFORMS": "cuda,cpu" if mode == "GPU" else "cpu",
    }
    if mode == "compile only":
        # jax 0.12 writes programs for chips that are not there, but cannot read them.
        given["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    return {**os.environ, **given, **dict(part.environment)}


def report(folder: Path) -> bool:
    """Writes report.md. A fault in a table must not cost the parts that are left."""
    try:
        day_report.write(folder)
    except Exception:
        traceback.print_exc()
        return False
    return True


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
