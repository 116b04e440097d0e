"""Running a program that was compiled for a GPU on a CPU: what did XLA make of the numbers?"""

from typing import Any

import jax

from jaxfp8.programs._compiled import flat_arguments, full_text, results_tree
from jaxfp8.programs._execute import execute
from jaxfp8.programs._portable_text import portable_text
from jaxfp8.programs._taps import Seen, Taps


def run_on_cpu(
    compiled: jax.stages.Compiled | str,
    *arguments: Any,
    seen: Seen | None = None,
) -> Any:
    """Runs an optimized GPU program on this machine's CPU.

    XLA's passes for GPUs can change numbers: they drop a rounding to FP8, for instance. JAX
    compiles for a GPU that is not there. This function runs such a program, and its numbers can be
    compared with those that the CPU computes. It keeps the conversions and branches that XLA made.
    Matmuls of cuBLAS, cuBLASLt, cuDNN and of XLA's Triton emitter become sums in float32 that are
    rounded once.

    It does not imitate the order of sums, the short accumulator of Hopper's fast FP8 matmuls, TF32
    where no algorithm was asked for by name, the approximations of transcendental functions, or the
    fusion of a multiply with an add. Nothing is cached: each call rewrites and compiles.

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returns, for one GPU, or the program's text.
      arguments: the arrays of `f` by position, without static arguments. Keyword arguments are
        refused. For a text: the flat arrays that its program takes.
      seen: is called with (label, lhs, rhs, lhs_scale, rhs_scale) each time a matmul runs, in loops
        and branches too. The label is jax's name of the operation. lhs and rhs are NumPy arrays as
        the matmul gets them. The scales are those that the matmul applies itself, or None.
        Scales of tiles are [.., rows, tiles]. The order of the calls is not that of the program.

    Returns:
      What `f` returns; for a text the list of its results.

    Raises:
      TypeError: if compiled is neither.
      ValueError: for arguments that the program does not take, and for a program that cannot run:
        for several devices, with hand-written kernels (Pallas, Triton), with library calls other
        than matmuls, or with opcodes that are not known here.

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
        raise TypeError(
            f"compiled is a {type(compiled).__name__}; pass jax.jit(f).lower(...).compile() or its "
            "text."
        )
    taps = Taps(seen)
    if isinstance(compiled, str):
        return execute(portable_text(compiled, taps), arguments, taps)
    flat = flat_arguments(compiled, arguments)
    results = execute(portable_text(full_text(compiled), taps), flat, taps)
    return results_tree(compiled, results)
