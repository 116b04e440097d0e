"""Bytes that the kernels of a compiled program move in a run, loop bodies as often as they run.

A scanned program has the weights of all layers in one array. A kernel in the loop reads the slice
of its layer, and writes such a slice in place. Only the slice is counted.
"""

from collections.abc import Mapping

from program import CALLED, Instruction, Program, size_of

Computation = Mapping[str, Instruction]
SLICES = ("dynamic-slice", "slice")
UPDATE = "dynamic-update-slice"


def moved(program: Program, computation: str) -> int:
    """Bytes that kernels read and write in a run of a computation, workspaces left out."""
    return sum(
        times * _of_kernel(program, program.computations[within], instruction)
        for within, instruction, times in program.runs(computation)
        if instruction.is_kernel
    )


def _of_kernel(program: Program, around: Computation, kernel: Instruction) -> int:
    if kernel.op.endswith("-done"):  # it was counted with its start
        return 0
    operands = [around[name].type for name in kernel.operands]
    written = size_of(kernel.type)
    if kernel.op.endswith("-start"):  # its own type has its operands, too
        ((_, done),) = _users(around, kernel)
        written = size_of(done.type)
    if kernel.op in ("fusion", "fusion-start"):
        (name,) = CALLED.findall(kernel.attributes)
        inside = program.computations[name]
        read = sum(_read(inside, str(at), type) for at, type in enumerate(operands))
        return read + written - _left(inside, written)
    if kernel.op in SLICES:
        return 2 * written + sum(map(size_of, operands[1:]))
    if kernel.op == UPDATE:
        return size_of(operands[1]) + sum(map(size_of, operands[1:]))
    return written + sum(map(size_of, operands))


def _read(inside: Computation, position: str, type: str) -> int:
    """Bytes that a fusion reads of the operand at a position."""
    (parameter,) = [i for i in inside.values() if i.op == "parameter" and i.operands == (position,)]
    users = _users(inside, parameter)
    sliced = 0
    for before, user in users:
        if user.op in SLICES:
            sliced += size_of(user.type)
        elif user.op != UPDATE or user.operands[0] != before or before in user.operands[1:]:
            return size_of(type)
    return min(sliced, size_of(type)) if users else 0


def _users(inside: Computation, value: Instruction) -> list[tuple[str, Instruction]]:
    """(what it reads, the user) of all users of a value, seen through bitcasts."""
    found = []
    for user in inside.values():
        if value.name in user.operands:
            found += _users(inside, user) if user.op == "bitcast" else [(value.name, user)]
    return found


def _left(inside: Computation, written: int) -> int:
    """Bytes of the results of a fusion that are not written, because only a slice of it is."""
    left = 0
    for update in inside.values():
        if update.op == UPDATE and all(user.op == "tuple" for _, user in _users(inside, update)):
            left += size_of(update.type) - size_of(inside[update.operands[1]].type)
    return min(left, written)
