"""The memory of a compiled program: its buffers, and what a train step keeps in them.

XLA prints the instructions of a program in the order in which they run. So the text says when each
array is made and last read. XLA's own plan of the memory (its buffer assignment) has the sizes that
it allocates. It is not available for a program that was compiled for a GPU that is not there.

References:
  XLA, xla/service/hlo_dataflow_analysis.cc: which instructions share the memory of their operands.
"""

import dataclasses
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


class _Phases:
    """The phases of the instructions of a program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._fused: dict[str, tuple[_Phase | None, ...]] = {}

    def of(self, instruction: Instruction) -> tuple[_Phase | None, ...]:
        """The phase of an instruction, None without a name. A fusion has one for each result.

        XLA adds instructions that have no name of JAX, for instance copies. The name of a fusion is
        that of one of its operations. So its phases come from the operations that make its results.
        """
        named = _named_phase(instruction)
        fused = instruction.computations("calls") if instruction.opcode == "fusion" else ()
        if fused and (named is None or instruction.type.startswith("(")):
            return tuple(phase or named for phase in self._results(fused[0]))
        return (named,)

    def _results(self, name: str) -> tuple[_Phase | None, ...]:
        """The phase of each result of a fused computation."""
        if name not in self._fused:
            computation = self._program.computations.get(name, {})
            nearest: dict[str, _Phase | None] = {}
            found: tuple[_Phase | None, ...] = (None,)
            for instruction in computation.values():
                before = [nearest.get(operand) for operand in instruction.operands]
                known = [phase for phase in before if phase is not None]
                own = _named_phase(instruction) or (_latest(known) if known else None)
                nearest[instruction.name] = own
                if instruction.is_root:
                    found = tuple(before) if instruction.opcode == "tuple" else (own,)
            self._fused[name] = found
        return self._fused[name]


# Buffers: which arrays share a piece of memory, and from when to when.


@dataclasses.dataclass
class _Buffer:
    """A piece of memory for arrays, in turn. Times count the instructions as they run."""

    bytes: int
    elements: int  # of its arrays
    born: int  # when the first instruction writes it
    dies: int  # when the last instruction reads it
    makers: set[_Phase]  # the phases of the instructions that write it
    readers: set[_Phase]  # and of those that read it. "other" reads a result of the program
    # Whether a loop with a backward pass in it writes the buffer outside of that pass. Sums of
    # gradients over microbatches are such buffers.
    summed: bool = False
    outside: bool = False  # an argument or a constant of the program, or in the memory of one
    returned: bool = False  # a result of the program


class _Storage:
    """The buffers of a program. A buffer is named by a number, and several numbers may name one."""

    def __init__(self) -> None:
        self._same: list[int] = []
        self._buffers: list[_Buffer] = []

    def new(self, tensors: Sequence[Tensor], time: int, phases: Sequence[_Phase]) -> list[int]:
        """A buffer for each array that an instruction writes. `phases` may be one for all."""
        names = []
        each = phases if len(phases) == len(tensors) else [_latest(phases)] * len(tensors)
        for tensor, phase in zip(tensors, each, strict=True):
            names.append(len(self._same))
            self._same.append(names[-1])
            elements = math.prod(tensor.shape)
            self._buffers.append(_Buffer(tensor.bytes, elements, time, time, {phase}, set()))
        return names

    def of(self, name: int) -> _Buffer:
        return self._buffers[self._find(name)]

    def read(self, names: Iterable[int], time: int, phases: Iterable[_Phase]) -> None:
        """Note that an instruction reads these buffers."""
        for name in names:
            buffer = self.of(name)
            buffer.dies = max(buffer.dies, time)
            buffer.readers.update(phases)

    def keep(self, names: Iterable[int], time: int) -> None:
        """Note that these buffers are needed until this time."""
        for name in names:
            buffer = self.of(name)
            buffer.dies = max(buffer.dies, time)

    def join(self, some: Sequence[int], others: Sequence[int]) -> None:
        """Make one buffer of each pair."""
        for one, other in zip(some, others, strict=True):
            first, second = sorted((self._find(one), self._find(other)))
            if first == second:
                continue
            self._same[second] = first
            a, b = self._buffers[first], self._buffers[second]
            self._buffers[first] = _Buffer(
                max(a.bytes, b.bytes), max(a.elements, b.elements), min(a.born, b.born),
                max(a.dies, b.dies), a.makers | b.makers, a.readers | b.readers,
                a.summed or b.summed, a.outside or b.outside, a.returned or b.returned,
            )  # fmt: skip

    def buffers(self) -> list[_Buffer]:
        return [self._buffers[n] for n, same in enumerate(self._same) if n == same]

    def _find(self, name: int) -> int:
        while self._same[name] != name:
            self._same[name] = self._same[self._same[name]]
            name = self._same[name]
        return name


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
        live, most, peak = 0, 0, 0
        for time, change in enumerate(changes):
            live += change
            if live > most:
                most, peak = live, time
        return peak

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
    parameters = walk.parameters(program.entry)
    storage = walk.storage
    results = walk.run(program.entry, parameters, "other")
    end = len(walk.phases)
    storage.read(results, end, ["other"])
    for operand, copies in reversed(walk.added):  # who reads a copy, reads the original
        for copy in copies:
            storage.of(operand).readers.update(storage.of(copy).readers)
    shared = _OF_PROGRAM.search(text)
    for output, parameter, _ in _SHARED.findall(shared[1]) if shared else ():
        storage.join([results[int(output or 0)]], [parameters[int(parameter)][0]])
    for result in results:
        storage.of(result).returned = True
    inside = [buffer for buffer in storage.buffers() if not buffer.outside]
    return _Memory(
        tuple(buffer for buffer in inside if not buffer.returned),
        tuple(buffer for buffer in inside if buffer.returned),
        tuple(walk.phases),
    )


class _Walk:
    """Follows a program in the order in which it runs. Each loop is followed once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.storage = _Storage()
        self._phases = _Phases(program)
        # (operand, results) of instructions that XLA added, for instance copies and casts.
        self.added: list[tuple[int, list[int]]] = []
        self.phases: list[_Phase] = []

    def parameters(self, name: str) -> list[list[int]]:
        """Buffers of the parameters of the program."""
        found = [i for i in self.program.computations[name].values() if i.opcode == "parameter"]
        found.sort(key=lambda i: int(i.inside))
        return [self._outside(i) for i in found]

    def run(self, name: str, parameters: Sequence[list[int]], phase: _Phase) -> list[int]:
        """The buffers of the results of a computation."""
        computation = self.program.computations[name]
        made: dict[str, list[int]] = {}
        phases: dict[str, _Phase] = {}
        root: list[int] = []
        for instruction in computation.values():
            of = instruction.name
            if instruction.opcode == "parameter":
                made[of], phases[of] = parameters[int(instruction.inside)], phase
            elif instruction.opcode == "constant":
                made[of], phases[of] = self._outside(instruction), "other"
            else:
                operands = [o for o in instruction.operands if o in made]
                named = self._phases.of(instruction)
                # What XLA adds belongs to the latest phase of its operands.
                inherited = _latest(phases[o] for o in operands)
                each = [phase or inherited for phase in named]
                phases[of] = _latest(each)
                given = [made[o] for o in operands]
                passed_on = self._passed_on(instruction, given, computation)
                if passed_on is None:
                    made[of] = self._called(instruction, given, each)
                    if not any(named) and instruction.opcode not in _CALLERS:
                        self.added += [(name, made[of]) for names in given for name in names]
                else:
                    made[of] = passed_on
            if instruction.is_root:
                root = made[of]
        return root

    def _outside(self, instruction: Instruction) -> list[int]:
        names = self.storage.new(tensors_of(instruction.type), len(self.phases), ["other"])
        for name in names:
            self.storage.of(name).outside = True
        return names

    def _passed_on(
        self, instruction: Instruction, given: list[list[int]], computation: dict[str, Instruction]
    ) -> list[int] | None:
        """The buffers of an instruction that makes no array. None for the others."""
        opcode = instruction.opcode
        if opcode == "tuple":
            return [name for names in given for name in names]
        if opcode == "get-tuple-element" and (found := _INDEX.search(instruction.attributes)):
            return _element(computation[instruction.operands[0]].type, int(found[1]), given[0])
        if opcode in _SAME or opcode.endswith("-update"):  # of an asynchronous start
            return given[0]
        if opcode.endswith("-done"):
            started = computation[instruction.operands[0]]
            # A start has its operands, its results, and more. A copy has its result first.
            parts = tuple_types(started.type)
            which = 0 if len(parts) == 1 or started.opcode in ("copy-start", "recv") else 1
            count = len(tensors_of(instruction.type))
            self.storage.keep(given[0], len(self.phases))
            names = given[0] if len(parts) == count else _element(started.type, which, given[0])
            return names[:count]
        return None

    def _called(
        self, instruction: Instruction, given: list[list[int]], phases: Sequence[_Phase]
    ) -> list[int]:
        """The buffers of an instruction that calls computations, or makes arrays itself."""
        opcode, phase = instruction.opcode, _latest(phases)
        if opcode == "while":
            return self._loop(instruction, given[0], phase)
        if opcode == "call":
            (called,) = instruction.computations("to_apply")
            return self.run(called, given, phase)
        if opcode == "conditional":
            branches = instruction.computations(*BRANCHES)
            self._step(given[0], phases)
            results = [
                self.run(branch, [names], phase)
                for branch, names in zip(branches, given[1:], strict=True)
            ]
            for other in results[1:]:
                self.storage.join(results[0], other)
            return results[0]
        time = self._step((name for names in given for name in names), phases)
        if opcode.endswith("-start"):
            return self._started(instruction, given, time, phases)
        names = self.storage.new(tensors_of(instruction.type), time, phases)
        if shared := _OF_INSTRUCTION.search(instruction.attributes):
            for output, operand, index in _SHARED.findall(shared[1]):
                mine = _element(instruction.type, int(output), names) if output else names
                theirs = given[int(operand)]
                self.storage.join(mine[:1], theirs[int(index or 0) :][:1])
        return names

    def _loop(self, loop: Instruction, carried: list[int], phase: _Phase) -> list[int]:
        begin = len(self.phases)
        (condition,), (body,) = loop.computations("condition"), loop.computations("body")
        self.run(condition, [carried], phase)
        results = self.run(body, [carried], phase)
        if "backward" in self.phases[begin:]:
            for old, new in zip(carried, results, strict=True):
                buffer = self.storage.of(new)
                buffer.summed = buffer.summed or (old != new and "other" in buffer.makers)
        self.storage.join(carried, results)
        self.storage.keep(carried, len(self.phases))
        return carried

    def _started(
        self, start: Instruction, given: list[list[int]], time: int, phases: Sequence[_Phase]
    ) -> list[int]:
        """The buffers of an asynchronous start, which has its operands among its results."""
        operands = [name for names in given for name in names]
        parts = [tensors_of(part) for part in tuple_types(start.type)]
        which = 1 if start.opcode == "copy-start" else 0
        found: list[int] = []
        for n, tensors in enumerate(parts):
            mine = len(parts) > 1 and n == which and len(tensors) == len(operands)
            found += operands if mine else self.storage.new(tensors, time, [_latest(phases)])
        return found

    def _step(self, read: Iterable[int], phases: Sequence[_Phase]) -> int:
        """Read buffers at the next time. Returns it."""
        time = len(self.phases)
        self.storage.read(read, time, phases)
        self.phases.append(_latest(phases))
        return time


def _element(type: str, index: int, names: list[int]) -> list[int]:
    """The buffers of one element of a tuple."""
    counts = [len(tensors_of(part)) for part in tuple_types(type)]
    start = sum(counts[:index])
    return names[start : start + counts[index]]


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
            "step for a CPU or for an NVIDIA GPU."
        )
    memory = _buffers_of(compiled.as_text())
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    returned = sum(b.bytes for b in memory.results if _is_gradient(b, weight_sizes))
    residuals, gradients = _at_peak(memory, weight_sizes)
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


def _at_peak(memory: _Memory, weight_sizes: Collection[int]) -> tuple[int, int]:
    """Bytes of residuals and gradients at the peak."""
    live = memory.live(memory.peak)
    residuals = [b for b in live if _is_residual(b)]
    gradients = [b for b in live if not _is_residual(b) and _is_gradient(b, weight_sizes)]
    return sum(b.bytes for b in residuals), sum(b.bytes for b in gradients)


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
