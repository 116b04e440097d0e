"""Runs a framework's own command with each recipe, and compares its losses with bfloat16's.

    python benchmarks/clients/run.py tunix --python ENVIRONMENT/bin/python
    python benchmarks/clients/run.py maxtext --python ... --checkout FOLDER --rows fsdp
    nox -s clients -- tunix maxtext --checkout maxtext=FOLDER    # makes the environments, too

Each row is a process of its own, with random data, on CPU devices. The losses are read from what it
prints, or from a file that it writes. XLA dumps its train step, and the matmuls that read FP8 are
counted. Results go to results/CLIENT.json, with the day and the versions of each row. Rows that
were not run this time keep their results. A row fails if the command fails or takes 15 minutes, if
it gives too few losses, or if they do not fall as those of bfloat16 or identity() do, within 30 %.
It also fails if a resumed run has other losses than the whole run, if no matmul reads FP8, or if a
refusal does not come. Then the exit status is 1.
"""

import argparse
import datetime
import importlib
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from _client import HERE, RECIPES, ROOT, Client, Row

BASELINE = "bfloat16"
MOST_MINUTES = 15.0
MOST_OVER = 0.3
"""A row fails if its last loss is further from bfloat16's and from `identity`'s than this part of
what they fell by. A run that learns nothing is at 1."""
VERSIONS = (
    "jax", "flax", "qwix", "optax", "equinox", "google-tunix", "gemma", "kauldron", "marin-haliax",
    "marin-levanter", "axlearn",
)  # fmt: skip
"""Packages whose versions a result names, where they are installed."""


def checked_out(client: Client, given: Path | None, scratch: Path) -> Path:
    """A copy of the client's source tree, with its patches. Without a tree, a new folder."""
    folder = scratch / "checkout"
    if client.checkout is None:
        folder.mkdir()
        return folder
    if given is None:
        sys.exit(f"{client.name} needs its source tree, {client.checkout}: --checkout FOLDER")
    commit = client.checkout.split()[-1]
    if (given / ".git").exists():
        head = output("git", "-C", str(given), "rev-parse", "HEAD")
        if not head.startswith(commit):
            sys.exit(f"{given} is at {head}, and the patch is for {commit}: check that out")
    shutil.copytree(given, folder, ignore=shutil.ignore_patterns(".git"), symlinks=True)
    for patch in client.patches:
        subprocess.run(["patch", "-p1", "-s"], input=patch(), text=True, check=True, cwd=folder)
    return folder


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def environment(client: Client, row: Row, dumps: Path, filled: dict[str, str]) -> dict[str, str]:
    flags = (
        f"--xla_force_host_platform_device_count={row.devices}",
        f"--xla_dump_to={dumps}",
        "--xla_dump_hlo_as_text",
        f"--xla_dump_hlo_module_re={client.program}",
    )
    given = {
        key: text.format(**filled)
        for key, text in {**client.environment, **row.environment}.items()
    }
    paths = (given.pop("PYTHONPATH", ""), str(ROOT), os.environ.get("PYTHONPATH", ""))
    outer = dict(os.environ)
    outer.pop("JAX_COMPILATION_CACHE_DIR", None)  # XLA dumps nothing for a program in a cache
    return {
        **outer,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        **given,
        "XLA_FLAGS": " ".join((*flags, given.get("XLA_FLAGS", ""))),
    }


def run(client: Client, row: Row, python: Path, checkout: Path, log: Path) -> dict[str, Any]:
    """The result of a row: its losses, its counts, and `error` if it is not as it must be."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        dumps = scratch / "dumps"
        filled = {"here": str(HERE), "checkout": str(checkout), "scratch": str(scratch)}
        given = environment(client, row, dumps, filled)
        began = time.monotonic()
        written = client.loss_file and Path(client.loss_file.format(**filled))
        for number, arguments in enumerate((*row.setup, row.arguments)):
            shutil.rmtree(dumps, ignore_errors=True)  # the step of the last command counts
            if written:
                written.unlink(missing_ok=True)
            command = [part.format(**filled) for part in (*client.command, *arguments)]
            with log.open("w") as file:
                ran = subprocess.run(
                    [str(python), *command], cwd=checkout, env=given, text=True,
                    stdout=file, stderr=subprocess.STDOUT, timeout=60 * MOST_MINUTES, check=False,
                )  # fmt: skip
            if ran.returncode and number < len(row.setup):
                return {"error": f"setup failed: {last_error(log)}"}
        seconds = round(time.monotonic() - began)
        text = log.read_text(errors="replace")
        read = written.read_text() if written and written.exists() else "" if written else text
        losses = [float(loss) for loss in re.findall(client.loss, read)]
        result: dict[str, Any] = {"losses": losses, "seconds": seconds}
        for name, number in client.prints.items():
            if numbers := re.findall(number, text):
                result[name] = [float(each) for each in numbers]
        if row.refuses is not None:
            refused = ran.returncode and re.search(row.refuses, text)
            if not refused:
                return {**result, "error": f"it should stop with {row.refuses!r}"}
            return {"refused": last_error(log), "seconds": seconds}
        if ran.returncode:
            return {**result, "error": last_error(log)}
        most = row.losses or client.losses
        if len(losses) != most or not all(map(math.isfinite, losses)):
            return {**result, "error": f"it printed {len(losses)} losses, and should print {most}"}
        counted = subprocess.run(
            [str(python), str(HERE / client.counts), str(dumps)],
            capture_output=True, text=True, env=given | {"XLA_FLAGS": ""}, check=False,
        )  # fmt: skip
        if counted.returncode:
            return {**result, "error": f"matmuls: {counted.stderr.strip().splitlines()[-1]}"}
        result |= json.loads(counted.stdout)
        if row.recipe in RECIPES and not result["fp8"]:
            result["error"] = "no matmul reads FP8"
        if row.recipe == BASELINE and result["fp8"]:
            result["error"] = f"{result['fp8']} matmuls of the baseline read FP8"
        return result


def last_error(log: Path) -> str:
    """The last line of a traceback in what a command printed, or its last line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    return (errors or lines or ["it printed nothing"])[-1][:400]


