"""A second clock for programs of TPU 7x: bounds of each kernel, from what the compiler wrote.

XLA's estimates leave out Pallas kernels. This file bounds the time of a kernel from below, in three
ways. The largest of the three is its figure.

- Bundles. A kernel takes at least as many cycles as it runs bundles, see `_tpu_bundles.py`. A part
  that is skipped in some steps counts in those in which it surely runs.
- Matmuls. A `vmatmul` keeps one of the two matrix units busy for `CYCLES_OF_A_MATMUL`.
- HBM. A kernel reads its operands and writes its results at least once.

Nothing here is measured. What cannot be read is None. A child process compiles, because libtpu
reads the options of its dumps once:

    with dumps() as folder:
        subprocess.run([...], env=environment(folder))
        rows = kernels(text_of_the_program, folder)
"""

import contextlib
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _tpu_bundles import Runs, grid_of, runs_of

from jaxfp8.programs import tpu_cycles
from jaxfp8.programs._hlo import Instruction, Program, read_program, tensors_of

# One core of TPU 7x. The first two are half of a chip's, from Google Cloud's page of TPU7x. The
# page has no clock. The rest is derived: in the machine code of XLA's own matmuls a `vmatmul` is 16
# rows of bfloat16, or 32 of FP8, times 256 x 256, on one of two units. If it takes c cycles, the
# peak asks for a clock of 0.275 GHz times c. 8 is taken, and so 2.2 GHz, because XLA's estimates of
# large matmuls are then 0.8 to 0.9 of the peak. With 4 they would be below half.
PEAK_BFLOAT16 = 2307e12 / 2
HBM_BYTES_A_SECOND = 7.38e12 / 2
CYCLES_OF_A_MATMUL = 8
MATRIX_UNITS = 2
CLOCK = PEAK_BFLOAT16 / (MATRIX_UNITS * 2 * 16 * 256 * 256) * CYCLES_OF_A_MATMUL

# Dumps of the compiler.


@contextlib.contextmanager
def dumps() -> Iterator[Path]:
    """A folder for the dumps of one compilation. They may have a GB, and are deleted."""
    with tempfile.TemporaryDirectory(prefix="bundles-") as folder:
        yield Path(folder)


def environment(folder: Path) -> dict[str, str]:
    """The environment of a child that compiles and dumps. libtpu reads it when jax starts."""
    options = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_mosaic_dump_to={folder}"
    return os.environ | {"LIBTPU_INIT_ARGS": options}


_FILE = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")
_ALIKE = re.compile(r"key:(\S+)\n.*\nequivalent_hlos.*\n((?:  \S+\n)*)")


def texts(folder: Path) -> dict[str, str]:
    """The machine code of each kernel, by the name of its instruction in the program."""
    found = {}
    for path in folder.glob("*-final_bundles.txt"):
        if name := _FILE.fullmatch(path.name):
            found[name[1]] = path.read_text()
    # Kernels that are alike are compiled once.
    for path in folder.glob("*-deduplication-map.txt"):
        for first, others in _ALIKE.findall(path.read_text()):
            found |= {name: found[first] for name in others.split() if first in found}
    return found


# The second clock.


class Kernel(NamedTuple):
    """One instruction of a program, by both clocks. Cycles are those of one run.

    Attributes:
      name, kind, op_name, times: see `CyclesRow`.
      estimate: what XLA estimates; None for a Pallas kernel.
      bundles: at least and at most; None if they cannot be read.
      matmuls, memory: cycles that the matrix units and HBM need at least; None for unknown.
      runs: what was read of the machine code; None if there is none.
      steps: how many steps the grid has, if it is data.
    """

    name: str
    kind: str
    op_name: str
    times: int
    estimate: int | None
    bundles: tuple[int, int] | None
    matmuls: int | None
    memory: int | None
    runs: Runs | None
    steps: int | None

    @property
    def second(self) -> int | None:
        """The second clock: the largest of the three bounds. None if the bundles are unknown."""
        if self.bundles is None:
            return None
        return max(self.bundles[0], self.matmuls or 0, self.memory or 0)

    @property
    def bound_by(self) -> str:
        bounds = {"bundles": (self.bundles or (0, 0))[0], "matmuls": self.matmuls or 0,
                  "memory": self.memory or 0}  # fmt: skip
        return "unknown" if self.second is None else max(bounds, key=lambda each: bounds[each])


def kernels(compiled: str, folder: Path, *, groups: Sequence[int] = ()) -> list[Kernel]:
    """Both clocks of each instruction that runs, from the text of a program and its dumps.

    `groups`: the rows of each expert. Without them the kernels of `jax.lax.ragged_dot` are unknown,
    because their grid is data. Those of jaxfp8 then count what is sure.
    """
    report, program = tpu_cycles(compiled), read_program(compiled)
    code, found = texts(folder), []
    around = {name: of for of in program.computations.values() for name in of}
    for row in (*report.rows, *report.unknown):
        of = around[row.name]
        steps = grid_steps(of[row.name], of, groups) if groups else None
        runs = None
        if row.name in code:
            parts = parts_of_grid(row.name, code[row.name], groups)
            runs = runs_of(code[row.name], steps=steps, parts=parts)
        matmuls = runs.matmuls if runs else None
        found.append(
            Kernel(
                row.name, row.kind, row.op_name, row.times, row.cycles, runs and runs.bundles,
                None if matmuls is None else matmuls * CYCLES_OF_A_MATMUL,
                _memory(program, of[row.name], of), runs, steps,
            )
        )  # fmt: skip
    return found


