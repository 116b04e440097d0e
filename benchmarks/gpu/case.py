"""A case, which is one timed operation, and the program that repeats it many times.

The program is a loop. Each turn of the loop does the work once on each of several sets of inputs.
All sets together are larger than the L2 cache, so a set is not in the cache when it is used again.
Each set has its own memory for results.

XLA must not remove work. The inputs of each repetition pass through an `optimization_barrier`,
together with the results of the previous repetition. So XLA finds nothing that it could move out of
the loop, and no equal work to merge. Layouts are row-major inside the loop too. Otherwise XLA could
choose a layout in which a transposed result needs no transposition. The results of the previous
turn are donated, so nothing is copied or filled.

`Compiled.check` reads the compiled program. If XLA removed work, the case fails, and no number is
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
from jaxfp8.programs._fp8_gemms import _find_gemms
from jaxfp8.programs._hlo import Instruction, read_program

PORTABLE = {"xla", "reference"}
"""Backends that run on every device. All other backends are kernels for GPUs."""

ROTATED_BYTES = 2**28
"""The least bytes of all sets of inputs together.

This is several times the L2 cache of an H100 (50 MB), and twice that of a B200 (126 MB).
"""
MOST_SETS = 8
"""The most sets of inputs. 8 sets are enough for the smallest inputs here, which have 32 MiB."""
PROGRAM_SECONDS = 2e-3
"""The least time of a program on a fast GPU.

The call of the next program takes about a tenth of it, and runs at the same time.
"""
FASTEST = {"bytes": 5e12, "flops": 2e15}
"""Bytes and operations of a fast GPU in a second, used only to choose the number of turns.

The data sheet of the H200 has 4.8 TB/s, and 1979 TFLOP/s in FP8.
"""

# Opcodes of HLO that move no bytes.
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
    """One operation on one shape, done by one contender.

    Attributes:
      section: name of the section: "casts", "layers" or another.
      group: name of the group. The cases of a group are timed alternately.
      operation: name of the operation.
      contender: name of the backend or recipe that does it.
      named: arguments of `fp8.Kernels` that name backends.
      function: takes `arguments`, and returns a tree of arrays.
      arguments: trees of `jax.ShapeDtypeStruct`.
      options: compiler options of XLA.
      bytes: the least bytes to move, with each input and each output once.
      flops: operations of matmuls.
      looped: False if the work is long enough without a loop.
      inputs: takes the compiled program and `timing.Inputs`, and returns values of the arguments of
        a case without a loop. None for random arrays.
      carried: of a case without a loop, the number of first arguments that are donated. The first
        results replace them in the next call, as in training.
      tiny: True in a dry run, which has two sets and two turns.
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
    inputs: Callable[[Any, Any], Any] | None = None
    carried: int = 0
    tiny: bool = False

    @property
    def name(self) -> str:
        return f"{self.section}: {self.group}, {self.operation}, {self.contender}"

    @property
    def sets(self) -> int:
        """The number of sets of inputs."""
        size = max(nbytes(self.arguments), 1)
        return (
            min(math.ceil(ROTATED_BYTES / size), 2 if self.tiny else MOST_SETS)
            if self.looped
            else 1
        )

    @property
    def turns(self) -> int:
        """The number of turns of the loop, at least two, because XLA removes a loop of one turn."""
        if not self.looped:
            return 1
        floor = max(self.bytes / FASTEST["bytes"], self.flops / FASTEST["flops"])
        return (
            2 if self.tiny else max(math.ceil(PROGRAM_SECONDS / (self.sets * max(floor, 1e-6))), 2)
        )

    def why_not(self, target: Target) -> str | None:
        """Why the case cannot run on this target. None if it can."""
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
    """The tree, with row-major layouts."""

    def pin(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if x.ndim > 1 else x

    return jax.tree.map(pin, tree)


def repeated(function: Callable[..., Any], turns: int) -> Callable[..., Any]:
    """`run(results, sets) -> results`: `function` on each set of inputs, `turns` times."""
    function = jax.jit(function)  # so it is traced once for all sets

    def run(results: list[Any], sets: list[Any]) -> list[Any]:
        def turn(_: Any, results: list[Any]) -> list[Any]:
            results = list(results)
            for n, inputs in enumerate(sets):
                # The barrier ties these inputs to the previous results. So XLA can neither merge
                # the work of two sets nor move it out of the loop.
                inputs, results[n - 1] = lax.optimization_barrier((inputs, results[n - 1]))
                results[n] = row_major(function(*row_major(inputs)))
            return results

        return lax.fori_loop(0, turns, turn, results)

    return run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled:
    """The compiled program of a case.

    Attributes:
      case: the case.
      program: takes (results, sets) if the case is looped, and the case's arguments if not.
      results: types of the results of one repetition.
      seconds: time that XLA took to compile.
    """

    case: Case
    program: jax.stages.Compiled
    results: Any
    seconds: float

    @property
    def repetitions(self) -> int:
        """How many times one call does the work."""
        return self.case.sets * self.case.turns

    def check(self, target: Target) -> dict[str, Any]:
        """Numbers of kernels and FP8 matmuls of one repetition, and memory in bytes.

        Raises:
          RuntimeError: if the program has no loop, or work outside of it. Also if the loop has less
            than one kernel for each repetition.
        """
        gemms, memory = _find_gemms(self.program), self.program.memory_analysis()
        figures: dict[str, Any] = {
            "fp8_gemms": len(gemms.fp8),
            "other_gemms": len(gemms.high_precision),
        }
        if memory is not None:
            figures["argument_bytes"] = memory.argument_size_in_bytes
            figures["output_bytes"] = memory.output_size_in_bytes
            figures["temporary_bytes"] = memory.temp_size_in_bytes
            # Not every version of jax has this figure.
            figures["peak_bytes"] = getattr(memory, "peak_memory_in_bytes", None)
        # For CPUs XLA compiles loops differently, so only programs for GPUs are checked.
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
        # The trip count is less than case.turns if XLA unrolled the loop.
        turns = program.trip_count(loops[0], entry) or self.case.turns
        done = len(kernels) * turns / self.repetitions
        if done < 1:
            raise RuntimeError(f"XLA left {done:g} kernels for a repetition")
        return {**figures, "fp8_gemms": len(gemms.fp8) * turns / self.repetitions, "kernels": done}


def _is_work(instruction: Instruction) -> bool:
    """Whether an instruction moves bytes. The counter and the condition of a loop do not count."""
    return instruction.opcode not in _FREE and not instruction.type.startswith(("s32[]", "pred[]"))


def lower(case: Case, target: Target) -> tuple[Any, Any]:
    """The traced program, and the types of the results of one repetition."""

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
        program = jax.jit(case.function, donate_argnums=tuple(range(case.carried)))
        return program.lower(*arguments), results


def compile(case: Case, lowered: Any, results: Any) -> Compiled:
    start = time.perf_counter()
    program = lowered.compile(compiler_options=dict(case.options))
    return Compiled(
        case=case, program=program, results=results, seconds=time.perf_counter() - start
    )
