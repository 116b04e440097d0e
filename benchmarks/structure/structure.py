"""The structure of jaxfp8 in numbers: parameters, frames, calls, moves between files, lengths.

    python benchmarks/structure/structure.py --compare FILE

The script counts the jaxfp8 that Python imports, and the tests, benchmarks and examples beside it.

These files have the definitions of the figures:
- `_source.py`: parameters and lines
- `_doors.py`: doors, which are the functions that users call; others are inner functions
- `_passes.py`: one traced pass, and the names that it is searched for
- `_trace.py`: calls, moves and frames

The figures of a pass depend on the versions of Python and jax. Compare them only within the same
versions.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

from _doors import doors
from _passes import trace_figures
from _source import (
    COLUMNS,
    PARAMETERS,
    functions,
    lengths,
    long_lines,
    questions,
    read,
)

import jaxfp8 as fp8

WIDEST = 10
PACKAGES = ("jax", "flax", "jaxfp8")
BESIDE = ("tests", "benchmarks", "examples")
GRANULARITIES = "numerics"  # the folder that may test the type of a granularity


def source_figures(root: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures of the source, and the lists behind them."""
    for folder in BESIDE:
        if not (root.parent / folder).is_dir():
            cure = "set PYTHONPATH to a checkout"
            raise SystemExit(f"jaxfp8 is {root}, but {folder}/ must be beside it; {cure}.")
    source = read(root)
    public = doors(source)
    rows = sorted(functions(source), key=lambda row: (-row["parameters"], row["file"], row["line"]))
    is_door = [(row["file"], row["function"]) in public for row in rows]
    outer = [row for row, door in zip(rows, is_door, strict=True) if door]
    inner = [row for row, door in zip(rows, is_door, strict=True) if not door]
    asked = questions(source, outside=GRANULARITIES)
    size = lengths(source)
    too_wide = [row for row in inner if row["parameters"] > PARAMETERS]
    beside = [line for folder in BESIDE for line in long_lines(root.parent / folder)]
    figures = {
        "doors: most parameters": outer[0]["parameters"],
        "inner functions: most parameters": inner[0]["parameters"],
        f"inner functions of over {PARAMETERS} parameters": len(too_wide),
        "files": size["files"],
        "lines": size["lines"],
        "lines of the median file": size["median"],
        "lines of the longest file": size["longest"],
        f"lines over {COLUMNS} columns": len(long_lines(root)),
        f"lines over {COLUMNS} columns in {', '.join(BESIDE)}": len(beside),
        f"lines with isinstance(x, Per...) outside {GRANULARITIES}": len(asked),
        "files with such lines": len({row["file"] for row in asked}),
        "comments, % of lines": size["comments"],
    }
    lists = {
        "widest doors": outer[:WIDEST],
        "widest inner functions": inner[:WIDEST],
        "longest file": size["longest_file"],
        "questions by file": Counter(row["file"] for row in asked),
    }
    return figures, lists


def table(figures: dict[str, float], before: dict[str, float] | None = None) -> str:
    """A line for each figure. With `before`, the line also has the old value and new / old."""
    if before is None:
        return "\n".join(f"{name:55} {now:8}" for name, now in figures.items())
    lines = [f"{'':55} {'before':>8} {'now':>8} {'ratio':>6}"]
    for name in figures | before:
        old, now = before.get(name), figures.get(name)
        ratio = f"{now / old:.2f}" if old and now is not None else "-"
        cells = ["-" if value is None else value for value in (old, now)]
        lines.append(f"{name:55} {cells[0]:>8} {cells[1]:>8} {ratio:>6}")
    return "\n".join(lines)


def listing(lists: dict[str, Any]) -> str:
    lines = [f"longest file: {lists['longest file']}"]
    for title in ("widest doors", "widest inner functions"):
        lines += ["", title]
        for row in lists[title]:
            where = f"{row['file']}:{row['line']}"
            lines.append(f"{row['parameters']:4}  {row['function']}  {where}")
    lines += ["", f"lines with isinstance(x, Per...) outside {GRANULARITIES}"]
    lines += [f"{count:4}  {file}" for file, count in lists["questions by file"].items()]
    return "\n".join(lines)


def commit(root: Path) -> str | None:
    """The last commit that changed the package. None without git."""
    command = ["git", "-C", str(root), "log", "-1", "--format=%h", "--", "."]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip() or None


def read_figures(path: Path) -> dict[str, Any]:
    """Read a file that `--json` wrote.

    Raises:
      ValueError: if the file holds something else.
    """
    result = json.loads(path.read_text())
    if not isinstance(result, dict) or not {"figures", "versions"} <= {*result}:
        raise ValueError("it has no figures and versions")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="print those figures, too")
    arguments = parser.parse_args()
    before = None
    if arguments.compare:
        try:
            before = read_figures(arguments.compare)
        except (OSError, ValueError) as error:
            parser.error(f"--compare {arguments.compare}: {error}; give a file that --json wrote")
    root = Path(fp8.__file__).parent
    print(f"of {root}")
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    versions = {"python": platform.python_version()} | versions
    figures, lists = source_figures(root)
    figures |= trace_figures(root)
    if before and before["versions"] != versions:
        print(f"before: {before['versions']}, now: {versions}; calls and moves depend on them")
    print(table(figures, before and before["figures"]))
    print(listing(lists))
    if arguments.json:
        result = {
            "command": "python benchmarks/structure/structure.py",
            "commit": commit(root),
            "versions": versions,
            "figures": figures,
            "lists": lists,
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
