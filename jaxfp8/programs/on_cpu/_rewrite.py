"""The text of an optimized program, rewritten into HLO that every backend of XLA accepts.

Layouts are removed. Without them HLO means the same, except for `bitcast`, which becomes other
operations. Fusions become calls. Matmuls become calls of Python. The few custom calls of XLA for
TPUs that are no kernels become what they mean. Every other operation and conversion does not
change.

References:
  XLA, xla/hlo/ir/hlo_opcode.h (all opcodes) and xla/hlo/parser/hlo_parser.cc (what the text says).
  jax, jax/_src/callback.py (emit_python_callback) and XLA, xla/python/ifrt/host_callback.h.
"""

import re
from collections.abc import Iterable, Sequence

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
from jaxfp8.programs.on_cpu._layouts import (
    Array,
    Step,
    read_array_type,
    reads_padding,
    size_in_memory,
    strip_layouts,
    to_memory,
    type_text,
)
from jaxfp8.programs.on_cpu._matmuls import MATMULS, Matmuls, matmul_name


def _row_major(dtype: str, shape: tuple[int, ...]) -> str:
    order = ",".join(str(d) for d in reversed(range(len(shape))))
    layout = f"{{{order}}}" if shape else ""  # the parser takes no `{}` here
    return type_text(dtype, shape) + layout


def _zero(type: Array) -> str:
    return "false" if type.dtype == "pred" else "0"


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

# Custom calls of XLA for TPUs that are no kernels.
_IDENTITIES = ("AssumeGatherIndicesInBound",)
_HALVES = ("X64Combine", "X64SplitLow", "X64SplitHigh")

# XLA for TPUs mixes bfloat16 and float32 in these. They compute in the widest of the types.
_MIXED = re.compile(
    "abs|add|atan2|broadcast|cbrt|ceil|clamp|compare|concatenate|copy|cosine|divide|"
    "dynamic-update-slice|erf|exponential|exponential-minus-one|floor|is-finite|log|log-plus-one|"
    "logistic|maximum|minimum|multiply|negate|pad|power|remainder|reshape|reverse|"
    "round-nearest-afz|round-nearest-even|rsqrt|select|sign|sine|slice|sqrt|subtract|tan|tanh|"
    "transpose"
)

# Attributes that do not change the result.
_DROPPED = re.compile(
    "metadata|backend_config|frontend_attributes|sharding|control-predecessors|origin|"
    "original_value|statistics|async_execution_thread|result_accuracy|parameter_replication|"
    "cross_program_prefetch_index"
)


