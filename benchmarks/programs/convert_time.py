"""How long does `fp8.convert` take, and to trace, lower and compile the step of its model?

Models have 32 blocks of attention and an MLP, in linen and in nnx. Those of "flax" have flax's
layers. Those of "own" multiply by parameters of their own. Nothing runs.

    git worktree add /tmp/before COMMIT
    python benchmarks/programs/convert_time.py --trees /tmp/before . --json result.json
    python benchmarks/programs/convert_time.py --codes own --compile always --json result.json

Each measurement has a process of its own, without a cache of programs. In each round every
contender is measured once, in a new order, so that other work of the machine slows all of them
alike. The tables have medians, least and most CPU seconds, and ratios within rounds: of the last
tree to the first, and of converted models to the unconverted ones. `_convert_models.py` has the
models.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from programs import about_this_machine

LIBRARIES = ("linen", "nnx")
CODES = ("flax", "own")
RECIPES = ("none", "delayed", "current")
PARTS = ("convert", "trace", "lower", "compile")
CLOCKS = ("clock", "cpu")
Runs = list[dict[str, Any]]


class Case(NamedTuple):
    """What is measured. `tree` is the number of a source tree. Recipe "none": no conversion."""

    library: str
    code: str
    recipe: str
    tree: int


def in_a_process(tree: Path, bytecode: str, arguments: list[Any]) -> dict[str, Any]:
    """One measurement of a tree in a fresh process. `arguments` are those of `measure`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "PYTHONDONTWRITEBYTECODE")
    }
    environment = {**kept, "PYTHONPATH": str(tree), "PYTHONPYCACHEPREFIX": bytecode}
    command = [sys.executable, __file__, "--measure", json.dumps(arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{arguments} failed in {tree}:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if not Path(result.pop("file")).is_relative_to(tree):
        raise RuntimeError(f"another jaxfp8 than that of {tree} was imported")
    result["seconds"]["all"] = [sum(each) for each in zip(*result["seconds"].values(), strict=True)]
    return result


def cases_of(given: argparse.Namespace) -> Iterator[Case]:
    """The cases of one round. Only the last tree has all of them."""
    last = len(given.trees) - 1
    for library in given.libraries:
        for code in given.codes:
            for recipe in given.recipes:
                # No other tree converts the code of a model, and none changes a model without one.
                trees = range(last + 1) if code == "flax" and recipe != "none" else [last]
                yield from (Case(library, code, recipe, tree) for tree in trees)


def seconds_of(runs: Runs, part: str, clock: str) -> list[float]:
    return [r["seconds"][part][CLOCKS.index(clock)] for r in runs if part in r["seconds"]]


def spread(values: Iterable[float], digits: int) -> dict[str, float]:
    values = list(values)
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, digits) for name, value in found.items()}


def row_of(case: Case, runs: Runs, commits: list[str]) -> dict[str, Any]:
    """The seconds of a case, by part."""
    if len({tuple(run["program"]) for run in runs}) > 1:
        raise RuntimeError(f"{case} has another program in each round")
    lines, digest = runs[0]["program"]
    row: dict[str, Any] = {**case._asdict(), "tree": commits[case.tree], "rounds": len(runs)}
    row |= {"share": round(runs[0]["share"], 4), "program_lines": lines, "program": digest}
    for part in (*PARTS, "all"):
        for clock in CLOCKS:
            if seconds := seconds_of(runs, part, clock):
                row[f"{part}_{clock}_seconds"] = spread(seconds, 3)
    return row


def ratio_of(name: str, base: Case, case: Case, runs: dict[Case, Runs]) -> dict[str, Any]:
    """How much longer a case takes than its base in the same round."""
    row: dict[str, Any] = {**case._asdict(), "tree": "", "ratio": name}
    row["same_program"] = runs[base][0]["program"] == runs[case][0]["program"]
    for part in (*PARTS, "all"):
        for clock in CLOCKS:
            pairs = zip(
                seconds_of(runs[case], part, clock), seconds_of(runs[base], part, clock),
                strict=False,
            )  # fmt: skip
            ratios = [seconds / of_base for seconds, of_base in pairs if of_base > 0.01]
            if ratios:
                row[f"{part}_{clock}"] = spread(ratios, 3)
    del row["tree"]
    return row


