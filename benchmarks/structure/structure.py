"""The structure of jaxfp8 in numbers: files, lines, names, calls, and the way of a value.

    python benchmarks/structure/structure.py --compare FILE

The script counts the jaxfp8 that Python imports. These files have the definitions of the figures:
- `_source.py`: files, lines and parameters
- `_names.py`: inner names, their importers, and whose docstrings there are
- `_doors.py`: doors, which are the functions that users call; others are inner functions
- `_walk.py`: the files that `lhs` enters from `fp8.dot_general` to its cast
- `_passes.py`: one traced pass, and the names that it is searched for
- `_trace.py`: calls, moves and frames
- `import_time.py`: the time of the import, after flax and optax

The figures of a pass depend on the versions of Python and jax. Compare them only within the same
versions.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

from _doors import doors
from _names import docstring_lines, inner_names
from _passes import RECIPES, trace_figures
from _source import PARAMETERS, Source, functions, lengths, packed_kib, private_imports, read
from _walk import climbs, way_of_lhs
from import_time import STEPS, measure

import jaxfp8 as fp8

WIDEST = 10
IMPORTS = 5  # interpreters that time the import
PACKAGES = ("jax", "flax", "jaxfp8")
Figures = tuple[dict[str, Any], dict[str, Any]]
"""Figures, and the lists behind them."""


def function_figures(source: Source) -> Figures:
    public = doors(source)
    rows = sorted(functions(source), key=lambda row: (-row["parameters"], row["file"], row["line"]))
    is_door = [(row["file"], row["function"]) in public for row in rows]
    outer = [row for row, door in zip(rows, is_door, strict=True) if door]
    inner = [row for row, door in zip(rows, is_door, strict=True) if not door]
    figures = {
        "doors: most parameters": outer[0]["parameters"],
        "inner functions: most parameters": inner[0]["parameters"],
        f"inner functions of over {PARAMETERS} parameters": sum(
            row["parameters"] > PARAMETERS for row in inner
        ),
    }
    return figures, {"widest doors": outer[:WIDEST], "widest inner functions": inner[:WIDEST]}


def line_figures(source: Source) -> Figures:
    size = lengths(source)
    private = private_imports(source)
    figures = {
        "files": size["files"],
        "files without faces": size["files without faces"],
        "lines of the median file without faces": size["median"],
        "lines of the longest file": size["longest"],
        "lines": size["lines"],
        "lines of code": size["code"],
        "lines of docstrings": size["docstrings"],
        "lines with a comment": size["comments"],
        "lines of imports": size["imports"],
        "imports, % of lines of code": size["share of imports"],
        "docstrings, % of lines": round(100 * size["docstrings"] / size["lines"], 1),
        "classes": size["classes"],
        "private imports of other packages": len(private),
        "files in a zip, KiB": packed_kib(source.root),
    }
    return figures, {"longest file": size["longest_file"], "private imports": private}


def name_figures(source: Source) -> Figures:
    names = inner_names(source)
    by_count = {
        count: sorted(f"{file}: {name}" for (file, name), by in names.items() if len(by) == count)
        for count in (0, 1)
    }
    figures = {
        "inner names": len(names),
        "inner names that no other file imports": len(by_count[0]),
        "inner names that one other file imports": len(by_count[1]),
    } | {f"lines of docstrings of {owner}": n for owner, n in docstring_lines(source).items()}
    lists = {
        "inner names that no other file imports": by_count[0],
        "inner names that one other file imports": by_count[1],
    }
    return figures, lists


def walk_figures(root: Path) -> Figures:
    ways = {name: way_of_lhs(root, fp8.recipes.get(name)) for name in RECIPES}
    figures = {}
    for name, way in ways.items():
        figures[f"{name}: rooms that lhs enters before its cast"] = len({*way})
        figures[f"{name}: climbs back of lhs"] = climbs(way)
    return figures, {f"way of lhs, {name}": way for name, way in ways.items()}


def import_figures(root: Path) -> Figures:
    file, seconds = measure(IMPORTS)
    if Path(file).parent != root:
        raise SystemExit(f"fresh interpreters import {file}, not {root}; set PYTHONPATH to one.")
    processor = seconds[:, [*STEPS].index("jaxfp8"), 1]
    return {"import jaxfp8, CPU seconds": round(statistics.median(processor.tolist()), 2)}, {}


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
    way = f"way of lhs, {RECIPES[0]}"
    for title in ("private imports", "inner names that no other file imports", way):
        lines += ["", title, *(f"      {each}" for each in lists[title])]
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
    source = read(root)
    figures: dict[str, Any] = {}
    lists: dict[str, Any] = {}
    for some, behind in (
        line_figures(source),
        name_figures(source),
        function_figures(source),
        import_figures(root),
        walk_figures(root),
        (trace_figures(root), {}),
    ):
        figures |= some
        lists |= behind
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