def portable_text(text: str, matmuls: Matmuls) -> str:
    """Rewrites the text of a program for one GPU or TPU.

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
    later: tuple[str, ...] = ()
    start = instruction
    while not start.opcode.endswith("-start"):
        later = (*start.operands[1:], *later)  # XLA for TPUs gives operands to a `call-update`
        start = source[start.operands[0]]
    opcode = start.opcode.removesuffix("-start")
    return start._replace(
        name=instruction.name,
        type=instruction.type,
        opcode="fusion" if opcode == "async" else opcode,
        operands=(*start.operands, *later),
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
            self._custom_call(instruction)
        elif opcode == "bitcast":
            (operand,) = instruction.operands
            source = read_array_type(self._source[operand].type)
            x = self._bitcast(operand, source, read_array_type(type))
            self._emit(strip_layouts(type), "copy", x, name=name)
        elif opcode == "fusion":
            (called,) = instruction.computations("calls")
            to = f"to_apply=%{called}"
            self._emit(strip_layouts(type), "call", *instruction.operands, name=name, also=[to])
        elif opcode == "rng-bit-generator" and "algorithm=rng_default" in instruction.attributes:
            raise ValueError(
                f"cannot run on a CPU: {name} draws bits by the chip's own algorithm. Use keys of "
                'jax.random.key(seed, impl="threefry2x32"), whose bits are the same everywhere.'
            )
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
        also = [a for a in attributes if not _DROPPED.fullmatch(a.partition("=")[0])]
        is_array = not instruction.type.startswith("(")  # a copy may have a tuple
        if is_array and _MIXED.fullmatch(instruction.opcode) and self._mixed(instruction, also):
            return
        self._emit(
            strip_layouts(instruction.type),
            instruction.opcode,
            *instruction.operands,
            inside=instruction.inside if instruction.opcode in ("constant", "parameter") else None,
            name=instruction.name,
            also=also,
        )

    def _mixed(self, instruction: Instruction, also: list[str]) -> bool:
        """Writes an operation on floats of several types, and returns whether it is one."""
        result = read_array_type(instruction.type)
        types = [self._type_of(x) for x in instruction.operands]
        floats = [type for type in (*types, result) if type.is_float]
        if len({type.dtype for type in floats}) < 2:
            return False
        wide = max(floats, key=lambda type: type.bits).dtype
        operands = [
            self._converted(x, type, wide) if type.is_float else x
            for x, type in zip(instruction.operands, types, strict=True)
        ]
        computed = result._replace(dtype=wide) if result.is_float else result
        x = self._emit(
            type_text(computed.dtype, result.shape), instruction.opcode, *operands, also=also
        )
        opcode = "copy" if computed.dtype == result.dtype else "convert"
        self._emit(strip_layouts(instruction.type), opcode, x, name=instruction.name)
        return True

    def _converted(self, x: str, type: Array, dtype: str) -> str:
        if type.dtype == dtype:
            return x
        return self._emit(type_text(dtype, type.shape), "convert", x)

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
        given, returned = (
            ", ".join(_row_major(type.carrier, type.shape) for type in types)
            for types in (operands, results)
        )
        call = self._emit(
            f"({returned})",
            "custom-call",
            *sent,
            also=[
                'custom_call_target="xla_ffi_python_cpu_callback"',
                # Otherwise XLA could choose the layout of its operands, as it does in branches.
                f"operand_layout_constraints={{{given}}}",
                # Otherwise XLA could merge two calls, and `seen` would miss one.
                "custom_call_has_side_effect=true",
                "api_version=API_VERSION_TYPED_FFI",
                f"backend_config={{index = {index} : ui64}}",
            ],
        )
        found = []
        for n, type in enumerate(results):
            also = [f"index={n}"]
            x = self._emit(
                type_text(type.carrier, type.shape), "get-tuple-element", call, also=also
            )
            found.append(self._reread(x, type.dtype))
        found += [self._zeros(type) for type in types[len(results) :]]
        opcode = "tuple" if is_tuple else "copy"
        self._emit(strip_layouts(instruction.type), opcode, *found, name=instruction.name)

    def _custom_call(self, instruction: Instruction) -> None:
        """A call that is no matmul. ValueError if it is a kernel, or unknown."""
        type, target = instruction.type, instruction.call_target
        if target == "AllocateBuffer":  # memory that the program fills
            parts = [self._zeros(read_array_type(part)) for part in tuple_types(type)]
            opcode = "tuple" if type.startswith("(") else "copy"
            self._emit(strip_layouts(type), opcode, *parts, name=instruction.name)
        elif target in _IDENTITIES:
            self._emit(strip_layouts(type), "copy", *instruction.operands, name=instruction.name)
        elif target in _HALVES:
            self._halves(instruction)
        else:
            known = ", ".join([*list(MATMULS)[2:], "AllocateBuffer", *_IDENTITIES, *_HALVES])
            raise ValueError(
                f"cannot run on a CPU: {instruction.name} calls {target}, which is code for the "
                f"chip. It comes from {instruction.label}. Only {known} can run. Compile the "
                "function without it, for instance with XLA's kernels in place of Pallas's or "
                "Triton's."
            )

    def _halves(self, instruction: Instruction) -> None:
        """An array of 64 bits from two of 32, which TPUs have in its place, or one of them."""
        result = read_array_type(instruction.type)
        types = [result, *(self._type_of(x) for x in instruction.operands)]
        if any(type.dtype == "f64" for type in types):
            raise ValueError(
                f"cannot run on a CPU: {instruction.name} is a float64 in two float32. Compile a "
                "function without float64."
            )
        if "c64" in (types[0].dtype, types[1].dtype):  # the real and the imaginary part
            opcode = {"X64Combine": "complex", "X64SplitLow": "real", "X64SplitHigh": "imag"}
            self._emit(
                strip_layouts(instruction.type),
                opcode[instruction.call_target],
                *instruction.operands,
                name=instruction.name,
            )
            return
        wide, half = (type_text(dtype, result.shape) for dtype in ("u64", "u32"))
        places = self._emit("u64[]", "constant", inside="32")
        places = self._emit(wide, "broadcast", places, also=["dimensions={}"])
        if instruction.call_target == "X64Combine":
            low, high = (
                self._emit(wide, "convert", self._reread(x, "u32")) for x in instruction.operands
            )
            high = self._emit(wide, "shift-left", high, places)
            x = self._emit(wide, "or", low, high)
        else:
            x = self._reread(instruction.operands[0], "u64")
            if instruction.call_target == "X64SplitHigh":
                x = self._emit(wide, "shift-right-logical", x, places)
            x = self._emit(half, "convert", x)
        x = self._reread(x, result.dtype)
        self._emit(strip_layouts(instruction.type), "copy", x, name=instruction.name)

    def _zeros(self, type: Array) -> str:
        zero = self._emit(type_text(type.dtype, ()), "constant", inside=_zero(type))
        whole = type_text(type.dtype, type.shape)
        return self._emit(whole, "broadcast", zero, also=["dimensions={}"])

    # A bitcast without layouts: the same bytes in memory, read as another type.
    #
    # `bitcast` is the only instruction whose meaning depends on layouts. The rewritten program has
    # no layouts. So an array is brought to its order in memory, reinterpreted, and brought to the
    # order of the result. On TPUs a reshape of the logical array would be wrong: f32[8,1024] in
    # tiles of 8 x 128 has the bytes of f32[8,8,128], where the tiles are a dimension.

    def _bitcast(self, x: str, source: Array, result: Array) -> str:
        """`x` of type `source`, read as `result`.

        ValueError if the sizes differ, if elements change their type and are not whole bytes, or
        if the result would have elements from the padding of tiles.
        """
        if source == result:  # in another memory space
            return x
        sizes = size_in_memory(source), size_in_memory(result)
        if sizes[0] * source.bits != sizes[1] * result.bits or reads_padding(source, result):
            raise ValueError(
                f"cannot run on a CPU: a bitcast of {source} to {result} changes the number of "
                "bytes, or reads the padding of tiles. Pass the text as XLA prints it."
            )
        if source.dtype != result.dtype and (source.bits % 8 or result.bits % 8):
            raise ValueError(
                f"cannot run on a CPU: a bitcast of {source.dtype} to {result.dtype} reads "
                "elements that are no whole bytes. Compile a program without packed elements."
            )
        x = self._take(x, to_memory(source))
        if source.bits != result.bits:
            x = self._reread(x, f"u{source.bits}")
            if source.bits > result.bits:
                shape: tuple[int, ...] = (sizes[0], source.bits // result.bits)
            else:
                # The elements that become one wider element must be the last dimension.
                x = self._reshape(x, (sizes[1], result.bits // source.bits))
                shape = (sizes[1],)
            x = self._emit(type_text(f"u{result.bits}", shape), "bitcast-convert", x)
            x = self._reshape(x, (sizes[1],))
        x = self._reread(x, result.dtype)
        return self._take(x, [step.inverse for step in reversed(to_memory(result))])

    def _take(self, x: str, steps: Sequence[Step]) -> str:
        for step in steps:
            dtype = self._type_of(x).dtype
            zero = [self._zeros(Array(dtype, (), ()))] if step.opcode == "pad" else []
            x = self._emit(type_text(dtype, step.result), step.opcode, x, *zero, also=step.also)
        return x

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
        return self._emit(type_text(dtype, type.shape), opcode, x)

    def _reshape(self, x: str, shape: tuple[int, ...]) -> str:
        type = self._type_of(x)
        return x if type.shape == shape else self._emit(type_text(type.dtype, shape), "reshape", x)
