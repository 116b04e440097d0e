"""Reads the text of a compiled program (HLO), and the types of its arrays.

A program is a list of computations, which call each other. Examples are fusions, loop bodies,
branches and async wrappers. A function that counts instructions must begin at the entry and follow
the calls. Then each instruction counts as often as the program runs it.

References:
  XLA's printer, xla/hlo/ir/hlo_instruction.cc (HloInstruction::PrintWithCanonicalNameMap) and
  xla/shape_util.cc.
"""

import itertools
import math
import re
from typing import Any, NamedTuple

import jax

# The text: computations, their instructions and calls.

_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{$")
_LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)")
_OPCODE = re.compile(r"[\w\-]+")
_COMMENT = re.compile(r"/\*.*?\*/")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_STRING_OR_BORDER = re.compile(rf"{_STRING.pattern}|[()\[\]{{}},]")
_REFERENCE = re.compile(r"\b(\w+)=(\{[^{}]*\}|%?[\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"?(\d+)')

# A tensor type as printed, dtype[shape]{layout}. Tokens and opaque values do not match. E(4) in a
# layout says that elements are packed, with 4 bits each.
_TENSOR = re.compile(r"\b(pred|(bf|f|s|u|c)(\d+)(e\w+)?)\[([^\]]*)\](\{[^}]*\})?")
_PACKED = re.compile(r"E\((\d+)\)")
# Layouts of TPUs have tiles, as in {1,0:T(8,128)(2,1)S(1)}: the axes from minor to major, the tile
# of the most minor axes, tiles inside of it, and the memory.
_TILED = re.compile(r"\{([\d,]*):T\(([\d,]+)\)")
_MEMORY = re.compile(r"S\((\d+)\)")
_KINDS_OF_NUMBERS = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}

# The attributes that name computations. A conditional runs one of its BRANCHES. An instruction runs
# its CALLS once; reducers are among them.
BRANCHES = ("branch_computations", "true_computation", "false_computation")
CALLS = ("calls", "called_computations", "to_apply")


class Tensor(NamedTuple):
    """The type of an array in a program.

    Attributes:
      dtype: as jax names it, `float8_e4m3fn`.
      shape: [...]. A size that the program does not know is replaced by its upper bound.
      bytes: the size of all elements. Two 4-bit elements share a byte if the layout packs them.
      allocated: the bytes of its buffer in the memory of the device. A TPU pads each array to whole
        tiles. An array in the memories inside of a TPU (VMEM, SMEM), or in that of the host, takes
        none.
    """

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    allocated: int


def tensors_of(type: str) -> tuple[Tensor, ...]:
    """The arrays in a type as the program prints it. Those in tuples are included."""
    found = []
    for name, kind, bits, encoding, sizes, layout in _TENSOR.findall(type):
        dtype = (
            "bool"
            if name == "pred"
            else _KINDS_OF_NUMBERS[kind] + bits + (f"_{encoding}" if encoding else "")
        )
        shape = tuple(
            int(size.strip().removeprefix("<=")) for size in sizes.split(",") if size.strip()
        )
        packed = _PACKED.search(layout)
        element_bits = int(packed[1]) if packed else 8 * math.ceil(int(bits or 1) / 8)
        size = math.ceil(math.prod(shape) * element_bits / 8)
        allocated = math.ceil(_elements_allocated(shape, layout) * element_bits / 8)
        found.append(Tensor(dtype, shape, size, allocated))
    return tuple(found)


def _elements_allocated(shape: tuple[int, ...], layout: str) -> int:
    """The elements of an array in the memory of the device, with those that a TPU pads."""
    tiled = _TILED.match(layout)
    if tiled is None:
        return math.prod(shape)
    # On GPUs other numbers than 0 are the memory of the device, too. Their layouts have no tiles.
    memory = _MEMORY.search(layout)
    if memory and memory[1] != "0":
        return 0
    minor_first = [shape[int(axis)] for axis in tiled[1].split(",") if axis]
    tile = [int(size) for size in reversed(tiled[2].split(","))]
    return math.prod(
        math.ceil(size / side) * side
        for size, side in itertools.zip_longest(minor_first, tile, fillvalue=1)
    )


