"""How long are the sentences? `python docs/words.py` prints a table. It exits with 1 above a bound.

A page (Markdown or a notebook) is a row. The docstrings, comments and errors of a folder are a row
each. `--longest N` lists the N longest sentences, `--longest N PATH...` those of some files.
"""

import argparse
import ast
import inspect
import io
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MEDIAN, NINETIETH, LONGEST, COLUMNS, README_LINES = 14, 25, 40, 100, 120  # first three: words
TITLE = 2  # a text of one or two words is a title, a label or a value: not a sentence
FEW = 5  # fewer sentences have no meaningful median, so they join the row of the folder above
PRAGMA = re.compile(r"#\s*(type:|noqa|fmt:|mypy:|!)")  # tools read it
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
END = re.compile(r"(?<=[.!?])[)\]\"'”’*_]*\s+")
ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|cf|vs|al|etc|Fig|Eq|Sec)|\.\.)\.$")
ITEM = re.compile(r"\s*(?:[-*+]|\d{1,2}[.)])\s+")
# Of Markdown: comments, fences, formulas on lines of their own, headings that are underlined.
BLOCKS = re.compile(
    r"(?sm)<!--.*?-->|^[ >]*(```+|~~~+).*?^[ >]*\1[^\n]*$|\$\$.*?\$\$|^[^\n|]+\n(?:==+|--+) *$"
)
# Rows of tables, headings, addresses of links. In a docstring a row has two wide gaps or more.
LINES = re.compile(r"\s*(?:\|.*\|\s*$|#{1,6}\s|\[[^]]+\]:\s+\S+$)|.*\S {3,}\S.*\S {2,}\S")
SECTION = re.compile(r"[A-Z]\w+:$")  # of a docstring
NAMED = ("Args:", "Attributes:", "Options:", "Raises:", "Warns:")  # sections of `name: text`
ENTRY = re.compile(r"  \**[\w.]+(?:, \**[\w.]+)*(?: \([^)]*\))?:\s+")
SAYS = re.compile(r"(?:Error|Warning|Exit|error|warn|exit|add_note)$")  # calls that take a message
Lines = list[tuple[int, str]]  # with their numbers; an empty one ends a paragraph
Sentence = tuple[int, Path, int, str]  # words, file, line (in a notebook: cell), text


def split(text: str) -> Iterator[str]:
    """The sentences of a paragraph. None ends inside of code or after an abbreviation."""
    begin, masked = 0, CODE.sub(lambda code: "x" * len(code[0]), text)
    for end in END.finditer(masked):
        if not ABBREVIATION.search(masked, 0, end.start()):
            yield text[begin : end.end()].strip()
            begin = end.end()
    yield text[begin:]


def sentences(path: Path, lines: Lines) -> Iterator[Sentence]:
    """The sentences of a text. A blank line and a list item end one. Code is one word."""
    paragraph: Lines = []
    for number, line in [*lines, (0, "")]:
        item = ITEM.match(line)
        if paragraph and (item or not line.strip()):
            text = " ".join(words.strip() for _, words in paragraph)
            for sentence in split(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)):
                words = CODE.sub(" code ", sentence).split()
                if (count := sum(any(map(str.isalnum, word)) for word in words)) > TITLE:
                    yield count, path, paragraph[0][0], sentence
            paragraph = []
        if line.strip():
            paragraph.append((number, line[item.end() :] if item else line))


def of_markdown(text: str) -> Lines:
    """Prose of a page: no fences, tables, headings and comments. A formula is one word."""
    text = BLOCKS.sub(lambda block: "\n" * block[0].count("\n"), text)
    text = re.sub(r"</?[a-z][^>`]*>", "", re.sub(r"\$[^$`\n]+\$", "`formula`", text))
    lines = enumerate((line.lstrip("> ") for line in text.splitlines()), 1)
    return [(number, "" if LINES.match(line) else line) for number, line in lines]


def of_docstring(first: int, text: str) -> Lines:
    """Prose of a docstring: no examples, displays, tables, names of sections and of entries."""
    kept, section, example, display, before = [], "", False, False, ""
    for number, line in enumerate(inspect.cleandoc(text).splitlines(), first):
        if line and not line.startswith(" "):
            section = line if SECTION.match(line) else ""
        example = line.lstrip().startswith(">>>") or (example and bool(line.strip()))
        # Four spaces after a blank line: a command or a formula, as in Markdown.
        display = line.startswith("    ") and not section and (display or not before.strip())
        before, left_out = line, example or display or line == section or LINES.match(line)
        if section in NAMED and (entry := ENTRY.match(line)):
            kept.append((number, ""))
            line = line[entry.end() :]
        kept.append((number, "" if left_out else line))
    return kept


