"""Draws faults at random from the sources of jaxfp8, as a table for `run.py`.

    python tests/mutations/draw.py --output drawn.toml
    python tests/mutations/run.py --table drawn.toml --results runs/drawn.json

Nobody has chosen these faults, so they measure the tests without a bias. The same sources and the
same seed give the same faults. Some of them are equivalent: they change no result. Each place in
the sources is drawn with the same probability, so a file gets faults by its number of places:

    operators     + and -, * and /, < and <=, > and >=, == and !=, `and` and `or`, min and max
    constants     a number n becomes n + 1, 2n or 0, and an axis becomes another one
    not           `not x` becomes `x`
    keywords      a keyword argument is left out
    results       an element of a returned tuple becomes a copy of another

Faults are drawn from the working tree. If it differs from HEAD, give `run.py` `--working-tree`.
Docstrings, annotations, f-strings, `raise` and `assert` statements, imports, `__all__` and blocks
for type checking have no faults.
"""

import argparse
import ast
import dataclasses
import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from fault_table import ROOT, Fault, Sources, places_of, planted, read_sources

SEED, NUMBER = 43, 30
SKIPPED_FILES = ("_version.py",)
SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)

BINARY = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*")}
COMPARED = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="),
}  # fmt: skip
LOGICAL = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
EXTREMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
AXES = ("axis", "axes", "scatter_dimension", "split_axis", "concat_axis")


@dataclasses.dataclass(frozen=True)
class Change:
    """A piece of a source, by its first and last byte, and what may replace it."""

    start: int
    stop: int
    choices: tuple[str, ...]


