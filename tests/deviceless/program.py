"""Reading a compiled program.

Its kernels, and what they read.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
}
BYTES |= {"f8e8m0fnu": 1, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}
SHAPE = re.compile(r"\b(" + "|".join(BYTES) + r")\[([\d,]*)\]")
HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.\-]+)")
GROUPS = re.compile(r"replica_groups=(.*?), (?:channel_id|use_global|to_apply|metadata)")
TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"?(\d+)')
# What moves no byte.
FREE = {
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "opt-barrier",
    "after-all",
    "iota",
    "partition-id",
}
# What only holds other computations.
CONTAINERS = {"while", "call", "conditional", "async-start", "async-done"}
FP8_CALLS = ('"__cublas$lt$matmul$f8"', '"__cudnn$blockScaledDot"')


class Instruction(NamedTuple):
    """One line of HLO, `%name = type op(operands), attributes`."""

    name: str
    type: str
    op: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def literal(self) -> str | None:
        """The value of a constant, as printed."""
        return self.operands[0] if self.op == "constant" else None

    @property
    def is_fp8_matmul(self) -> bool:
        return self.op == "custom-call" and any(call in self.attributes for call in FP8_CALLS)

    @property
    def is_other_matmul(self) -> bool:
        library = re.search(
            r'custom_call_target="(__cublas|__onednn\$matmul|__cudnn)', self.attributes
        )
        return not self.is_fp8_matmul and (
            self.op == "dot" or (self.op == "custom-call" and library is not None)
        )

    @property
    def is_kernel(self) -> bool:
        return self.op not in FREE | CONTAINERS


class Maximum(NamedTuple):
    """An all-reduce that takes a maximum.

    Where it stands, which devices it joins, how often it runs.
    """

    computation: str
    groups: str
    times: int


class Program:
    """The computations of a compiled program, `{name: {instruction name: instruction}}`."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, Instruction]] = {}
        current: dict[str, Instruction] = {}
        for line in text.splitlines():
            if head := HEAD.match(line):
                current = self.computations[head[2]] = {}
                self.entry = head[2] if head[1] else getattr(self, "entry", head[2])
            elif " = " in line and line.startswith("  "):
                instruction = _instruction(line)
                current[instruction.name] = instruction

    def instructions(
        self, computation: str, *, into_fusions: bool = False
    ) -> Iterator[Instruction]:
        """The instructions of a computation and of the loops and calls in it; a loop body once."""
        for instruction in self.computations[computation].values():
            yield instruction
            if instruction.op in CONTAINERS or (into_fusions and instruction.op == "fusion"):
                for called in CALLED.findall(instruction.attributes):
                    yield from self.instructions(called, into_fusions=into_fusions)

    def kernels(self, computation: str) -> list[Instruction]:
        return [i for i in self.instructions(computation) if i.is_kernel]

    def fp8_matmuls(self, computation: str) -> list[Instruction]:
        return [i for i in self.instructions(computation) if i.is_fp8_matmul]

    def other_matmuls(self, computation: str) -> list[Instruction]:
        return [i for i in self.instructions(computation, into_fusions=True) if i.is_other_matmul]

    def source(self, computation: str, name: str) -> Instruction:
        """What a value is, seen through bitcasts, barriers and (of kernels) tuples."""
        instruction = self.computations[computation][name]
        while instruction.op in ("bitcast", "opt-barrier", "get-tuple-element"):
            before = self.computations[computation][instruction.operands[0]]
            if instruction.op == "get-tuple-element" and before.op == "tuple":
                before = self.computations[computation][
                    before.operands[int(re.search(r"index=(\d+)", instruction.attributes)[1])]
                ]
            elif instruction.op == "get-tuple-element" and before.op != "opt-barrier":
                return instruction  # a part of a kernel's result or of the parameters
            instruction = before
        return instruction

    def inside(self, computation: str, instruction: Instruction) -> list[Instruction]:
        """What a fusion does; of a part of its result, all of the fusion."""
        if instruction.op == "get-tuple-element":
            instruction = self.computations[computation][instruction.operands[0]]
        return [
            i
            for called in CALLED.findall(instruction.attributes)
            for i in self.computations[called].values()
        ]

    def runs(self, computation: str, times: int = 1) -> Iterator[tuple[str, Instruction, int]]:
        """The instructions of a computation, and of what runs in it: (computation, it, how often).

        A loop body runs as often as the loop turns. Of a conditional the first branch counts.
        """
        for instruction in self.computations[computation].values():
            yield computation, instruction, times
            if instruction.op == "conditional":
                yield from self.runs(_branches(instruction)[0], times)
            elif instruction.op in CONTAINERS - {"async-done"}:
                again = times * _trips(instruction)
                for called in CALLED.findall(instruction.attributes):
                    yield from self.runs(called, again)

    def launches(self, computation: str) -> int:
        """How many kernels a run of a computation starts."""
        return sum(
            times
            for _, instruction, times in self.runs(computation)
            if instruction.is_kernel and not instruction.op.endswith("-done")  # it only waits
        )

    def maxima(self, computation: str) -> list["Maximum"]:
        """The all-reduces that take a maximum, those in loops and calls as often as they run."""
        found = []
        for within, instruction, times in self.runs(computation):
            if instruction.op in ("all-reduce", "all-reduce-start"):
                combiner = self.computations[CALLED.findall(instruction.attributes)[0]]
                if any(i.op == "maximum" for i in combiner.values()):
                    groups = GROUPS.search(instruction.attributes)[1]
                    found.append(Maximum(within, groups, times))
        return found

    def readers(self, computation: str, type: str) -> list[Instruction]:
        """The kernels that read the parameter of this type, `bf16[64,32]` for instance."""

        def reads(kernel: Instruction) -> bool:
            for operand in kernel.operands:
                value = self.source(computation, operand)
                parameter = value.op == "parameter" or (
                    value.op == "get-tuple-element"
                    and self.computations[computation][value.operands[0]].op == "parameter"
                )
                if parameter and value.type.split("{")[0] == type:
                    return True
            return False

        return [i for i in self.computations[computation].values() if i.is_kernel and reads(i)]

    def traffic(self, computation: str) -> int:
        """Bytes that the kernels of a computation read and write, workspaces left out.

        A loop body once.
        """
        total = 0
        for name, instructions in self._reached(computation).items():
            for kernel in instructions.values():
                if kernel.is_kernel:
                    read = [self.computations[name][operand].type for operand in kernel.operands]
                    total += sum(size_of(type) for type in [kernel.type, *read])
        return total

    def _reached(self, computation: str) -> dict[str, dict[str, Instruction]]:
        found = {computation: self.computations[computation]}
        for instruction in self.computations[computation].values():
            if instruction.op in CONTAINERS:
                for called in CALLED.findall(instruction.attributes):
                    found |= self._reached(called)
        return found


