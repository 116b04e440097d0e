"""Rows of results in a JSON file, which a later run continues."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def continued(
    path: Path | None,
    names: Sequence[str],
    wanted: Iterable[Sequence[str]],
    figures: Callable[..., Row],
    about: Mapping[str, Any],
) -> list[Row]:
    """The rows of the file, and `figures(*key)` for each wanted key that it lacks.

    A key has a value for each of the `names`, and its row has these, too. Each new row is printed,
    and written at once with what it depends on (`about`). Without a path nothing is written.
    """
    rows: list[Row] = json.loads(path.read_text())["rows"] if path and path.exists() else []
    done = {tuple(row[name] for name in names) for row in rows}
    for key in wanted:
        if tuple(key) in done:
            continue
        rows.append(figures(*key))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if path:
            path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return rows
