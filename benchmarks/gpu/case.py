"""One thing that is timed, and the program that does it many times.

The program is a loop. Each turn of it does the work once on each of several sets of inputs, so that
no set is still in the L2 cache when its turn comes again, and writes each result to memory of its
own. XLA sees no invariant to take out of the loop and no two equal pieces of work to merge, for the
inputs of each piece pass through an `optimization_barrier` together with the results of the piece
before. Layouts are row-major inside the loop as outside, or XLA would choose some under which a
transposed result need not be transposed. The results of the turn before are donated, so nothing is
copied or filled.

`Compiled.check` reads the program: if XLA found a way around this, the case fails and no number is
written.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from target import Target

import jaxfp8 as fp8
from jaxfp8.programs._fp8_gemms import find_gemms
from jaxfp8.programs._hlo import Instruction, read_program

PORTABLE = {"xla", "reference"}
"""Backends that run anywhere; every other one is a kernel for GPUs."""

ROTATED_BYTES = 2**28
"""Of all sets of inputs together.

Several times the L2 of an H100 (50 MB) and twice that of a B200 (126 MB).
"""
MOST_SETS = 8
"""So many are enough for the smallest inputs here, of 32 MiB."""
PROGRAM_SECONDS = 2e-3
"""The least that a program shall take on a fast GPU.

Calling the next one, about a tenth of this, hides behind it.
"""
FASTEST = {"bytes": 5e12, "flops": 2e15}
"""What such a GPU does in a second, for that estimate alone (H200 datasheet: 4.8 TB/s, 1979 TFLOP/s
of FP8).
"""

# What moves no byte.
_FREE = {
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "after-all",
    "opt-barrier",
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A contender at one operation on one shape.

    Attributes:
      section: "casts", ...
      group: cases of one group are timed in turns.
      operation: what is done.
      contender: who does it.
      named: the backends that are asked for by name, arguments of `fp8.Kernels`.
      function: of `arguments`, to a tree of arrays.
      arguments: trees of `jax.ShapeDtypeStruct`.
      options: of XLA.
      bytes: the least that has to be moved, each input and each output once.
      flops: of matmuls.
      looped: False for work so long that once is enough.
      tiny: for a dry run, two sets and two turns.
    """

    section: str
    group: str
    operation: str
    contender: str
    named: Mapping[str, str] = dataclasses.field(default_factory=dict)
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    bytes: int = 0
    flops: int = 0
    looped: bool = True
    tiny: bool = False

    @property
    def name(self) -> str:
        return f"{self.section}: {self.group}, {self.operation}, {self.contender}"

    @property
    def sets(self) -> int:
        """How many sets of inputs take turns."""
        size = max(nbytes(self.arguments), 1)
        return (
            min(math.ceil(ROTATED_BYTES / size), 2 if self.tiny else MOST_SETS)
            if self.looped
            else 1
        )

    @property
    def turns(self) -> int:
        """Of the loop. Two at least, or XLA takes it away."""
        if not self.looped:
            return 1
        floor = max(self.bytes / FASTEST["bytes"], self.flops / FASTEST["flops"])
        return (
            2 if self.tiny else max(math.ceil(PROGRAM_SECONDS / (self.sets * max(floor, 1e-6))), 2)
        )

    def why_not(self, target: Target) -> str | None:
        """Why the case cannot be tried on this target."""
        if not target.is_gpu and (kernels := sorted({*self.named.values()} - PORTABLE)):
            return f"{', '.join(kernels)}: needs a GPU"
        try:
            fp8.Kernels(target.chip, **self.named)
        except ValueError as reason:
            return str(reason)
        return None


def nbytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def row_major(tree: Any) -> Any:
    """The tree, its arrays laid out row by row."""

    def pin(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if x.ndim > 1 else x

    return jax.tree.map(pin, tree)


def repeated(function: Callable[..., Any], turns: int) -> Callable[..., Any]:
    """`run(results, sets) -> results`: `function` on each set of inputs, `turns` times over."""
    function = jax.jit(function)  # traced once, however often it is called

    def run(results: list[Any], sets: list[Any]) -> list[Any]:
        def turn(_: Any, results: list[Any]) -> list[Any]:
            results = list(results)
            for n, inputs in enumerate(sets):
                inputs, results[n - 1] = lax.optimization_barrier((inputs, results[n - 1]))
                results[n] = row_major(function(*row_major(inputs)))
            return results

        return lax.fori_loop(0, turns, turn, results)

    return run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """A case as a program.

    Attributes:
      case: what it does.
      program: of (results, sets) if the case is looped, else of its arguments.
      results: types of what one repetition gives.
      seconds: that XLA took.
    """

    case: Case
    program: jax.stages.Compiled
    results: Any
    seconds: float

    @property
    def repetitions(self) -> int:
        """How often one call does the work."""
        return self.case.sets * self.case.turns

    def check(self, target: Target) -> dict[str, Any]:
        """Kernels and FP8 matmuls that do the work once, and memory in bytes.

        Raises:
          RuntimeError: if the loop is not there, does not hold the work, or holds less than one
            kernel a repetition.
        """
        gemms, memory = find_gemms(self.program), self.program.memory_analysis()
        figures: dict[str, Any] = {"fp8_gemms": len(gemms.fp8)}
        if memory is not None:
            figures["argument_bytes"] = memory.argument_size_in_bytes
            figures["output_bytes"] = memory.output_size_in_bytes
            figures["temporary_bytes"] = memory.temp_size_in_bytes
            # not in every version of jax
            figures["peak_bytes"] = getattr(memory, "peak_memory_in_bytes", None)
        # what XLA makes of a loop for CPUs is another matter
        if not self.case.looped or not target.is_gpu:
            return figures
        program = read_program(self.program)
        entry = program.computations[program.entry]
        loops = [i for i in entry.values() if i.opcode == "while"]
        outside = [i for i in entry.values() if _is_work(i) and i not in loops]
        if len(loops) != 1:
            raise RuntimeError(f"the program has {len(loops)} loops, not one")
        if outside:
            raise RuntimeError(f"XLA moved work out of the loop: {[i.name for i in outside]}")
        (body,) = loops[0].computations("body")
        kernels = [i for i in program.computations[body].values() if _is_work(i)]
        # fewer than asked for if XLA unrolled the loop
        turns = loops[0].trip_count or self.case.turns
        done = len(kernels) * turns / self.repetitions
        if done < 1:
            raise RuntimeError(f"XLA left {done:g} kernels for a repetition")
        return {**figures, "fp8_gemms": len(gemms.fp8) * turns / self.repetitions, "kernels": done}


def _is_work(instruction: Instruction) -> bool:
    """Whether it moves bytes; a loop's counter does not count."""
    return instruction.opcode not in _FREE and not instruction.type.startswith(("s32[]", "pred[]"))


def lower(case: Case, target: Target) -> tuple[Any, Any]:
    """The traced program, and the types of what the work gives."""

    def placed(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=target.sharding), tree
        )

    arguments = placed(case.arguments)
    with target.context():
        results = placed(jax.eval_shape(case.function, *arguments))
        if case.looped:
            program = jax.jit(repeated(case.function, case.turns), donate_argnums=0)
            return program.lower([results] * case.sets, [arguments] * case.sets), results
        return jax.jit(case.function).lower(*arguments), results


def compile(case: Case, lowered: Any, results: Any) -> Compiled:
    start = time.perf_counter()
    program = lowered.compile(compiler_options=dict(case.options))
    return Compiled(
        case=case, program=program, results=results, seconds=time.perf_counter() - start
    )