def compared(rows: dict[str, dict[str, Any]], row: Row, result: dict[str, Any]) -> None:
    """Adds what the losses of other rows say to a result."""
    losses = result.get("losses")
    if row.like is not None and losses:
        of = rows.get(key(*row.like), {})
        whole = [] if "error" in of else of.get("losses", [])
        result["like"] = key(*row.like)
        if whole[-len(losses) :] != losses:
            result["error"] = f"losses differ from those of {result['like']}: {whole}"
    if not losses or row.recipe == BASELINE:
        return
    gaps = {}
    for name in (BASELINE, "identity"):
        of = rows.get(key(row.name, name), {})
        base = [] if "error" in of or name == row.recipe else of.get("losses", [])
        if len(base) == len(losses):
            gaps[name] = (losses[-1] - base[-1], abs(base[-1] - base[0]))
    if BASELINE in gaps:
        result["over_bfloat16"] = round(gaps[BASELINE][0], 4)
    if gaps and all(abs(gap) > MOST_OVER * fell for gap, fell in gaps.values()):
        result["error"] = f"the last loss differs from those without FP8: {gaps}"
    if not gaps and row.like is None and losses[-1] >= losses[0]:
        result["error"] = f"the loss did not fall from {losses[0]}, and has no baseline"


def key(name: str, recipe: str) -> str:
    return f"{name} | {recipe}"


def versions(python: Path) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json, platform, sys\n"
        "found = {d.metadata['Name']: d.version for d in m.distributions()}\n"
        "versions = {n: found[n] for n in sys.argv[1:] if n in found}\n"
        "print(json.dumps({'python': platform.python_version(), **versions}))"
    )
    return json.loads(output(str(python), "-c", code, *VERSIONS))


def table(client: Client, rows: dict[str, dict[str, Any]]) -> str:
    lines = ["| run | losses | matmuls in FP8 |", "|---|---|---|"]
    for name, result in rows.items():
        said = " ".join(f"{loss:.3f}" for loss in result.get("losses", []))
        if "error" in result:
            said = f"ERROR {result['error']} {said}"
        elif "refused" in result:
            said = f"refused: {result['refused']}"
        counted = f"{result['fp8']} of {result['matmuls']}" if "fp8" in result else ""
        lines.append(f"| {name.replace(' | ', ', ')} | {said} | {counted} |")
    changed = "; ".join(f"{method}: {count}" for method, count in client.lines.items())
    return "\n".join((client.title, f"Lines to change: {changed}", "", *lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("client", help="NAME of a file NAME_client.py beside this one")
    parser.add_argument("--python", type=Path, required=True, help="of the client's environment")
    parser.add_argument("--checkout", type=Path, help="the client's source tree, if it needs one")
    parser.add_argument("--rows", default="", help="a regular expression for 'name | recipe'")
    parser.add_argument("--list", action="store_true", help="print the rows, and run nothing")
    parser.add_argument("--json", type=Path, help="where results go; default: results/CLIENT.json")
    parser.add_argument("--logs", type=Path, help="a folder that keeps what each row printed")
    given = parser.parse_args()
    client: Client = importlib.import_module(f"{given.client}_client").CLIENT
    matches = re.compile(given.rows, re.IGNORECASE).search
    chosen = [row for row in client.rows if matches(key(row.name, row.recipe))]
    if given.list or not chosen:
        print("\n".join(key(row.name, row.recipe) for row in chosen or client.rows))
        sys.exit(not chosen)
    file = given.json or HERE / "results" / f"{client.name}.json"
    python = Path(os.path.abspath(given.python))  # not resolved: it is a link into another one
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        checkout = checked_out(client, given.checkout, scratch)
        logs = given.logs or scratch
        logs.mkdir(parents=True, exist_ok=True)
        failed, with_versions = [], versions(python)
        for row in chosen:
            of = key(row.name, row.recipe)
            log = logs / (re.sub(r"\W+", "_", of) + ".log")
            try:
                result = run(client, row, python, checkout, log)
            except subprocess.TimeoutExpired:
                result = {"error": f"no end within {MOST_MINUTES:g} minutes"}
            result |= {"day": datetime.date.today().isoformat(), "versions": with_versions}
            # Read anew, because another run may have written rows in the meantime.
            done = json.loads(file.read_text())["rows"] if file.exists() else {}
            compared(done, row, result)
            done[of] = result
            failed += [of] if "error" in result else []
            print(f"{of}: {json.dumps(result)}", flush=True)
            ordered = {k: done[k] for r in client.rows if (k := key(r.name, r.recipe)) in done}
            report = {
                "client": client.title,
                "command": " ".join(("python", *client.command)),
                "rows": ordered,
            }
            file.parent.mkdir(exist_ok=True)
            half = file.with_suffix(".half")  # a run that is killed leaves the old results
            half.write_text(json.dumps(report, indent=1) + "\n")
            half.replace(file)
    print(f"\n{table(client, ordered)}")
    gaps = [r["over_bfloat16"] for r in ordered.values() if "over_bfloat16" in r]
    if gaps:
        print(
            f"\nlast loss over bfloat16's: median {statistics.median(gaps):+.4f}, "
            f"from {min(gaps):+.4f} to {max(gaps):+.4f}"
        )
    if failed:
        sys.exit(f"{len(failed)} of {len(chosen)} rows are not as they must be: {failed}")


if __name__ == "__main__":
    main()
