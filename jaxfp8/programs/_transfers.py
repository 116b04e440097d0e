"""The bytes that collectives of a program send, counted as often as one run executes them.

A collective runs in groups of devices. In this file, b is the number of bytes of its operand on one
device, and g the number of devices in its group.

References:
  NCCL tests, doc/PERFORMANCE.md: what a ring sends per device.
  XLA, xla/hlo/ir/replica_group.cc and mesh_and_axis.cc (how groups are printed),
  xla/service/collective_ops_utils.cc (GetCollectiveOpGroupMode: whether they name replicas or
  partitions).
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, TypeAlias

from jaxfp8.programs._hlo import BRANCHES, CALLS, Instruction, Program, Tensor, tensors_of

# The bytes that one collective of a program sends.

CollectiveKind: TypeAlias = Literal[
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
    "send",
]

# The bytes that each of g > 1 devices sends, for an operand of b bytes. The sizes in a ragged
# all-to-all are data, so b is an upper bound there.
_WIRE: dict[str, Callable[[int, int], float]] = {
    "all-gather": lambda b, g: b * (g - 1),
    "all-reduce": lambda b, g: 2 * b * (g - 1) / g,
    "reduce-scatter": lambda b, g: b * (g - 1) / g,
    "all-to-all": lambda b, g: b * (g - 1) / g,
    "ragged-all-to-all": lambda b, g: b,
    "collective-permute": lambda b, g: b,
    "collective-broadcast": lambda b, g: b,
    "send": lambda b, g: b,
}
KINDS = tuple(_WIRE)

# If a collective of these kinds has a channel, its groups name replicas. Each replica brings all of
# its partitions. With `use_global_device_ids=true` the groups name devices.
_REPLICAS_OR_BOTH = ("all-gather", "all-reduce", "reduce-scatter")

_LISTED = re.compile(r"replica_groups=\{((?:\{[\d, ]*\}[, ]*)*)\}")
_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_MESH = re.compile(r"replica_groups=mesh\[(.*?)\].*?\{(.*?)\}")
_PAIRS = re.compile(r'source_target_pairs="?\{((?:\{\d+,\d+\}[, ]*)*)\}')


class Transfer(NamedTuple):
    """One tensor in one collective of a program. A combined collective has several tensors.

    Attributes:
      kind: the collective, for instance `all-gather`. In a `send`, one device of a pair sends and
        the other receives.
      dtype: the dtype that is sent, as jax names it.
      shape: [...] of the operand on one device.
      group_size: the number of devices in a group. For unequal groups it is the largest, for a
        permutation the longest ring.
      bytes: the bytes of the operand on one device, each time.
      times: how often one run of the program executes the collective.
      label: the jax operation that it came from.

    Example:
      >>> gather = Transfer(
      ...     "all-gather", "bfloat16", (16, 32), group_size=4, bytes=1024, times=10, label=""
      ... )
      >>> gather.operand_bytes, gather.wire_bytes
      (10240, 30720)
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    group_size: int
    bytes: int
    times: int
    label: str

    @property
    def operand_bytes(self) -> int:
        """Bytes of the operand on one device, over the whole run."""
        return self.times * self.bytes

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends over the whole run.

        In a permutation, some devices may send nothing. The bytes are those of a device that sends.
        """
        return (
            self.times * _WIRE[self.kind](self.bytes, self.group_size) if self.group_size > 1 else 0
        )


def _transfers_of(
    instruction: Instruction, computation: dict[str, Instruction], program: Program
) -> list[Transfer]:
    """The transfers of an instruction each time that it runs, without those of its calls.

    ValueError if its devices are printed in an unknown way. NotImplementedError if it sends slices
    of buffers in place, as some programs for TPUs do.
    """
    kind = instruction.opcode.removesuffix("-start")
    if kind not in KINDS or (kind == "send" and "is_host_transfer=true" in instruction.attributes):
        return []
    if "slice_sizes=" in instruction.attributes:
        raise NotImplementedError(
            f"{instruction.name} is an in-place {kind}, whose bytes cannot be counted. Compile "
            "the function for a GPU or a CPU."
        )
    # The further operands of these two kinds are offsets and sizes, or a token. They hold no data.
    operands = instruction.operands[: 1 if kind in ("ragged-all-to-all", "send") else None]
    if missing := [operand for operand in operands if operand not in computation]:
        raise ValueError(
            f"{instruction.name} reads {missing[0]}, which the text does not hold. Pass all of it."
        )
    tensors = [tensor for operand in operands for tensor in tensors_of(computation[operand].type)]
    if kind == "all-to-all" and "dimensions=" not in instruction.attributes:
        tensors = _stacked(tensors)
    size = _devices_in_a_group(instruction, kind, program)
    return [Transfer(kind, t.dtype, t.shape, size, t.bytes, 1, instruction.label) for t in tensors]


def _stacked(pieces: Iterable[Tensor]) -> list[Tensor]:
    """The tensors that an all-to-all splits.

    Without `dimensions=`, its operands are the pieces of a tensor, one for each device.
    """
    alike: dict[tuple[str, tuple[int, ...]], list[Tensor]] = {}
    for piece in pieces:
        alike.setdefault((piece.dtype, piece.shape), []).append(piece)
    return [
        Tensor(d, (len(of), *shape), sum(p.bytes for p in of), sum(p.allocated for p in of))
        for (d, shape), of in alike.items()
    ]


def _devices_in_a_group(instruction: Instruction, kind: str, program: Program) -> int:
    if kind in ("collective-permute", "send"):
        pairs = _PAIRS.search(instruction.attributes)
        if pairs is None:
            raise ValueError(_unknown(instruction))
        return _longest_ring(pairs[1])
    with_channel = "channel_id=" in instruction.attributes
    both = (
        with_channel
        and kind in _REPLICAS_OR_BOTH
        and "use_global_device_ids=true" not in instruction.attributes
    )
    # An empty list of groups means one group of all devices.
    size = _printed_size(instruction) or (
        program.partitions if with_channel and not both else program.replicas
    )
    return size * program.partitions if both else size


def _printed_size(instruction: Instruction) -> int:
    """The size of the largest group; 0 for an empty list. XLA prints groups in three ways."""
    if found := _LISTED.search(instruction.attributes):
        return max(
            (group.count(",") + 1 for group in re.findall(r"\{[^}]+\}", found[1])), default=0
        )
    if found := _IOTA.search(instruction.attributes):
        return int(found[1])
    if found := _MESH.search(instruction.attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
        size = 1
        # A part of a mesh axis is printed as 'axis':(devices before it)devices in it.
        for axis, part in re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", found[2]):
            size *= int(part or sizes[axis])
        return size
    raise ValueError(_unknown(instruction))


@functools.cache
def _longest_ring(pairs: str) -> int:
    """The number of devices in the largest set that the pairs `{source,target}` connect."""
    sets: list[set[str]] = []
    for pair in re.findall(r"\d+,\d+", pairs):
        joined = set(pair.split(",")).union(
            *(devices for devices in sets if not devices.isdisjoint(pair.split(",")))
        )
        sets = [devices for devices in sets if devices.isdisjoint(joined)] + [joined]
    return max(map(len, sets), default=1)


def _unknown(instruction: Instruction) -> str:
    attributes = instruction.attributes.strip(" ,")[:200]
    return f"cannot read which devices {instruction.name} joins: {attributes}"


# The collectives of a program, counted as often as one run executes them.


def traffic_of(
    program: Program, trip_count: int | None = None, every_branch: bool = False
) -> tuple[tuple[Transfer, ...], list[str]]:
    """The transfers of one run of a program, and the loops for which `trip_count` was used.

    `trip_count` is how often a loop runs if the program does not know it. By default only the
    branch of a conditional that sends the most bytes counts. ValueError if a collective is in a
    loop of unknown length, or if the text is not complete.
    """
    loops_of_unknown_length: list[str] = []

    @functools.cache
    def run_by(name: str) -> tuple[Transfer, ...]:
        """The transfers of one run of a computation and of all that it calls."""
        if name not in program.computations:
            raise ValueError(
                f"the text calls a computation {name} that it does not hold. Pass all of it."
            )
        computation = program.computations[name]
        found: list[Transfer] = []
        for instruction in computation.values():
            if instruction.is_second_half:  # its `-start` was counted
                continue
            found += _transfers_of(instruction, computation, program)
            for called in instruction.computations(*CALLS):
                found += run_by(called)
            branches = [run_by(branch) for branch in instruction.computations(*BRANCHES)]
            if not every_branch:
                branches = [max(branches, key=lambda of: sum(t.wire_bytes for t in of), default=())]
            found += itertools.chain(*branches)
            found += run_in_loop(instruction, computation)
        return tuple(found)

    def run_in_loop(loop: Instruction, around: dict[str, Instruction]) -> list[Transfer]:
        body = [t for name in loop.computations("body") for t in run_by(name)]
        condition = [t for name in loop.computations("condition") for t in run_by(name)]
        if not (body or condition):
            return []
        times = program.trip_count(loop, around)
        if times is None:
            loops_of_unknown_length.append(loop.label)
            times = trip_count
            if times is None:
                raise ValueError(
                    f"a {(body + condition)[0].kind} is in a loop whose length the program does "
                    f"not know: {loop.label}. Pass trip_count=, or use a loop of fixed length "
                    "(jax.lax.scan)."
                )
        # The condition runs once more than the body: its last run ends the loop.
        every_time = [(t, times) for t in body] + [(t, times + 1) for t in condition]
        return [t._replace(times=t.times * n) for t, n in every_time if n]

    return run_by(program.entry), loops_of_unknown_length
