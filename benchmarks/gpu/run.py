"""Check and time casts, matmuls, layers, steps and experts on a GPU, in one command of 8 minutes.

    python benchmarks/gpu/run.py --json benchmarks/gpu/results/h200.json --markdown

Two modes run without a GPU. --compile-only h200 compiles every program for that chip. --dry-run
runs everything on a CPU with tiny shapes. benchmarks/README.md says what is measured, and how. The
exit status is 1 if a check failed, and 3 if the run took too long.

Needs: a GPU; with `--compile-only` the wheels of jax[cuda13]; with `--dry-run` nothing.
"""

import argparse
import importlib.util
import os
import shlex
import sys
import threading
from pathlib import Path
from typing import Any

SECTIONS = ("copies", "checks", "casts", "layers", "steps", "experts", "matmuls")
CUT_OFF = 1.15
"""The watchdog ends the run after this factor times --minutes, because a kernel may hang.

The results that are already written stay.
"""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the numbers there, after every group"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="write tables beside the JSON file, as FILE.md"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=8.0,
        help="cases that do not fit into this time are skipped and listed (default 8)",
    )
    parser.add_argument(
        "--rounds", type=int, default=10, help="times that each case is timed (default 10)"
    )
    parser.add_argument("--sections", default=",".join(SECTIONS), help="some of %(default)s")
    parser.add_argument(
        "--match",
        action="append",
        default=[],
        metavar="TEXT",
        help="only cases with this text in their name",
    )
    parser.add_argument(
        "--chip", help="chip of the GPU, if its name does not say: h100, h200 or b200"
    )
    parser.add_argument("--commit", help="commit of the code, if git is missing")
    without = parser.add_mutually_exclusive_group()
    without.add_argument(
        "--compile-only",
        metavar="CHIP",
        help="compile for this chip without a GPU (needs jax[cuda13])",
    )
    without.add_argument(
        "--dry-run", action="store_true", help="tiny shapes on a CPU; the numbers mean nothing"
    )
    arguments = parser.parse_args()
    arguments.sections = arguments.sections.split(",")
    if unknown := sorted({*arguments.sections} - {*SECTIONS}):
        parser.error(f"--sections has {unknown}; use some of {SECTIONS}")
    if arguments.rounds < 1 or arguments.minutes <= 0:
        parser.error("--rounds and --minutes must be positive")
    if arguments.markdown and arguments.json is None:
        parser.error("--markdown writes beside the JSON file; give --json too")
    return arguments


def prefer_ptxas_of_wheels() -> None:
    """Put the ptxas of the CUDA wheels first on PATH.

    jax-triton uses the first ptxas on PATH. An older one cannot compile the code of Triton.
    """
    wheels = importlib.util.find_spec("nvidia")
    for folder in wheels.submodule_search_locations or () if wheels else ():
        os.environ["PATH"] = os.pathsep.join([f"{folder}/cu13/bin", os.environ["PATH"]])


def target_of(arguments: argparse.Namespace) -> Any:
    """The `target.Target` of a command. Call it before jax is imported."""
    prefer_ptxas_of_wheels()
    # These variables have no effect after jax is imported.
    if arguments.dry_run or arguments.compile_only:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    elif os.environ.get("JAX_PLATFORMS") == "cuda":
        os.environ["JAX_PLATFORMS"] = "cuda,cpu"  # the reference runs on the CPU
    import target as targets

    if arguments.dry_run:
        return targets.cpu()
    if arguments.compile_only:
        return targets.described(arguments.compile_only)
    return targets.here(arguments.chip)


def main() -> int:
    arguments = parse()
    target = target_of(arguments)
    import report
    from suite import Suite, failures

    words = [word for word in sys.argv[1:] if not word.endswith(".json") and word != "--json"]
    result = {
        "command": shlex.join(["python", "benchmarks/gpu/run.py", *words]),
        "machine": report.machine(target, arguments.commit),
        "rounds": 2 if arguments.dry_run else arguments.rounds,
        "minutes": arguments.minutes,
        "compile_only": bool(arguments.compile_only),
        "dry_run": arguments.dry_run,
        "units": "seconds of one repetition; gib_per_s of floor_bytes, each input and output once; "
        "tflops of 1e12; speedup is the time of bf16 over that of the row, round by round",
        "finished": "Not finished",
        "seconds": 0.0,
        "section_seconds": {},
        "rows": [],
    }
    watchdog = threading.Timer(60 * CUT_OFF * arguments.minutes, os._exit, (3,))
    watchdog.daemon = True
    watchdog.start()
    suite = Suite(
        target=target,
        result=result,
        path=arguments.json,
        minutes=arguments.minutes,
        rounds=result["rounds"],
        tiny=arguments.dry_run,
        match=tuple(arguments.match),
        compile_only=bool(arguments.compile_only),
    )
    suite.run(arguments.sections)
    result["finished"] = "Finished"
    result["gpu_after"] = report.smi("clocks.sm,clocks.mem,temperature.gpu,power.draw")
    suite.write()
    tables = report.markdown(result)
    print(tables)
    if arguments.markdown:
        arguments.json.with_suffix(".md").write_text(tables)
    counts = {
        status: sum(row["status"] == status for row in result["rows"])
        for status in ("ok", "compiled", "skipped", "failed")
    }
    print(
        ", ".join(f"{count} {status}" for status, count in counts.items() if count),
        f"in {result['seconds']:.0f} s",
    )
    status = 1 if failures(result) else 0
    if arguments.compile_only:
        # Threads may still compile. Nobody waits for programs that are not ready in time.
        sys.stdout.flush()
        os._exit(status)
    return status


if __name__ == "__main__":
    # A redirected output is buffered in blocks. With lines it is complete up to the moment in which
    # the watchdog ends the process.
    sys.stdout.reconfigure(line_buffering=True)
    sys.exit(main())
