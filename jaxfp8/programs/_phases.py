"""The phases of a train step: forward pass, backward pass, and what is neither.

JAX writes its transformations into the name of each operation. `jvp(` marks the forward pass of a
gradient. `transpose(` marks the backward pass, also the part that `jax.checkpoint` computes again.
"""

import re
from collections.abc import Iterable
from typing import Literal

from jaxfp8.programs._hlo import Instruction

Phase = Literal["other", "forward", "backward"]

_OP_NAME = re.compile(r'op_name="([^"]*)"')
_LATER: tuple[Phase, ...] = ("other", "forward", "backward")


def phase_of(instruction: Instruction, before: Iterable[Phase]) -> Phase:
    """The phase of an instruction.

    XLA adds instructions that have no name of JAX, for instance copies. They belong to the latest
    phase of their operands.

    Args:
      instruction: the instruction.
      before: the phases of its operands.

    Example:
      >>> attributes = ', metadata={op_name="jit(step)/transpose(jvp(jit(_gradients)))/mul"}'
      >>> phase_of(Instruction("y", "f32[]", "multiply", ("x", "x"), attributes), [])
      'backward'
      >>> phase_of(Instruction("z", "f32[]", "copy", ("y",), ""), ["backward"])
      'backward'
    """
    found = _OP_NAME.search(instruction.attributes)
    if found is None:
        return max(before, key=_LATER.index, default="other")
    if "transpose(" in found[1]:
        return "backward"
    return "forward" if "jvp(" in found[1] else "other"