class File:
    def __init__(self, source: str) -> None:
        self.source = source.encode()  # ast counts bytes
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.tree = ast.parse(source)

    def start(self, node: ast.expr | ast.keyword) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def stop(self, node: ast.expr | ast.keyword) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr) -> str:
        return self.source[self.start(node) : self.stop(node)].decode()

    def changes(self) -> Iterator[Change]:
        yield from self._of(self.tree)

    def _of(self, node: ast.AST, is_axis: bool = False) -> Iterator[Change]:
        if isinstance(node, SKIPPED) or _is_left_out(node):
            return
        yield from self._here(node, is_axis)
        for name, field in ast.iter_fields(node):
            if name in ("annotation", "returns", "type_params"):
                continue
            axis = isinstance(node, ast.keyword) and node.arg in AXES
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.AST):
                    yield from self._of(child, axis or (is_axis and name in ("elts", "operand")))

    def _here(self, node: ast.AST, is_axis: bool) -> Iterator[Change]:
        match node:
            case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
                if not any(map(_is_text, (left, right))):
                    yield from self._between(left, right, *BINARY[type(op)])
            case ast.Compare(left=left, ops=ops, comparators=others):
                sides = [left, *others]
                for first, op, second in zip(sides, ops, others, strict=False):
                    if type(op) in COMPARED:
                        yield from self._between(first, second, *COMPARED[type(op)])
            case ast.BoolOp(op=op, values=values):
                for first, second in itertools.pairwise(values):
                    yield from self._between(first, second, *LOGICAL[type(op)])
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield Change(self.start(node), self.stop(node), (self.text(operand),))
            case ast.Constant(value=value) if type(value) in (int, float):
                yield Change(self.start(node), self.stop(node), _numbers(value, is_axis))
            case ast.Call(func=func, keywords=keywords):
                yield from self._of_call(func, keywords)
            case ast.Return(value=ast.Tuple(elts=elements)) if len(elements) > 1:
                for i, element in enumerate(elements):
                    other = self.text(elements[(i + 1) % len(elements)])
                    yield Change(self.start(element), self.stop(element), (other,))

    def _between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Change]:
        first, last = self.stop(left), self.start(right)
        between = self.source[first:last].decode()
        pattern = rf"\b{old}\b" if old.isalpha() else re.escape(old)
        found = list(re.finditer(pattern, between))
        if len(found) == 1 and between.isascii() and "#" not in between:
            yield Change(first + found[0].start(), first + found[0].end(), (new,))

    def _of_call(self, func: ast.expr, keywords: list[ast.keyword]) -> Iterator[Change]:
        name = getattr(func, "attr", getattr(func, "id", ""))
        if name in EXTREMES:
            stop = self.stop(func)
            yield Change(stop - len(name), stop, (EXTREMES[name],))
        for keyword in keywords:
            if keyword.arg in (None, "strict"):  # no result depends on the `strict` of a zip
                continue
            start, stop = self.start(keyword), self.stop(keyword)
            if after := re.match(rb"\s*,[ ]*", self.source[stop:]):
                stop += after.end()
            elif before := re.search(rb",\s*$", self.source[:start]):
                start = before.start()
            yield Change(start, stop, ("",))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _is_left_out(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True  # a docstring
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
        case ast.AnnAssign(annotation=ast.Name(id="TypeAlias")):
            return True
    return False


def _numbers(value: float, is_axis: bool) -> tuple[str, ...]:
    if is_axis:
        return ("1",) if value == 0 else ("0",)
    plain = dict.fromkeys(repr(new) for new in (value + 1, 2 * value, type(value)(0)))
    return tuple(text for text in plain if text != repr(value))


def grown(file: File, path: str, start: int, stop: int, sources: Sources) -> tuple[int, int]:
    """Whole lines around a piece of a file, as few as the package has only once."""
    ends = file.starts
    first = max(i for i, begin in enumerate(ends[:-1]) if begin <= start)
    last = min(i for i in range(first, len(ends) - 1) if ends[i + 1] >= stop)
    up = True
    while True:
        text = file.source[ends[first] : ends[last + 1]].decode().rstrip("\n")
        if places_of(text, sources) == {path: 1}:
            return ends[first], ends[first] + len(text.encode())
        if (up and first > 0) or last + 2 >= len(ends):
            first -= 1
        else:
            last += 1
        up = not up


def drawn(sources: Sources, seed: int, number: int) -> list[Fault]:
    """Faults of the package, in the order in which they are drawn."""
    draw = random.Random(seed)
    files = {path: File(text) for path, text in sources.items() if path not in SKIPPED_FILES}
    changes = [(path, change) for path, file in files.items() for change in file.changes()]
    draw.shuffle(changes)
    faults: list[Fault] = []
    for path, change in changes:
        new = draw.choice(change.choices)
        file = files[path]
        start, stop = grown(file, path, change.start, change.stop, sources)
        before, after = file.source[start : change.start], file.source[change.stop : stop]
        old = file.source[change.start : change.stop].decode()
        fault = Fault(
            id=f"drawn-{seed}-{len(faults) + 1:02}",
            file=path,
            text=file.source[start:stop].decode(),
            replacement=before.decode() + new + after.decode(),
            breaks=f"{' '.join(old.split())!r} becomes {new!r}.",
        )
        try:
            planted(fault, sources)
        except (SyntaxError, ValueError):
            continue  # another place is drawn for it
        faults.append(fault)
        if len(faults) == number:
            break
    return faults


def as_toml(faults: list[Fault], seed: int) -> str:
    lines = [f"# {len(faults)} faults that tests/mutations/draw.py drew with the seed {seed}."]
    for fault in faults:
        lines += ["", f"[{fault.id}]"]
        for field in ("file", "text", "replacement", "breaks"):
            # A string of JSON is one of TOML, too.
            lines.append(f"{field} = {json.dumps(getattr(fault, field), ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=SEED, help=f"default: {SEED}")
    parser.add_argument("--number", type=int, default=NUMBER, help=f"default: {NUMBER}")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    faults = drawn(read_sources(ROOT / "jaxfp8"), arguments.seed, arguments.number)
    arguments.output.write_text(as_toml(faults, arguments.seed), encoding="utf-8")
    print(f"{len(faults)} faults in {arguments.output}")


if __name__ == "__main__":
    main()
