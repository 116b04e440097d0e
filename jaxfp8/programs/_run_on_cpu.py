"""Running a program that was compiled for a GPU on a CPU: what did XLA make of the numbers?"""

from typing import Any

import jax

from jaxfp8.programs._compiled import flat_arguments, full_text, results_tree
from jaxfp8.programs._execute import execute
from jaxfp8.programs._portable_text import portable_text
from jaxfp8.programs._taps import Seen, Taps


def run_on_cpu(compiled: jax.stages.Compiled | str, *arguments: Any, seen: Seen | None = None) -> Any:
    """Runs an optimized GPU program on this machine's CPU, operation by operation as the GPU would.

    XLA's passes for GPUs can change numbers: they drop the rounding to a narrow dtype in between, for instance. A program
    can be compiled for a GPU that is not there; this runs it, so that its numbers can be compared with those that the
    function has on a CPU. What XLA made is kept: every operation, conversion and branch. Matmuls sum in float32 and
    round once, be they Triton's, cuBLAS's or cuDNN's.

    What is not imitated: the order of sums, the shorter accumulator of Hopper's fast FP8 matmuls, TF32 where no
    algorithm was asked for by name, approximations of transcendental functions, multiply-adds rounded once.

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returns, for one GPU, or the text of such a program.
      arguments: those of `f`, by position; for a text the flat arrays that its program takes.
      seen: if given, is called with (label, lhs, rhs, lhs_scale, rhs_scale) each time a matmul runs, in loops and branches
        too. The label is jax's name of the operation. lhs and rhs are NumPy arrays as the matmul gets them; the scales
        are those that it applies itself, or None. The order is that of the CPU's scheduler.

    Returns:
      What `f` returns; for a text the list of its results.

    Raises:
      TypeError: if compiled is neither.
      ValueError: for arguments that the program does not take; for a program that no CPU can run: one for several
        devices, with kernels (Pallas, Triton), library calls other than matmuls, or opcodes that are not known here.

    Example:
      >>> import jax.numpy as jnp
      >>> program = '''
      ... HloModule doubled_sum
      ... %fused_add (p.0: f32[2], p.1: f32[2]) -> f32[2] {
      ...   %p.0 = f32[2]{0} parameter(0)
      ...   %p.1 = f32[2]{0} parameter(1)
      ...   ROOT %sum = f32[2]{0} add(%p.0, %p.1)
      ... }
      ... ENTRY %main (x: f32[2]) -> f32[2] {
      ...   %x = f32[2]{0} parameter(0)
      ...   ROOT %y = f32[2]{0} fusion(%x, %x), kind=kLoop, calls=%fused_add
      ... }'''
      >>> run_on_cpu(program, jnp.array([1.0, 2.0]))
      [Array([2., 4.], dtype=float32)]

    References:
      XLA, xla/service/gpu/gpu_compiler.cc (the passes); xla/service/simplify_fp_conversions.cc and
      xla/hlo/transforms/simplifiers/algebraic_simplifier.cc (which conversions they drop, under
      xla_allow_excess_precision).
    """
    if not isinstance(compiled, str | jax.stages.Compiled):
        raise TypeError(f"compiled is a {type(compiled).__name__}; pass jax.jit(f).lower(...).compile() or its text.")
    taps = Taps(seen)
    if isinstance(compiled, str):
        return execute(portable_text(compiled, taps), arguments, taps)
    flat = flat_arguments(compiled, arguments)
    results = execute(portable_text(full_text(compiled), taps), flat, taps)
    return results_tree(compiled, results)