class Instruction(NamedTuple):
    """One line of a computation, `%name = type opcode(operands), attributes`."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    # The text between the brackets of the opcode: a constant's literal, a parameter's number.
    inside: str = ""
    is_root: bool = False

    @property
    def is_second_half(self) -> bool:
        """Whether this ends or continues what an asynchronous `-start` began."""
        return self.opcode.endswith(("-done", "-update"))

    @property
    def op_name(self) -> str | None:
        """The jax operation that the instruction came from, if XLA names it."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else None

    @property
    def label(self) -> str:
        """The jax operation that the instruction came from, or its own name."""
        return self.name if self.op_name is None else self.op_name

    @property
    def call_target(self) -> str:
        """The target of a custom call; "" for other instructions."""
        found = _TARGET.search(self.attributes)
        return found[1] if found else ""

    def computations(self, *roles: str) -> tuple[str, ...]:
        """The names of the computations in these attributes, for example `computations("body")`."""
        # Strings are removed first. They may hold the source of a kernel, with any text in it.
        references = _REFERENCE.findall(_STRING.sub('""', self.attributes))
        return tuple(
            name.strip(" %")
            for role, names in references
            if role in roles
            for name in names.strip("{}").split(",")
        )


class Program(NamedTuple):
    """A compiled program: `computations[computation][instruction]`, both by name.

    Attributes:
      entry: the name of the computation that runs.
      computations: in the order of the text.
      replicas: how many times the program runs in parallel.
      partitions: how many devices each replica runs on.
    """

    entry: str
    computations: dict[str, dict[str, Instruction]]
    replicas: int
    partitions: int

    def trip_count(self, loop: Instruction, computation: dict[str, Instruction]) -> int | None:
        """How often a loop of this computation runs; None if the program does not know.

        Programs for CPUs and GPUs say it. In programs for TPUs the counter of the loop is read.
        """
        if found := _TRIP_COUNT.search(loop.attributes):
            return int(found[1])
        (condition,) = (self.computations.get(n, {}) for n in loop.computations("condition"))
        (body,) = (self.computations.get(n, {}) for n in loop.computations("body"))
        test, carried = _root(condition), _root(body)
        before = computation.get(loop.operands[0])
        # The loop goes on while its counter, an element of the carried tuple, is less than a bound.
        if not (test and carried and before) or "direction=LT" not in test.attributes:
            return None
        if (carried.opcode, before.opcode) != ("tuple", "tuple") or test.opcode != "compare":
            return None
        index = _index_of_element(test.operands[0], condition)
        if index is None:
            return None
        step = _step(carried.operands[index], index, body)
        start = _constant(before.operands[index], computation)
        bound = _constant(test.operands[1], condition)
        if start is None or bound is None or not step:
            return None
        return max(0, math.ceil((bound - start) / step))


# The counter of a loop.

# These pass an integer on.
_SAME_NUMBER = ("copy", "bitcast", "copy-start", "copy-done")
_INDEX = re.compile(r"\bindex=(\d+)")


def _root(computation: dict[str, Instruction]) -> Instruction | None:
    return next((each for each in computation.values() if each.is_root), None)


def _index_of_element(name: str, computation: dict[str, Instruction]) -> int | None:
    """Which element of a computation's parameter this is; None for anything else."""
    element = _source(name, computation)
    if element is None or element.opcode != "get-tuple-element":
        return None
    index = _INDEX.search(element.attributes)
    of = computation.get(element.operands[0])
    return int(index[1]) if index and of and of.opcode == "parameter" else None


def _step(name: str, index: int, body: dict[str, Instruction]) -> int | None:
    """What is added to an element of the body's parameter. None unless a constant above 0."""
    total = _source(name, body)
    if total is None or total.opcode != "add":
        return None
    for one, other in (total.operands, total.operands[::-1]):
        step = _constant(other, body)
        if _index_of_element(one, body) == index and step and step > 0:
            return step
    return None


