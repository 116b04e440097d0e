"""Names: which parameter each tensor of a file is, and how its axes lie there.

A `Row` says it for one kind of tensor. A layout (`_layouts.py`) is a tuple of rows. `entries_of`
applies rows to the parameters of a model.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from jaxfp8._check import check_type
from jaxfp8._typing import Axes, PyTree
from jaxfp8.ops._quantize_params import path_name
from jaxfp8.state._saved import listed
from jaxfp8.state._state import is_state
from jaxfp8.weights._quantized_weight import is_weight

Kind: TypeAlias = Literal["linear", "router", "head", "embedding", "norm", "plain"]
Parallel: TypeAlias = Literal["columns", "rows"]

_LEAF = {
    "linear": "kernel", "router": "kernel", "head": "kernel", "embedding": "embedding",
    "norm": "scale",
}  # fmt: skip
"""What flax calls the parameter of a module that the file calls `weight`."""
LINEAR = ("linear", "router", "head")
"""Kinds whose matrix [out, in] is a kernel [in, out] in flax."""

_PLACEHOLDER, _BRACES = re.compile(r"\{([a-z_]\w*)\}"), re.compile(r"[{}]")

# Axes: from the order of a file to the order of a parameter.


@dataclasses.dataclass(frozen=True)
class AxisMap:
    """The axes of a tensor of a file, and those of the parameter.

    `"(heads features) in -> in heads features"` says that the file has a matrix whose rows are
    heads and their features, and that the parameter has three axes. Axes of the parameter that the
    file lacks are placeholders of the name: they stack tensors.

    Attributes:
      of_file: for each axis of the tensor, the names of the axes that are merged into it.
      of_parameter: the names of the axes of the parameter.
    """

    of_file: tuple[tuple[str, ...], ...]
    of_parameter: tuple[str, ...]

    @staticmethod
    def parse(text: str) -> "AxisMap":
        """The axes that a text names. ValueError if it is none."""
        left, arrow, right = text.partition("->")
        groups = re.findall(r"\(([\w ]+)\)|(\w+)", left)
        of_file = tuple(tuple((many or one).split()) for many, one in groups)
        rest = re.sub(r"\([\w ]+\)|\w+", "", left).strip()
        of_parameter = tuple(right.split())
        names = sum(of_file, ())
        words = all(re.fullmatch(r"\w+", name) for name in of_parameter)
        once = len(set(names)) == len(names) and len(set(of_parameter)) == len(of_parameter)
        if not arrow or rest or not words or not once or not set(names) <= set(of_parameter):
            raise ValueError(
                f"axes={text!r} must name the axes of the file, an arrow, and those of the "
                'parameter, each once: "(heads features) in -> in heads features".'
            )
        return AxisMap(of_file, of_parameter)

    def __str__(self) -> str:
        """The text that `parse` reads."""
        left = " ".join(f"({' '.join(group)})" for group in self.of_file)
        return f"{left} -> {' '.join(self.of_parameter)}"

    @property
    def stacked(self) -> tuple[str, ...]:
        """The axes that only the parameter has."""
        inside = sum(self.of_file, ())
        return tuple(name for name in self.of_parameter if name not in inside)

    def sizes(self, shape: Axes) -> dict[str, int]:
        return dict(zip(self.of_parameter, shape, strict=True))

    def file_shape(self, shape: Axes) -> Axes:
        """The shape of the tensor in the file, for a parameter of this shape."""
        sizes = self.sizes(shape)
        return tuple(math.prod(sizes[name] for name in group) for group in self.of_file)

    def step(self, shape: Axes) -> int:
        """How many rows of the file belong to one index of the parameter's axis."""
        sizes = self.sizes(shape)
        return math.prod(sizes[name] for name in self.of_file[0][1:]) if self.of_file else 1

    def region(self, shape: Axes, at: Mapping[str, int], rows: slice) -> tuple[slice, ...]:
        """The part of the parameter that rows of one tensor are. A scalar is one row."""
        step = self.step(shape)
        parts = {name: slice(i, i + 1) for name, i in at.items()}
        if self.of_file:
            parts[self.of_file[0][0]] = slice(rows.start // step, -(-rows.stop // step))
        whole = zip(self.of_parameter, shape, strict=True)
        return tuple(parts.get(name, slice(0, size)) for name, size in whole)

    def to_file(self, part: Any) -> Any:
        """A region [...] of the parameter, in the axes of the file."""
        sizes = self.sizes(part.shape)
        order = [self.of_parameter.index(name) for name in (*self.stacked, *sum(self.of_file, ()))]
        shape = tuple(math.prod(sizes[name] for name in group) for group in self.of_file)
        return part.transpose(order).reshape(shape)

    def from_file(self, tensor: Any, shape: Axes) -> Any:
        """Reverses `to_file` for a region of this shape."""
        sizes = self.sizes(shape)
        order = (*self.stacked, *sum(self.of_file, ()))
        tensor = tensor.reshape([sizes[name] for name in order])
        return tensor.transpose([order.index(name) for name in self.of_parameter])

    def without_input(self) -> "AxisMap":
        """The axes of the bias of a matrix with these axes."""
        first = self.of_file[:1]
        kept = (*self.stacked, *sum(first, ()))
        return AxisMap(first, tuple(name for name in self.of_parameter if name in kept))


# Row: one kind of tensor.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of tensor of a file, and the parameter that it is.

    Attributes:
      name: the name of the tensor in the file, with placeholders for numbers:
        "model.layers.{layer}.mlp.up_proj.weight".
      path: the path of the parameter, with "/" between keys: "layers/{layer}/mlp/up_proj/kernel".
        Default: the name with flax's word for the last key. A placeholder that is not in the path
        is an axis of the parameter, which stacks the tensors.
      axes: the axes of the tensor, an arrow, and the axes of the parameter, as in
        "(heads features) in -> in heads features". A placeholder that is an axis is on the right
        side, too: "out in -> layer in out". Default: "out in -> in out" for matrices of linear
        layers, otherwise the same axes on both sides. In the default, stacked axes come first.
      kind: "linear" (a format may write it in FP8), "router" or "head" (linear, but never in FP8),
        "embedding", "norm" or "plain".
      parallel: how a serving engine splits the matrix over devices: its "columns" (outputs), its
        "rows" (inputs), or None.
      merged: a name for the matrices that an engine merges into one: "qkv".

    Raises:
      TypeError, ValueError: for a field that is none of these.

    Example:
      >>> row = Row(name="blocks.{i}.up.weight", path="blocks/up/kernel", kind="linear")
      >>> row.axis_map(3)
      AxisMap(of_file=(('out',), ('in',)), of_parameter=('i', 'in', 'out'))
    """

    name: str
    path: str = ""
    axes: str = ""
    kind: Kind = "plain"
    parallel: Parallel | None = None
    merged: str | None = None

    def __post_init__(self) -> None:
        for field in ("name", "path", "axes"):
            check_type(field, getattr(self, field), str, "a string")
        for text in (self.name, self.path):
            if _BRACES.search(_PLACEHOLDER.sub("", text)) or {"in", "out"} & {*_placeholders(text)}:
                raise ValueError(
                    f"{text!r} has braces that are no placeholder. A placeholder is a word for a "
                    'number, such as {layer}, and not "in" or "out".'
                )
        if self.kind not in get_args(Kind) or self.parallel not in (None, *get_args(Parallel)):
            raise ValueError(
                f"kind={self.kind!r} must be one of {get_args(Kind)}, and parallel="
                f"{self.parallel!r} one of {get_args(Parallel)} or None."
            )
        if self.kind == "linear" and self.name.rpartition(".")[2] != "weight":
            raise ValueError(
                f"name={self.name!r} of a linear layer must end with .weight, because formats name "
                "the scale after it. Give it another kind."
            )
        if unknown := set(_placeholders(self.path)) - set(_placeholders(self.name)):
            raise ValueError(
                f"path={self.path!r} has placeholders {sorted(unknown)}, which name={self.name!r} "
                "lacks. Each tensor needs a name of its own."
            )
        if self.axes:
            stacked = set(AxisMap.parse(self.axes).stacked)
            if stacked != set(self.stacked):
                raise ValueError(
                    f"axes={self.axes!r} stacks {sorted(stacked)}, but the placeholders that are "
                    f"not in path={self.path!r} are {sorted(self.stacked)}. Name these after the "
                    "arrow."
                )

    @property
    def module(self) -> str:
        """The name of the module, without the last word."""
        return self.name.rpartition(".")[0]

    @property
    def found_at(self) -> str:
        """The path, or the default one."""
        return self.path or default_path(self.name, self.kind)

    @property
    def stacked(self) -> tuple[str, ...]:
        """The placeholders that are axes of the parameter."""
        return tuple(p for p in _placeholders(self.name) if p not in _placeholders(self.found_at))

    def axis_map(self, ndim: int) -> AxisMap:
        """The axes for a parameter of `ndim` axes. ValueError if it has another number."""
        if self.axes:
            found = AxisMap.parse(self.axes)
        elif self.kind in LINEAR:
            found = AxisMap((("out",), ("in",)), (*self.stacked, "in", "out"))
        else:
            own = tuple(f"axis_{i}" for i in range(ndim - len(self.stacked)))
            found = AxisMap(tuple((name,) for name in own), (*self.stacked, *own))
        if len(found.of_parameter) != ndim:
            raise ValueError(
                f"{self.found_at} has {ndim} axes, but the row of {self.name} says "
                f"{' '.join(found.of_parameter)!r}. Say in Row(axes=) how they lie, as in "
                '"(heads features) in -> in heads features".'
            )
        return found


def default_path(name: str, kind: Kind) -> str:
    """The path of the parameter in a flax model whose modules have the names of the file."""
    module, _, last = name.rpartition(".")
    if last == "weight":
        last = _LEAF.get(kind, last)
    return "/".join([*module.split("."), last] if module else [last])


def _placeholders(text: str) -> list[str]:
    return _PLACEHOLDER.findall(text)


def mirrored(parameters: Mapping[str, Any]) -> tuple[Row, ...]:
    """Rows for parameters of any model: names of files are paths with dots.

    The last words are those of Hugging Face: a kernel [in, out] is a `weight`, as are an embedding
    and a scale. `lm_head` is what loaders call a head, which they never have in FP8. Kernels with
    other axes keep their names, and a checkpoint without FP8 has them as they are.
    """
    rows = []
    for path, leaf in parameters.items():
        *module, last = path.split("/")
        kinds: dict[str, Kind] = {"kernel": "linear", "embedding": "embedding", "scale": "norm"}
        kind = kinds.get(last, "plain")
        if kind == "linear" and len(leaf.shape) != 2:
            kind = "plain"
        elif kind == "linear" and module[-1:] == ["lm_head"]:
            kind = "head"
        if _BRACES.search(path):
            raise ValueError(
                f"{path} has braces, which mark placeholders in names of tensors. Rename the key, "
                "or pass names=."
            )
        name = ".".join([*module, "weight" if kind != "plain" else last])
        rows.append(Row(name=name, path=path, kind=kind))
    return tuple(rows)


# Entries: rows, applied to the parameters of a model.


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor of a file and its place in a tree of parameters.

    Attributes:
      name: of the tensor.
      path: of the parameter.
      row: what both are.
      axes: how the axes of both lie.
      at: for each stacked axis, in their order, the index of this tensor.
      shape: of the parameter.
    """

    name: str
    path: str
    row: Row
    axes: AxisMap
    at: Mapping[str, int]
    shape: Axes

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def file_shape(self) -> Axes:
        return self.axes.file_shape(self.shape)

    def region(self, rows: slice) -> tuple[slice, ...]:
        """The part of the parameter that rows of the tensor are."""
        return self.axes.region(self.shape, self.at, rows)


def parameters_of(params: PyTree) -> dict[str, Any]:
    """The arrays and FP8 weights of a tree of parameters, or an nnx model, by path.

    Variables of nnx that are no `nnx.Param`, for instance quantizer state, are left out.
    """

    def is_end(node: Any) -> bool:
        return is_weight(node) or is_state(node) or isinstance(node, nnx.Variable)

    found: dict[str, Any] = {}
    variables: dict[int, str] = {}
    for path, node in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_end):
        name = path_name(path)
        if isinstance(node, nnx.Variable):
            if not isinstance(node, nnx.Param):
                continue
            # This path ends at the Variable. Its attribute of a module may be called `value`.
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            if (other := variables.setdefault(id(node), name)) != name:
                raise ValueError(
                    f"{other} and {name} are one Variable. Its two copies would differ after the "
                    "next step. Pass nnx.state(model, nnx.Param), which has it once, and update "
                    "the model: nnx.update(model, loaded)."
                )
            node = node.get_value()
        if not hasattr(node, "shape") or jnp.issubdtype(node.dtype, jax.dtypes.extended):
            shown = "quantizer state" if is_state(node) else repr(node)
            raise TypeError(
                f"{name} is {shown[:200]}, but params must hold arrays and weights in FP8. Pass "
                "the parameters only, variables['params'] of a linen model."
            )
        if name in found:
            raise ValueError(f"two parameters have the path {name}. Rename one of their keys.")
        found[name] = node
    if not found:
        raise ValueError("params holds no parameter. Pass variables['params'], or an nnx model.")
    return found