_TILING = re.compile(r'ragged_dot_tiling="(\d+),(\d+),(\d+)"')


def grid_steps(
    each: Instruction, around: dict[str, Instruction], groups: Sequence[int]
) -> int | None:
    """The steps of XLA's kernel for `jax.lax.ragged_dot`; None for any other kernel.

    The kernel visits each block of rows once for each group that has a row in it. The attribute
    has the sizes of blocks: rows, features in and features out.
    """
    if not (tiling := _TILING.search(each.attributes)):
        return None
    rows, k, n = map(int, tiling.groups())
    visits = _visits(rows, groups)
    (result,) = tensors_of(each.type)
    operands = [t for name in each.operands for t in tensors_of(around[name].type)]
    if len(result.shape) == 3:  # dw [groups, K, N]
        _, features_in, features_out = result.shape
    else:  # y [rows, N] of x [rows, K]
        features_out = result.shape[1]
        x = next(t for t in operands if len(t.shape) == 2 and t.shape[0] == result.shape[0])
        features_in = x.shape[1]
    return visits * math.ceil(features_in / k) * math.ceil(features_out / n)


def _visits(rows: int, groups: Sequence[int]) -> int:
    """How often blocks of so many rows are visited: once for each group that has a row in them."""
    visits = start = 0
    for size in groups:
        end = start + size
        visits += math.ceil(end / rows) - start // rows if size else 0
        start = end
    return visits


_OURS = re.compile(r"grouped_(rows|sums)_(\d+)")


def parts_of_grid(name: str, text: str, groups: Sequence[int]) -> tuple[int, ...]:
    """How often each part of jaxfp8's kernels for groups runs; () for any other kernel.

    The groups have all rows, and each has some. The grid is in the text, and the rows of a block in
    the name.
    """
    if not groups or not (found := _OURS.match(name)):
        return ()
    (*blocks, _), visits = grid_of(text), _visits(int(found[2]), groups)
    # Of the products, and of the rows of no group. Or of zeros, sums and results.
    parts = (visits, 0) if found[1] == "rows" else (len(groups), visits, len(groups))
    return tuple(math.prod(blocks) * part for part in parts)


_PARTS = ("slice", "dynamic-slice", "gather", "dynamic-update-slice")


def _memory(program: Program, each: Instruction, around: dict[str, Instruction]) -> int | None:
    """Cycles to read all operands from HBM and to write the results, once. None if it reads parts.

    Arrays in the memory on the chip take none.
    """
    fused = [program.computations[name] for name in each.computations("calls")]
    if any(one.opcode in _PARTS for one in (each, *(one for of in fused for one in of.values()))):
        return None
    operands = [around[name] for name in dict.fromkeys(each.operands) if name in around]
    moved = sum(t.allocated for one in (each, *operands) for t in tensors_of(one.type))
    return round(moved / HBM_BYTES_A_SECOND * CLOCK)


def summary(rows: Sequence[Kernel]) -> dict[str, Any]:
    """Sums over a program, each kernel as often as it runs.

    `second`: the second clock, of the kernels that have it. `kernels`: the same of Pallas kernels.
    `both`: XLA's estimates, and the second clock where there is no estimate. `estimate_only`: the
    estimates of kernels that `second` lacks. Most are small, and part of the program around them.
    `on_neither`: how many kernels have neither.
    """
    second = {row: row.second * row.times for row in rows if row.second is not None}
    return {
        "second": sum(second.values()),
        "kernels": sum(cycles for row, cycles in second.items() if row.kind == "kernel"),
        "both": sum(
            second.get(row, 0) if row.estimate is None else row.estimate * row.times for row in rows
        ),
        "estimate_only": sum((row.estimate or 0) * row.times for row in rows if row not in second),
        "on_neither": sum(row.times for row in rows if row.estimate is None and row not in second),
    }


_TITLES = ["kernel", "kind", "times", "estimate", "bundles", "matmuls", "memory", "second clock",
           "bound by", "estimate / second"]  # fmt: skip


def table(rows: Iterable[Kernel], least: int = 10_000) -> str:
    """Markdown of the kernels of at least some cycles, and of Pallas kernels. Cycles of one run."""

    def cell(n: Any) -> str:
        if n is None:
            return "unknown"
        ends = n if isinstance(n, tuple) else (n,)
        return " to ".join(f"{end:,}" for end in dict.fromkeys(ends))

    lines = [_TITLES, ["---"] * len(_TITLES)]
    for row in rows:
        if max(row.estimate or 0, row.second or 0) < least and row.kind != "kernel":
            continue
        ratio = f"{row.estimate / row.second:.2f}" if row.estimate and row.second else "–"
        figures = (row.estimate, row.bundles, row.matmuls, row.memory, row.second)
        lines.append([row.name, row.kind, str(row.times), *map(cell, figures), row.bound_by, ratio])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
