"""Types of arrays with their layouts, and where each element is in memory.

A layout has an order of dimensions, and on TPUs tiles, `{1,0:T(8,128)(2,1)S(1)}`. The first tile
cuts the last dimensions in memory into tiles, and pads the last tiles. A tile is contiguous, and
the next tile cuts it again. `S(1)` is a memory space, which does not change values.

References:
  XLA, docs/tiled_layout.md, xla/layout.cc (Layout::Print) and xla/shape_util.cc.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_ARRAY = re.compile(r"(\w+)\[([^\]]*)\](?:\{([^{}]*)\})?$")
_LAYOUT = re.compile(r"(\])\{[^{}]*\}")
_WIDTH = re.compile(r"[a-z]+(\d+)")
# What a layout says after its order. Other properties split an array or make it sparse.
_PROPERTIES = re.compile(r"(?:T(?P<tiles>(?:\(\d+(?:,\d+)*\))+))?(?:[LES]\(\d+\))*")

Shape = tuple[int, ...]


class Array(NamedTuple):
    """The type of one array.

    Attributes:
      dtype: as the program prints it, `bf16`.
      shape: the logical shape.
      order: the dimensions in the order of memory, the slowest first. For `{0,1}` it is (1, 0).
      tiles: the tiles of memory, `T(8,128)(2,1)`. Those of GPUs and CPUs are empty.
    """

    dtype: str
    shape: Shape
    order: Shape
    tiles: tuple[Shape, ...] = ()

    @property
    def bits(self) -> int:
        """The bits of one element. A boolean has 8."""
        found = _WIDTH.match(self.dtype)
        return int(found[1]) if found else 8

    @property
    def is_float(self) -> bool:
        """Whether elements are real floating-point numbers."""
        return self.dtype.startswith(("f", "bf"))

    @property
    def carrier(self) -> str:
        """The element type in which callbacks of jax get it. They take no FP8 and no 4 bits."""
        if self.bits < 8:
            return "f32"
        return f"u{self.bits}" if self.is_float and self.bits <= 16 else self.dtype


def read_array_type(text: str) -> Array:
    """Reads the type of one array.

    ValueError for tuples, tokens, unknown sizes, and layouts that are split or sparse.
    """
    found = _ARRAY.match(text.strip())
    layout, _, properties = (found[3] or "").partition(":") if found else ("", "", "")
    known = _PROPERTIES.fullmatch(properties)
    if not found or not known or "<" in found[2] or "?" in found[2]:
        raise ValueError(
            f"cannot run on a CPU: the type {text} is not an array of known size in a dense "
            "layout. Compile the function for one GPU or TPU, without dynamic shapes."
        )
    shape = tuple(int(size) for size in found[2].split(",") if size)
    order = tuple(int(d) for d in reversed(layout.split(",")) if d) or tuple(range(len(shape)))
    tiles = (known["tiles"] or "").strip("()").split(")(")
    return Array(found[1], shape, order, tuple(_sizes(tile) for tile in tiles if tile))


def _sizes(text: str) -> Shape:
    return tuple(map(int, text.split(",")))


def type_text(dtype: str, shape: Sequence[int]) -> str:
    """The type of an array as text, without a layout."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def strip_layouts(type: str) -> str:
    """A type, or a tuple of types, with the default layout everywhere."""
    return _LAYOUT.sub(r"\1", type)


# The way of an array to its order in memory, and back.


class Step(NamedTuple):
    """An operation that moves elements, or a reshape.

    Attributes:
      opcode: "transpose", "reshape", "pad" (at the ends, with zeros) or "slice" (from the starts).
      shape: the shape of the operand.
      result: the shape of the result.
      order: of a transpose, the dimension of the operand for each of the result.
    """

    opcode: str
    shape: Shape
    result: Shape
    order: Shape = ()

    @property
    def inverse(self) -> "Step":
        """The step back."""
        opcode = {"pad": "slice", "slice": "pad"}.get(self.opcode, self.opcode)
        order = tuple(map(int, np.argsort(self.order)))
        return Step(opcode, self.result, self.shape, order)

    @property
    def also(self) -> list[str]:
        """The attributes of the HLO instruction."""
        if self.opcode == "transpose":
            return [f"dimensions={{{','.join(map(str, self.order))}}}"]
        if self.opcode == "pad":
            ends = (f"0_{b - a}" for a, b in zip(self.shape, self.result, strict=True))
            return [f"padding={'x'.join(ends)}"]
        if self.opcode == "slice":
            return [f"slice={{{', '.join(f'[0:{size}]' for size in self.result)}}}"]
        return []


def to_memory(array: Array) -> list[Step]:
    """The steps from the logical array to its elements in the order of memory, in one dimension."""
    steps: list[Step] = []

    def reshape(result: Sequence[int], opcode: str = "reshape") -> None:
        shape = steps[-1].result if steps else array.shape
        if shape != tuple(result):
            steps.append(Step(opcode, shape, tuple(result)))

    def transpose(order: Sequence[int]) -> None:
        shape = steps[-1].result if steps else array.shape
        if tuple(order) != tuple(range(len(shape))):
            result = tuple(shape[d] for d in order)
            steps.append(Step("transpose", shape, result, tuple(order)))

    transpose(array.order)
    shape = [array.shape[d] for d in array.order]
    for tile in array.tiles:
        shape = [1] * (len(tile) - len(shape)) + shape
        reshape(shape)
        major, minor = shape[: -len(tile)], shape[-len(tile) :]
        counts = [-(-size // side) for size, side in zip(minor, tile, strict=True)]
        pairs = list(zip(counts, tile, strict=True))
        reshape(major + [count * side for count, side in pairs], "pad")
        # [.., count, side, count, side] to [.., count, count, side, side]
        reshape(major + [size for pair in pairs for size in pair])
        first, last = len(major), len(major) + 2 * len(tile)
        transpose([*range(first), *range(first, last, 2), *range(first + 1, last, 2)])
        shape = [*major, *counts, *tile]
    reshape([math.prod(shape)])
    return steps


def size_in_memory(array: Array) -> int:
    """The number of elements with the padding of tiles."""
    steps = to_memory(array)
    return math.prod(steps[-1].result if steps else array.shape)


def reads_padding(source: Array, result: Array) -> bool:
    """Whether an element of `result`, at the addresses of `source`, is in the padding of tiles."""
    if size_in_memory(source) == math.prod(source.shape):
        return False
    known: np.ndarray = np.ones(source.shape, bool)
    for step in to_memory(source):
        known = _in_numpy(step, known)
    # Of bits, because the elements may have another size.
    unit = math.gcd(source.bits, result.bits)
    known = np.repeat(known, source.bits // unit)
    known = np.all(known.reshape(-1, result.bits // unit), axis=1)
    for step in reversed(to_memory(result)):
        known = _in_numpy(step.inverse, known)
    return not np.all(known)


def _in_numpy(step: Step, x: np.ndarray) -> np.ndarray:
    if step.opcode == "transpose":
        return x.transpose(step.order)
    if step.opcode == "pad":
        return np.pad(x, [(0, b - a) for a, b in zip(step.shape, step.result, strict=True)])
    if step.opcode == "slice":
        return x[tuple(slice(size) for size in step.result)]
    return x.reshape(step.result)
