"""The Markdown pages of the project, and the code in them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = [README, *sorted((ROOT / "docs").glob("*.md"))]
"""What users read. The code of a page runs from top to bottom, in one namespace."""
PAGES = [
    *DOCS,
    *(
        ROOT / name
        for name in (
            "CHANGELOG.md",
            "CONTRIBUTING.md",
            "benchmarks/README.md",
            "jaxfp8/README.md",
            "jaxfp8/state/README.md",
        )
    ),
]

# Any fence, so that the end of one is never taken for the start of another.
_FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]+) -->\n)?```(?P<tags>[^\n]*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Fence(NamedTuple):
    """A piece of code: the comment above it, the words after the backticks, the text."""

    mark: str | None
    tags: tuple[str, ...]
    code: str
    above: int  # lines of the page above the code


def fences(text: str, *tags: str) -> Iterator[Fence]:
    """The fences with exactly these tags; all of them if none is given."""
    for found in _FENCE.finditer(text):
        above = text.count("\n", 0, found.start("code"))
        fence = Fence(found["mark"], tuple(found["tags"].split()), found["code"], above)
        if not tags or fence.tags == tags:
            yield fence


def marked(mark: str) -> str:
    """The code under the comment `<!-- mark -->`, which one page has."""
    (code,) = (f.code for page in DOCS for f in fences(page.read_text()) if f.mark == mark)
    return code


def sides_of(diff: str) -> tuple[str, str]:
    """The code before and after a diff."""
    before, after = (
        "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] != other)
        for other in "+-"
    )
    return before, after


def headings(text: str) -> set[str]:
    """The anchors of a page's headings."""
    outside = _FENCE.sub("", text)
    found = re.findall(r"^#+ (.*)$", outside, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in found}
