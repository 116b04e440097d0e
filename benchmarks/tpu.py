"""Cycles of train steps on TPUs, as their compiler estimates them: FP8 beside bfloat16.

The programs are compiled, not run. bfloat16, qwix, flax's `Fp8DirectDotGeneralOp` and the recipes
stand side by side in these cases:

- `layer`: fprop, dgrad and wgrad of x [M, K] @ w [K, N].
- `block`: a block of Llama 3 8B on 4 x 2048 tokens, forward and backward. `block-inputs` keeps the
  inputs of matmuls only, and computes the rest again. Attention is counted apart.
- `experts-4096`, `experts-512`: y, dx and dw of 16 experts of 4096 -> 2048 features, each with so
  many tokens.

    python benchmarks/tpu.py --clocks --vmem default 49152 --json benchmarks/results/tpu.json
    python benchmarks/tpu.py --cases layer --chips tpu7x

The figures are those of `fp8.programs.tpu_cycles`. `unknown` counts the instructions that have no
estimate, each as often as it runs. A figure with unknown ones is a lower bound. `--clocks` adds a
second clock, for TPU 7x: lower bounds of each kernel from its machine code, also of Pallas kernels.
Experts always have it, because XLA's kernel for them has no estimate.

`--vmem 49152` gives each kernel more of the memory inside of a TPU 7x, with a compiler option. All
contenders get it.

A file of results that exists is continued: what it has is not compiled again.

Needs: libtpu (`pip install "jaxfp8[tpu]" qwix`), no TPU.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Several processes may compile for TPUs at once.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
sys.path.insert(0, str(Path(__file__).parent / "programs"))

import _tpu_cases as cases
import _tpu_clocks as clocks
from _results import continued

from jaxfp8.programs import tpu_cycles

CHIPS = ("tpu7x", "v6e", "v5p", "v5e")
VMEM, DEFAULT = "xla_tpu_scoped_vmem_limit_kib", "default"  # the memory of a kernel in VMEM
KEY = ("case", "chip", "vmem_kib", "contender")
KINDS = ("matmul", "cast", "amax", "collective", "rest")
# Columns of the second clock, see `_tpu_clocks.summary`.
SECOND = {
    "kernels": "Pallas kernels, second clock",
    "both": "estimates and Pallas kernels",
    "both ratio": "bfloat16's over these",
    "second": "second clock",
    "second ratio": "bfloat16's over these",
}
PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "qwix")


def figures(
    case: str, chip: str, contender: str, vmem: str, shape: Sequence[int], text: Path | None
) -> Any:
    """A row of the results. `text`: where to write the program."""
    options = {VMEM: vmem} if vmem != DEFAULT else {}
    compiled = cases.lowered(case, chip, contender, tuple(shape)).compile(options)
    if text:
        text.write_text(compiled.as_text())
    report = tpu_cycles(compiled)
    attention = [row for row in report.rows if cases.ATTENTION in row.op_name]
    outside = [row for row in report.rows if cases.ATTENTION not in row.op_name]
    kinds = {kind: sum(row.total for row in outside if row.kind == kind) for kind in KINDS}
    unknown: dict[str, int] = {}
    for row in report.unknown:
        unknown[row.kind] = unknown.get(row.kind, 0) + row.times
    return {
        "case": case,
        "chip": chip,
        "contender": contender,
        "vmem_kib": vmem,
        "cycles": report.total,
        "unknown": sum(unknown.values()),
        "kinds": kinds | {"attention": sum(row.total for row in attention)},
        "unknown_kinds": unknown,
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
    }


def by_both_clocks(case: str, chip: str, contender: str, vmem: str, shape: Sequence[int]) -> Any:
    """A row with the second clock, of a child whose compiler dumps machine code."""
    with clocks.dumps() as folder:
        program = folder / "the-program.txt"
        command = [sys.executable, __file__, "--child", case, chip, contender, vmem, str(program)]
        command += ["--shape", *map(str, shape)]
        done = subprocess.run(
            command, env=clocks.environment(folder), stdout=subprocess.PIPE, text=True, check=True
        )
        row = json.loads(done.stdout.splitlines()[-1])
        experts = cases.EXPERTS.get(case)
        groups = [experts.tokens] * experts.count if experts else []
        kernels = clocks.kernels(program.read_text(), folder, groups=groups)
    print(f"\n{case}, {contender}, VMEM {vmem}\n\n{clocks.table(kernels)}\n", flush=True)
    return row | clocks.summary(kernels)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, a table for each case."""
    tables = []
    base = {_alike(row): row for row in rows if row["contender"] == "bfloat16"}
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        kinds = [k for k in (*KINDS, "attention") if any(row["kinds"][k] for row in mine)]
        second = any("second" in row for row in mine)
        titles = [
            "chip",
            "VMEM, KiB",
            "contender",
            "Mcycles",
            "bfloat16's over these",
            *kinds,
            "unknown",
        ]
        titles += list(SECOND.values()) if second else []
        cells = [_cells(row, base.get(_alike(row)), kinds, second) for row in mine]
        lines = [titles, ["---"] * len(titles), *cells]
        made = [f"| {' | '.join(line)} |" for line in lines]
        tables.append("\n".join([f"{case}, millions of cycles:\n", *made]))
    return "\n\n".join(tables)


