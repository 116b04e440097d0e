"""Compares the bits of matmuls on a GPU with those that are predicted for its tensor cores.

    python benchmarks/gpu/bits.py --json benchmarks/gpu/results/bits_h200.json

`predicted.py` has the rules. A Pallas kernel must give the predicted bits. cuBLASLt and cuDNN do
not publish their order of sums, so for them the number of different results is a figure. They fail
if their error is more than three times that of the prediction. cuBLASLt on Hopper also fails if
another rule is nearer, for instance if it promotes sums that should stay in the tensor cores.

Two modes run without a GPU. --compile-only h200 compiles for that chip. --dry-run multiplies small
matrices on a CPU, by XLA. The exit status is 1 if a path failed.

Needs: a GPU; with `--compile-only` the wheels of jax[cuda13]; with `--dry-run` nothing.
"""

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import run


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument(
        "--outputs", type=int, default=10**6, help="results of each matmul (default %(default)s)"
    )
    parser.add_argument("--match", default="", metavar="TEXT", help="only names with this text")
    parser.add_argument("--chip", help="chip of the GPU, if its name does not say")
    parser.add_argument("--commit", help="commit of the code, if git is missing")
    without = parser.add_mutually_exclusive_group()
    without.add_argument("--compile-only", metavar="CHIP", help="compile for a chip, run nothing")
    without.add_argument("--dry-run", action="store_true", help="small matrices on a CPU")
    arguments = parser.parse_args()
    if arguments.outputs < 1:
        parser.error("--outputs must be positive")
    return arguments


def main() -> int:
    arguments = parse()
    target = run.target_of(arguments)
    import bits_cases
    import report

    outputs = min(arguments.outputs, 2**12) if arguments.dry_run else arguments.outputs
    words = [word for word in sys.argv[1:] if not word.endswith(".json") and word != "--json"]
    result: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/gpu/bits.py", *words]),
        "machine": report.machine(target, arguments.commit),
        "units": "distances and errors relative to the exact result, in Frobenius norm; distance "
        "is that from the prediction; different counts results with other bits",
        "finished": "Not finished",
        "seconds": 0.0,
        "rows": [],
    }
    start = time.perf_counter()

    def write() -> None:
        result["seconds"] = round(time.perf_counter() - start, 1)
        if arguments.json is not None:
            report.write(arguments.json, result)

    for of in bits_cases.matmuls(target.chip):
        for one_sign in (False, True)[: 1 if arguments.compile_only else 2]:
            if arguments.match not in of.name:
                continue
            how = {"one_sign": one_sign, "compile_only": bool(arguments.compile_only)}
            try:
                found = bits_cases.row(of, target, outputs, **how)
            except Exception as error:  # a kernel that fails ends its row, not the run
                name = f"{of.name}, {of.backend}"
                found = {"path": name, "status": "failed", "reason": report.one_line(error)}
            result["rows"].append(found)
            write()
            figures = [f"{key} {found[key]:.3g}" for key in FIGURES if key in found]
            figures += [f"nearest {found['nearest']}"] if "nearest" in found else []
            said = found.get("reason") or ", ".join(figures)
            print(f"{found['status']:8} {found['path']}  {said}", flush=True)
    result["finished"] = "Finished"
    write()
    return int(any(found["status"] == "failed" for found in result["rows"]))


FIGURES = ("outputs", "different", "distance", "error", "error_of_prediction")

if __name__ == "__main__":
    sys.exit(main())
