"""Who imports the names of private files, and whose docstrings there are.

A **public name** is on a face, or in a file whose name has no underscore. An **inner name** is a
name without an underscore at the top of a private file (`_*.py`), and on no face. So only jaxfp8
itself and its tests use it. A **private name** begins with an underscore.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from _doors import file_of, imports_of, resolve
from _source import Definition, Source, is_face, is_text

Owned = tuple[str, str]
"""A file of the package, and a name at its top."""


def faced(source: Source) -> set[Owned]:
    """The names on all faces, each with the file that defines it. Folders are left out."""
    modules = {_module(source, path) for path in source.trees}
    return {
        resolve(source, path, name)[:2]
        for path, tree in source.trees.items()
        if is_face(path)
        for module, there, name in imports_of(tree)
        if f"{module}.{there}" not in modules
    }


def inner_names(source: Source) -> dict[Owned, set[str]]:
    """For each inner name the files that import it, without its own file."""
    on_a_face, importers = faced(source), _importers(source)
    return {
        owned: importers[owned] - {path}
        for path, tree in source.trees.items()
        if _is_private(path)
        for owned in ((path, name) for node in tree.body for name in _names(node))
        if not owned[1].startswith("_") and owned not in on_a_face
    }


def docstring_lines(source: Source) -> dict[str, int]:
    """Lines of docstrings by owner: files, public names, inner names and private names.

    The docstring of a method belongs to its class. A private method of a public class is a private
    name.
    """
    on_a_face = faced(source)
    lines = dict.fromkeys(("files", "public names", "inner names", "_private names"), 0)
    for path, tree in source.trees.items():
        for owners, count in _texts(tree, ()):
            if not owners:
                lines["files"] += count
            elif (path, owners[0]) in on_a_face or not _is_private(path):
                hidden = any(each.startswith("_") and not each.endswith("__") for each in owners)
                lines["_private names" if hidden else "public names"] += count
            else:
                hidden = owners[0].startswith("_")
                lines["_private names" if hidden else "inner names"] += count
    return lines


def _is_private(path: str) -> bool:
    return Path(path).name.startswith("_") and not is_face(path)


def _names(node: ast.stmt) -> list[str]:
    """The names that a statement defines. An import defines none."""
    if isinstance(node, Definition):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    parts = (part for each in targets if each is not None for part in ast.walk(each))
    return [part.id for part in parts if isinstance(part, ast.Name)]


def _importers(source: Source) -> defaultdict[Owned, set[str]]:
    """For each name the files that refer to it."""
    found: defaultdict[Owned, set[str]] = defaultdict(set)
    modules = {_module(source, path) for path in source.trees}
    for path, tree in source.trees.items():
        for module, name in _references(tree, modules):
            where, there, _ = resolve(source, file_of(source, module), name)
            found[where, there].add(path)
    return found


def _references(tree: ast.Module, modules: set[str]) -> Iterator[tuple[str, str]]:
    """Yields (module, name) of each name of the package that a file refers to.

    There are three ways: `from module import name`, `module.name` of an imported module, and two
    strings in a call. The last one is how a kernel is named that is imported later. If a module is
    also a value (`room = module`), each `.name` in the file may be a name of that module.
    """
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in modules:
            for alias in node.names:
                if (whole := f"{node.module}.{alias.name}") in modules:
                    imported[alias.asname or alias.name] = whole
                else:
                    yield node.module, alias.name
        elif isinstance(node, ast.Call):
            texts = [each.value for each in node.args[:2] if isinstance(each, ast.Constant)]
            if len(texts) == 2 and texts[0] in modules:
                yield texts[0], texts[1]
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    owners = {id(node.value) for node in attributes}
    values = {
        imported[node.id]
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id in imported and id(node) not in owners
    }
    for node in attributes:
        if getattr(node.value, "id", None) in imported:
            yield imported[node.value.id], node.attr
        yield from ((module, node.attr) for module in values)


def _module(source: Source, path: str) -> str:
    dotted = path.removesuffix(".py").replace("/", ".")
    return f"{source.root.name}.{dotted}".removesuffix(".__init__")


def _texts(node: ast.AST, owners: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yields (owners, lines) of each docstring. Owners are names from the top of the file down."""
    above: list[str] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and is_text(child):
            named = owners or tuple(above[:1])  # a docstring below a constant of the file
            yield named, child.end_lineno - child.lineno + 1
        elif isinstance(child, Definition):
            yield from _texts(child, (*owners, child.name))
        else:
            yield from _texts(child, owners)
        above = _names(child) if isinstance(child, ast.Assign | ast.AnnAssign) else []
