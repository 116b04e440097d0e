"""What one collective puts on the wire.

b stands for the bytes of its operand on one device, g for the number of devices that take part
together.

References:
  NCCL tests, doc/PERFORMANCE.md: what a ring sends per device.
  XLA, xla/hlo/ir/replica_group.cc and mesh_and_axis.cc (how groups are printed),
  xla/service/collective_ops_utils.cc (GetCollectiveOpGroupMode: whether they name replicas or
  partitions).
"""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, TypeAlias

from jaxfp8.programs._hlo import Instruction, Program, Tensor, tensors_of

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

# Of b bytes among g > 1 devices, those that each of them sends. The sizes in a ragged all-to-all
# are data: b is the most.
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

# The kinds whose groups name replicas, each with all of its partitions, unless the program says
# otherwise.
_REPLICAS_OR_BOTH = ("all-gather", "all-reduce", "reduce-scatter")

_LISTED = re.compile(r"replica_groups=\{((?:\{[\d, ]*\}[, ]*)*)\}")
_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_MESH = re.compile(r"replica_groups=mesh\[(.*?)\].*?\{(.*?)\}")
_PAIRS = re.compile(r'source_target_pairs="?\{((?:\{\d+,\d+\}[, ]*)*)\}')


class Transfer(NamedTuple):
    """One tensor in one collective of a program; a combined collective carries several.

    Attributes:
      kind: the collective, `all-gather` for instance; `send` is one half of a pair of devices, the
        other receives.
      dtype: what travels, as jax names it.
      shape: [...] of the operand on one device.
      group_size: devices that take part together; of unequal groups the largest, of a permutation
        its longest ring.
      bytes: of the operand on one device, each time.
      times: how often one run of the program meets it.
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

        In a permutation, a device that sends at all.
        """
        return (
            self.times * _WIRE[self.kind](self.bytes, self.group_size) if self.group_size > 1 else 0
        )


def transfers_of(
    instruction: Instruction, computation: dict[str, Instruction], program: Program
) -> list[Transfer]:
    """What an instruction puts on the wire each time that it runs, not counting what it calls.

    Raises:
      ValueError: its devices are printed in a way that is not known here.
      NotImplementedError: it sends slices of buffers in place, as some programs for TPUs do.
    """
    kind = instruction.opcode.removesuffix("-start")
    if kind not in KINDS or (kind == "send" and "is_host_transfer=true" in instruction.attributes):
        return []
    if "slice_sizes=" in instruction.attributes:
        raise NotImplementedError(
            f"{instruction.name} is an in-place {kind}, whose bytes are not counted yet."
        )
    # Behind the first operand of these stand offsets and sizes, or a token.
    operands = instruction.operands[: 1 if kind in ("ragged-all-to-all", "send") else None]
    if missing := [operand for operand in operands if operand not in computation]:
        raise ValueError(
            f"{instruction.name} reads {missing[0]}, which the text does not hold; pass all of it."
        )
    tensors = [tensor for operand in operands for tensor in tensors_of(computation[operand].type)]
    if kind == "all-to-all" and "dimensions=" not in instruction.attributes:
        tensors = _stacked(tensors)
    size = _devices_in_a_group(instruction, kind, program)
    return [Transfer(kind, t.dtype, t.shape, size, t.bytes, 1, instruction.label) for t in tensors]


def _stacked(pieces: Iterable[Tensor]) -> list[Tensor]:
    """The tensors that an all-to-all splits. Its operands are the pieces, one for each device."""
    alike: dict[tuple[str, tuple[int, ...]], list[Tensor]] = {}
    for piece in pieces:
        alike.setdefault((piece.dtype, piece.shape), []).append(piece)
    return [
        Tensor(d, (len(of), *shape), sum(p.bytes for p in of)) for (d, shape), of in alike.items()
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
    # An empty list means everyone.
    size = _printed_size(instruction) or (
        program.partitions if with_channel and not both else program.replicas
    )
    return size * program.partitions if both else size


def _printed_size(instruction: Instruction) -> int:
    """The largest group in the three ways in which groups are printed; 0 for an empty list."""
    if found := _LISTED.search(instruction.attributes):
        return max(
            (group.count(",") + 1 for group in re.findall(r"\{[^}]+\}", found[1])), default=0
        )
    if found := _IOTA.search(instruction.attributes):
        return int(found[1])
    if found := _MESH.search(instruction.attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", found[1]))
        size = 1
        # Part of an axis is printed as 'axis':(devices before)devices.
        for axis, part in re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", found[2]):
            size *= int(part or sizes[axis])
        return size
    raise ValueError(_unknown(instruction))


@functools.cache
def _longest_ring(pairs: str) -> int:
    """The devices of the largest set that the pairs `{source,target}` connect."""
    sets: list[set[str]] = []
    for pair in re.findall(r"\d+,\d+", pairs):
        joined = set(pair.split(",")).union(
            *(devices for devices in sets if not devices.isdisjoint(pair.split(",")))
        )
        sets = [devices for devices in sets if devices.isdisjoint(joined)] + [joined]
    return max(map(len, sets), default=1)


def _unknown(instruction: Instruction) -> str:
    attributes = instruction.attributes.strip(" ,")[:200]
    return f"cannot tell which devices {instruction.name} joins: {attributes}"
