"""`run_on_cpu`: runs a program that was compiled for a GPU on a CPU, to check its numbers."""

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

    XLA's passes for GPUs can change numbers. For instance, they can drop a rounding to FP8. JAX can
    compile for a GPU that is not present. This function runs such a program, so that you can
    compare its numbers with those that the CPU computes.

    It keeps the conversions and branches that XLA made. Matmuls of cuBLAS, cuBLASLt, cuDNN and of
    XLA's Triton emitter become sums in float32 that are rounded once. Nothing is cached: each call
    rewrites and compiles.

    Five properties of a GPU are not imitated:

    - The order of sums.
    - The short accumulator of Hopper's fast FP8 matmuls.
    - TF32, unless the program names it as the algorithm of a matmul.
    - The approximations of transcendental functions.
    - The fusion of a multiply with an add.

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returns, for one GPU, or the program's text.
      arguments: the arrays of `f` by position, without static arguments. Keyword arguments are
        refused. For a text, the flat arrays that its program takes.
      seen: a function that is called each time a matmul runs, also in loops and branches. Its
        arguments are (label, lhs, rhs, lhs_scale, rhs_scale). The label is jax's name of the
        operation. lhs and rhs are NumPy arrays, as the matmul gets them. The scales are those that
        the matmul itself applies, or None. Scales of tiles are [.., rows, tiles]. The order of the
        calls may differ from the order of the program.

    Returns:
      The result of `f`. For a text, the list of the program's results.

    Raises:
      TypeError: if `compiled` is neither a compiled function nor a text.
      ValueError: if the program does not take these arguments. Also if it cannot run on a CPU. It
        must be for one device. It must not have hand-written kernels (Pallas, Triton), library
        calls other than matmuls, or unknown opcodes.

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
            f"compiled is a {type(compiled).__name__}. Pass jax.jit(f).lower(...).compile() or its "
            "text."
        )
    taps = Taps(seen)
    if isinstance(compiled, str):
        return execute(portable_text(compiled, taps), arguments, taps)
    flat = flat_arguments(compiled, arguments)
    results = execute(portable_text(full_text(compiled), taps), flat, taps)
    return results_tree(compiled, results)
