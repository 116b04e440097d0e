"""The table of the page on GPUs is that of the stored result, and the result that of the code."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))
import accumulation

GPU = Path(accumulation.__file__).parent
ROWS = json.loads((GPU / "results" / "accumulation.json").read_text())["rows"]


def test_the_page_has_the_result():
    page = (GPU.parents[1] / "docs" / "gpu.md").read_text()
    table, *others = accumulation.markdown(ROWS).strip().split("\n\n")
    assert f"<!-- accumulation -->\n{table}\n" in page
    assert others == ["Blackwell: at most 0.0060 %", "float32: at most < 0.001 %"]
    assert "Blackwell loses at most 0.0060 % here, and float32 less than 0.001 %." in " ".join(
        page.split()
    )


@pytest.mark.parametrize("path", accumulation.PATHS)
@pytest.mark.parametrize("signs", accumulation.SIGNS)
def test_the_result_is_that_of_the_code(path, signs):
    (stored,) = (r for r in ROWS if (r["path"], r["signs"], r["k"]) == (path, signs, 512))
    row = accumulation.row(path, signs, 512)
    assert row.keys() == stored.keys()
    figures = [key for key in ("error", "shift") if key in row]
    for key in figures:
        assert row[key] == pytest.approx(stored[key], rel=1e-9), key