def entries_of(rows: Sequence[Row], parameters: Mapping[str, Any]) -> list[Entry]:
    """The tensors of a file that hold these parameters, in the order of the parameters.

    Raises:
      ValueError: if a parameter has no row or several, or if two tensors have one name.
    """
    patterns = [(row, _pattern(row.found_at)) for row in rows]
    missing: list[str] = []
    entries: dict[str, Entry] = {}
    for path, leaf in parameters.items():
        matches = [(row, m) for row, pattern in patterns if (m := pattern.fullmatch(path))]
        if not matches:
            missing.append(f"  {path} {list(leaf.shape)}")
            continue
        if len(matches) > 1:
            raise ValueError(
                f"{path} is the parameter of {[row.name for row, _ in matches]}. Only one row may "
                "have its path."
            )
        ((row, match),) = matches
        for entry in _entries(row, path, tuple(leaf.shape), match.groupdict()):
            if (other := entries.setdefault(entry.name, entry)) is not entry:
                raise ValueError(
                    f"{other.path} and {path} are both the tensor {entry.name}. Give each row a "
                    "placeholder for what tells them apart."
                )
    if missing:
        paths = [row.found_at for row in rows]
        near = difflib.get_close_matches(missing[0], paths, n=3, cutoff=0)
        raise ValueError(
            f"no row of names= has the path of these parameters:\n{listed(missing)}\n"
            f"The paths of rows that are nearest to the first one are {near}. Name the modules of "
            "your model in fp8.checkpoint.names(layout, {...}), or write rows of your own. Pass "
            "the parameters only, variables['params'] of a linen model."
        )
    return list(entries.values())


def _entries(row: Row, path: str, shape: Axes, known: dict[str, str]) -> Iterator[Entry]:
    """The tensors of one parameter: several if it stacks them."""
    axes = row.axis_map(len(shape))
    sizes = axes.sizes(shape)
    count = math.prod(sizes[name] for name in axes.stacked)
    for i in range(count):
        at = dict.fromkeys(axes.stacked, 0)  # in the order of the axes
        for name in reversed(axes.stacked):
            i, at[name] = divmod(i, sizes[name])
        yield Entry(row.name.format(**known, **at), path, row, axes, at, shape)


def _pattern(path: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", path)
    text = "".join(
        rf"(?P<{part}>\d+)" if i % 2 else re.escape(part) for i, part in enumerate(parts)
    )
    return re.compile(text)
