"""Nodes of pytrees, and how `jax.export` writes them into files.

`jax.export` serializes a program with the structures of its arguments and results. A node of such a
structure has arrays and static fields. The arrays are arguments of the program. The static fields
are written here, as JSON. Nothing in a file is executed: a name in it is looked up in `_VALUES`.

`register_node` registers a class with JAX and with `jax.export` at once, so that no node lacks the
second registration. `register_value` names a class that static fields hold.
"""

import base64
import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.export
import numpy as np

T = TypeVar("T")

STATIC = types.MappingProxyType({"static": True})
"""The `metadata=` of a field of a node that is no array."""

# Values of static fields.


class _Value(NamedTuple):
    """How the values of a class are written."""

    kind: type
    fields: tuple[str, ...]
    make: Callable[..., Any]  # makes a value from its fields, given by name


_VALUES: dict[str, _Value] = {}
_DTYPE, _TREEDEF = "dtype", "treedef"  # names of what is no registered class


def register_value(
    kind: type[T],
    *,
    name: str | None = None,
    fields: tuple[str, ...] | None = None,
    make: Callable[..., T] | None = None,
) -> type[T]:
    """Name a class of static values in files. Also a decorator of dataclasses and NamedTuples.

    Args:
      kind: the class.
      name: the name in files. It must never change, or older files cannot be read. Default: the
        name of the class.
      fields: the fields that are written; default: all arguments of the constructor.
      make: makes a value from these fields, given by name; default: the class.

    Returns:
      The class.

    Raises:
      ValueError: if another class has the name.
    """
    name = kind.__name__ if name is None else name
    known = _VALUES[name].kind if name in _VALUES else kind
    if name in (_DTYPE, _TREEDEF) or not _is_same(known, kind):
        raise ValueError(
            f"serialized_name={name!r} of {kind.__module__}.{kind.__qualname__} is taken. Choose "
            f"another name, for instance 'my_project.{kind.__name__}'."
        )
    _VALUES[name] = _Value(kind, _fields_of(kind) if fields is None else fields, make or kind)
    return kind


def _is_same(before: type, kind: type) -> bool:
    """Whether two classes are one, before and after its module is reloaded."""
    return (before.__module__, before.__qualname__) == (kind.__module__, kind.__qualname__)


