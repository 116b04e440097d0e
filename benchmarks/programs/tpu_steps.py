"""Whole train steps on a TPU 7x: cycles, memory, bytes on the wire, and seconds to compile.

The programs are compiled, not run. bfloat16, qwix and the recipes stand side by side. A step has
blocks of Llama 3 and AdamW. The blocks are a `lax.scan` or an unrolled loop. The backward pass
keeps what jax decides ("by jax"), the inputs of matmuls, or nothing of a block.

- `8B`: 4 blocks of width 4096, on one core
- `12 blocks`: 12 blocks of width 2048, on one core, for the seconds to compile
- `70B`: 4 blocks of width 8192, with weights that 64 cores split (FSDP)

    python benchmarks/programs/tpu_steps.py --json benchmarks/programs/results/tpu_steps.json
    python benchmarks/programs/tpu_steps.py --models 8B --loops scan --contenders bfloat16 delayed

Cycles are those of `fp8.programs.tpu_cycles`, without attention: its kernel has no estimate, and is
the same for all. `--json` keeps the rows that the file has already. Seconds are those of
processors, which other programs disturb less than the clock's.

Needs: libtpu (`pip install "jaxfp8[tpu]" qwix`), no TPU.
"""

import argparse
import functools
import importlib.metadata
import itertools
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import _tpu_cases as cases
import _tpu_models as models
from _results import continued

from jaxfp8.programs import tpu_cycles, wire_report

KEY = ("model", "loop", "kept", "contender")
PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "qwix")
KINDS = ("matmul", "cast", "amax", "collective", "rest")


def figures(*key: str, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """A row of the results."""
    step, arguments = models.lowering(*key)
    times = [time.process_time()]
    lowered = step.lower(*arguments)
    times.append(time.process_time())
    compiled = lowered.compile(compiler_options=options)
    times.append(time.process_time())
    report, memory = tpu_cycles(compiled), compiled.memory_analysis()
    outside = [row for row in report.rows if cases.ATTENTION not in row.op_name]
    kinds = {kind: sum(row.total for row in outside if row.kind == kind) for kind in KINDS}
    unknown: dict[str, int] = {}
    for row in report.unknown:
        if cases.ATTENTION not in row.op_name and row.kind != "kernel":  # those of attention
            unknown[row.kind] = unknown.get(row.kind, 0) + row.times
    return {
        **dict(zip(KEY, key, strict=True)),
        "cycles": sum(kinds.values()),
        "kinds": kinds,
        "unknown": sum(unknown.values()),
        "unknown_kinds": unknown,
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "wire": round(sum(each.wire_bytes for each in wire_report(compiled).transfers)),
        "seconds": {
            "trace and lower": round(times[1] - times[0], 2),
            "compile": round(times[2] - times[1], 2),
        },
        "instructions": sum(" = " in line for line in compiled.as_text().splitlines()),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: figures, and in brackets their ratios to bfloat16's."""
    base = {tuple(row[k] for k in KEY[:3]): row for row in rows if row["contender"] == "bfloat16"}
    lines = [[*KEY, "Mcycles", "temporaries, GiB", "wire, GiB", "seconds", "unknown"]]
    lines.append(["---"] * len(lines[0]))

    for row in rows:
        of = base.get(tuple(row[k] for k in KEY[:3]))
        cells = [
            _cell(row["cycles"], of and of["cycles"], 1e6),
            _cell(row["temporaries"], of and of["temporaries"], 2**30),
            _cell(row["wire"], of and of["wire"], 2**30),
            _cell(_seconds(row), of and _seconds(of), 1),
        ]
        lines.append([*(row[k] for k in KEY), *cells, str(row["unknown"])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(own: float, of: float | None, unit: float) -> str:
    return f"{own / unit:.2f}" + (f" ({own / of:.2f})" if of else "")


def _seconds(row: dict[str, Any]) -> float:
    return sum(row["seconds"].values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = {"models": [*models.MODELS], "loops": models.LOOPS, "kept": models.KEPT}
    for argument, choices in (every | {"contenders": models.CONTENDERS}).items():
        parser.add_argument(f"--{argument}", nargs="+", choices=choices, default=list(choices))
    parser.add_argument("--options", type=json.loads, help="of the compiler, for all contenders")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the results")
    given = parser.parse_args()
    about = {
        "command": " ".join(["python benchmarks/programs/tpu_steps.py", *sys.argv[1:]]),
        "models": {name: model._asdict() for name, model in models.MODELS.items()},
        "options": given.options or {},
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, no TPU",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "unit": "bytes and estimated cycles of one core, seconds of processors",
    }
    wanted = itertools.product(given.models, given.loops, given.kept, given.contenders)
    run = functools.partial(figures, options=given.options)
    print(table(continued(given.json, KEY, wanted, run, about)))


if __name__ == "__main__":
    main()
