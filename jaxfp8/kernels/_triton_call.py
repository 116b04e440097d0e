"""A call of a Triton kernel, with any version of jax-triton.

Version 0.4 renamed arguments. Only this file depends on that.
"""

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax_triton

from jaxfp8._typing import Array

_BEFORE_0_4 = "out_shape" in inspect.signature(jax_triton.triton_call).parameters


def triton_call(
    *arrays: Array,
    kernel: Any,
    results: Sequence[jax.ShapeDtypeStruct],
    grid: int,
    warps: int,
    compute_capability: int | None,
    overwrites: Sequence[int] = (),
    **constants: Any,
) -> Sequence[Array]:
    """`kernel(*arrays, *results, **constants)`: a kernel under `triton.jit` writes the results.

    `grid` counts programs. `overwrites` has the indices of arrays that the kernel overwrites, one
    for each result. Without a compute capability jax-triton asks the GPU. A constant is None for an
    array that the kernel does not use. Sizes are constants, too: Triton then knows that they are
    multiples of 16, and it stores 16 bytes at once.
    """
    # No fused multiply-add: it rounds once instead of twice, so the bits would depend on what the
    # compiler fuses.
    if _BEFORE_0_4:
        how: dict[str, Any] = {"out_shape": results, "enable_fp_fusion": False}
    else:
        how = {"out_type": results, "backend_options": {"enable_fp_fusion": False}}
    # Since version 0.4 such results are no arguments of the kernel. It needs arguments same_0, ...
    # for them nonetheless.
    if overwrites:
        first = len(results) if _BEFORE_0_4 else 0
        same = [name for name in kernel.arg_names if name.startswith("same_")]
        constants |= dict.fromkeys(same[first:])
    with warnings.catch_warnings():
        # Version 0.4 recommends references instead, which `custom_partitioning` cannot take.
        warnings.filterwarnings("ignore", "input_output_aliases is deprecated", DeprecationWarning)
        return jax_triton.triton_call(
            *arrays,
            kernel=kernel,
            grid=(grid,),
            num_warps=warps,
            compute_capability=compute_capability,
            input_output_aliases=dict(zip(overwrites, range(len(results)), strict=False)),
            **how,
            **constants,
        )
