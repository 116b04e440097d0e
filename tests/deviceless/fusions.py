"""How many different kernels XLA compiles for the fusions of a program.

XLA compiles a fusion once, and uses the kernel for all equal fusions. Equal ones have the same
operations, constants, layouts and types.
"""

import re
from typing import NamedTuple

from program import CALLED, Instruction, Program

# What a kernel does not depend on.
_NOTES = re.compile(r"(?:, )?(?:metadata|backend_config|sharding|frontend_attributes)=\{.*")


class Fusions(NamedTuple):
    """Numbers of fusions: all, different ones, and those that differ by more than constants and
    bounds of slices."""

    fusions: int
    different: int
    different_but_for_constants: int


def fusions_of(program: Program) -> Fusions:
    """The fusions that a program runs. One in a loop counts once."""
    texts = [
        (_text(program, each, masked=False), _text(program, each, masked=True))
        for each in program.instructions(program.entry)
        if each.op == "fusion"
    ]
    exact, masked = ({text[i] for text in texts} for i in (0, 1))
    return Fusions(len(texts), len(exact), len(masked))


def _text(program: Program, fusion: Instruction, *, masked: bool) -> str:
    """What a fusion computes, without names. `masked`: without values of constants and slices."""
    (called,) = CALLED.findall(fusion.attributes)
    body = program.computations[called]
    *_, root = body
    numbers: dict[str, int] = {}
    lines = [each.type for each in body.values() if each.op == "parameter"]
    pending = [root]
    while pending:
        name = pending[-1]
        instruction = body[name]
        inputs = [] if instruction.op in ("parameter", "constant") else instruction.operands
        missing = [each for each in inputs if each not in numbers]
        if missing:
            pending.append(missing[0])
            continue
        pending.pop()
        if name in numbers:
            continue
        numbers[name] = len(numbers)
        attributes = _NOTES.sub("", instruction.attributes)
        # A reduction is named by what it combines with, and not by the name of that computation.
        for combiner in CALLED.findall(attributes):
            operations = "-".join(each.op for each in program.computations[combiner].values())
            attributes = attributes.replace(combiner, operations)
        literal = ",".join(instruction.operands) if instruction.op == "constant" else ""
        if masked:
            attributes, literal = re.sub(r"slice=\{.*?\}", "", attributes), ""
        which = instruction.operands if instruction.op == "parameter" else ()
        operands = [str(numbers[each]) for each in inputs]
        lines.append(
            " ".join([instruction.type, instruction.op, *which, *operands, attributes, literal])
        )
    return "\n".join(lines)