def _fields_of(kind: Any) -> tuple[str, ...]:
    """The arguments of the constructor of a dataclass or a NamedTuple."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind) if field.init)
    return tuple(kind._fields)


def _plain(where: str, value: Any) -> Any:
    """A static value as JSON has it. TypeError if it has no such form."""
    # A subclass of str or int, such as an enum or NumPy's numbers, would come back as its base.
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, jax.tree_util.PyTreeDef):
        return {_TREEDEF: _treedef_as_text(value)}
    if type(value) is tuple:
        return [_plain(f"{where}[{i}]", each) for i, each in enumerate(value)]
    for name, known in _VALUES.items():
        if type(value) is known.kind:
            plain = {each: _plain(f"{where}.{each}", getattr(value, each)) for each in known.fields}
            _check_is_read(where, value, {name: plain})
            return {name: plain}
    # An array has a dtype, too, and `np.dtype` would take that.
    if isinstance(value, np.dtype | type) and (dtype := np.dtype(value)) != np.dtype(object):
        return {_DTYPE: _dtype_named(dtype.name).name}
    raise TypeError(
        f"{where}={value!r} is a {type(value).__name__}, which cannot be written into a file of "
        "jax.export. Static fields hold None, bool, int, float, str, dtypes, tuples of these, and "
        "the classes of jaxfp8. If it is a quantizer of yours, name it: "
        "fp8.quantizers.register_quantizer_serialization(Class, serialized_name='my_project.Class')"
        " in the programs that write and read the file."
    )


def _check_is_read(where: str, value: Any, plain: Any) -> None:
    """TypeError if JSON comes back as another value: a format of users with the name of ours."""
    try:
        found = _value(where, plain)
        problem = None if found == value else f"it would come back as {found!r}"
    except Exception as error:  # a constructor of users can raise anything
        problem = str(error)
    if problem is not None:
        raise TypeError(
            f"{where}={value!r} cannot be written into a file of jax.export: {problem}. Its class "
            "must take all its fields as arguments, of the types in its annotations, and compare "
            "by them. Use the formats of jaxfp8: fp8.E4M3, fp8.E5M2."
        )


def _value(where: str, plain: Any) -> Any:
    """The static value of what JSON has. ValueError, or what a constructor raises, for others."""
    if isinstance(plain, list):
        return tuple(_value(f"{where}[{i}]", each) for i, each in enumerate(plain))
    if not isinstance(plain, dict):
        return plain
    if len(plain) != 1:
        raise ValueError(f"{where} has the keys {list(plain)}, and needs one: the name of a class")
    ((name, inner),) = plain.items()
    if name == _DTYPE:
        return _dtype_named(inner)
    if name == _TREEDEF:
        return _treedef_of_text(inner)
    if name not in _VALUES:
        raise ValueError(
            f"{where} has the class {name!r}, which this program does not know. If it is a "
            "quantizer of yours, call fp8.quantizers.register_quantizer_serialization first"
        )
    known = _VALUES[name]
    read = _read_fields(where, inner, known.kind, known.fields)
    return known.make(**read)


def _read_fields(where: str, plain: Any, kind: type, names: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a class by name, checked by their annotations.

    A field that is missing gets its default. So a later version may add one.
    """
    if not isinstance(plain, dict) or not {*plain} <= {*names}:
        found = list(plain) if isinstance(plain, dict) else plain
        raise ValueError(f"{where} has the fields {found!r}; {kind.__name__} has {list(names)}")
    hints = _hints_of(kind)
    read = {name: _value(f"{where}.{name}", each) for name, each in plain.items()}
    for name, each in read.items():
        if not _fits(each, hints.get(name, Any)):
            raise ValueError(f"{where}.{name}={each!r} is no {hints[name]}")
    return read


