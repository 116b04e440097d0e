"""`tpu_cycles`: how many cycles a program takes on a TPU, as the compiler for TPUs estimates.

XLA for TPUs writes `"estimated_cycles":"N"` into the `backend_config` of most instructions that
run. Instructions inside of a fusion have none. Scalars, Pallas kernels, collectives and the work of
SparseCores have none either.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

from jaxfp8._check import check_one_of
from jaxfp8._table import align
from jaxfp8.programs._hlo import BRANCHES, CALLS, Instruction, Program, read_program, tensors_of
from jaxfp8.programs._tpu_kinds import (
    COPY,
    NO_WORK,
    RUN_ONCE,
    SPARSE_CORE,
    Computation,
    is_collective,
    kind_of,
)

CyclesKind: TypeAlias = Literal["matmul", "cast", "amax", "collective", "rest"]
_KINDS: tuple[CyclesKind, ...] = ("matmul", "cast", "amax", "collective", "rest")

_ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
_NO_ESTIMATE = 10**12  # XLA prints about 2^63 where it has no estimate
# Layouts of TPUs have tiles. Those of CPUs and GPUs have none.
_TPU_LAYOUT = re.compile(r"\{[\d,]*:T\(")

_NO_WORK_CALLS = ("AllocateBuffer", "ConcatBitcast")


class CyclesRow(NamedTuple):
    """One instruction of a program that runs.

    Attributes:
      name: its name in the program.
      kind: see `tpu_cycles`. Without an estimate it may also be "kernel", "sparsecore" or "loop".
      cycles: the estimate for one run; None if there is none.
      times: how often one run of the program executes it.
      op_name: the jax operation that it came from; "" if XLA names none. For a matmul in a fusion
        it is that of the matmul.

    Example:
      >>> CyclesRow("fusion.1", "matmul", 4356, times=6, op_name="jit(f)/dot_general").total
      26136
    """

    name: str
    kind: str
    cycles: int | None
    times: int
    op_name: str

    @property
    def total(self) -> int:
        """Cycles of all runs; 0 if there is no estimate."""
        return (self.cycles or 0) * self.times


@dataclasses.dataclass(frozen=True)
class CyclesReport:
    """The cycles of one run of a program on one TPU core, as XLA estimates them.

    `print` shows them as a table.

    Attributes:
      rows: the instructions that have an estimate.
      unknown: the instructions that work and have none. If there are any, `total` is too low.
      copies: copies between memories that run beside other instructions. They have no estimate.

    Example:
      >>> rows = CyclesRow("fusion", "matmul", 500, 6, "dot"), CyclesRow("copy", "rest", 100, 1, "")
      >>> report = CyclesReport(rows, (CyclesRow("sort", "rest", None, 2, "jit(f)/sort"),))
      >>> report.total, report.by_kind["matmul"]
      (3100, 3000)
      >>> print(report)
      kind    instructions  runs  cycles  share
      matmul             1     6   3,000   0.97
      rest               1     1     100   0.03
      total              2     7   3,100   1.00
      Too low, because these have no estimate:
      kind  runs  name  operation
      rest     2  sort  jit(f)/sort
    """

    rows: tuple[CyclesRow, ...]
    unknown: tuple[CyclesRow, ...] = ()
    copies: tuple[CyclesRow, ...] = ()

    @property
    def total(self) -> int:
        """The sum over `rows`, each as often as it runs."""
        return sum(row.total for row in self.rows)

    @property
    def by_kind(self) -> Mapping[str, int]:
        """The same for each kind."""
        return {kind: self.only(kind).total for kind in _KINDS}

    def only(self, kind: CyclesKind) -> "CyclesReport":
        """A report with only the instructions of a kind, and without `copies`."""
        check_one_of("kind", kind, _KINDS)
        return CyclesReport(
            tuple(row for row in self.rows if row.kind == kind),
            tuple(row for row in self.unknown if row.kind == kind),
        )

    def __str__(self) -> str:
        lines = [["kind", "instructions", "runs", "cycles", "share"]]
        for kind in (*_KINDS, "total"):
            rows = [row for row in self.rows if kind in (row.kind, "total")]
            cycles, runs = sum(row.total for row in rows), sum(row.times for row in rows)
            if rows or kind == "total":
                share = f"{cycles / self.total:.2f}" if self.total else "–"
                lines.append([kind, str(len(rows)), f"{runs:,}", f"{cycles:,}", share])
        text = align(lines, right=range(1, 5))
        if self.unknown:
            lines = [["kind", "runs", "name", "operation"]]
            lines += [[row.kind, f"{row.times:,}", row.name, row.op_name] for row in self.unknown]
            text += f"\nToo low, because these have no estimate:\n{align(lines, right=[1])}"
        return text


def tpu_cycles(compiled: Any) -> CyclesReport:
    """Adds up the cycles that XLA for TPUs estimates for one run of a compiled program.

    The figures are `estimated_cycles` in the text of the program. XLA chooses its tilings by them.
    They are not measured. Instructions on the TensorCore run one after the other, so their cycles
    are added. In a loop they count each time. Of the branches of a conditional the one with most
    cycles counts.

    Each instruction has a kind, which is the first that fits:

    - "matmul": a fusion with a matmul, or a convolution.
    - "collective": a transfer between devices. Most have no estimate, so `total` is without them.
    - "cast": a fusion that writes FP8 values. It may compute their amax, too.
    - "amax": a fusion that reduces absolute values to their maximum.
    - "rest".

    XLA has no estimate for some instructions. They are in `unknown`, with these further kinds:

    - "kernel": a Pallas kernel, also XLA's own for `jax.lax.ragged_dot`.
    - "sparsecore": work of a SparseCore, which may run beside the TensorCore.
    - "loop": a loop whose length the program does not know. Its body counts once.

    The unknown instructions of all branches of a conditional are listed. Operations on single
    numbers are left out: they have no estimate, and take few cycles.

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returns, or its `as_text()`. Compile it for a
        TPU. No TPU is needed for that.

    Returns:
      The report.

    Raises:
      TypeError, ValueError: if `compiled` is neither, or the program has no text.
      ValueError: if the program is not for a TPU.

    Example:
      >>> program = '''ENTRY %main (x: bf16[512,512]) -> bf16[512,512] {
      ...   %x = bf16[512,512]{1,0:T(8,128)(2,1)} parameter(0)
      ...   ROOT %y = bf16[512,512]{0,1:T(8,128)} copy(%x), config={"estimated_cycles":"2920"}
      ... }'''
      >>> tpu_cycles(program).total
      2920
    """
    program = read_program(compiled)
    instructions = [each for of in program.computations.values() for each in of.values()]
    if not any(_TPU_LAYOUT.search(each.type) for each in instructions):
        raise ValueError(
            "compiled is not a program for a TPU, so it has no estimates of cycles: its layouts "
            "have no tiles. Give the arguments of .lower(...) a sharding on devices of a TPU, for "
            'instance jax.experimental.topologies.get_topology_desc(topology_name="tpu7x:2x2x1", '
            'platform="tpu").devices.'
        )
    found: dict[CyclesRow, int] = collections.defaultdict(int)
    for row in _instructions_that_run(program):
        found[row._replace(times=0)] += row.times
    rows = [row._replace(times=times) for row, times in found.items() if times]
    unknown = [row for row in rows if row.cycles is None]
    return CyclesReport(
        tuple(row for row in rows if row.cycles is not None),
        tuple(row for row in unknown if row.kind != COPY),
        tuple(row._replace(kind="rest") for row in unknown if row.kind == COPY),
    )


# The instructions that run, each as often as it runs.


def _instructions_that_run(program: Program) -> tuple[CyclesRow, ...]:
    @functools.cache
    def run_by(name: str) -> tuple[CyclesRow, ...]:
        """The instructions of one run of a computation and of all that it calls."""
        if name not in program.computations:
            raise ValueError(
                f"the text calls a computation {name} that it does not hold. Pass all of it."
            )
        computation = program.computations[name]
        found: list[CyclesRow] = []
        for each in computation.values():
            if each.opcode == "while":
                found += run_in_loop(each, computation)
            elif each.opcode == "conditional":
                found += run_in_branches(each)
            elif _cycles(each) is None and _runs_its_calls(each):
                for called in each.computations(*CALLS):
                    found += run_by(called)
            elif _cycles(each) is not None or not _no_work(each, computation):
                found.append(_row(program, each, computation))
        return tuple(found)

    def run_in_loop(loop: Instruction, around: Computation) -> list[CyclesRow]:
        (body,), (condition,) = loop.computations("body"), loop.computations("condition")
        times = program.trip_count(loop, around)
        if times is None:
            unknown = CyclesRow(loop.name, "loop", None, 1, loop.op_name or "")
            return [unknown, *run_by(body), *run_by(condition)]
        # The condition runs once more than the body: its last run ends the loop.
        every_time = [(row, times) for row in run_by(body)]
        every_time += [(row, times + 1) for row in run_by(condition)]
        return [row._replace(times=row.times * n) for row, n in every_time]

    def run_in_branches(conditional: Instruction) -> list[CyclesRow]:
        branches = [run_by(branch) for branch in conditional.computations(*BRANCHES)]
        dearest = max(branches, key=lambda of: sum(row.total for row in of))
        # Another branch may be dearer by what it has without an estimate.
        others = [row for branch in branches if branch is not dearest for row in branch]
        return [*dearest, *(row for row in others if row.cycles is None and row.kind != COPY)]

    return run_by(program.entry)


def _cycles(each: Instruction) -> int | None:
    found = _ESTIMATE.search(each.attributes)
    return int(found[1]) if found and int(found[1]) < _NO_ESTIMATE else None


def _runs_its_calls(each: Instruction) -> bool:
    return each.opcode in RUN_ONCE and SPARSE_CORE not in each.attributes


def _no_work(each: Instruction, computation: Computation) -> bool:
    """Whether an instruction without an estimate does nothing, or works on single numbers."""
    if each.opcode in NO_WORK or each.call_target in _NO_WORK_CALLS or each.is_second_half:
        return True
    # These say nothing by the sizes of their operands.
    if each.opcode in ("fusion", "custom-call", *RUN_ONCE) or is_collective(each):
        return False
    types = [each.type, *(computation[name].type for name in each.operands if name in computation)]
    return all(math.prod(tensor.shape) <= 1 for type in types for tensor in tensors_of(type))


def _row(program: Program, each: Instruction, computation: Computation) -> CyclesRow:
    kind, matmul = kind_of(program, each, computation)
    name = (matmul and matmul.op_name) or each.op_name or ""
    return CyclesRow(each.name, kind, _cycles(each), 1, name)
