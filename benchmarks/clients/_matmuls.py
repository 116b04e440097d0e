"""Counts the matmuls of a dumped train step that read FP8, and what its all-gathers send.

    python benchmarks/clients/_matmuls.py FOLDER

FOLDER is that of XLA's flag `--xla_dump_to`. Of several programs the one with the most matmuls
counts. The program before XLA's optimizations is read, because on a CPU they may replace a matmul
by a library's call. A matmul reads FP8 if both of its operands are FP8 numbers, or were made of
them by casts, scales and changes of layout only. So fake quantization counts, too. Scales are not
told from other factors: a product with one such operand counts as FP8.
"""

import functools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jaxfp8.programs._hlo import BRANCHES, Instruction, Program, read_program, tuple_types
from jaxfp8.programs._transfers import traffic_of

# Of these operations the result holds the numbers of the first operand, in another place or dtype.
MOVES = {
    "all-gather", "all-to-all", "bitcast", "bitcast-convert", "broadcast", "collective-permute",
    "convert", "copy", "custom-call", "dynamic-slice", "gather", "opt-barrier", "pad",
    "reduce-precision", "reshape", "reverse", "slice", "transpose",
}  # fmt: skip
SCALES = {"multiply", "divide", "select"}  # one operand of FP8 numbers: the other scales or masks
MATMULS = {"dot", "ragged-dot"}
FP8 = re.compile(r"\bf8e")
MEMBER = re.compile(r"%([\w.\-]+)(?:#(\d+))?")

Value = Any
"""Whether an array is made of FP8 numbers, or a tuple of such."""


class Found(NamedTuple):
    """Matmuls by the number of their operands that are made of FP8 numbers: 0, 1 or 2."""

    of: tuple[int, int, int] = (0, 0, 0)

    def __add__(self, other: Any) -> "Found":
        return Found(tuple(a + b for a, b in zip(self.of, other.of, strict=True)))


def count(program: Program) -> Found:
    """The matmuls of one run. The body of a loop counts once, and the larger branch of a cond."""

    @functools.cache
    def run(name: str, given: tuple[Value, ...]) -> tuple[Value, Found]:
        at: dict[str, Value] = {}
        found, result = Found(), None
        for instruction in program.computations[name].values():
            operands = [
                at[each] if not index else at[each][int(index)]
                for each, index in MEMBER.findall(instruction.inside)
            ]
            value, inside = step(instruction, operands, given)
            at[instruction.name], found = value, found + inside
            if instruction.is_root:
                result = value
        return result, found

    def step(
        instruction: Instruction, operands: list[Value], given: tuple[Value, ...]
    ) -> tuple[Value, Found]:
        kind = instruction.opcode
        if kind == "parameter":
            return both(given[int(instruction.inside)], typed(instruction.type), any), Found()
        if kind == "tuple":
            return tuple(operands), Found()
        if kind == "get-tuple-element":
            index = re.search(r"index=(\d+)", instruction.attributes)
            return operands[0][int(index[1])], Found()
        if kind == "call":
            return run(instruction.computations("to_apply")[0], tuple(operands))
        if kind == "while":
            return loop(instruction, operands[0])
        if branches := instruction.computations(*BRANCHES):
            ran = [
                run(name, (operand,)) for name, operand in zip(branches, operands[1:], strict=True)
            ]
            value = functools.reduce(lambda a, b: both(a, b, all), [each for each, _ in ran])
            return value, max((each for _, each in ran), key=lambda of: (sum(of.of), -of.of[2]))
        if kind in MATMULS:
            of = [0, 0, 0]
            of[sum(map(bool, operands[:2]))] = 1
            return typed(instruction.type), Found(tuple(of))
        plain = typed(instruction.type)
        if isinstance(plain, tuple) or not operands:
            return plain if kind != "opt-barrier" else operands[0], Found()
        if kind in MOVES:
            return plain or operands[0] is True, Found()
        if kind in SCALES:
            return plain or True in operands, Found()
        if kind == "clamp":
            return plain or operands[1] is True, Found()
        if kind == "concatenate":
            return plain or all(operands), Found()
        return plain, Found()

    def loop(instruction: Instruction, start: Value) -> tuple[Value, Found]:
        (body,) = instruction.computations("body")
        while True:  # what is FP8 in each round. It only becomes less, so this ends
            end, found = run(body, (start,))
            end = both(start, end, all)
            if end == start:
                return end, found
            start = end

    entry = program.computations[program.entry].values()
    parameters = [each for each in entry if each.opcode == "parameter"]
    given = tuple(
        typed(each.type) for each in sorted(parameters, key=lambda each: int(each.inside))
    )
    return run(program.entry, given)[1]


def typed(type: str) -> Value:
    """Whether a type is FP8; of a tuple, for each member."""
    if type.startswith("("):
        return tuple(map(typed, tuple_types(type)))
    return FP8.search(type) is not None


def both(one: Value, other: Value, join: Any) -> Value:
    """Two values joined, array by array, by `any` or `all`."""
    if isinstance(one, tuple):
        return tuple(both(a, b, join) for a, b in zip(one, other, strict=True))
    return join((one, other))


def counts(folder: Path) -> dict[str, Any]:
    """The matmuls and all-gathers of the train step in a folder of dumps."""
    names = sorted(folder.glob("*.before_optimizations.txt"))
    if not names:
        raise ValueError(f"{folder} has no *.before_optimizations.txt. Set XLA's flags for dumps.")
    of = {name: count(read_program(name.read_text())) for name in names}
    step = max(of, key=lambda name: sum(of[name].of))
    optimized = list(folder.glob(step.name.split(".before_")[0] + ".*after_optimizations.txt"))
    none, one, two = of[step].of
    return {
        "program": step.name.split(".")[1],
        "matmuls": none + one + two,
        "fp8": two,
        "one_operand_fp8": one,
        "all_gathers": all_gathers(read_program(path.read_text()) for path in optimized),
    }


def all_gathers(programs: Iterable[Program]) -> dict[str, int]:
    """The arrays that optimized programs gather, by dtype. A loop of unknown length counts once."""
    gathers: Counter[str] = Counter()
    for program in programs:
        transfers, _ = traffic_of(program, trip_count=1)
        gathers.update(each.dtype for each in transfers if each.kind == "all-gather")
    return dict(gathers)


if __name__ == "__main__":
    print(json.dumps(counts(Path(sys.argv[1]))))
