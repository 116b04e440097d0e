"""The text of one computation of the rewritten program, written line by line."""

from collections.abc import Iterable

from jaxfp8.programs._hlo import Instruction
from jaxfp8.programs._types import Array, array_type, spelled

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
        return array_type(self.source[name].type)

    def type_of(self, name: str) -> Array:
        """The type of an array that this writer has written."""
        return array_type(self._types[name])

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

        Args:
          type: the type of the result.
          opcode: the operation.
          *operands: names of the operands.
          inside: the text between the brackets, if it is not a list of operands.
          name: the name of the instruction; by default a new one.
          also: attributes.
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
        return x if type.dtype == dtype else self.emit(spelled(dtype, type.shape), "convert", x)

    def reshape(self, x: str, shape: tuple[int, ...]) -> str:
        type = self.type_of(x)
        return x if type.shape == shape else self.emit(spelled(type.dtype, shape), "reshape", x)

    def transpose(self, x: str, permutation: tuple[int, ...]) -> str:
        if permutation == tuple(range(len(permutation))):
            return x
        type = self.type_of(x)
        shape = tuple(type.shape[d] for d in permutation)
        also = [_dimensions(permutation)]
        return self.emit(spelled(type.dtype, shape), "transpose", x, also=also)

    def broadcast(self, x: str, shape: tuple[int, ...], dimensions: tuple[int, ...] = ()) -> str:
        type = self.type_of(x)
        if type.shape == shape:
            return x
        return self.emit(spelled(type.dtype, shape), "broadcast", x, also=[_dimensions(dimensions)])

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
