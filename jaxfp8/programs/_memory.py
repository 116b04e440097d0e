"""The memory of a compiled program: its buffers, and what a train step keeps in them.

XLA prints the instructions of a program in the order in which they run. So the text says when each
array is made and last read. XLA's own plan of the memory (its buffer assignment) has the sizes that
it allocates. It is not available for a program that was compiled for a GPU that is not there.

References:
  XLA, xla/service/hlo_dataflow_analysis.cc: which instructions share the memory of their operands.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax

from jaxfp8.programs._hlo import (
    BRANCHES,
    Instruction,
    Program,
    Tensor,
    read_program,
    tensors_of,
    tuple_types,
)

# The phases of a train step. JAX writes its transformations into the name of each operation. `jvp(`
# marks the forward pass of a gradient. `transpose(` marks the backward pass, also the part that
# `jax.checkpoint` computes again.

_Phase = Literal["other", "forward", "backward"]
_ORDER: tuple[_Phase, ...] = ("other", "forward", "backward")


def _latest(phases: Iterable[_Phase]) -> _Phase:
    """The phase that a step reaches last. "other" if there is none."""
    return max(phases, key=_ORDER.index, default="other")


def _named_phase(instruction: Instruction) -> _Phase | None:
    """The phase that the name of an instruction says. None without a name of JAX."""
    name = instruction.op_name
    # Parameters have the names of arguments.
    if name is None or instruction.opcode == "parameter":
        return None
    if "transpose(" in name:
        return "backward"
    return "forward" if "jvp(" in name else "other"


def _phases_of(program: Program, instruction: Instruction) -> list[_Phase | None]:
    """The phase of an instruction, None without a name. A fusion has one for each result.

    XLA adds instructions that have no name of JAX, for instance copies. The name of a fusion is
    that of one of its operations. So its phases come from the operations that make its results.
    """
    named = _named_phase(instruction)
    fused = instruction.computations("calls") if instruction.opcode == "fusion" else ()
    if not fused or (named and not instruction.type.startswith("(")):
        return [named]
    nearest: dict[str, _Phase | None] = {}
    found: list[_Phase | None] = [None]
    for each in program.computations[fused[0]].values():
        before = [nearest.get(operand) for operand in each.operands]
        known = [phase for phase in before if phase]
        own = nearest[each.name] = _named_phase(each) or (_latest(known) if known else None)
        if each.is_root:
            found = before if each.opcode == "tuple" else [own]
    return [phase or named for phase in found]


# Buffers: which arrays share a piece of memory, and from when to when.


@dataclasses.dataclass(eq=False)
class _Buffer:
    """A piece of memory for arrays, in turn. Times count the instructions as they run."""

    bytes: int
    elements: int  # of its arrays
    born: int  # when the first instruction writes it
    dies: int  # when the last instruction reads it
    makers: set[_Phase]  # the phases of the instructions that write it
    # and of those that read it. "other" reads a result of the program
    readers: set[_Phase] = dataclasses.field(default_factory=set)
    # Whether a loop with a backward pass in it writes the buffer outside of that pass. Sums of
    # gradients over microbatches are such buffers.
    summed: bool = False
    outside: bool = False  # an argument or a constant of the program, or in the memory of one
    returned: bool = False  # a result of the program
    joined: "_Buffer | None" = None  # with which it became one buffer, by `_join`

    @property
    def whole(self) -> "_Buffer":
        """The buffer that this one is now."""
        buffer = self
        while buffer.joined is not None:
            buffer = buffer.joined
        return buffer


def _read(buffers: Iterable[_Buffer], time: int, phases: Iterable[_Phase] = ()) -> None:
    """Note that these buffers are needed until a time, and by whom."""
    for buffer in (each.whole for each in buffers):
        buffer.dies = max(buffer.dies, time)
        buffer.readers.update(phases)


def _join(some: Sequence[_Buffer], others: Sequence[_Buffer]) -> None:
    """Make one buffer of each pair."""
    for one, other in zip(some, others, strict=True):
        a, b = one.whole, other.whole
        if a is b:
            continue
        b.joined = a
        a.bytes, a.elements = max(a.bytes, b.bytes), max(a.elements, b.elements)
        a.born, a.dies = min(a.born, b.born), max(a.dies, b.dies)
        a.makers |= b.makers
        a.readers |= b.readers
        a.summed, a.outside = a.summed or b.summed, a.outside or b.outside


class _Memory(NamedTuple):
    """The memory of a program over time."""

    buffers: tuple[_Buffer, ...]  # temporary ones, so no arguments, constants and results
    results: tuple[_Buffer, ...]  # those that take no memory of a donated argument
    phases: tuple[_Phase, ...]  # of each instruction, in the order in which they run

    @property
    def peak(self) -> int:
        """The time of the instruction before which most bytes are live."""
        changes = [0] * (len(self.phases) + 3)
        for buffer in self.buffers:
            changes[buffer.born + 1] += buffer.bytes
            changes[buffer.dies + 1] -= buffer.bytes
        live = list(itertools.accumulate(changes))
        return live.index(max(live))

    def live(self, time: int) -> list[_Buffer]:
        """The buffers that were written before this time, and are read at it or later."""
        return [buffer for buffer in self.buffers if buffer.born < time <= buffer.dies]


# `_buffers_of`: the buffers of a compiled program, read from its text.

# These pass their operand on.
_SAME = ("bitcast", "optimization-barrier", "add-dependency", "domain", "get-tuple-element")
_CALLERS = ("while", "conditional", "call")
_INDEX = re.compile(r"\bindex=(\d+)")
# {output index}: (operand or parameter, {index in it}). An index has one number at most here.
_SHARED = re.compile(r"\{(\d*)\}: \((\d+), \{(\d*)\}")
_OF_INSTRUCTION = re.compile(r"output_to_operand_aliasing=\{(.*?\)) ?\}")
_OF_PROGRAM = re.compile(r"^HloModule .*?\binput_output_alias=\{ (.*?\)) \}", re.MULTILINE)


def _buffers_of(text: str) -> _Memory:
    """The buffers of a compiled program. ValueError if its text has no order of time."""
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError(
            "the text of the program has no is_scheduled=true, so its instructions are in no order "
            "of time. Pass the text of a compiled program, lowered.compile().as_text()."
        )
    program = read_program(text)
    walk = _Walk(program)
    entry = program.computations[program.entry].values()
    inputs = [i for i in entry if i.opcode == "parameter"]
    inputs.sort(key=lambda i: int(i.inside))
    parameters = [walk.outside(i) for i in inputs]
    results = walk.run(program.entry, parameters, "other")
    _read(results, len(walk.phases), ["other"])
    for operand, copies in reversed(walk.added):  # who reads a copy, reads the original
        for copy in copies:
            operand.whole.readers.update(copy.whole.readers)
    shared = _OF_PROGRAM.search(text)
    for output, parameter, _ in _SHARED.findall(shared[1]) if shared else ():
        _join([results[int(output or 0)]], [parameters[int(parameter)][0]])
    for result in results:
        result.whole.returned = True
    inside = [b for b in walk.buffers if b.joined is None and not b.outside]
    return _Memory(
        tuple(buffer for buffer in inside if not buffer.returned),
        tuple(buffer for buffer in inside if buffer.returned),
        tuple(walk.phases),
    )


class _Walk:
    """Follows a program in the order in which it runs. Each loop is followed once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.buffers: list[_Buffer] = []
        # (operand, results) of instructions that XLA added, for instance copies and casts.
        self.added: list[tuple[_Buffer, list[_Buffer]]] = []
        self.phases: list[_Phase] = []

    def new(self, tensors: Sequence[Tensor], phases: Sequence[_Phase]) -> list[_Buffer]:
        """A buffer for each array that the last instruction writes. `phases` may be one for all."""
        if len(phases) != len(tensors):
            phases = [_latest(phases)] * len(tensors)
        time = len(self.phases) - 1
        found = [
            _Buffer(tensor.allocated, math.prod(tensor.shape), time, time, {phase})
            for tensor, phase in zip(tensors, phases, strict=True)
        ]
        self.buffers += found
        return found

    def outside(self, instruction: Instruction) -> list[_Buffer]:
        """The buffers of a parameter or a constant of the program."""
        found = self.new(tensors_of(instruction.type), ["other"])
        for buffer in found:
            buffer.outside = True
        return found

    def run(self, name: str, parameters: Sequence[list[_Buffer]], phase: _Phase) -> list[_Buffer]:
        """The buffers of the results of a computation."""
        computation = self.program.computations[name]
        made: dict[str, list[_Buffer]] = {}
        phases: dict[str, _Phase] = {}
        root: list[_Buffer] = []
        for instruction in computation.values():
            of = instruction.name
            if instruction.opcode == "parameter":
                made[of], phases[of] = parameters[int(instruction.inside)], phase
            elif instruction.opcode == "constant":
                made[of], phases[of] = self.outside(instruction), "other"
            else:
                operands = [o for o in instruction.operands if o in made]
                named = _phases_of(self.program, instruction)
                # What XLA adds belongs to the latest phase of its operands.
                inherited = _latest(phases[o] for o in operands)
                each = [phase or inherited for phase in named]
                phases[of] = _latest(each)
                given = [made[o] for o in operands]
                passed_on = self._passed_on(instruction, given, computation)
                if passed_on is None:
                    made[of] = self._called(instruction, given, each)
                    if not any(named) and instruction.opcode not in _CALLERS:
                        self.added += [
                            (buffer, made[of]) for operand in given for buffer in operand
                        ]
                else:
                    made[of] = passed_on
            if instruction.is_root:
                root = made[of]
        return root

    def _passed_on(
        self,
        instruction: Instruction,
        given: list[list[_Buffer]],
        computation: dict[str, Instruction],
    ) -> list[_Buffer] | None:
        """The buffers of an instruction that makes no array. None for the others."""
        opcode = instruction.opcode
        if opcode == "tuple":
            return [buffer for operand in given for buffer in operand]
        if opcode == "get-tuple-element" and (found := _INDEX.search(instruction.attributes)):
            return _element(computation[instruction.operands[0]].type, int(found[1]), given[0])
        # An update continues an asynchronous start. On TPUs it may bring the operands.
        if opcode in _SAME or (opcode.endswith("-update") and len(given) == 1):
            return given[0]
        if opcode.endswith("-done"):
            started = computation[instruction.operands[0]]
            # A start has its operands, its results, and more. A copy has its result first.
            parts = tuple_types(started.type)
            which = 0 if len(parts) == 1 or started.opcode in ("copy-start", "recv") else 1
            count = len(tensors_of(instruction.type))
            _read(given[0], len(self.phases))
            done = given[0] if len(parts) == count else _element(started.type, which, given[0])
            return done[:count]
        return None

    def _called(
        self, instruction: Instruction, given: list[list[_Buffer]], phases: Sequence[_Phase]
    ) -> list[_Buffer]:
        """The buffers of an instruction that calls computations, or makes arrays itself."""
        opcode, phase = instruction.opcode, _latest(phases)
        if opcode == "while":
            return self._loop(instruction, given[0], phase)
        if opcode == "call":
            (called,) = instruction.computations("to_apply")
            return self.run(called, given, phase)
        read = given[0] if opcode == "conditional" else [b for operand in given for b in operand]
        _read(read, len(self.phases), phases)
        self.phases.append(phase)
        if opcode == "conditional":
            branches = instruction.computations(*BRANCHES)
            results = [
                self.run(branch, [buffers], phase)
                for branch, buffers in zip(branches, given[1:], strict=True)
            ]
            for other in results[1:]:
                _join(results[0], other)
            return results[0]
        if opcode.endswith("-start"):
            return self._started(instruction, read, phase)
        if opcode.endswith("-update"):
            return self._started(instruction, read[len(given[0]) :], phase)
        found = self.new(tensors_of(instruction.type), phases)
        if shared := _OF_INSTRUCTION.search(instruction.attributes):
            for output, operand, index in _SHARED.findall(shared[1]):
                mine = _element(instruction.type, int(output), found) if output else found
                theirs = given[int(operand)]
                _join(theirs[int(index or 0) :][:1], mine[:1])
        return found

    def _loop(self, loop: Instruction, carried: list[_Buffer], phase: _Phase) -> list[_Buffer]:
        begin = len(self.phases)
        (condition,), (body,) = loop.computations("condition"), loop.computations("body")
        self.run(condition, [carried], phase)
        results = self.run(body, [carried], phase)
        if "backward" in self.phases[begin:]:
            for old, new in zip(carried, results, strict=True):
                if old is not new and "other" in new.whole.makers:
                    new.whole.summed = True
        _join(carried, results)
        _read(carried, len(self.phases))
        return carried

    def _started(self, start: Instruction, operands: list[_Buffer], phase: _Phase) -> list[_Buffer]:
        """The buffers of an asynchronous start, which has its operands among its results."""
        parts = [tensors_of(part) for part in tuple_types(start.type)]
        which = 1 if start.opcode == "copy-start" else 0
        found: list[_Buffer] = []
        for n, tensors in enumerate(parts):
            mine = len(parts) > 1 and n == which and len(tensors) == len(operands)
            found += operands if mine else self.new(tensors, [phase])
        return found


