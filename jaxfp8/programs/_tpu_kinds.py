"""What an instruction of a program for a TPU does: a matmul, a cast, an amax, and so on."""

import re
from typing import TypeAlias

from jaxfp8.programs._hlo import CALLS, Instruction, Program
from jaxfp8.programs._transfers import KINDS as COLLECTIVES

Computation: TypeAlias = dict[str, Instruction]

COPY = "copy"  # a copy that runs beside other instructions
# These do no work of their own.
NO_WORK = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
     "add-dependency", "opt-barrier", "partition-id", "replica-id")
)  # fmt: skip
# They run the computation that they name, once. All others that name one give it to the chip: a
# reducer, a comparison of a sort, the body of a fusion.
RUN_ONCE = ("call", "call-start", "async-start")
# They move an array, or a part of it, between HBM and the memory on the chip.
_COPIES = ("copy-start", "slice-start")
SPARSE_CORE = '_execution_thread="sparsecore"'
_PALLAS = "tpu_custom_call"

# E8M0 is a format of scales, not of values. The bytes of FP8 values may be integers for a while.
_FP8 = re.compile(r"f8e[45]m")
_ONE_BYTE = re.compile(r"f8e[45]m|[us]8\[")


def kind_of(
    program: Program, each: Instruction, computation: Computation
) -> tuple[str, Instruction | None]:
    """The kind of an instruction that runs, see `tpu_cycles`, and the matmul in it."""
    inside = _inside(program, each)
    matmul = next((one for one in inside if one.opcode in ("convolution", "dot")), None)
    if matmul:
        return "matmul", matmul
    if any(map(is_collective, inside)):
        return "collective", None
    if SPARSE_CORE in each.attributes:
        return "sparsecore", None
    if each.call_target == _PALLAS:
        return "kernel", None
    if each.opcode in _COPIES:
        return COPY, None
    if _writes_fp8(program, each, computation):
        return "cast", None
    return "amax" if any(_is_amax(program, name) for name in _fused(each)) else "rest", None


def is_collective(each: Instruction) -> bool:
    return each.opcode.removesuffix("-start") in COLLECTIVES


def _fused(each: Instruction) -> tuple[str, ...]:
    return each.computations("calls") if each.opcode == "fusion" else ()


def _inside(program: Program, each: Instruction) -> list[Instruction]:
    """The instruction, and all in the computations that it is made of."""
    names = each.computations(*CALLS) if each.opcode in RUN_ONCE else _fused(each)
    parts = [one for name in names for one in program.computations.get(name, {}).values()]
    return [each, *(one for part in parts for one in _inside(program, part))]


def _writes_fp8(program: Program, each: Instruction, computation: Computation) -> bool:
    """Whether an instruction that runs makes FP8 values of wider ones, and writes them."""
    if each.opcode == "convert":
        source = computation.get(each.operands[0])
        return bool(_FP8.match(each.type) and source and not _ONE_BYTE.match(source.type))
    return any(_root_is_fp8(program, name) for name in _fused(each))


def _root_is_fp8(program: Program, name: str) -> bool:
    fused = program.computations.get(name, {})
    found: dict[tuple[str, bool], bool] = {}  # many paths lead to one operand

    def is_made(each: Instruction, as_fp8: bool) -> bool:
        key = each.name, as_fp8
        if key not in found:
            found[key] = makes(each, as_fp8)
        return found[key]

    def makes(each: Instruction, as_fp8: bool) -> bool:
        """Whether bytes are FP8 values that were wider. `as_fp8`: somebody takes them for FP8."""
        sources = [fused[operand] for operand in each.operands if operand in fused]
        if each.opcode == "tuple":
            return any(is_made(source, False) for source in sources)
        if not _ONE_BYTE.match(each.type) or each.opcode in (*NO_WORK - {"bitcast"}, "iota"):
            return False
        if any(_root_is_fp8(program, inner) for inner in _fused(each)):
            return True
        as_fp8 = as_fp8 or bool(_FP8.match(each.type))
        bytes = [source for source in sources if _ONE_BYTE.match(source.type)]
        # An instruction without bytes among its operands made them, a fusion may have.
        if not bytes and each.opcode != "fusion":
            return as_fp8
        return any(is_made(source, as_fp8) for source in bytes)

    return any(each.is_root and is_made(each, False) for each in fused.values())


def _is_amax(program: Program, name: str) -> bool:
    """Whether a fused computation reduces absolute values to their maximum."""
    fused = program.computations.get(name, {})
    absolute: set[str] = set()  # instructions with an absolute value among all that they read
    for each in fused.values():
        reads = not absolute.isdisjoint(each.operands)
        if any(_is_amax(program, inner) for inner in _fused(each)):
            return True
        if reads and each.opcode == "reduce" and _root_opcode(program, each) == "maximum":
            return True
        if reads or any(one.opcode == "abs" for one in _inside(program, each)):
            absolute.add(each.name)
    return False


def _root_opcode(program: Program, reduce: Instruction) -> str | None:
    """The operation by which a reduction combines two values."""
    (name,) = reduce.computations("to_apply")
    reducer = program.computations.get(name, {}).values()
    return next((each.opcode for each in reducer if each.is_root), None)