def ratios_of(runs: dict[Case, Runs]) -> Iterator[dict[str, Any]]:
    last = max(case.tree for case in runs)
    for case in runs:
        first, plain = case._replace(tree=0), case._replace(tree=last, recipe="none")
        if case.tree == last and last and first in runs:
            yield ratio_of("last tree / first tree", first, case, runs)
        if case.tree == last and case.recipe != "none" and plain in runs:
            yield ratio_of("converted / unconverted", plain, case, runs)


def table(rows: list[dict[str, Any]], first: list[str], ending: str) -> str:
    """Markdown: a line for each row, with medians, least and most of each part."""
    lines = [[*first, *PARTS, "all"], ["---"] * (len(first) + 1 + len(PARTS))]
    for row in rows:
        found = [row.get(f"{part}_{ending}") for part in (*PARTS, "all")]
        cells = ["{median:.2f} ({min:.2f} to {max:.2f})".format(**x) if x else "-" for x in found]
        lines.append([*(str(row[name]) for name in first), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def commit_of(tree: Path) -> str:
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def report(given: argparse.Namespace, commits: list[str], runs: dict[Case, Runs]) -> str:
    """The tables. The JSON file has the same rows."""
    rows = [row_of(case, of, commits) for case, of in runs.items()]
    ratios = list(ratios_of(runs))
    if given.json:
        found = {
            "command": given.command, "trees": commits,
            **{name: getattr(given, name) for name in ("blocks", "rounds", "compile")},
            **about_this_machine(), "load_average": [round(x, 1) for x in os.getloadavg()],
            "unit": "seconds by the clock, and of the CPU in all threads",
            "rows": rows, "ratios": ratios,
        }  # fmt: skip
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    names = [name for name in Case._fields if name != "tree"]
    return "\n\n".join(
        [
            table(rows, [*names, "tree"], "cpu_seconds"),
            table(ratios, [*names, "ratio", "same_program"], "cpu"),
        ]
    )


def parse() -> argparse.Namespace:
    root = Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument(
        "--trees", type=Path, nargs="+", default=[root], help="source trees (default: this one)"
    )
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--codes", nargs="+", choices=CODES, default=list(CODES))
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--blocks", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument(
        "--compile", choices=("always", "never"), default="always",
        help="a step of 32 blocks compiles for minutes; equal programs need not (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the results")
    given = parser.parse_args()
    if given.rounds < 1 or given.blocks < 1:
        parser.error("--rounds and --blocks are at least 1")
    words = {
        "codes": " ".join(given.codes), "recipes": " ".join(given.recipes),
        "libraries": " ".join(given.libraries), "blocks": given.blocks, "rounds": given.rounds,
        "compile": given.compile,
    }  # fmt: skip
    start = "python benchmarks/programs/convert_time.py"
    start += " --trees BEFORE AFTER" if len(given.trees) == 2 else ""
    given.command = " ".join([start, *(f"--{name} {value}" for name, value in words.items())])
    given.trees = [tree.resolve() for tree in given.trees]
    return given


def main() -> None:
    given = parse()
    if given.measure:
        import _convert_models

        print(json.dumps(_convert_models.measure(*json.loads(given.measure))))
        return

    cases, commits = list(cases_of(given)), [commit_of(tree) for tree in given.trees]
    runs: dict[Case, Runs] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as bytecode:
        for tree in given.trees:  # not counted: it writes the bytecode
            for library in given.libraries:
                in_a_process(tree, bytecode, [library, "flax", 1, "delayed", False])
        for number in range(given.rounds):
            for case in random.Random(number).sample(cases, len(cases)):
                arguments = [case.library, case.code, given.blocks, case.recipe]
                arguments.append(given.compile == "always")
                run = in_a_process(given.trees[case.tree], bytecode, arguments)
                runs[case].append(run)
                print(number, *case, run["seconds"], run["program"], file=sys.stderr, flush=True)
            print(report(given, commits, runs), file=sys.stderr, flush=True)
    print(report(given, commits, runs))


if __name__ == "__main__":
    main()
