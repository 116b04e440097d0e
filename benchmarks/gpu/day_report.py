"""The report of the first half hour on a GPU, from the JSON files in a folder.

It says what did not hold, which marks are met, and which automatic choices of kernels must change.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from day_parts import CRASHED, CUT, Files, read

Row = dict[str, Any]
# The marks
CAST_MARK, BOTH_WAYS_MARK = 0.85, 0.80  # of the bandwidth of the best copy
BOTH_WAYS = re.compile(r"\b1x(\d+) and \1x1\b")
"""Casts to tiles in both directions."""
MATMUL_MARK, CUBLASLT = 0.85, "tensor, xla"  # XLA calls cuBLASLt for scales of tensors
LAYER_MARKS = {"delayed": 1.75, "current": 1.65, "rowwise": 1.5, "blockwise": 1.55}
EXPERTS_MARK = 1.6
BY_BACKEND = ("casts", "matmuls")  # all their cases name a backend, also that of the choice
BACKENDS = ("xla", "mosaic", "triton", "cudnn")
NAMED = {
    "XLA alone": {"casts": "xla", "matmuls": "xla"},
    "Pallas casts": {"casts": "mosaic", "matmuls": "xla"},
    "all in Pallas": {"casts": "mosaic", "matmuls": "mosaic"},
}
"""`NAMED` of layers.py, for files that were written before rows had a field `named`."""
LEAST_ROUNDS = 3  # quartiles of fewer rounds say nothing
MOST_LINES = 60  # of a list: a chip on which nothing runs has hundreds of failed tests


def write(folder: Path) -> None:
    """Writes `report.md`."""
    unfinished = folder / "report.partial"
    unfinished.write_text(page(read(folder)))
    unfinished.replace(folder / "report.md")


def page(files: Files) -> str:
    sections = {
        "Parts": parts(files.state),
        "What did not hold": faults(files),
        "Marks": marks(files.results),
        "Choices that must change": choices(files.results),
        "Bits of tensor cores": bits(files.results),
        "Tilings that were timed": tilings(files.timings),
        "What was left out": left_out(files.results),
    }
    lines = ["# The first half hour on a GPU", "", *machine(files)]
    for title, text in sections.items():
        if text := list(text):
            lines += ["", f"## {title}", "", *text]
    return "\n".join(lines) + "\n"


def machine(files: Files) -> Iterator[str]:
    mode = files.state.get("mode")
    if mode == "dry run" or any(result.get("dry_run") for result in files.results.values()):
        yield "A dry run with tiny shapes on a CPU. Its figures, marks and choices mean nothing."
        yield ""
    commits: dict[str, list[str]] = {}
    for result in files.results.values():
        what = result.get("machine") or {}
        if "versions" in what:
            gpu = {n: value for n, value in (what.get("gpu") or {}).items() if n != "name"}
            figures, versions = (
                ", ".join(f"{name} {value}" for name, value in each.items())
                for each in (gpu, what["versions"])
            )
            words = (f"{what['device']} ({what['chip']})", figures, versions)
            found = commits.setdefault(". ".join(filter(None, words)) + ".", [])
            commit = f"{what['commit']} with {what['changed_files']} changed files"
            found += [commit] * (commit not in found)
    for name, of_machine in commits.items():
        yield f"{name} Commit {'; '.join(of_machine)}."
    if not commits:
        yield "No result names the machine."


def parts(state: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        {"part": name} | part | {"results": counted(part["counts"])}
        for name, part in state.get("parts", {}).items()
    ]
    names = ("part", "outcome", "results", "seconds", "limit", "decides")
    yield from table(names, rows)


def counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in sorted(counts.items())) or "none"


# What did not hold


def faults(files: Files) -> Iterator[str]:
    found = [*broken_parts(files), *failed_rows(files.results), *withdrawn(files.results)]
    if not found and files.results:
        yield "Every part that ran has held."
    yield from found


def broken_parts(files: Files) -> Iterator[str]:
    known = files.state.get("parts", {})
    for name, part in known.items():
        if part["outcome"] == CUT:
            yield f"- the part `{name}` was cut off after {part['seconds']:.0f} s"
        if part["outcome"] == CRASHED:
            yield f"- the part `{name}` crashed with the exit status {part['status']}: `{name}.log`"
    for name, result in files.results.items():
        if name not in known and result.get("finished") not in ("Finished", True):
            yield f"- {name}: the run did not finish"


def failed_rows(results: Mapping[str, Any]) -> Iterator[str]:
    for name, result in results.items():
        lines = [
            f"- {name}: {title(row)}: {row.get('reason', 'the file has no reason')}"
            for row in result["rows"]
            if row["status"] == "failed"
        ]
        yield from lines[:MOST_LINES]
        if len(lines) > MOST_LINES:
            yield f"- {name}: {len(lines) - MOST_LINES} more, in `{name}.json`"


def title(row: Row) -> str:
    """The name of a row: of a test, of a path of tensor cores, of a case, or of a tuned layer."""
    words = (row.get(name) for name in NAMES)
    return ", ".join(filter(None, words)) or "a row without a name"


NAMES = (
    "file", "test", "path", "section", "group", "operation", "contender", "shape", "recipe", "step",
)  # fmt: skip


def withdrawn(results: Mapping[str, Any]) -> Iterator[str]:
    """The kernels that gave a wrong result. Cases that are only timed are not checked."""
    wrong: dict[str, list[str]] = {}
    for row in failed_checks(results):
        wrong.setdefault(kernel(row), []).append(f"{row['operation']} ({row['group']})")
    for what, cases in wrong.items():
        yield f"- **{what} must be withdrawn from every automatic choice**: {'; '.join(cases)}"


def failed_checks(results: Mapping[str, Any]) -> list[Row]:
    rows = (row for result in results.values() for row in result["rows"])
    return [r for r in rows if r["status"] == "failed" and r.get("section") == "checks"]


def kernel(row: Row) -> str:
    """What a check names. Without names `fp8.Kernels(chip)` chooses the kernels."""
    named = written(named_of(row))
    return f"{named} ({row['contender']})" if named else f"the choice of `{row['contender']}`"


def left_out(results: Mapping[str, Any]) -> Iterator[str]:
    """The cases without time, by their group, and the tests that were skipped, by the reason."""
    for name, result in results.items():
        groups: dict[str, list[Row]] = {}
        for row in result["rows"]:
            words = row.get("section"), row.get("group") or row.get("shape")
            place = ", ".join(filter(None, words)) or f"{row.get('reason')}"
            groups.setdefault(place, []).append(row)
        for place, rows in groups.items():
            skipped = [row for row in rows if row["status"] == "skipped"]
            # A case with another reason cannot run there, so it is not left out.
            late = [row for row in skipped if row.get("reason") == "no time left" or "test" in row]
            if any(row["status"] != "skipped" for row in rows):
                operations = {row.get("operation") for row in rows}
                which = WHICH if len(operations) > 1 else WHICH[1:]
                names = "; ".join(", ".join(filter(None, map(row.get, which))) for row in late)
            else:
                names = "all"
            if late:
                yield f"- {name}, {place}: {names} ({len(late)})"


WHICH = ("operation", "contender", "recipe", "step")


# Marks


def marks(results: Mapping[str, Any]) -> Iterator[str]:
    found = [*cast_marks(results), *matmul_marks(results), *layer_marks(results)]
    rows = [row | {"verdict": "met" if row["found"] >= row["mark"] else "not met"} for row in found]
    for row in rows:
        row |= {"mark": f"{row['mark']:.2f}", "found": f"{row['found']:.2f}"}
    yield from table(("what", "by", "mark", "found", "verdict", "file"), rows)


def timed(result: Mapping[str, Any], section: str) -> list[Row]:
    return [r for r in result["rows"] if r.get("section") == section and r["status"] == "ok"]


def cast_marks(results: Mapping[str, Any]) -> Iterator[Row]:
    """The bandwidth of each cast at its largest shape, over that of the best copy of the run.

    The figure is that of the backend that is chosen, or of the fastest one if the file does not
    have the choice.
    """
    for name, result in results.items():
        largest: dict[str, list[Row]] = {}
        for row in timed(result, "casts"):
            if row["operation"] == "copy" or "share_of_copy" not in row:
                continue
            rows = largest.setdefault(row["operation"], [])
            if rows and rows[0]["floor_bytes"] < row["floor_bytes"]:
                rows.clear()
            if not rows or rows[0]["group"] == row["group"]:
                rows.append(row)
        for operation, rows in largest.items():
            chosen = [*filter(is_chosen, rows)]
            best = min(chosen or rows, key=median)
            yield {
                "what": f"cast {operation}, {best['group']}, of the copy",
                "by": f"{best['contender']}, {'chosen' if chosen else 'the fastest'}",
                "mark": BOTH_WAYS_MARK if BOTH_WAYS.search(operation) else CAST_MARK,
                "found": best["share_of_copy"],
                "file": name,
            }


def matmul_marks(results: Mapping[str, Any]) -> Iterator[Row]:
    """Matmuls of tiles, each over cuBLASLt's in FP8 with the same accumulation."""
    for name, result in results.items():
        rows = timed(result, "matmuls")
        cublaslt = {
            (r["group"], r["operation"]): r["tflops"] for r in rows if r["contender"] == CUBLASLT
        }
        for row in rows:
            key, split = (row["group"], row["operation"]), by_backend(row)
            if split and split[0] == "tiles of 128" and split[1] != "xla" and key in cublaslt:
                yield {
                    "what": f"matmul {row['contender']}, {', '.join(key)}, of cuBLASLt's FP8",
                    "by": split[1],
                    "mark": MATMUL_MARK,
                    "found": row["tflops"] / cublaslt[key],
                    "file": name,
                }


