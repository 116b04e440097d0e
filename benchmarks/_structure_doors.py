"""The functions and methods of a package that its users call, read without importing it."""

import ast
import re
from collections.abc import Iterator

from _structure_source import Definition, Function, Source

METHODS = ("", "linen", "nnx")
"""Faces whose classes are called by users. Other classes are public, but their methods are not."""


def doors(source: Source) -> set[tuple[str, str]]:
    """Returns (file, name) of the functions and methods that a user reaches from the face.

    A face is an `__init__.py`. The face of the package leads to the faces that it imports. A
    function of any of them is a door. A class that a face in METHODS names has doors, too: public
    methods and methods like `__call__`, also those of its bases in the package. Nested functions
    and the fields of classes are no doors.
    """
    found = set()
    for room, name in _public(source, ""):
        path, node = _resolve(source, _file(source, _dotted(source, room)), name)
        if isinstance(node, ast.ClassDef) and room in METHODS:
            found |= set(_methods(source, path, node))
        elif isinstance(node, Function):
            found.add((f"{source.root.name}/{path}", name))
    return found


def _public(source: Source, room: str) -> Iterator[tuple[str, str]]:
    """Yields (room, name) of what the face of a room names, or a face that it imports."""
    face = f"{room}/__init__.py" if room else "__init__.py"
    for module, name, public in _imports(source.trees[face]):
        if public.startswith("_"):
            continue
        inside = "/".join([*module.split(".")[1:], name])
        if f"{inside}/__init__.py" in source.trees:
            yield from _public(source, inside)
        else:
            yield room, public


def _imports(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yields (module, name there, name here) of each `from module import name`."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((node.module, each.name, each.asname or each.name) for each in node.names)


def _dotted(source: Source, room: str) -> str:
    return ".".join([source.root.name, *room.split("/")]) if room else source.root.name


def _file(source: Source, module: str) -> str | None:
    """The file of a module of the package; None for a module of another one."""
    package, *parts = module.split(".")
    if package != source.root.name:
        return None
    inside = "/".join(parts)
    found = {f"{inside}.py", f"{inside}/__init__.py".removeprefix("/")} & {*source.trees}
    if not found:
        raise ValueError(
            f"module={module!r} is imported, but {package}/ has no file of that name; "
            "write the import of a module that is there."
        )
    return found.pop()


def _resolve(source: Source, path: str | None, name: str) -> tuple[str, ast.stmt | None]:
    """The file and the definition of a name; None for what is no function or class."""
    while path is not None:
        tree = source.trees[path]
        for node in tree.body:
            if isinstance(node, Definition) and node.name == name:
                return path, node
        origin = [(module, there) for module, there, here in _imports(tree) if here == name]
        if not origin:
            return path, None
        module, name = origin[-1]
        path = _file(source, module)
    return "", None


def _methods(source: Source, path: str, node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yields (file, name) of the public methods of a class, and of its bases in the package."""
    for each in node.body:
        is_special = isinstance(each, Function) and re.fullmatch(r"__\w+__", each.name)
        if isinstance(each, Function) and (is_special or not each.name.startswith("_")):
            yield f"{source.root.name}/{path}", f"{node.name}.{each.name}"
    for base in node.bases:
        if isinstance(base, ast.Name):
            where, parent = _resolve(source, path, base.id)
            if isinstance(parent, ast.ClassDef):
                yield from _methods(source, where, parent)
