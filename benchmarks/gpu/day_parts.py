"""The parts of the first half hour on a GPU: what runs, for how long, and what came of it."""

import dataclasses
import itertools
import json
import os
import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from run import CUT_OFF

ROOT = Path(__file__).resolve().parents[2]
START = 20
"""Seconds that a part gets to import jax and to end, beside its `--minutes`."""
OWN_CUT = 3
"""The exit status with which a script ends itself. That of pytest has other meanings."""
MOST_TESTERS = 12
"""The most processes of pytest. All of them share one GPU."""
# What came of a part. A part that passed may still have results below a mark.
PASSED, FAULTS, CUT, CRASHED = "passed", "found faults", "cut off", "crashed"
SKIPPED = "skipped"  # of a rehearsal: nothing of the part can run without a GPU
LAYERS = ("bf16", "delayed", "current", "blockwise", "rowwise", "flax", "plain pattern")
"""Contenders of layers, also with named kernels. They compile one by one, some for 20 s."""
RUN, BITS, TUNE = (f"benchmarks/gpu/{name}.py" for name in ("run", "bits", "autotune"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One process, with a limit of its own.

    Attributes:
      name: its name, and the begin of the names of its files.
      command: words after the interpreter. A word with `{folder}` gets the path of the folder.
      seconds: the process and its children are killed after so long.
      decides: what its results decide.
      environment: variables of this part only.
      gpu: False in a rehearsal, where a part may have nothing to do.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    decides: str
    environment: tuple[tuple[str, str], ...] = ()
    gpu: bool = True

    def words(self, folder: Path) -> list[str]:
        return [word.replace("{folder}", str(folder)) for word in self.command]

    @property
    def script(self) -> str | None:
        """The script that it runs. None for a module, and for code."""
        return self.command[0] if self.command[0].endswith(".py") else None


def timed(name: str, sections: str, minutes: float, decides: str, *match: str) -> Part:
    """A call of `run.py`. Its own watchdog comes before the limit of the part."""
    only = (word for text in match for word in ("--match", text))
    words = ("--sections", sections, "--minutes", f"{minutes:g}", "--markdown", *only)
    return Part(
        name=name,
        command=(RUN, *words, "--json", f"{{folder}}/{name}.json"),
        seconds=round(60 * CUT_OFF * minutes + START),
        decides=decides,
    )


def of_day(block: str = "Llama 3 8B") -> tuple[Part, ...]:
    """The parts on a GPU, in their order: half an hour in all. `block` has the timed layers."""
    testers = min(len(os.sched_getaffinity(0)), MOST_TESTERS)
    # -v prints each result when it is known, so that the log of a cut-off run has them. A test of
    # more than 100 s writes its stack, because a kernel may hang.
    words = ("-v", "-m", "gpu", "tests/gpu", "-n", str(testers), "-p", "no:cacheprovider")
    truth = ("-m", "pytest", *words, "-o", "faulthandler_timeout=100")
    tune = ("--json", "{folder}/tuning_timings.json", "--report", "{folder}/tuning.json")
    shapes = ("--shapes", "8192,4096,4096", "8192,4096,6144", "8192,14336,4096", "8192,4096,28672")
    return (
        Part(
            name="truth",
            command=(*truth, "--junitxml={folder}/truth.xml"),
            seconds=240,
            decides="which kernels may be chosen at all",
            environment=(("JAX_PLATFORMS", "cuda"),),
        ),
        timed("checks", "copies,checks", 3, "which kernels may be chosen at all"),
        Part(
            name="bits",
            command=(BITS, "--json", "{folder}/bits.json"),
            seconds=120,
            decides="whether the model of the tensor cores holds",
        ),
        timed("casts", "copies,casts", 1.5, "which backend casts"),
        timed(
            "layers",
            "layers",
            4,
            "which kernels a recipe gets, and what a layer gains",
            *(f"{block}, forward and backward, {name}" for name in LAYERS),
        ),
        timed("matmuls", "matmuls", 1.5, "which backend multiplies"),
        timed("experts", "experts", 2.5, "which kernels experts get, and what they gain"),
        timed("step", "steps", 3, "what a whole train step gains"),
        Part(
            name="tuning",
            command=(TUNE, *tune, "--minutes", "3", *shapes),
            seconds=240,
            decides="which tilings a matmul gets",
        ),
    )


def of_dry_run() -> tuple[Part, ...]:
    """The same parts on a CPU, with tiny shapes. The tests on a GPU are only collected."""
    return tuple(
        dataclasses.replace(
            part,
            command=(*part.command, *(() if part.script is None else ("--dry-run",))),
            environment=(),
            gpu=False,
        )
        for part in of_day(block="tiny")
    )


def of_compile_only(chips: Sequence[str], minutes: float) -> tuple[Part, ...]:
    """The programs of all parts for chips that are not there, each chip with the same time."""
    seconds = (60 * minutes - START) / len(chips)
    for_bits = min(60.0, seconds / 8)
    for_programs = seconds - for_bits
    sections = "copies,checks,casts,layers,experts,matmuls,steps"
    parts = []
    for chip in chips:
        name = f"{chip}_programs"
        # No kernel can hang, so the limit of the part need not wait for the watchdog of run.py.
        limit = round((for_programs - START) / 60, 2)
        programs = timed(name, sections, limit, "whether the programs compile")
        bits = (BITS, "--compile-only", chip, "--json", f"{{folder}}/{chip}_bits.json")
        parts += [
            dataclasses.replace(
                programs,
                command=(*programs.command, "--compile-only", chip),
                seconds=for_programs,
                gpu=False,
            ),
            Part(
                name=f"{chip}_bits",
                command=bits,
                seconds=for_bits,
                decides="whether the programs compile",
                gpu=False,
            ),
        ]
    return tuple(parts)


# What came of a part


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """How the process of a part ended: its exit status, or None if it was cut off."""

    status: int | None
    seconds: float


def outcome(part: Part, ending: Ending, folder: Path) -> dict[str, Any]:
    """The entry of a part in `day.json`.

    An exception ends Python with 1, as faults do. So 1 counts as faults only if the results are
    complete.
    """
    rows, finished = results(part, folder)
    counts = Counter(row["status"] for row in rows)
    if ending.status is None or (ending.status == OWN_CUT and part.script):
        came = CUT
    elif not finished or ending.status not in (0, 1):
        came = CRASHED
    elif counts["failed"]:
        came = FAULTS
    elif ending.status == 1:
        came = CRASHED
    elif counts["ok"] or counts["compiled"]:
        came = PASSED
    else:  # A rehearsal only collects the tests on a GPU. On a GPU something must have run.
        came = CRASHED if part.gpu else SKIPPED
    return {
        "outcome": came,
        "status": ending.status,
        "seconds": round(ending.seconds, 1),
        "limit": round(part.seconds, 1),
        "decides": part.decides,
        "counts": dict(counts),
    }


def results(part: Part, folder: Path) -> tuple[list[dict[str, Any]], bool]:
    """The rows of a part's JSON file, and whether the part wrote that it finished.

    Tests get a JSON file too, from pytest's XML. After a cut-off there is none, and the log has the
    results so far.
    """
    path, xml, log = (folder / f"{part.name}.{kind}" for kind in ("json", "xml", "log"))
    if any("--junitxml" in word for word in part.command):
        try:
            rows, finished = of_xml(xml.read_text()), "Finished"
        except (FileNotFoundError, ET.ParseError):  # pytest was ended before, or while it wrote
            rows, finished = of_log(log.read_text(errors="replace")), "Not finished"
        write(path, {"rows": rows, "finished": finished})
    try:
        result = json.loads(path.read_text())
        rows, finished = result["rows"], result["finished"]
    except (FileNotFoundError, ValueError, KeyError):
        return [], False
    return rows, finished in ("Finished", True)


def of_xml(text: str) -> list[dict[str, Any]]:
    """A row for each test, with the first line of its error, or the reason why it is skipped."""
    rows = []
    for case in ET.fromstring(text).iter("testcase"):
        row = {"test": f"{case.get('classname')}::{case.get('name')}", "status": "ok"}
        for tag, status in (("skipped", "skipped"), ("error", "failed"), ("failure", "failed")):
            if (found := case.find(tag)) is not None:
                words = (found.get("message") or found.text or "").strip()
                row |= {"status": status, "reason": first_line(words)}
        rows.append(row)
    return rows


def of_log(text: str) -> list[dict[str, Any]]:
    """The same rows without reasons, from the lines of `pytest -v -n`."""
    known = {"PASSED": "ok", "FAILED": "failed", "ERROR": "failed", "SKIPPED": "skipped"}
    lines = re.findall(r"^\[gw\d+\].*? (PASSED|FAILED|ERROR|SKIPPED) (\S.*?) *$", text, re.M)
    return [{"test": name, "status": known[word]} for word, name in lines]


def first_line(text: str) -> str:
    return next(iter(text.splitlines()), "")[:300]


def write(path: Path, value: Any) -> None:
    """Writes a JSON file. The call may be killed while it writes, so the file is renamed then."""
    unfinished = path.with_suffix(".partial")
    unfinished.write_text(json.dumps(value, indent=1) + "\n")
    unfinished.replace(path)


def keep_old(part: Part, folder: Path, before: dict[str, Any] | None) -> None:
    """Renames the files of an earlier try, so that they are not taken for this one's.

    `before` is its entry in `day.json`, if it ended.
    """
    endings = [".json", ".md", ".xml", ".log"]
    # autotune skips what its table has. So it goes on after a try that was cut off, but after a
    # whole one it would time nothing.
    if before is not None and before["outcome"] in (PASSED, FAULTS):
        endings.append("_timings.json")
    for ending in endings:
        path = folder / f"{part.name}{ending}"
        if path.exists():
            number = next(n for n in itertools.count(1) if not Path(f"{path}.{n}").exists())
            path.rename(f"{path}.{number}")


# What a folder has


class Files(NamedTuple):
    """What a folder has.

    Attributes:
      state: the content of `day.json`.
      results: the content of each file that has rows, by the name of the file.
      timings: the content of each file of `fp8.plan.Timings`.
    """

    state: dict[str, Any]
    results: dict[str, dict[str, Any]]
    timings: dict[str, dict[str, Any]]


class NoResultsError(Exception):
    """A folder without results."""


def read(folder: Path) -> Files:
    """Reads a folder.

    Raises:
      NoResultsError: if there is no result in it.
    """
    files = Files({}, {}, {})
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text())
        except ValueError as error:
            content = {"rows": [{"status": "failed", "file": path.name, "reason": str(error)}]}
        if not isinstance(content, dict):
            continue  # a file of others
        rows = content.get("rows")
        if path.name == "day.json":
            files.state.update(content)
        elif "schema" in content and "times" in content:
            files.timings[path.stem] = content
        elif isinstance(rows, list) and all(isinstance(r, dict) and "status" in r for r in rows):
            files.results[path.stem] = content
    if not (files.state or files.results or files.timings):
        raise NoResultsError(
            f"{folder} has no results in JSON. Name the folder of a run by --folder."
        )
    # The order in which the parts ran.
    order = {name: number for number, name in enumerate(files.state.get("parts", ()))}
    names = sorted(files.results, key=lambda name: (order.get(name, len(order)), name))
    return files._replace(results={name: files.results[name] for name in names})