def layer_marks(results: Mapping[str, Any]) -> Iterator[Row]:
    """Layers and experts with the kernels that `fp8.Kernels(chip)` chooses, over bfloat16."""
    experts = dict.fromkeys(("current", "rowwise", "blockwise"), EXPERTS_MARK)
    for section, wanted in (("layers", LAYER_MARKS), ("experts", experts)):
        for name, result in results.items():
            for row in timed(result, section):
                recipe = row["contender"].removesuffix(", settled")
                if recipe in wanted and "speedup" in row:
                    yield {
                        "what": f"{section}, {row['group']}, {row['contender']}, of bf16",
                        "by": "chosen",
                        "mark": wanted[recipe],
                        "found": row["speedup"]["median"],
                        "file": name,
                    }


# Choices


def choices(results: Mapping[str, Any]) -> Iterator[str]:
    """Named contenders that are faster than the automatic choice, with quartiles apart."""
    changes: dict[str, list[str]] = {}
    few: list[str] = []
    unknown: list[str] = []
    wrong = {pair for row in failed_checks(results) for pair in named_of(row).items()}
    for name, result in results.items():
        chip = (result.get("machine") or {}).get("chip")
        for what, group, chosen, others in rivals(result):
            if chosen is None:
                unknown.append(f"- {name}: {what}, {group}: {ranking(others)}")
                continue
            for other in sorted(others, key=median):
                named = named_of(other)
                key = f'- {name}: {what}: `fp8.Kernels("{chip}", {written(named)})` is faster than '
                key += ", ".join(filter(None, ("the choice", written(named_of(chosen)))))
                key += ", but one of its checks failed" if wrong & {*named.items()} else ""
                rounds = min(row["seconds"]["rounds"] for row in (other, chosen))
                gain = f"{median(chosen) / median(other):.2f} ({group})"
                if rounds < LEAST_ROUNDS and median(other) < median(chosen):
                    few.append(f"{key}: {gain}, {rounds} rounds")
                elif other["seconds"]["quartiles"][1] < chosen["seconds"]["quartiles"][0]:
                    changes.setdefault(key, []).append(gain)
    if not changes:
        yield "None that the quartiles of these files show."
    yield from (f"{key}: {', '.join(gains)}" for key, gains in changes.items())
    for lines, heading in (
        (few, f"Timed in less than {LEAST_ROUNDS} rounds, which decides nothing:"),
        (unknown, "The files do not have the choice. All that were timed:"),
    ):
        if lines:
            yield from ("", heading, "", *lines)


