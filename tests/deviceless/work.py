"""The operations and the bytes of a compiled program, each as often as it runs.

A slice of an array reads what it takes, and an update in place writes what it changes. A gather
reads what it takes.
"""

import json
import math
import re
from typing import NamedTuple

from program import CALLED, SHAPE, Instruction, Program, size_of

_DIMENSIONS = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_SLICES = ("dynamic-slice", "gather", "slice")


class Work(NamedTuple):
    """Operations of matmuls (a product and its sum are two), and bytes that kernels move."""

    flops: float
    bytes: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def times(self, number: float) -> "Work":
        return Work(self.flops * number, self.bytes * number)


def work_of(program: Program) -> Work:
    """The work of one run of a program. Kernels in Pallas count no operations."""
    total = Work(0, 0)
    for computation, instruction, times in program.runs(program.entry):
        if instruction.is_kernel and not instruction.op.endswith("-done"):
            one = Work(_flops(program, computation, instruction), 0) + Work(
                0, _moved(program, computation, instruction)
            )
            total += one.times(times)
    return total


def _flops(program: Program, computation: str, kernel: Instruction) -> float:
    found = 0.0
    for within, instruction in _inside(program, computation, kernel):
        if instruction.op == "dot" or "__cublas" in instruction.attributes:
            lhs = _shape(program.computations[within][instruction.operands[0]].type)
            result = _shape(instruction.type)
            contracted = math.prod(lhs[axis] for axis in _contracted(instruction))
            found += 2.0 * math.prod(result) * contracted
    return found


def _contracted(instruction: Instruction) -> list[int]:
    if found := _DIMENSIONS.search(instruction.attributes):
        return [int(axis) for axis in found[1].split(",") if axis]
    config = re.search(r"backend_config=(\{.*\})", instruction.attributes)
    gemm = json.loads(_balanced(config[1]))["gemm_backend_config"]
    return [int(axis) for axis in gemm["dot_dimension_numbers"]["lhs_contracting_dimensions"]]


def _balanced(text: str) -> str:
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[: position + 1]
    raise ValueError(text)


def _inside(program: Program, computation: str, kernel: Instruction):
    """A kernel that is one instruction, or the instructions of a fusion, those of calls too."""
    if kernel.op != "fusion":
        yield computation, kernel
        return
    for called in CALLED.findall(kernel.attributes):
        for instruction in program.computations[called].values():
            yield from _inside(program, called, instruction)


def _moved(program: Program, computation: str, kernel: Instruction) -> int:
    types = {name: each.type for name, each in program.computations[computation].items()}
    if kernel.op == "fusion-start":  # asynchronous: its type lists operands, result and context
        (called,) = CALLED.findall(kernel.attributes)[:1]
        (root,) = list(program.computations[called].values())[-1:]
        kernel = kernel._replace(op="fusion", type=root.type)
    if kernel.op != "fusion":
        if kernel.op in _SLICES:
            return 2 * size_of(kernel.type)
        if kernel.op == "dynamic-update-slice":
            return 2 * size_of(types[kernel.operands[1]])
        return size_of(kernel.type) + sum(size_of(types[each]) for each in kernel.operands)
    (called,) = CALLED.findall(kernel.attributes)[:1]
    body = program.computations[called]
    read = 0
    in_place: list[str] = []
    for parameter in (each for each in body.values() if each.op == "parameter"):
        read += _read(body, parameter, in_place)
    written = size_of(kernel.type)
    for update in in_place:
        buffer, change = (size_of(body[each].type) for each in body[update].operands[:2])
        written -= buffer - change
    return read + written


def _read(body: dict[str, Instruction], value: Instruction, in_place: list[str]) -> int:
    """The bytes of a parameter that a fusion reads."""
    size, whole = 0, size_of(value.type)
    waiting = [value.name]
    while waiting:
        name = waiting.pop()
        for user in body.values():
            if name not in user.operands or user.op == "parameter":
                continue
            if user.op in _SLICES and user.operands[0] == name:
                size += size_of(user.type)
            elif user.op == "dynamic-update-slice" and user.operands[0] == name:
                in_place.append(user.name)
            elif user.op == "bitcast":
                waiting.append(user.name)
            else:
                return whole
    return min(size, whole)


def _shape(type: str) -> list[int]:
    dtype, shape = next((d, s) for d, s in SHAPE.findall(type) if d != "s8")
    del dtype
    return [int(size) for size in shape.split(",") if size]


def host_transfers(program: Program) -> list[str]:
    """Instructions that wait for the host, and loops whose length only the device knows."""
    kinds = ("infeed", "outfeed", "send", "recv", "send-start", "recv-start")
    found = [
        each.name
        for computation in program.computations.values()
        for each in computation.values()
        if each.op in kinds or "xla_ffi_python" in each.attributes or each.op == "conditional"
    ]
    return found + [
        each.name
        for computation in program.computations.values()
        for each in computation.values()
        if each.op == "while" and "known_trip_count" not in each.attributes
    ]
