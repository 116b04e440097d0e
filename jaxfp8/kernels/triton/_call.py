"""Calling a Triton kernel, whichever jax-triton there is.

The one file that knows what version 0.4 renamed.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax_triton

from jaxfp8._typing import Array

_BEFORE_0_4 = "out_shape" in inspect.signature(jax_triton.triton_call).parameters


def triton_call(
    x: Array,
    *,
    kernel: Any,
    results: Sequence[jax.ShapeDtypeStruct],
    grid: int,
    warps: int,
    compute_capability: int | None,
    **constants: Any,
) -> Sequence[Array]:
    """`kernel(x, *results, **constants)`, which writes the results.

    Args:
      x: [...] what it reads.
      kernel: a function under `triton.jit`.
      results: shape and dtype of each array that it writes.
      grid: how many programs.
      warps: of a program.
      compute_capability: to compile for, 90 for an H200; None asks the GPU.
      **constants: its `tl.constexpr` arguments; those that come after the results and are None are
        not there.
    """
    # A product and a sum that are fused round once: bits would depend on what the compiler fuses.
    if _BEFORE_0_4:
        how: dict[str, Any] = {"out_shape": results, "enable_fp_fusion": False}
    else:
        how = {"out_type": results, "backend_options": {"enable_fp_fusion": False}}
    return jax_triton.triton_call(
        x,
        kernel=kernel,
        grid=(grid,),
        num_warps=warps,
        compute_capability=compute_capability,
        **how,
        **constants,
    )