def _constant(name: str, computation: dict[str, Instruction]) -> int | None:
    source = _source(name, computation)
    if source is None or source.opcode != "constant":
        return None
    return int(source.inside) if re.fullmatch(r"-?\d+", source.inside) else None


def _source(name: str, computation: dict[str, Instruction]) -> Instruction | None:
    """The instruction that made a number, without its copies."""
    found = computation.get(name)
    while found is not None and found.opcode in _SAME_NUMBER:
        found = computation.get(found.operands[0])
    return found


# The text becomes a `Program`.


def check_compiled(compiled: object) -> None:
    """Raise TypeError unless it is a compiled program or its text."""
    if not isinstance(compiled, str | jax.stages.Compiled):
        raise TypeError(
            f"compiled is of type {type(compiled).__name__}. Pass jax.jit(f).lower(...).compile(), "
            "or its as_text()."
        )


def read_program(compiled: Any) -> Program:
    """Reads what `jax.jit(f).lower(...).compile()` returns, or its `as_text()`.

    TypeError for anything else. ValueError if the program has no text, or if the text holds several
    programs.
    """
    check_compiled(compiled)
    text = (compiled if isinstance(compiled, str) else compiled.as_text()) or ""
    computations: dict[str, dict[str, Instruction]] = {}
    entries: list[str] = []
    current: dict[str, Instruction] | None = None
    for line in text.splitlines():
        if head := _HEAD.match(line.rstrip()):
            current = computations[head[2]] = {}
            entries += [head[2]] if head[1] else []
        elif current is not None and (found := _LINE.match(line)):
            current[found[2]] = _instruction(found[2], found[3], found[1] is not None)
    if len(entries) != 1:
        raise ValueError(
            f"compiled holds {len(entries)} ENTRY computations, but a program has one. Pass what "
            "jax.jit(f).lower(...).compile() returns, or its as_text()."
        )
    return Program(
        entries[0], computations, _count("replica_count", text), _count("num_partitions", text)
    )


def _count(name: str, text: str) -> int:
    found = re.search(rf"^HloModule .*\b{name}=(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 1


def _instruction(name: str, rest: str, is_root: bool) -> Instruction:
    rest = _COMMENT.sub("", rest).strip()
    end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ")
    type, rest = rest[:end], rest[end:].strip()
    opcode = _OPCODE.match(rest)
    if end < 0 or opcode is None or not rest[opcode.end() :].startswith("("):
        raise ValueError(
            f"cannot read the instruction {name} = {type} {rest[:80]}. It has no opcode(operands) "
            "after the type. Pass the text as XLA prints it."
        )
    end = _closing(rest, opcode.end())
    inside = rest[opcode.end() + 1 : end - 1]
    operands = re.findall(r"%([\w.\-]+)", inside) or [
        operand.strip() for operand in inside.split(",")
    ]
    return Instruction(
        name, type, opcode[0], tuple(filter(None, operands)), rest[end:], inside, is_root
    )


def _closing(text: str, start: int) -> int:
    """The position after the bracket that closes the one at `start`, or the end of the text."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == "(") - (text[position] == ")")
        if depth == 0:
            return position + 1
    return len(text)


def tuple_types(type: str) -> list[str]:
    """The types in a tuple, one level deep. For another type, the type itself.

    Example:
      >>> tuple_types("(f32[2,3]{1,0}, (s8[4]{0}, token[]))")
      ['f32[2,3]{1,0}', '(s8[4]{0}, token[])']
    """
    return split_at_commas(type.strip()[1:-1]) if type.strip().startswith("(") else [type.strip()]


def split_at_commas(text: str) -> list[str]:
    """`text` split at the commas that no bracket and no string encloses."""
    found, depth, start = [], 0, 0
    for token in _STRING_OR_BORDER.finditer(text):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if token[0] == "," and depth == 0:
            found.append(text[start : token.start()].strip())
            start = token.end()
    return [part for part in (*found, text[start:].strip()) if part]