def _element(type: str, index: int, buffers: list[_Buffer]) -> list[_Buffer]:
    """The buffers of one element of a tuple."""
    counts = [len(tensors_of(part)) for part in tuple_types(type)]
    start = sum(counts[:index])
    return buffers[start : start + counts[index]]


# The memory of a compiled train step beside its arguments: gradients, residuals, and the rest.


class _StepMemory(NamedTuple):
    """Bytes of a program on one device. They add up to what XLA allocates, without code."""

    arguments: int  # of all arguments that the program reads or returns
    gradients: int  # of weights, as results or at the peak
    residuals: int  # what the forward pass left for the backward pass, at the peak
    temporaries: int  # the rest of XLA's temporary memory
    results: int  # others, if they do not take the memory of donated arguments


def step_memory(compiled: Any, weight_sizes: Collection[int]) -> _StepMemory:
    """The memory of a compiled train step. ValueError if XLA does not tell it.

    The peak is the moment at which most temporary bytes are live. A buffer is a residual if the
    forward pass writes it and the backward pass reads it. It is a gradient if the backward pass
    writes it, the optimizer reads it, and it has as many elements as a weight. A sum of gradients
    over microbatches is one, too. Everything else is a temporary: activations and their gradients
    while a layer runs, workspaces of matmuls, and gaps between buffers. `weight_sizes` are the
    numbers of elements of the weights, of whole arrays and of shards.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise ValueError(
            f"{jax.default_backend()} does not tell the memory of a compiled program. Compile the "
            "step for a CPU, an NVIDIA GPU or a TPU."
        )
    memory = _buffers_of(compiled.as_text())
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    returned = sum(b.bytes for b in memory.results if _is_gradient(b, weight_sizes))
    live = memory.live(memory.peak)
    residuals = sum(b.bytes for b in live if _is_residual(b))
    gradients = sum(b.bytes for b in live if _is_gradient(b, weight_sizes))
    # XLA may put a temporary into the memory of a result or of a donated argument, which is not in
    # use at that moment. What does not fit is there, and counts there.
    returned = min(returned, results)
    residuals = min(residuals, stats.temp_size_in_bytes)
    gradients = min(gradients, stats.temp_size_in_bytes - residuals)
    return _StepMemory(
        stats.argument_size_in_bytes,
        returned + gradients,
        residuals,
        stats.temp_size_in_bytes - residuals - gradients,
        results - returned,
    )


def _is_residual(buffer: _Buffer) -> bool:
    return (
        "forward" in buffer.makers
        and "backward" not in buffer.makers
        and "backward" in buffer.readers
    )


def _is_gradient(buffer: _Buffer, weight_sizes: Collection[int]) -> bool:
    return (
        ("backward" in buffer.makers or buffer.summed)
        and "forward" not in buffer.makers
        and "other" in buffer.readers
        and buffer.elements in weight_sizes
    )
