"""Find the functions and methods of a package that its users call, without importing it.

A face is an `__init__.py` that users import from. A room is a folder of the package.
"""

import ast
import re
from collections.abc import Iterator

from _source import Definition, Function, Source

METHODS = ("", "linen", "nnx")
"""Rooms with classes whose methods users call. Users only construct the classes of other rooms."""


def doors(source: Source) -> set[tuple[str, str]]:
    """Returns (file, name) of the functions and methods that a user reaches from the face.

    These functions and methods are called doors. The search starts at the face of the package, and
    follows its imports to other faces. Every function that a face names is a door. If the face is
    in METHODS, the public methods of its classes are doors too. So are special methods such as
    `__call__`, and the methods of bases in the package. Nested functions and fields of classes are
    not doors.
    """
    found = set()
    for room, name in _public(source, ""):
        path, _, node = resolve(source, file_of(source, _dotted(source, room)), name)
        if isinstance(node, ast.ClassDef) and room in METHODS:
            found |= set(_methods(source, path, node))
        elif isinstance(node, Function):
            found.add((f"{source.root.name}/{path}", name))
    return found


def _public(source: Source, room: str) -> Iterator[tuple[str, str]]:
    """Yields (room, name) of each name in the face of a room, and in the faces that it imports."""
    face = f"{room}/__init__.py" if room else "__init__.py"
    for module, name, public in imports_of(source.trees[face]):
        if public.startswith("_"):
            continue
        inside = "/".join([*module.split(".")[1:], name])
        if f"{inside}/__init__.py" in source.trees:
            yield from _public(source, inside)
        else:
            yield room, public


def imports_of(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yields (module, name there, name here) of each `from module import name`."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((node.module, each.name, each.asname or each.name) for each in node.names)


def _dotted(source: Source, room: str) -> str:
    return ".".join([source.root.name, *room.split("/")]) if room else source.root.name


def file_of(source: Source, module: str) -> str | None:
    """The file of a module of the package. None for a module of another package."""
    package, *parts = module.split(".")
    if package != source.root.name:
        return None
    inside = "/".join(parts)
    found = {f"{inside}.py", f"{inside}/__init__.py".removeprefix("/")} & {*source.trees}
    if not found:
        raise ValueError(
            f"module={module!r} is imported, but {package}/ has no file of that name. "
            "Import a module that exists."
        )
    return found.pop()


def resolve(source: Source, path: str | None, name: str) -> tuple[str, str, ast.stmt | None]:
    """The file, the name there, and the definition of a name. None for other objects.

    Only functions and classes have definitions here. The file is "" if it is of another package.
    """
    while path is not None:
        tree = source.trees[path]
        for node in tree.body:
            if isinstance(node, Definition) and node.name == name:
                return path, name, node
        origin = [(module, there) for module, there, here in imports_of(tree) if here == name]
        if not origin:
            return path, name, None
        module, name = origin[-1]
        path = file_of(source, module)
    return "", name, None


def _methods(source: Source, path: str, node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yields (file, name) of the public methods of a class, and of its bases in the package."""
    for each in node.body:
        is_special = isinstance(each, Function) and re.fullmatch(r"__\w+__", each.name)
        if isinstance(each, Function) and (is_special or not each.name.startswith("_")):
            yield f"{source.root.name}/{path}", f"{node.name}.{each.name}"
    for base in node.bases:
        if isinstance(base, ast.Name):
            where, _, parent = resolve(source, path, base.id)
            if isinstance(parent, ast.ClassDef):
                yield from _methods(source, where, parent)
