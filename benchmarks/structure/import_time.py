"""Time `import jaxfp8` after flax and optax, in fresh interpreters.

Each interpreter times three imports in this order: `flax.linen`, `flax.nnx` and `optax`; jaxfp8;
the file of a Pallas kernel. It measures time by the clock and time of the processor. Time of the
processor depends less on other work of the machine. All modules have bytecode, as after
`pip install`. A first interpreter, which is not counted, writes it to a temporary folder.

    python benchmarks/structure/import_time.py --repeats 20 --json result.json
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

STEPS = {
    "flax.linen, flax.nnx, optax": "import flax.linen, flax.nnx, optax",
    "jaxfp8": "import jaxfp8",
    "a Pallas kernel": "import jaxfp8.kernels.scaled_matmul.hopper._door",
}
"""The imports, which one interpreter runs one after the other."""
PROGRAM = """\
import json, sys, time
seconds = []
for step in json.loads(sys.argv[1]):
    clock, processor = time.perf_counter(), time.process_time()
    exec(step)
    seconds.append((time.perf_counter() - clock, time.process_time() - processor))
print(json.dumps([jaxfp8.__file__, seconds]))
"""
PACKAGES = ("jax", "flax", "optax", "jaxfp8")


def measure(repeats: int) -> tuple[str, np.ndarray]:
    """The path of the jaxfp8 that is measured, and seconds [interpreter, step, 2].

    The last axis has time by the clock and time of the processor.
    """
    with tempfile.TemporaryDirectory() as bytecode:
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPYCACHEPREFIX": bytecode}
        # This variable would make every interpreter compile all modules again.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        rounds = []
        for _ in range(1 + repeats):
            command = [sys.executable, "-c", PROGRAM, json.dumps([*STEPS.values()])]
            run = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            file, seconds = json.loads(run.stdout)
            rounds.append(seconds)
    return file, np.array(rounds[1:])


def row_of(name: str, milliseconds: np.ndarray) -> dict[str, Any]:
    """The row of one import, from milliseconds [interpreter, 2]."""
    return {"import": name} | {
        f"{of}_ms": {
            "median": round(float(np.median(each)), 1),
            "quartiles": [round(float(q), 1) for q in np.percentile(each, (25, 75))],
        }
        for of, each in zip(("clock", "processor"), milliseconds.T, strict=True)
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'':27}  {'clock':>11}  {'quartiles':>15}  {'processor':>11}  {'quartiles':>15}"]
    for row in rows:
        line = f"{row['import']:27}"
        for of in ("clock_ms", "processor_ms"):
            low, high = row[of]["quartiles"]
            line += f"  {row[of]['median']:8.1f} ms  {low:6.1f} - {high:6.1f}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="also write the numbers there"
    )
    parser.add_argument(
        "--repeats", type=int, default=20, help="interpreters that are timed (default 20)"
    )
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error(
            f"--repeats {arguments.repeats}: at least one interpreter is timed; use --repeats 1 or "
            "more"
        )
    load = [round(each, 1) for each in os.getloadavg()] if hasattr(os, "getloadavg") else None
    file, seconds = measure(arguments.repeats)
    rows = [row_of(name, 1e3 * seconds[:, step]) for step, name in enumerate(STEPS)]
    print(f"of {file}")
    print(table(rows))
    if arguments.json:
        versions = {name: importlib.metadata.version(name) for name in PACKAGES}
        written = {
            "command": f"python benchmarks/structure/import_time.py --repeats {arguments.repeats}",
            "cores": len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count(),
            "load_average": load,
            "versions": {"python": platform.python_version()} | versions,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
