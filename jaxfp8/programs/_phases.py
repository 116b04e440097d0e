"""The phases of a train step: forward pass, backward pass, and what is neither.

JAX writes its transformations into the name of each operation. `jvp(` marks the forward pass of a
gradient. `transpose(` marks the backward pass, also the part that `jax.checkpoint` computes again.
"""

import re
from collections.abc import Iterable
from typing import Literal

from jaxfp8.programs._hlo import Instruction, Program

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


def named_phase(instruction: Instruction) -> Phase | None:
    """The phase that the name of an instruction says. None without a name of JAX.

    Example:
      >>> attributes = ', metadata={op_name="jit(step)/transpose(jvp(jit(_gradients)))/mul"}'
      >>> named_phase(Instruction("y", "f32[]", "multiply", ("x", "x"), attributes))
      'backward'
    """
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
        named = named_phase(instruction)
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
                own = named_phase(instruction) or (latest(known) if known else None)
                nearest[instruction.name] = own
                if instruction.is_root:
                    found = tuple(before) if instruction.opcode == "tuple" else (own,)
            self._fused[name] = found
        return self._fused[name]
