"""Figures of the source of a package, read without importing it."""

import ast
import dataclasses
import io
import statistics
import tokenize
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

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


def is_face(path: str) -> bool:
    """Whether users import from this file. A face holds only imports."""
    return Path(path).name == "__init__.py"


def is_text(node: ast.stmt) -> bool:
    """Whether a statement is a docstring. A string below a constant or a field is one, too."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def lines_of(nodes: Iterable[ast.AST]) -> set[int]:
    """The numbers of the lines of some statements."""
    return {line for node in nodes for line in range(node.lineno, node.end_lineno + 1)}


def lengths(source: Source) -> dict[str, Any]:
    """Files and lines of the package.

    A line of code is neither blank nor of a docstring, and has more than a comment. `comments` are
    the lines with a comment, also behind code. `imports` is the share of lines of code.
    """
    sizes: dict[str, int] = {}
    classes = 0
    kinds: Counter[str] = Counter()
    for path, tree in source.trees.items():
        text = (source.root / path).read_text()
        sizes[path] = len(text.splitlines())
        nodes = [*ast.walk(tree)]
        docstrings = lines_of(
            node for node in nodes if isinstance(node, ast.Expr) and is_text(node)
        )
        imports = lines_of(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))
        classes += sum(isinstance(node, ast.ClassDef) for node in nodes)
        code, comments = _tokens(text)
        kinds.update(code=len(code - docstrings), docstrings=len(docstrings))
        kinds.update(comments=len(comments), imports=len(imports))
    coded = {path: size for path, size in sizes.items() if not is_face(path)}
    longest = max(sizes, key=lambda path: sizes[path])
    return {
        "files": len(sizes),
        "files without faces": len(coded),
        "median": statistics.median(coded.values()),
        "longest": sizes[longest],
        "longest_file": f"{source.root.name}/{longest}",
        "lines": sum(sizes.values()),
        "classes": classes,
        **kinds,
        "share of imports": round(100 * kinds["imports"] / kinds["code"], 1),
    }


def private_imports(source: Source) -> list[str]:
    """What the package imports from private modules of others, or by a private name."""
    found: set[str] = set()
    for tree in source.trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    foreign = {name for name in found if name.split(".")[0] not in (source.root.name, "__future__")}
    return sorted(name for name in foreign if any(part[0] == "_" for part in name.split(".")))


def packed_kib(root: Path) -> float:
    """KiB of the package's files in a zip, as in a wheel. A wheel also has metadata and README."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(root.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                archive.write(path, path.relative_to(root.parent))
    return round(len(packed.getvalue()) / 1024, 1)


def _tokens(text: str) -> tuple[set[int], set[int]]:
    """The lines with code or strings, and the lines with a comment."""
    code: set[int] = set()
    comments: set[int] = set()
    blank = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in blank:
            code |= {*range(token.start[0], token.end[0] + 1)}
    return code, comments


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