def rivals(result: Mapping[str, Any]) -> Iterator[tuple[str, str, Row | None, list[Row]]]:
    """Yields (what, its shape, the row of the automatic choice, the rows that name others).

    The row is None if a file does not have the choice. All rows are of one run and one group, so
    they were timed alternately.
    """
    same: dict[tuple[str, ...], list[Row]] = {}
    for row in result["rows"]:
        if row["status"] != "ok" or "contender" not in row or "seconds" not in row:
            continue
        named, what = named_of(row), f"`{row['contender']}`"
        if row["section"] in BY_BACKEND:
            split = by_backend(row)
            what = f"{row['operation']}, {split[0]}" if split else row["operation"]
            if not named:  # a copy, or bfloat16
                continue
        elif named:
            what = f"`{row['contender'].rpartition(', ')[0]}`"
        key = f"{row['section']}, {what}", row["group"], row["operation"]
        same.setdefault(key, []).append(row)
    for (what, group, _), rows in same.items():
        chosen = next(filter(is_chosen, rows), None)
        if len(rows) > 1:
            yield what, group, chosen, [row for row in rows if row is not chosen]


def is_chosen(row: Row) -> bool:
    """Whether it has the kernels that `fp8.Kernels(chip)` chooses."""
    named = named_of(row)
    return row.get("chosen") in named.values() if row["section"] in BY_BACKEND else not named