def _alike(row: dict[str, Any]) -> tuple[str, ...]:
    """What rows that are compared have in common."""
    return tuple(row[name] for name in KEY[:-1])


def _cells(
    row: dict[str, Any], base: dict[str, Any] | None, kinds: list[str], second: bool
) -> list[str]:
    def ratio(key: str) -> str:
        return f"{base[key] / row[key]:.2f}" if base and base.get(key) and row.get(key) else "–"

    found = [
        row["chip"],
        row["vmem_kib"],
        row["contender"],
        f"{row['cycles'] / 1e6:.2f}",
        ratio("cycles"),
    ]
    found += [f"{row['kinds'][kind] / 1e6:.2f}" for kind in kinds]
    found += [str(row["unknown"])]
    if second:
        for key in SECOND:
            cycles, _, is_ratio = key.partition(" ")
            text = f"{row[cycles] / 1e6:.2f}" if cycles in row else "–"
            found.append(ratio(cycles) if is_ratio else text)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=cases.CASES, default=list(cases.CASES))
    parser.add_argument(
        "--chips", nargs="+", choices=CHIPS, help="default: all for a layer, else tpu7x"
    )
    parser.add_argument(
        "--contenders", nargs="+", choices=cases.CONTENDERS, default=list(cases.CONTENDERS)
    )
    parser.add_argument(
        "--vmem", nargs="+", default=[DEFAULT], metavar="KIB", help=f"of {VMEM}, for all contenders"
    )
    parser.add_argument("--shape", type=int, nargs=3, default=cases.LAYER, help="of the layer")
    parser.add_argument("--clocks", action="store_true", help="a second clock for TPU 7x")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results are")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        *key, text = given.child
        print(json.dumps(figures(*key, given.shape, Path(text))))
        return
    packages = [name for name in PACKAGES if name != "qwix" or cases.QWIX]
    about = {
        "command": " ".join(["python benchmarks/tpu.py", *sys.argv[1:]]),
        "shape": list(given.shape),
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, no TPU",
        "python": platform.python_version(),
        "versions": {package: importlib.metadata.version(package) for package in packages},
        "unit": "cycles that XLA estimates for one forward and backward pass on one device",
    }

    def row_of(case: str, chip: str, vmem: str, contender: str) -> Any:
        both = chip == CHIPS[0] and (given.clocks or case in cases.EXPERTS)
        arguments = (case, chip, contender, vmem, given.shape)
        return by_both_clocks(*arguments) if both else figures(*arguments, None)

    wanted = [
        (case, chip, vmem, contender)
        for case in given.cases
        for chip in given.chips or (CHIPS if case == "layer" else CHIPS[:1])
        for vmem in given.vmem
        for contender in given.contenders
        if cases.fits(case, chip, contender) and (vmem == DEFAULT or chip == CHIPS[0])
    ]
    print(table(continued(given.json, KEY, wanted, row_of, about)))


if __name__ == "__main__":
    main()