def _hints_of(kind: type) -> dict[str, Any]:
    """The annotations of a class."""
    try:
        return typing.get_type_hints(kind)
    except NameError:  # a name that only type checkers import: nothing is checked
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has the type of an annotation. Of a generic type only tuples are checked."""
    if hint is Any:
        return True
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in inner)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if inner[1:] == (...,):
            return all(_fits(each, inner[0]) for each in value)
        return len(value) == len(inner) and all(map(_fits, value, inner))
    if hint is None:
        return value is None
    if hint is float:
        return type(value) in (float, int)
    if hint in (bool, int, str):  # a bool is an int in Python, and no number here
        return type(value) is hint
    return not isinstance(hint, type) or isinstance(value, hint)


def _dtype_named(name: Any) -> np.dtype[Any]:
    """The dtype with this name. ValueError for what is no name of one."""
    # NumPy would read other strings as records of several dtypes.
    dtype = np.dtype(name) if isinstance(name, str) and name.isidentifier() else None
    if dtype is None or dtype.name != name or dtype.hasobject or dtype.fields:
        raise ValueError(f"{name!r} is not the name of a dtype")
    return dtype


# The structure of a tree that a static field holds. `jax.export` has no public function that writes
# one alone. So it is written as the structure of the argument of a program that does nothing.


def _treedef_as_text(treedef: Any) -> str:
    leaf = jax.ShapeDtypeStruct((), np.float32)
    tree = jax.tree.unflatten(treedef, [leaf] * treedef.num_leaves)
    # The platform of no device, so that writing does not start one.
    exported = jax.export.export(jax.jit(_nothing), platforms=["cpu"])(tree)
    return base64.b64encode(exported.serialize()).decode()


def _treedef_of_text(text: Any) -> Any:
    exported = jax.export.deserialize(bytearray(base64.b64decode(text, validate=True)))
    in_tree: Any = exported.in_tree
    (treedef,) = in_tree.children()[0].children()
    return treedef


def _nothing(tree: Any) -> tuple[()]:
    del tree
    return ()


# Nodes.


class _Node(NamedTuple):
    """How the nodes of a class are written."""

    kind: type
    name: str  # in files
    arrays: tuple[str, ...]  # the fields with children
    static: tuple[str, ...]


NODES: dict[str, _Node] = {}
"""All nodes, by their names in files."""


def register_node(kind: type[T]) -> type[T]:
    """Make a class a node of pytrees that programs in files take and return. A decorator.

    The class is a dataclass, whose static fields have `metadata=STATIC`, or a NamedTuple of
    children. Its name in files is "jaxfp8." and the name of the class. Files need this name, and
    the names of the fields with children in their order: a change makes older files unreadable. A
    static field that is added needs a default.

    Example:
      >>> @register_node
      ... @dataclasses.dataclass(frozen=True)
      ... class Pair:
      ...     first: jax.Array
      ...     rank: int = dataclasses.field(default=1, metadata=STATIC)
      >>> jax.tree.map(lambda x: 2 * x, Pair(3))
      Pair(first=6, rank=1)
    """
    name = f"jaxfp8.{kind.__name__}"
    static: tuple[str, ...] = ()
    arrays = _fields_of(kind)
    if dataclasses.is_dataclass(kind):
        fields = {each.name: each for each in dataclasses.fields(kind)}
        static = tuple(each for each in arrays if fields[each].metadata.get("static"))
        arrays = tuple(each for each in arrays if each not in static)
        jax.tree_util.register_dataclass(kind, list(arrays), list(static))
    known = _Node(kind, name, arrays, static)
    # A module that is reloaded (`%autoreload` of IPython) registers its classes again, which
    # jax.export refuses. Programs in files then have the structure of the first class.
    if name in NODES and _is_same(NODES[name].kind, kind):
        return kind
    jax.export.register_pytree_node_serialization(
        kind,
        serialized_name=name,
        serialize_auxdata=functools.partial(_write, known),
        deserialize_auxdata=functools.partial(_read, known),
        from_children=functools.partial(_build, known),
    )
    NODES[name] = known
    return kind


def _write(known: _Node, static: tuple[Any, ...] | None) -> bytes:
    """The static fields of a node as bytes. JAX has them in the order of `known.static`."""
    plain = {
        name: _plain(f"{known.kind.__name__}.{name}", value)
        for name, value in zip(known.static, static or (), strict=True)
    }
    return json.dumps({"arrays": known.arrays, "static": plain}).encode()


def _read(known: _Node, text: bytes) -> tuple[Any, ...]:
    """What `_write` wrote."""
    name = known.kind.__name__
    try:
        plain = json.loads(text)
        if not isinstance(plain, dict) or {*plain} != {"arrays", "static"}:
            raise ValueError("it has other keys than 'arrays' and 'static'")
        if plain["arrays"] != list(known.arrays):
            raise ValueError(f"it has the arrays {plain['arrays']}, not {list(known.arrays)}")
        read = _read_fields(name, plain["static"], known.kind, known.static)
        fields: Any = dataclasses.fields(known.kind) if known.static else ()
        read = {each.name: each.default for each in fields if each.name in known.static} | read
        if missing := [each for each in read if read[each] is dataclasses.MISSING]:
            raise ValueError(f"it has no {missing}")
    # Bytes that are damaged can be anything, and so can what a constructor says about them.
    except Exception as error:
        shown = bytes(text[:200]) + (b"..." if len(text) > 200 else b"")
        raise ValueError(
            f"a program in a file has a {name} with static fields {shown!r}, which cannot be "
            f"read: {str(error)[:300]}. The file is damaged, or another version of jaxfp8 wrote "
            "it. Export the program again, or read the file by the version that wrote it."
        ) from error
    return tuple(read[each] for each in known.static)


def _build(known: _Node, static: tuple[Any, ...], children: Any) -> Any:
    """A node of this class. JAX only reads its structure."""
    fields = zip(known.arrays + known.static, (*children, *static), strict=True)
    return known.kind(**dict(fields))
