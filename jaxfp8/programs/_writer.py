"""Writes the computations of the program that `run_on_cpu` runs, and its taps."""

from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfp8.programs._hlo import Array, Instruction, format_array_type, read_array_type, tensors_of

# The text of one computation of the rewritten program, written line by line.

# The only computation that is added to a program. `Writer.largest` calls it.
MAXIMUM = "rewritten.maximum"
MAXIMUM_TEXT = f"""%{MAXIMUM} {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %larger = f32[] maximum(%x, %y)
}}"""


class Writer:
    """The lines of one computation, and the types of their results.

    An instruction of the program keeps its name. Instructions that are added get new names.
    """

    def __init__(self, name: str, is_entry: bool, source: dict[str, Instruction]) -> None:
        self.source = source
        self._head = f"{'ENTRY ' if is_entry else ''}%{name} {{"
        self._lines: list[str] = []
        self._types: dict[str, str] = {}

    @property
    def text(self) -> str:
        return "\n".join([self._head, *self._lines, "}"])

    def source_type(self, name: str) -> Array:
        """The type of an instruction of the program, with its layout."""
        return read_array_type(self.source[name].type)

    def type_of(self, name: str) -> Array:
        """The type of an array that this writer has written."""
        return read_array_type(self._types[name])

    def emit(
        self,
        type: str,
        opcode: str,
        *operands: str,
        inside: str | None = None,
        name: str = "",
        also: Iterable[str] = (),
    ) -> str:
        """Writes `%name = type opcode(operands), attributes` and returns the name.

        `inside` is the text between the brackets, if it is not a list of operands. By default the
        name is a new one. `also` has the attributes.
        """
        name = name or f"rewritten.{len(self._lines)}"
        inside = ", ".join(f"%{operand}" for operand in operands) if inside is None else inside
        self._types[name] = type
        self._lines.append(f"  %{name} = {', '.join([f'{type} {opcode}({inside})', *also])}")
        return name

    def root(self, name: str) -> None:
        """Makes the instruction of that name the result of the computation."""
        (line,) = (line for line in self._lines if line.startswith(f"  %{name} ="))
        self._lines.remove(line)
        self._lines.append("  ROOT " + line.strip())

    # What several rules need.

    def constant(self, dtype: str, literal: str) -> str:
        return self.emit(f"{dtype}[]", "constant", inside=literal)

    def convert(self, x: str, dtype: str) -> str:
        type = self.type_of(x)
        return (
            x
            if type.dtype == dtype
            else self.emit(format_array_type(dtype, type.shape), "convert", x)
        )

    def reshape(self, x: str, shape: tuple[int, ...]) -> str:
        type = self.type_of(x)
        return (
            x
            if type.shape == shape
            else self.emit(format_array_type(type.dtype, shape), "reshape", x)
        )

    def transpose(self, x: str, permutation: tuple[int, ...]) -> str:
        if permutation == tuple(range(len(permutation))):
            return x
        type = self.type_of(x)
        shape = tuple(type.shape[d] for d in permutation)
        also = [_dimensions(permutation)]
        return self.emit(format_array_type(type.dtype, shape), "transpose", x, also=also)

    def broadcast(self, x: str, shape: tuple[int, ...], dimensions: tuple[int, ...] = ()) -> str:
        type = self.type_of(x)
        if type.shape == shape:
            return x
        return self.emit(
            format_array_type(type.dtype, shape), "broadcast", x, also=[_dimensions(dimensions)]
        )

    def elementwise(self, opcode: str, *operands: str, also: Iterable[str] = ()) -> str:
        """An operation on operands of one type, with a result of that type."""
        return self.emit(self.type_of(operands[0]).text, opcode, *operands, also=also)

    def largest(self, x: str) -> str:
        """The maximum of a float32 array, as a scalar. It is NaN if one element is NaN."""
        dimensions = _dimensions(tuple(range(len(self.type_of(x).shape))))
        start = self.constant("f32", "-inf")
        return self.emit("f32[]", "reduce", x, start, also=[dimensions, f"to_apply=%{MAXIMUM}"])

    def filled(self, type: Array, literal: str) -> str:
        return self.broadcast(self.constant(type.dtype, literal), type.shape)


def _dimensions(dimensions: tuple[int, ...]) -> str:
    return f"dimensions={{{','.join(map(str, dimensions))}}}"


# Taps, which pass the operands of a matmul to a function of the user each time that it runs.
#
# A tap is a call of jax's own callback target. It returns nothing and is marked as having a side
# effect. Without the mark, the compiler would remove it.
#
# References:
#     jax, jax/_src/callback.py (emit_python_callback) and XLA, xla/python/ifrt/host_callback.h.

_TARGET = "xla_ffi_python_cpu_callback"

# label, lhs, rhs, lhs_scale, rhs_scale
Seen = Callable[[str, np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None], Any]


class Taps:
    """The taps of one program.

    Attributes:
      callbacks: the functions that XLA calls. The program holds the index of each.
      error: the first error that `seen` raised. XLA would report only its text.
    """

    def __init__(self, seen: Seen | None) -> None:
        self._seen = seen
        self.callbacks: list[Callable[..., tuple[()]]] = []
        self.error: BaseException | None = None

    def show(
        self,
        writer: Writer,
        label: str,
        lhs: str,
        rhs: str,
        lhs_scale: str | None = None,
        rhs_scale: str | None = None,
    ) -> None:
        """Writes a call that passes these operands to `seen`."""
        if self._seen is None:
            return
        given = [lhs, rhs, lhs_scale, rhs_scale]
        dtypes = [None if x is None else writer.type_of(x).dtype for x in given]
        sent = [_as_bytes(writer, x) for x in given if x is not None]
        writer.emit(
            "()",
            "custom-call",
            *sent,
            also=[
                f'custom_call_target="{_TARGET}"',
                "custom_call_has_side_effect=true",
                "api_version=API_VERSION_TYPED_FFI",
                f"backend_config={{index = {len(self.callbacks)} : ui64}}",
            ],
        )
        self.callbacks.append(self._callback(label, dtypes))

    def _callback(self, label: str, dtypes: list[str | None]) -> Callable[..., tuple[()]]:
        def called(*arrays: Any) -> tuple[()]:
            given = iter(arrays)
            shown = [None if dtype is None else _as_array(next(given), dtype) for dtype in dtypes]
            try:
                if self.error is None and self._seen is not None:
                    self._seen(label, *shown)  # type: ignore[arg-type]
            except BaseException as error:  # `execute` raises it again in the caller
                self.error = error
            return ()

        return called


def _as_bytes(writer: Writer, x: str) -> str:
    """`x` in a type that callbacks accept. They accept neither FP8 nor 4-bit types."""
    type = writer.type_of(x)
    if type.bits < 8:
        return writer.convert(x, "f32")
    if not type.is_float or type.bits > 16:
        return x
    return writer.emit(format_array_type(f"u{type.bits}", type.shape), "bitcast-convert", x)


def _as_array(x: Any, dtype: str) -> np.ndarray:
    """A copy of `x` in its own dtype. XLA reuses the memory of `x` after the callback."""
    named = jnp.dtype(tensors_of(f"{dtype}[]")[0].dtype)
    array = np.array(x)
    return array.astype(named) if read_array_type(f"{dtype}[]").bits < 8 else array.view(named)