def of_comments(source: str) -> Lines:
    """Prose of comments. Lines below each other are one text, unless code stands before them."""
    lines, before = [], (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not PRAGMA.match(token.string):
            number, column = token.start
            if before != (number - 1, column) or token.line[:column].strip():
                lines.append((number, ""))
            lines.append((number, token.string.lstrip("#: ")))
            before = number, column
    return lines


def text_of(node: ast.AST) -> str | None:
    """The text of a string, an f-string or a sum of them. A value in it is one word."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) or "value" for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            both = text_of(left), text_of(right)
            return "".join(text or "value" for text in both) if any(both) else None
    return None


def of_strings(node: ast.AST, says: bool = False) -> Iterator[tuple[str, Lines]]:
    """Docstrings and errors. An error is what is raised, or any text that ends as a sentence."""
    for child in ast.iter_child_nodes(node):
        if (text := text_of(child)) is None:
            called = isinstance(child, ast.Call) and SAYS.search(ast.unparse(child.func))
            yield from of_strings(child, says or isinstance(child, ast.Raise) or bool(called))
        elif isinstance(node, ast.Expr):
            yield "docstrings", of_docstring(child.lineno, text)
        elif says or re.search(r" \S*\w\.$", text):
            yield "errors", [(child.lineno, line) for line in text.splitlines()]


def texts_of(path: Path, text: str) -> Iterator[tuple[str, Lines]]:
    """The texts of a file, each with its kind. A page has no kind, and a notebook has cells."""
    if path.suffix == ".py":
        yield "comments", of_comments(text)
        yield from of_strings(ast.parse(text))
    elif path.suffix == ".md":
        yield "", of_markdown(text)
    else:
        for number, cell in enumerate(json.loads(text)["cells"], 1):
            if cell["cell_type"] == "markdown":
                yield "", [(number, line) for _, line in of_markdown("".join(cell["source"]))]


def columns_of(path: Path) -> int:
    """The longest line. A notebook has no lines: a paragraph is one."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return 0 if path.suffix == ".ipynb" else max(map(len, lines), default=0)


def rows_of(paths: list[Path]) -> dict[tuple[Path, str], list[Sentence]]:
    """Sentences by page, or by folder and kind. Small rows join that of the folder above."""
    rows = defaultdict(list)
    for path in paths:
        name = Path(os.path.relpath(path, ROOT))
        for kind, lines in texts_of(path, path.read_text(encoding="utf-8")):
            if found := list(sentences(name, lines)):
                rows[Path(*name.parts[:-1][:2]) if kind else name, kind] += found
    for depth in range(max((len(path.parts) for path, _ in rows), default=0), 0, -1):
        for path, kind in [key for key, row in rows.items() if len(row) < FEW]:
            if len(path.parts) == depth:
                rows[path.parent, kind or "pages"] += rows.pop((path, kind))
    return rows


def main() -> int:
    """Prints the table, or the longest sentences; 1 if a figure is above its bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--longest", type=int, metavar="N", help="list the N longest sentences")
    parser.add_argument("paths", nargs="*", type=Path, help="files; default: all that git knows")
    arguments = parser.parse_args()
    listed = ["git", "ls-files", "-co", "--exclude-standard"]
    if not (paths := [path.resolve() for path in arguments.paths]):
        known = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
        folders = (p for p in ROOT.iterdir() if p.name[0] != ".")  # an archive has no git
        found = (p for top in folders for p in ([top] if top.is_file() else top.rglob("*.*")))
        every = (ROOT / name for name in known) if known else found
        paths = [p for p in every if p.suffix in (".md", ".py", ".ipynb") and p.is_file()]
    rows, faults = rows_of(paths), []
    if arguments.longest:
        every = sorted((sentence for row in rows.values() for sentence in row), reverse=True)
        for count, path, line, text in every[: arguments.longest]:
            print(f"{count:3} words  {path}:{line}: {text}")
        return 0
    columns = {p: columns_of(p) for p in paths}
    print(f"{'':44} words sentences median  90th longest  line")
    for (path, kind), row in sorted(rows.items()):
        name, words = f"{path}: {kind}".removesuffix(": "), sorted(count for count, *_ in row)
        median, ninetieth = statistics.median(words), words[math.ceil(0.9 * len(words)) - 1]
        line = max(columns[(ROOT / page).resolve()] for _, page, *_ in row)
        figures = f"{len(words):9} {median:6} {ninetieth:5} {words[-1]:7} {line:5}"
        print(f"{name:44} {sum(words):5} {figures}")
        if median > MEDIAN or ninetieth > NINETIETH or words[-1] > LONGEST:
            faults.append(f"{name}: median {median}, 90th {ninetieth}, longest {words[-1]}")
    for path in paths:
        if columns[path] > COLUMNS:
            faults.append(f"{path}: a line of {columns[path]} columns")
        lines = path.read_text(encoding="utf-8").count("\n")
        if path == ROOT / "README.md" and lines > README_LINES:
            faults.append(f"{path}: {lines} lines, at most {README_LINES}")
    bounds = f"bounds {MEDIAN}, {NINETIETH} and {LONGEST} words, {COLUMNS} columns"
    print(f"{len(rows)} rows, {len(faults)} faults; {bounds}", *faults, sep="\n  ")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
