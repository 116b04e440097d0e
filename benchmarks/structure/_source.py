"""Figures of the source of a package, read without importing it."""

import ast
import dataclasses
import io
import re
import statistics
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COLUMNS = 100
"""The most characters of a line. A longer line is counted as a long line."""
PARAMETERS = 8
"""The goal: an inner function has at most so many parameters."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A package. `root` is its folder. `trees` has the tree of each file by its path in `root`."""

    root: Path
    trees: dict[str, ast.Module]


def read(root: Path) -> Source:
    """Parse every file of the package in `root`.

    Raises:
      ValueError: if the folder is not a package.
    """
    if not (root / "__init__.py").is_file():
        raise ValueError(f"root={str(root)!r} has no __init__.py; pass the folder of a package.")
    paths = sorted(root.rglob("*.py"))
    trees = {path.relative_to(root).as_posix(): ast.parse(path.read_text()) for path in paths}
    return Source(root=root, trees=trees)


def functions(source: Source) -> Iterator[dict[str, Any]]:
    """Yields a row for each function: its qualified name, its file, its line and its parameters.

    A row counts positional and keyword parameters. It does not count `self`, `cls`, `*args` and
    `**kwargs`. Nested functions have rows. Lambdas and `@overload`s have none. `@triton.jit`
    functions have none, because a launch of Triton takes flat arguments.
    """
    for path, tree in source.trees.items():
        for name, node, is_method in _defined(tree, "", in_class=False):
            yield {
                "function": name,
                "file": f"{source.root.name}/{path}",
                "line": node.lineno,
                "parameters": _parameters(node, is_method),
            }


def questions(source: Source, outside: str) -> list[dict[str, Any]]:
    """Lists the lines with `isinstance(x, PerX)` or `case PerX()` out of the folder `outside`."""
    lines = {
        (path, node.lineno)
        for path, tree in source.trees.items()
        if not path.startswith(f"{outside}/")
        for node in ast.walk(tree)
        if any(re.fullmatch(r"Per[A-Z]\w*", name) for name in _asked(node))
    }
    return [{"file": f"{source.root.name}/{path}", "line": line} for path, line in sorted(lines)]


def long_lines(folder: Path) -> list[dict[str, Any]]:
    """Lists the lines of Python files in the folder that are longer than COLUMNS characters."""
    return [
        {"file": path.relative_to(folder.parent).as_posix(), "line": number}
        for path in sorted(folder.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if len(line) > COLUMNS
    ]


def lengths(source: Source) -> dict[str, Any]:
    """The number of files, their lengths in lines, and the share of lines with a comment.

    The median is that of files with code: an `__init__.py` only imports.
    """
    texts = {path: (source.root / path).read_text() for path in source.trees}
    lines = {path: len(text.splitlines()) for path, text in texts.items()}
    longest = max(lines, key=lambda path: lines[path])
    comments = sum(_comments(text) for text in texts.values())
    coded = [count for path, count in lines.items() if Path(path).name != "__init__.py"]
    return {
        "files": len(lines),
        "lines": sum(lines.values()),
        "median": statistics.median(coded),
        "longest": lines[longest],
        "longest_file": f"{source.root.name}/{longest}",
        "comments": round(100 * comments / sum(lines.values()), 1),
    }


def _comments(text: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def _defined(tree: ast.AST, around: str, in_class: bool) -> Iterator[tuple[str, Function, bool]]:
    """Yields (name, function, whether it is a method), however deep it is nested."""
    for node in ast.iter_child_nodes(tree):
        name = f"{around}{node.name}" if isinstance(node, Definition) else ""
        if isinstance(node, Function):
            if not (_decorated(node, "overload") or _is_device_code(node)):
                yield name, node, in_class
            yield from _defined(node, f"{name}.", in_class=False)
        elif isinstance(node, ast.ClassDef):
            yield from _defined(node, f"{name}.", in_class=True)
        else:
            yield from _defined(node, around, in_class)


def _parameters(node: Function, is_method: bool) -> int:
    given = node.args
    positional = len(given.posonlyargs) + len(given.args)
    has_self = is_method and positional > 0 and not _decorated(node, "staticmethod")
    return positional + len(given.kwonlyargs) - has_self


def _decorated(node: Function, name: str) -> bool:
    names = [getattr(each, "id", getattr(each, "attr", None)) for each in node.decorator_list]
    return name in names


def _is_device_code(node: Function) -> bool:
    return any(ast.unparse(each) == "triton.jit" for each in node.decorator_list)


def _asked(node: ast.AST) -> Iterator[str]:
    """Yields the names of the classes that an expression or a pattern asks about."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "isinstance":
        asked = node.args[1:]
    elif isinstance(node, ast.MatchClass):
        asked = [node.cls]
    else:
        return
    for part in (part for each in asked for part in ast.walk(each)):
        if isinstance(part, ast.Name | ast.Attribute):
            yield part.id if isinstance(part, ast.Name) else part.attr
