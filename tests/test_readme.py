"""README.md keeps its word: its ```python fences run, one after another, in one namespace."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
# Any fence, so that the end of one is never taken for the start of another.
FENCE = re.compile(r"^```(?P<tag>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def python_fences(text: str) -> Iterator[tuple[int, str]]:
    """Yields (lines above the code, code) of each fence tagged `python` and not `no-run`."""
    for fence in FENCE.finditer(text):
        tags = fence["tag"].split()
        if "python" in tags and "no-run" not in tags:
            yield text.count("\n", 0, fence.start("code")), fence["code"]


@pytest.mark.skipif(not README.exists(), reason="no README.md yet")
@pytest.mark.usefixtures("standard_promotion")  # what its readers have
def test_readme(tmp_path, monkeypatch):
    fences = list(python_fences(README.read_text()))
    assert fences, "README.md shows no Python"
    monkeypatch.chdir(tmp_path)  # what it writes, it writes here
    namespace = {"__name__": "__main__"}
    for above, code in fences:
        # The empty lines give a traceback the line numbers of README.md.
        exec(compile("\n" * above + code, str(README), "exec"), namespace)


def test_only_python_fences_run():
    text = (
        "a\n```python\nx = 1\n```\n```bash\nls\n```\n"
        "```python no-run\nx = 2\n```\n```python\ny = x\n```\n"
    )
    assert list(python_fences(text)) == [(2, "x = 1\n"), (11, "y = x\n")]
