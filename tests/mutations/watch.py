"""A pytest plugin for `run.py`: it notes the test under way, and the first one that fails.

`run.py` starts pytest with `-p watch`. The environment names the copy of the repository that must
be tested, and the file for the notes.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

WRONG_PACKAGE = 77  # exit status: jaxfp8 of another folder would be tested
COPY, NOTES = "JAXFP8_MUTATION_COPY", "JAXFP8_MUTATION_NOTES"
_notes: dict[str, str] = {}


def _note(**fields: str) -> None:
    _notes.update(fields)
    path = Path(os.environ[NOTES])
    # A kill in the middle of a write must leave a file that can be read.
    path.with_suffix(".new").write_text(json.dumps(_notes))
    path.with_suffix(".new").replace(path)


def _check(origin: str | None) -> None:
    if origin is None or not Path(origin).resolve().is_relative_to(os.environ[COPY]):
        _note(why=f"jaxfp8 is imported from {origin}, not from {os.environ[COPY]}")
        pytest.exit(_notes["why"], WRONG_PACKAGE)


def _why(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash else report.longrepr).strip().splitlines()
    return (lines[0 if crash else -1] if lines else "")[:300]


def pytest_sessionstart() -> None:
    spec = importlib.util.find_spec("jaxfp8")  # imports nothing: an import may have the fault
    _check(spec and spec.origin)


def pytest_runtest_logstart(nodeid: str) -> None:
    _note(under_way=nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note(under_way=report.nodeid)
    if report.failed and "failed" not in _notes:
        _note(failed=report.nodeid, when="collection", why=_why(report))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and "failed" not in _notes:
        _note(failed=report.nodeid, when=report.when or "", why=_why(report))


def pytest_sessionfinish() -> None:
    if (package := sys.modules.get("jaxfp8")) is not None:
        _check(getattr(package, "__file__", None))
