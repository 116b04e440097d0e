"""The types of a program's arrays: element type, logical shape, order of dimensions in memory."""

import math
import re
from typing import NamedTuple

_ARRAY = re.compile(r"(\w+)\[([^\]]*)\](?:\{([^{}]*)\})?$")
_LAYOUT = re.compile(r"(\])\{[^{}]*\}")
_WIDTH = re.compile(r"[a-z]+(\d+)")


class Array(NamedTuple):
    """The type of one array.

    Attributes:
      dtype: as the program prints it, `bf16`.
      shape: the logical shape.
      order: the dimensions in the order of memory, the slowest first.

    Example:
      >>> array_type("bf16[8,128]{0,1}")
      Array(dtype='bf16', shape=(8, 128), order=(1, 0))
      >>> array_type("bf16[8,128]{0,1}").physical_shape
      (128, 8)
    """

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def physical_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[d] for d in self.order)

    @property
    def bits(self) -> int:
        """The bits of one element. A boolean has 8."""
        found = _WIDTH.match(self.dtype)
        return int(found[1]) if found else 8

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def text(self) -> str:
        return spelled(self.dtype, self.shape)

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("f", "bf"))


def array_type(text: str) -> Array:
    """Reads the type of one array.

    Raises:
      ValueError: for tuples, tokens, unknown sizes, and layouts in tiles.
    """
    found = _ARRAY.match(text.strip())
    layout, _, memory = (found[3] or "").partition(":") if found else ("", "", "")
    if not found or "<" in found[2] or "?" in found[2] or "T(" in memory:
        raise ValueError(
            f"cannot run on a CPU: the type {text} is not an array of known size in a plain "
            "layout. Compile for a GPU, without dynamic shapes."
        )
    shape = tuple(int(size) for size in found[2].split(",") if size)
    order = tuple(int(d) for d in reversed(layout.split(",")) if d) or tuple(range(len(shape)))
    return Array(found[1], shape, order)


def spelled(dtype: str, shape: tuple[int, ...]) -> str:
    """The type in the syntax of a program's text, without a layout."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def without_layouts(type: str) -> str:
    """A type, or a tuple of types, with the default layout everywhere."""
    return _LAYOUT.sub(r"\1", type)


def parts_of(type: str) -> list[str]:
    """The types in a tuple, one level deep. For another type, the type itself.

    Example:
      >>> parts_of("(f32[2,3]{1,0}, (s8[4]{0}, token[]))")
      ['f32[2,3]{1,0}', '(s8[4]{0}, token[])']
    """
    return split(type.strip()[1:-1]) if type.strip().startswith("(") else [type.strip()]


def split(text: str) -> list[str]:
    """`text` split at the commas that no bracket and no string encloses."""
    found, depth, start, quoted, position = [], 0, 0, False, 0
    while position < len(text):
        char = text[position]
        if quoted:
            position += char == "\\"  # the next character is escaped: skip it
            quoted = char != '"'
        elif char == '"':
            quoted = True
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            found.append(text[start:position].strip())
            start = position + 1
        position += 1
    return [part for part in (*found, text[start:].strip()) if part]
