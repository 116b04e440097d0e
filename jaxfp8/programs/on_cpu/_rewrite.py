"""The text of an optimized GPU program, rewritten into HLO that every backend of XLA accepts.

Layouts are removed. Without them HLO means the same, except for `bitcast`, which becomes other
operations. Fusions become calls. Matmuls become calls of Python. Every other operation and
conversion does not change.

References:
  XLA, xla/hlo/ir/hlo_opcode.h (all opcodes) and xla/hlo/parser/hlo_parser.cc (what the text says).
  jax, jax/_src/callback.py (emit_python_callback) and XLA, xla/python/ifrt/host_callback.h.
"""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxfp8.programs._hlo import (
    BRANCHES,
    CALLS,
    Instruction,
    Program,
    read_program,
    split_at_commas,
    tensors_of,
    tuple_types,
)
from jaxfp8.programs.on_cpu._matmuls import MATMULS, Matmuls, matmul_name

# Types of arrays: element type, logical shape, order of dimensions in memory.

_ARRAY = re.compile(r"(\w+)\[([^\]]*)\](?:\{([^{}]*)\})?$")
_LAYOUT = re.compile(r"(\])\{[^{}]*\}")
_WIDTH = re.compile(r"[a-z]+(\d+)")


class Array(NamedTuple):
    """The type of one array.

    Attributes:
      dtype: as the program prints it, `bf16`.
      shape: the logical shape.
      order: the dimensions in the order of memory, the slowest first. For `{0,1}` it is (1, 0).
    """

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def bits(self) -> int:
        """The bits of one element. A boolean has 8."""
        found = _WIDTH.match(self.dtype)
        return int(found[1]) if found else 8

    @property
    def carrier(self) -> str:
        """The element type in which callbacks of jax get it. They take no FP8 and no 4 bits."""
        if self.bits < 8:
            return "f32"
        short = self.dtype.startswith(("f", "bf")) and self.bits <= 16
        return f"u{self.bits}" if short else self.dtype