def by_backend(row: Row) -> tuple[str, str] | None:
    """The contender of a matmul without its backend, and the backend."""
    words = row["contender"].split(", ")
    if len(words) < 2 or words[1] not in BACKENDS:
        return None
    return ", ".join([words[0], *words[2:]]), words[1]


def named_of(row: Row) -> Mapping[str, str]:
    """The arguments of `fp8.Kernels` that name backends. Empty for an automatic choice."""
    if "named" in row:
        return row["named"]
    # A file from before that field.
    if split := by_backend(row):
        return {"matmuls": split[1]}
    if row["contender"] in BACKENDS:
        return {"casts": row["contender"]}
    return NAMED.get(row["contender"].rpartition(", ")[2], {})


def written(named: Mapping[str, str]) -> str:
    return ", ".join(f'{field}="{backend}"' for field, backend in named.items())


def ranking(rows: Iterable[Row]) -> str:
    ranked = sorted(rows, key=median)
    return ", ".join(
        f"{row['contender']} {1e6 * median(row):.1f} µs ({row['seconds']['rounds']} rounds)"
        for row in ranked
    )


def median(row: Row) -> float:
    return row["seconds"]["median"]


def bits(results: Mapping[str, Any]) -> Iterator[str]:
    """Outputs that differ from the prediction. For libraries they are a figure, and no fault."""
    errors = ("distance", "error", "error_of_prediction")
    rows = [
        dict.fromkeys(("nearest", *errors), "")
        | row
        | {name: f"{row[name]:.2g}" for name in errors if name in row}
        for result in results.values()
        for row in result["rows"]
        if "different" in row
    ]
    yield from table(("path", "status", "outputs", "different", *errors, "nearest"), rows)


def tilings(timings: Mapping[str, Any]) -> Iterator[str]:
    """The fastest way of each matmul, and the fastest one of the next backend."""
    rows = []
    for each in (each for timed_ in timings.values() for each in timed_["times"]):
        best, *others = sorted(each["times"], key=lambda way: way["seconds"])
        row = {"matmul": each["matmul"], "fastest": way_of(best), "next backend": "", "gain": ""}
        for other in [way for way in others if way["backend"] != best["backend"]][:1]:
            gain = f"{other['seconds'] / best['seconds']:.2f}"
            row |= {"next backend": way_of(other), "gain": gain}
        rows.append(row)
    yield from table(("matmul", "fastest", "next backend", "gain"), rows)


def way_of(way: Mapping[str, Any]) -> str:
    tiling = ", ".join(f"{name}={value}" for name, value in (way["tiling"] or {}).items())
    return f"{' '.join(filter(None, (way['backend'], tiling)))}: {1e6 * way['seconds']:.1f} µs"


def table(names: Iterable[str], rows: list[Row]) -> list[str]:
    """A Markdown table of these fields."""
    names = list(names)
    if not rows:
        return []
    cells = [names, *([str(row[name]) for name in names] for row in rows)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return [lines[0], "|" + "---|" * len(names), *lines[1:]]
