"""Tables of docs/tpu.md have the figures of their results."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tpu.md").read_text()
RESULTS = ROOT / "benchmarks" / "programs" / "results"
CHIPS = ("tpu7x", "v6e", "v5p", "v5e")


def rows_of(name):
    return json.loads((RESULTS / name).read_text())["rows"]


def test_memory():
    totals = {
        (row["recipe"], row["loop"], row["kept"], row["chip"]): row["total"]
        for row in rows_of("tpu_memory.json")
    }
    found = re.findall(
        r"^\| `?(\w+)(?:\(\)`)? \| (scan|unrolled) \| (by jax|inputs) \| (.*) \|$", PAGE, re.M
    )
    assert {(*key, chip) for *key, _ in found for chip in CHIPS} == totals.keys()
    for name, *way, cells in found:
        own, bf16 = ([totals[each, *way, chip] for chip in CHIPS] for each in (name, "bfloat16"))
        if name == "bfloat16":
            figures = [f"{total / 2**30:.2f} GiB" for total in own]
        else:
            figures = [f"{a / b:.2f}" for a, b in zip(own, bf16, strict=True)]
        assert cells.split(" | ") == figures, (name, way)


def test_features():
    rows = rows_of("tpu_features.json")
    tiles = re.compile("blockwise|mxfp8|of tiles")
    for chip in CHIPS:
        (line,) = re.findall(rf"^\| {chip} \| (\d+ of .*) \|$", PAGE, re.M)
        own = [row for row in rows if row["chip"] == chip]
        good = [row for row in own if "error" not in row]
        sums = [
            " of ".join(
                str(sum(row[key] for row in good if bool(tiles.search(row["feature"])) == tiled))
                for key in ("fp8", "matmuls")
            )
            for tiled in (False, True)
        ]
        others = [sum(row["float64"] for row in good), sum(len(row["folded"]) for row in good)]
        assert line.split(" | ") == [f"{len(good)} of {len(own)}", *sums, *map(str, others)]