def read_array_type(text: str) -> Array:
    """Reads the type of one array.

    ValueError for tuples, tokens, unknown sizes, and layouts in tiles.
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


def _type(dtype: str, shape: Iterable[int]) -> str:
    """The type of an array as text, without a layout."""
    return f"{dtype}[{','.join(map(str, shape))}]"


def _strip_layouts(type: str) -> str:
    """A type, or a tuple of types, with the default layout everywhere."""
    return _LAYOUT.sub(r"\1", type)


def _numpy_dtype(dtype: str) -> np.dtype:
    return jnp.dtype(tensors_of(f"{dtype}[]")[0].dtype)


# Writes the computations.

# The opcodes that mean the same on every backend. These instructions are copied.
_PORTABLE = re.compile(
    "abs|acos|acosh|add|after-all|and|asin|asinh|atan2|atanh|bitcast-convert|broadcast|call|cbrt|"
    "ceil|clamp|compare|complex|concatenate|conditional|constant|convert|copy|cosh|cosine|"
    "count-leading-zeros|divide|dynamic-slice|dynamic-update-slice|erf|exponential|"
    "exponential-minus-one|fft|floor|gather|get-dimension-size|get-tuple-element|imag|iota|"
    "is-finite|log|log-plus-one|logistic|map|maximum|minimum|multiply|negate|not|opt-barrier|or|"
    "pad|parameter|popcnt|power|real|reduce|reduce-precision|reduce-window|remainder|reshape|"
    "reverse|rng-bit-generator|round-nearest-afz|round-nearest-even|rsqrt|scatter|select|"
    "select-and-scatter|shift-left|shift-right-arithmetic|shift-right-logical|sign|sine|sinh|"
    "slice|sort|sqrt|stochastic-convert|subtract|tan|tanh|transpose|tuple|while|xor"
)

# Attributes that do not change the result.
_DROPPED = re.compile(
    "metadata|backend_config|frontend_attributes|sharding|control-predecessors|origin|"
    "original_value|statistics|async_execution_thread|result_accuracy|parameter_replication"
)


def portable_text(text: str, matmuls: Matmuls) -> str:
    """Rewrites the text of a program for one GPU.

    ValueError if one CPU cannot run the program. Causes are several devices, kernels, unknown
    library calls or opcodes, and constants without their values.
    """
    program = read_program(text)
    if program.replicas * program.partitions != 1:
        raise ValueError(
            f"cannot run on a CPU: the program has {program.partitions} partitions and "
            f"{program.replicas} replicas, but only programs for one device can run. Compile the "
            "function for one device."
        )
    reachable = _reachable(program)
    # In the order of the text, in which a computation comes before its callers.
    bodies = [
        f"{'ENTRY ' if name == program.entry else ''}%{name} {{\n{_body(source, matmuls)}\n}}"
        for name, source in program.computations.items()
        if name in reachable
    ]
    return "\n\n".join(["HloModule rewritten", *bodies]) + "\n"


def _reachable(program: Program) -> set[str]:
    found, waiting = set(), [program.entry]
    while waiting:
        if (name := waiting.pop()) in found:
            continue
        found.add(name)
        for instruction in program.computations[name].values():
            waiting += instruction.computations("condition", "body", *BRANCHES, *CALLS)
    return found


def _body(source: dict[str, Instruction], matmuls: Matmuls) -> str:
    """The lines of a computation."""
    # If no instruction is marked ROOT, the last one is the result.
    root = next((i.name for i in source.values() if i.is_root), list(source)[-1])
    writer = _Writer(source, matmuls)
    for instruction in source.values():
        # An asynchronous operation is written in the place of its `-done`, where its result exists.
        if not instruction.opcode.endswith(("-start", "-update")):
            writer.write(_started(source, instruction))
    return "\n".join(
        f"  {'ROOT ' if name == root else ''}%{name} = {line}"
        for name, line in writer.lines.items()
    )


def _started(source: dict[str, Instruction], instruction: Instruction) -> Instruction:
    """The complete operation that a `-done` instruction ends."""
    if not instruction.opcode.endswith("-done"):
        return instruction
    start = instruction
    while not start.opcode.endswith("-start"):
        start = source[start.operands[0]]
    opcode = start.opcode.removesuffix("-start")
    return start._replace(
        name=instruction.name,
        type=instruction.type,
        opcode="fusion" if opcode == "async" else opcode,
    )


class _Writer:
    """The instructions of one computation, `lines[name] = "type opcode(operands), attributes"`.

    An instruction of the program keeps its name. Instructions that are added get new names.
    """

    def __init__(self, source: dict[str, Instruction], matmuls: Matmuls) -> None:
        self.lines: dict[str, str] = {}
        self._source = source
        self._matmuls = matmuls

    def write(self, instruction: Instruction) -> None:
        """Writes instructions that compute the same. The last one has its name."""
        name, opcode, type = instruction.name, instruction.opcode, instruction.type
        if matmul_name(instruction) in MATMULS:
            self._matmul(instruction)
        elif opcode == "custom-call":
            raise ValueError(
                f"cannot run on a CPU: {name} calls {instruction.call_target}, which is code for a "
                f"GPU. Only the matmuls {', '.join(list(MATMULS)[1:])} can run. Compile the "
                "function without it, for instance with XLA's kernels in place of Pallas's or "
                "Triton's."
            )
        elif opcode == "bitcast":
            (operand,) = instruction.operands
            source = read_array_type(self._source[operand].type)
            x = self._bitcast(operand, source, read_array_type(type))
            self._emit(_strip_layouts(type), "copy", x, name=name)
        elif opcode == "fusion":
            (called,) = instruction.computations("calls")
            to = f"to_apply=%{called}"
            self._emit(_strip_layouts(type), "call", *instruction.operands, name=name, also=[to])
        elif _PORTABLE.fullmatch(opcode):
            self._copy(instruction)
        else:
            raise ValueError(
                f"cannot run on a CPU: {name} has the opcode {opcode}, which one CPU cannot run. "
                "Compile the function for one device, without a mesh and without the operation "
                "that it comes from."
            )

    def _emit(
        self,
        type: str,
        opcode: str,
        *operands: str,
        inside: str | None = None,
        name: str = "",
        also: Iterable[str] = (),
    ) -> str:
        """Writes `%name = type opcode(operands), also` and returns the name, by default a new one.

        `inside` is the text between the brackets, if it is not a list of operands.
        """
        name = name or f"rewritten.{len(self.lines)}"
        inside = ", ".join(f"%{operand}" for operand in operands) if inside is None else inside
        self.lines[name] = ", ".join([f"{type} {opcode}({inside})", *also])
        return name

    def _type_of(self, name: str) -> Array:
        """The type of an array that is written."""
        return read_array_type(self.lines[name].partition(" ")[0])

    def _copy(self, instruction: Instruction) -> None:
        if instruction.opcode == "constant" and "{...}" in instruction.inside:
            raise ValueError(
                "cannot run on a CPU: the text leaves out the value of the constant "
                f"{instruction.name}. Pass the compiled program itself, or a text with "
                "print_large_constants."
            )
        attributes = split_at_commas(instruction.attributes.lstrip(", "))
        self._emit(
            _strip_layouts(instruction.type),
            instruction.opcode,
            *instruction.operands,
            inside=instruction.inside if instruction.opcode in ("constant", "parameter") else None,
            name=instruction.name,
            also=[a for a in attributes if not _DROPPED.fullmatch(a.partition("=")[0])],
        )

    def _matmul(self, instruction: Instruction) -> None:
        """A call of jax's own callback target, which calls Python."""
        operands = [self._type_of(x) for x in instruction.operands]
        types = [read_array_type(part) for part in tuple_types(instruction.type)]
        is_tuple = instruction.type.startswith("(")
        # Bytes are the workspace of a library call, its last result.
        results = [t for t in types if not (is_tuple and t.dtype in ("s8", "u8"))]
        index = self._matmuls.add(
            instruction,
            [_numpy_dtype(type.dtype) for type in operands],
            [_numpy_dtype(type.carrier) for type in results],
        )
        sent = [
            self._reread(x, type.carrier)
            for x, type in zip(instruction.operands, operands, strict=True)
        ]
        call = self._emit(
            f"({', '.join(_type(type.carrier, type.shape) for type in results)})",
            "custom-call",
            *sent,
            also=[
                'custom_call_target="xla_ffi_python_cpu_callback"',
                # Otherwise XLA could merge two calls, and `seen` would miss one.
                "custom_call_has_side_effect=true",
                "api_version=API_VERSION_TYPED_FFI",
                f"backend_config={{index = {index} : ui64}}",
            ],
        )
        found = []
        for n, type in enumerate(results):
            also = [f"index={n}"]
            x = self._emit(_type(type.carrier, type.shape), "get-tuple-element", call, also=also)
            found.append(self._reread(x, type.dtype))
        for type in types[len(results) :]:
            zero = self._emit(_type(type.dtype, ()), "constant", inside="0")
            whole = _type(type.dtype, type.shape)
            found.append(self._emit(whole, "broadcast", zero, also=["dimensions={}"]))
        opcode = "tuple" if is_tuple else "copy"
        self._emit(_strip_layouts(instruction.type), opcode, *found, name=instruction.name)

    # A bitcast without layouts: the same bytes in memory, read as another type.
    #
    # `bitcast` is the only instruction whose meaning depends on layouts. The rewritten program has
    # no layouts. So an array is transposed to its order in memory, reinterpreted, and transposed to
    # the order of the result. See ShapeUtil::DecomposeBitcast in XLA's xla/shape_util.cc.

    def _bitcast(self, x: str, source: Array, result: Array) -> str:
        """`x` of type `source`, read as `result`.

        ValueError if the sizes differ, or if elements change their type and are not whole bytes.
        """
        sizes = math.prod(source.shape), math.prod(result.shape)
        if sizes[0] * source.bits != sizes[1] * result.bits:
            raise ValueError(
                f"cannot run on a CPU: a bitcast of {source} to {result} changes the number of "
                "bytes. Pass the text as XLA prints it."
            )
        if source.dtype != result.dtype and (source.bits % 8 or result.bits % 8):
            raise ValueError(
                f"cannot run on a CPU: a bitcast of {source.dtype} to {result.dtype} reads "
                "elements that are no whole bytes. Compile a program without packed elements."
            )
        x = self._transpose(x, source.order)
        if source.bits != result.bits:
            x = self._reread(x, f"u{source.bits}")
            if source.bits > result.bits:
                x = self._reshape(x, (sizes[0],))
                shape: tuple[int, ...] = (sizes[0], source.bits // result.bits)
            else:
                # The elements that become one wider element must be the last dimension.
                x = self._reshape(x, (sizes[1], result.bits // source.bits))
                shape = (sizes[1],)
            x = self._emit(_type(f"u{result.bits}", shape), "bitcast-convert", x)
        x = self._reread(x, result.dtype)
        x = self._reshape(x, tuple(result.shape[d] for d in result.order))
        return self._transpose(x, tuple(map(int, np.argsort(result.order))))

    def _reread(self, x: str, dtype: str) -> str:
        """The same bytes as another element type. Elements of less than a byte are converted."""
        type = self._type_of(x)
        if type.dtype == dtype:
            return x
        # `bitcast-convert` takes no booleans. A boolean is a byte of 0 or 1, which `convert` keeps.
        if "pred" in (type.dtype, dtype) and not {type.dtype, dtype} <= {"pred", "u8"}:
            return self._reread(self._reread(x, "u8"), dtype)
        whole = type.bits == Array(dtype, (), ()).bits and "pred" not in (type.dtype, dtype)
        opcode = "bitcast-convert" if whole else "convert"
        return self._emit(_type(dtype, type.shape), opcode, x)

    def _reshape(self, x: str, shape: tuple[int, ...]) -> str:
        type = self._type_of(x)
        return x if type.shape == shape else self._emit(_type(type.dtype, shape), "reshape", x)

    def _transpose(self, x: str, order: tuple[int, ...]) -> str:
        type = self._type_of(x)
        if order == tuple(range(len(order))):
            return x
        also = [f"dimensions={{{','.join(map(str, order))}}}"]
        shape = (type.shape[d] for d in order)
        return self._emit(_type(type.dtype, shape), "transpose", x, also=also)
