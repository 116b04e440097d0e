"""The arguments and results of a jax.stages.Compiled, as the flat arrays of its program.

The program takes the constants that jit moved out of the function, then the leaves of the arguments, without those
that the function does not use. Keys of random numbers are the integers that they are made of.

References:
  jax, jax/_src/stages.py (Compiled.call) and jax/_src/interpreters/pxla.py (MeshExecutable).
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxlib import _hlo


def full_text(compiled: jax.stages.Compiled) -> str:
    """The program, with the constants that `as_text()` leaves out.

    Raises:
      ValueError: unless there is one program, for one device.
    """
    modules = compiled.runtime_executable().hlo_modules()  # type: ignore[union-attr]
    if len(modules) != 1:
        raise ValueError(f"compiled holds {len(modules)} programs; compile a function for one device.")
    options = _hlo.HloPrintOptions()
    options.print_large_constants = True
    return modules[0].to_string(options)


def flat_arguments(compiled: jax.stages.Compiled, arguments: Sequence[Any]) -> list[Any]:
    """The arrays that the program takes.

    Raises:
      ValueError: for other trees, shapes or dtypes than the function was compiled for.
    """
    leaves, tree = jax.tree.flatten((tuple(arguments), {}))
    if tree != compiled.in_tree:
        raise ValueError(
            f"arguments are the tree {tree}, but the function was compiled for {compiled.in_tree}; pass the same, by "
            "position."
        )
    infos = jax.tree.leaves(compiled.args_info)
    given = [_argument(position, x, info) for position, (x, info) in enumerate(zip(leaves, infos, strict=True))]
    every = [*compiled._params.const_args, *given]
    return [x for position, x in enumerate(every) if position in compiled._executable._kept_var_idx]


def results_tree(compiled: jax.stages.Compiled, results: Sequence[jax.Array]) -> Any:
    """The results, as the function returns them."""
    wanted = jax.tree.leaves(compiled.out_info)
    leaves = [_result(x, info.dtype) for x, info in zip(results, wanted, strict=True)]
    return jax.tree.unflatten(compiled.out_tree, leaves)


def _argument(position: int, x: Any, info: Any) -> Any:
    # A Python number has no dtype of its own; everything else has to have the right one already.
    array = np.asarray(x, info.dtype) if isinstance(x, bool | int | float | complex) else x
    dtype = array.dtype if isinstance(array, jax.Array) else jax.dtypes.canonicalize_dtype(np.asarray(array).dtype)
    if dtype != info.dtype or np.shape(array) != info.shape:
        raise ValueError(
            f"leaf {position} of the arguments is {dtype}{list(np.shape(array))}, but the function was compiled for "
            f"{info.dtype}{list(info.shape)}; pass that, or compile for what you have."
        )
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.key_data(array)
    return array if isinstance(array, jax.Array) else np.asarray(array, dtype)


def _result(x: jax.Array, dtype: Any) -> jax.Array:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(x, impl=dtype._impl)
    return x
