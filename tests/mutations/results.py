"""The results of `run.py`: its JSON file, and a comparison of two files."""

import json
import threading
from pathlib import Path
from typing import Any

from fault_table import Fault


class Results:
    """The JSON file. Each result is written when it is known, with its commit and environment."""

    def __init__(self, path: Path, **of: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._of = of
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def has(self, fault: Fault, limit: float, *, confirm: bool) -> bool:
        known = self.content.get(fault.id)
        if known is None or not known.items() >= (self._of | {"fault": fault.digest}).items():
            return False
        if known["outcome"] == "cut off":
            return bool(known["limit"] >= limit)
        return known["outcome"] != "killed" or not confirm or "confirmed" in known

    def add(self, fault: Fault, result: dict[str, Any], limit: float) -> None:
        with self._lock:
            known = {"breaks": fault.breaks, "fault": fault.digest, "limit": limit}
            self.content[fault.id] = result | known | self._of
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = self.path.with_suffix(".new")
            new.write_text(json.dumps(self.content, indent=1, ensure_ascii=False) + "\n")
            new.replace(self.path)


def line_of(fault: str, result: dict[str, Any]) -> str:
    where = result.get("test") or result.get("under_way") or ""
    when = f" ({result['when']})" if result.get("when") not in (None, "call") else ""
    return f"{result['outcome']:9} {result['seconds']:6.1f} s  {fault}  {where}{when}"


def summary(paths: list[Path]) -> str:
    """The number of faults with each outcome, the faults that were not killed, and changes."""
    every = [json.loads(path.read_text()) for path in paths]
    lines = []
    for path, results in zip(paths, every, strict=True):
        commits = {result["commit"][:7] for result in results.values()}
        lines.append(f"{path}: {', '.join(sorted(commits))}")
    outcomes = ("killed", "survived", "cut off", "broken test")
    for outcome in outcomes:
        counts = [sum(r["outcome"] == outcome for r in results.values()) for results in every]
        lines.append(f"{outcome:12}" + "".join(f"{count:6}" for count in counts))
    lines.append(f"{'seconds':12}" + "".join(f"{_seconds(results):6}" for results in every))
    for outcome in outcomes[1:]:
        for name, result in every[-1].items():
            if result["outcome"] == outcome:
                lines.append(f"{outcome}: {name}: {result['breaks']}")
    if len(every) == 2:
        before, after = every
        for name in dict.fromkeys((*before, *after)):
            pair = [each[name]["outcome"] if name in each else "no result" for each in every]
            if pair[0] != pair[1]:
                lines.append(f"{name}: {pair[0]} -> {pair[1]}")
    return "\n".join(lines)


def _seconds(results: dict[str, Any]) -> int:
    return round(sum(result["seconds"] for result in results.values()))
