"""Which features compile for TPUs, and whether their matmuls read FP8. Nothing runs.

    python benchmarks/programs/tpu_features.py --json result.json
    python benchmarks/programs/tpu_features.py --chips tpu7x --only "recipe: .*"

`tests/tpu/` has the features, and `tpu_program.py` there reads the programs. A feature that fails
is a row with the first line of its error. `--json` keeps the rows that the file has already, so a
run that was cut off goes on.

Needs: libtpu of jax[tpu], and jax-triton for `fused_adamw`; no TPU.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

# These variables have no effect after jax is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "tpu"))

import tpu_program
from tpu_targets import TOPOLOGIES, topology

PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax")


def row_of(name: str, make: Any, chip: str) -> dict[str, Any]:
    """What was found, or the first line of the error."""
    devices = list(topology(chip).devices)
    try:
        found = tpu_program.measure(make(devices), devices, control=True)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {"feature": name, "chip": chip, **found}


def cell(row: dict[str, Any] | None) -> str:
    """FP8 matmuls of all matmuls, and what should not be there."""
    if row is None:
        return "not compiled"
    if "error" in row:
        return row["error"].replace("|", "/")[:60]
    words = [f"{row['fp8']}/{row['matmuls']}" if row["matmuls"] else "yes"]
    words += [f"{row['float64']} float64"] if row["float64"] else []
    words += [f"{len(row['folded'])} folded"] if row.get("folded") else []
    return ", ".join(words)


def table(rows: list[dict[str, Any]], chips: list[str]) -> str:
    """Markdown: a line for each feature, a column for each chip."""
    found = {(row["feature"], row["chip"]): row for row in rows}
    lines = [["feature", *chips, f"casts, {chips[0]}", f"CPU seconds, {chips[0]}"]]
    lines.append(["---"] * len(lines[0]))
    for name in dict.fromkeys(row["feature"] for row in rows):
        first = found.get((name, chips[0]), {})
        cells = [cell(found.get((name, chip))) for chip in chips]
        lines.append([name, *cells, *(str(first.get(key, "-")) for key in ("casts", "seconds"))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def summary(rows: list[dict[str, Any]], chips: list[str]) -> str:
    """Markdown: a line for each chip and kind of features, the first word of their names."""
    lines = [
        ["chip", "kind", "compile", "FP8 matmuls, no tiles", "of tiles", "float64", "casts removed"]
    ]
    lines.append(["---"] * len(lines[0]))
    for chip in chips:
        of_chip = [row for row in rows if row["chip"] == chip]
        kinds = dict.fromkeys(row["feature"].split(":")[0] for row in of_chip)
        for kind in kinds:
            of_kind = [row for row in of_chip if row["feature"].startswith(f"{kind}:")]
            lines.append([chip, kind, *sums(of_kind)])
        lines.append([chip, "all", *sums(of_chip)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def sums(rows: list[dict[str, Any]]) -> list[str]:
    """The cells of a line of `summary`."""
    good = [row for row in rows if "error" not in row]
    tiles = [row for row in good if tpu_program.TILES.search(row["feature"])]
    cells = [f"{len(good)} of {len(rows)}"]
    for those in ([row for row in good if row not in tiles], tiles):
        matmuls = sum(row["matmuls"] for row in those)
        cells.append(f"{sum(row['fp8'] for row in those)} of {matmuls}" if matmuls else "–")
    removed = sum(len(row["folded"]) for row in good)
    return [*cells, str(sum(row["float64"] for row in good)), str(removed)]


def about(given: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "command": "python benchmarks/programs/tpu_features.py",
        "chips": {chip: TOPOLOGIES[chip] for chip in given.chips},
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, no TPU",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "unit": "matmuls of one run, loop bodies once; CPU seconds to trace, lower and compile",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chips", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES))
    parser.add_argument("--only", metavar="REGEX", default="", help="features to compile")
    parser.add_argument("--again", action="store_true", help="also those that FILE has")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the results")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if given.json and given.json.exists():
        rows = json.loads(given.json.read_text())["rows"]
    chosen = {
        name: make for name, make in tpu_program.features().items() if re.search(given.only, name)
    }
    for chip in given.chips:
        for name, make in chosen.items():
            old = [row for row in rows if (row["feature"], row["chip"]) == (name, chip)]
            if old and "error" not in old[0] and not given.again:
                continue
            rows = [row for row in rows if row not in old] + [row_of(name, make, chip)]
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if given.json:
                given.json.write_text(json.dumps(about(given) | {"rows": rows}, indent=1) + "\n")
    shown = [row for row in rows if row["feature"] in chosen]
    print(table(sorted(shown, key=lambda row: list(chosen).index(row["feature"])), given.chips))
    print("\n" + summary(shown, given.chips))


if __name__ == "__main__":
    main()
