"""Which arrays of a program share memory, and in which phase of a step each is made."""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from jaxfp8.programs._hlo import Instruction, Program, Tensor

# The phases of a train step: forward pass, backward pass, and what is neither.
#
# JAX writes its transformations into the name of each operation. `jvp(` marks the forward pass of a
# gradient. `transpose(` marks the backward pass, also the part that `jax.checkpoint` computes
# again.

Phase = Literal["other", "forward", "backward"]

_OP_NAME = re.compile(r'op_name="([^"]*)"')
_ORDER: tuple[Phase, ...] = ("other", "forward", "backward")


def latest(phases: Iterable[Phase]) -> Phase:
    """The phase that a step reaches last. "other" if there is none.

    Example:
      >>> latest(["forward", "backward", "other"])
      'backward'
    """
    return max(phases, key=_ORDER.index, default="other")


def _named_phase(instruction: Instruction) -> Phase | None:
    """The phase that the name of an instruction says. None without a name of JAX."""
    found = _OP_NAME.search(instruction.attributes)
    # Parameters have the names of arguments.
    if found is None or instruction.opcode == "parameter":
        return None
    if "transpose(" in found[1]:
        return "backward"
    return "forward" if "jvp(" in found[1] else "other"


class Phases:
    """The phases of the instructions of a program.

    Example:
      >>> phases = Phases(Program("main", {}, 1, 1))
      >>> phases.of(Instruction("z", "f32[]", "copy", ("y",), ""))
      (None,)
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._fused: dict[str, tuple[Phase | None, ...]] = {}

    def of(self, instruction: Instruction) -> tuple[Phase | None, ...]:
        """The phase of an instruction. A fusion with several results has one for each.

        XLA adds instructions that have no name of JAX, for instance copies. Their phase is None.
        The name of a fusion is that of one of its operations, so the phases come from the
        operations that make its results.
        """
        named = _named_phase(instruction)
        fused = instruction.computations("calls") if instruction.opcode == "fusion" else ()
        if fused and (named is None or instruction.type.startswith("(")):
            return tuple(phase or named for phase in self._results(fused[0]))
        return (named,)

    def _results(self, name: str) -> tuple[Phase | None, ...]:
        """The phase of each result of a fused computation."""
        if name not in self._fused:
            computation = self._program.computations.get(name, {})
            nearest: dict[str, Phase | None] = {}
            found: tuple[Phase | None, ...] = (None,)
            for instruction in computation.values():
                before = [nearest.get(operand) for operand in instruction.operands]
                known = [phase for phase in before if phase is not None]
                own = _named_phase(instruction) or (latest(known) if known else None)
                nearest[instruction.name] = own
                if instruction.is_root:
                    found = tuple(before) if instruction.opcode == "tuple" else (own,)
            self._fused[name] = found
        return self._fused[name]


# Which arrays of a program share one piece of memory, and from when to when they need it.


@dataclasses.dataclass
class Buffer:
    """A piece of memory, which holds an array or several ones in turn.

    Times count the instructions of the program in the order in which they run.

    Attributes:
      bytes: its size.
      elements: the number of elements of its arrays.
      born: the time of the first instruction that writes it.
      dies: the time of the last instruction that reads it.
      makers: the phases of the instructions that write it.
      readers: the phases of the instructions that read it. A result of the program is read by
        "other".
      summed: whether a loop with a backward pass in it writes the buffer outside of that pass. Sums
        of gradients over microbatches are such buffers.
      outside: whether it is an argument or a constant of the program, or takes the memory of one.
      returned: whether it is a result of the program.
    """

    bytes: int
    elements: int
    born: int
    dies: int
    makers: set[Phase]
    readers: set[Phase]
    summed: bool = False
    outside: bool = False
    returned: bool = False


class Storage:
    """The buffers of a program. A buffer is named by a number, and several numbers may name one.

    Example:
      >>> storage = Storage()
      >>> a, b = storage.new([Tensor("float32", (4,), 16)] * 2, 0, ["other"])
      >>> storage.join([a], [b])
      >>> storage.read([b], 3, ["backward"])
      >>> [(buffer.bytes, buffer.born, buffer.dies) for buffer in storage.buffers()]
      [(16, 0, 3)]
    """

    def __init__(self) -> None:
        self._same: list[int] = []
        self._buffers: list[Buffer] = []

    def new(self, tensors: Sequence[Tensor], time: int, phases: Sequence[Phase]) -> list[int]:
        """A buffer for each of the arrays that an instruction makes.

        Args:
          tensors: the arrays.
          time: when they are written.
          phases: the phase of each array, or one for all.
        """
        names = []
        each = phases if len(phases) == len(tensors) else [latest(phases)] * len(tensors)
        for tensor, phase in zip(tensors, each, strict=True):
            names.append(len(self._same))
            self._same.append(names[-1])
            elements = math.prod(tensor.shape)
            self._buffers.append(Buffer(tensor.bytes, elements, time, time, {phase}, set()))
        return names

    def of(self, name: int) -> Buffer:
        """The buffer of a name."""
        return self._buffers[self._find(name)]

    def read(self, names: Iterable[int], time: int, phases: Iterable[Phase]) -> None:
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
            self._buffers[first] = Buffer(
                max(a.bytes, b.bytes), max(a.elements, b.elements), min(a.born, b.born),
                max(a.dies, b.dies), a.makers | b.makers, a.readers | b.readers,
                a.summed or b.summed, a.outside or b.outside, a.returned or b.returned,
            )  # fmt: skip

    def buffers(self) -> list[Buffer]:
        """All buffers."""
        return [self._buffers[n] for n, same in enumerate(self._same) if n == same]

    def _find(self, name: int) -> int:
        while self._same[name] != name:
            self._same[name] = self._same[self._same[name]]
            name = self._same[name]
        return name


class Memory(NamedTuple):
    """The memory of a program over time.

    Attributes:
      buffers: temporary ones. Arguments, constants and results are none.
      results: those of results that take no memory of a donated argument.
      phases: the phase of each instruction, in the order in which they run.
    """

    buffers: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    phases: tuple[Phase, ...]

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

    def live(self, time: int) -> list[Buffer]:
        """The buffers that were written before this time, and are read at it or later."""
        return [buffer for buffer in self.buffers if buffer.born < time <= buffer.dies]