def size_of(type: str) -> int:
    """Bytes of a type, tuples included; not those of a cuBLASLt workspace, s8[n]."""
    return sum(
        BYTES[dtype] * math.prod(int(n) for n in shape.split(",") if n)
        for dtype, shape in SHAPE.findall(type)
        if dtype != "s8"
    )


def _branches(conditional: Instruction) -> list[str]:
    if found := re.search(r"branch_computations=\{([^}]*)\}", conditional.attributes):
        return [name.strip(" %") for name in found[1].split(",")]
    return [
        re.search(rf"{side}_computation=%?([\w.\-]+)", conditional.attributes)[1]
        for side in ("false", "true")
    ]


def _trips(container: Instruction) -> int:
    """How often a loop turns. A call runs once."""
    if container.op != "while":
        return 1
    if (known := TRIP_COUNT.search(container.attributes)) is None:
        raise ValueError(f"XLA does not know how often the loop {container.name} turns")
    return int(known[1])


def _instruction(line: str) -> Instruction:
    name, rest = re.sub(r"/\*.*?\*/", "", line.strip()).removeprefix("ROOT ").split(" = ", 1)
    end = _closing(rest, 0) if rest[0] == "(" else rest.index(" ")
    type, rest = rest[:end], rest[end:].strip()
    op = re.match(r"[\w\-]+", rest)[0]
    end = _closing(rest, len(op))
    operands = tuple(
        a.strip().split(" ")[-1].lstrip("%")
        for a in rest[len(op) + 1 : end - 1].split(",")
        if a.strip()
    )
    return Instruction(name.lstrip("%"), type, op, operands, rest[end:])


def _closing(text: str, start: int) -> int:
    """Just behind the bracket that opens at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == "(") - (text[position] == ")")
        if depth == 0:
            return position + 1
    raise ValueError(f"no closing bracket in {text!r}")
