"""How long are the sentences? `python docs/words.py` prints a table, and exits with 1 above a bound.

One row for each Markdown page, and one for the docstrings, comments and errors of each folder of
code. `--longest N` lists the N longest sentences, `--longest N PATH...` those of some files.
"""

import argparse
import ast
import io
import re
import statistics
import subprocess
import sys
import textwrap
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
MEDIAN, NINETIETH, COLUMNS = 14, 25, 100  # words, words, characters
README_LINES = 120

# What is no word: a pragma for a tool, a rule of signs.
PRAGMA = re.compile(r"#\s*(type:|noqa|fmt:|mypy:|!)")
ENTRY = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+|^\s*\**[\w.]+(?:, \**[\w.]+)*(?: \([^)]*\))?:\s+")
SECTION = re.compile(r"^\s*(Args|Attributes|Returns|Yields|Raises|Examples?|Source|Note):$")
FENCE = re.compile(r"^```.*?^```[^\n]*$", re.MULTILINE | re.DOTALL)


class Sentence(NamedTuple):
    """A sentence and the line on which its paragraph begins."""

    line: int
    text: str

    @property
    def words(self) -> int:
        """Words of the sentence. Code between backticks is one word, as is a link's address."""
        text = re.sub(r"``?[^`]*``?", " code ", self.text)
        return sum(any(c.isalnum() for c in word) for word in text.split())


def sentences_of(lines: list[tuple[int, str]]) -> Iterator[Sentence]:
    """The sentences of a text. Blank lines, list items and entries of a section end a paragraph."""
    paragraph: list[str] = []
    begin = 0
    for number, line in [*lines, (0, "")]:
        starts = ENTRY.match(line)
        if paragraph and (starts or not line.strip()):
            text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(paragraph)).replace("**", "")
            yield from (Sentence(begin, s) for s in re.split(r"(?<=[.!?])[)\"']*\s+", text) if s)
            paragraph = []
        if line.strip():
            begin = begin if paragraph else number
            paragraph.append((line[starts.end() :] if starts else line).strip())


def of_markdown(text: str) -> Iterator[Sentence]:
    """Prose of a page: no fences, tables, headings and comments."""
    blank = lambda match: "\n" * match[0].count("\n")
    text = re.sub(r"<!--.*?-->", blank, FENCE.sub(blank, text), flags=re.DOTALL)
    lines = enumerate(text.splitlines(), 1)
    kept = [(n, "" if re.match(r"\s*(\||#)", line) else line) for n, line in lines]
    yield from sentences_of(kept)


def of_docstring(node: ast.AST, text: str) -> Iterator[Sentence]:
    """Prose of a docstring: no examples, no names of sections."""
    first, kept, example = node.body[0].lineno, [], False
    for number, line in enumerate(FENCE.sub("", textwrap.dedent(text)).splitlines(), first):
        example = line.lstrip().startswith(">>>") or (example and bool(line.strip()))
        kept.append((number, "" if example or SECTION.match(line) else line))
    yield from sentences_of(kept)


def of_comments(source: str) -> Iterator[Sentence]:
    """Prose of comments. Neighbouring lines are one text, unless code stands before them."""
    lines: list[tuple[int, str]] = []
    before = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or PRAGMA.match(token.string):
            continue
        number, column = token.start
        alone = not token.line[:column].strip()
        if not alone or number != before + 1:
            lines.append((number, ""))
        lines.append((number, token.string.lstrip("# ")))
        before = number if alone else 0
    yield from sentences_of(lines)


def of_errors(tree: ast.AST) -> Iterator[Sentence]:
    """Prose of texts that are raised where they are written. A value in them is one word."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args:
                parts = argument.values if isinstance(argument, ast.JoinedStr) else [argument]
                text = "".join(
                    str(p.value) if isinstance(p, ast.Constant) else "value" for p in parts
                )
                yield from sentences_of([(node.lineno, text)])


def of_python(source: str) -> Iterator[tuple[str, Sentence]]:
    """(kind, sentence) for all docstrings, comments and errors of a file."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and (text := ast.get_docstring(node, clean=False)):
            yield from (("docstrings", s) for s in of_docstring(node, text))
    yield from (("comments", s) for s in of_comments(source))
    yield from (("errors", s) for s in of_errors(tree))


def files() -> list[Path]:
    """Every Markdown and Python file that git would commit."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md", "*.py"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in names.splitlines() if (ROOT / name).exists()]


class Row:
    """The sentences and the longest line of one row of the table."""

    def __init__(self) -> None:
        self.sentences: list[tuple[Path, Sentence]] = []
        self.longest_line = 0

    def figures(self) -> tuple[int, int, float, float, int]:
        """Words, sentences, their median and 90th percentile in words, the longest line."""
        words = [sentence.words for _, sentence in self.sentences] or [0]
        ninetieth = statistics.quantiles([*words, words[0]], n=10, method="inclusive")[-1]
        return sum(words), len(words), statistics.median(words), ninetieth, self.longest_line

    def too_long(self) -> bool:
        """Whether a figure is above its bound."""
        *_, median, ninetieth, columns = self.figures()
        return median > MEDIAN or ninetieth > NINETIETH or columns > COLUMNS


def table(paths: list[Path]) -> dict[str, Row]:
    """The rows by name: a page, or a kind of prose in a folder of code."""
    rows: dict[str, Row] = defaultdict(Row)
    for path in paths:
        text, name = path.read_text(), path.relative_to(ROOT)
        longest = max(map(len, text.splitlines()), default=0)
        if path.suffix == ".md":
            found = [(str(name), sentence) for sentence in of_markdown(text)]
        else:
            folder = "/".join(name.parts[:-1][:2]) or "."
            found = [(f"{folder}: {kind}", sentence) for kind, sentence in of_python(text)]
        for row, sentence in found:
            rows[row].sentences.append((name, sentence))
            rows[row].longest_line = max(rows[row].longest_line, longest)
    return rows


def main() -> int:
    """Prints the table, or the longest sentences; 1 if a figure is above its bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--longest", type=int, metavar="N", help="list the N longest sentences")
    parser.add_argument("paths", nargs="*", type=Path, help="files; default: all that git knows")
    arguments = parser.parse_args()
    rows = table([path.resolve() for path in arguments.paths] or files())
    if arguments.longest:
        every = [pair for row in rows.values() for pair in row.sentences]
        for name, sentence in sorted(every, key=lambda p: -p[1].words)[: arguments.longest]:
            print(f"{sentence.words:3} words  {name}:{sentence.line}: {sentence.text}")
        return 0
    print(f"{'':44} words sentences median  90th longest line")
    for name, row in sorted(rows.items()):
        words, count, median, ninetieth, columns = row.figures()
        remark = "  TOO LONG" if row.too_long() else ""
        print(f"{name:44} {words:5} {count:9} {median:6.1f} {ninetieth:5.1f} {columns:12}{remark}")
    lines = len((ROOT / "README.md").read_text().splitlines())
    print(f"README.md has {lines} lines, at most {README_LINES} are allowed")
    too_long = [name for name, row in rows.items() if row.too_long()]
    print(f"bounds: median {MEDIAN}, 90th percentile {NINETIETH} words, {COLUMNS} columns")
    print(f"{len(rows)} rows, {len(too_long)} too long")
    return int(bool(too_long) or lines > README_LINES)


if __name__ == "__main__":
    sys.exit(main())
