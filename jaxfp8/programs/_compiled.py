"""The arguments and results of a jax.stages.Compiled, as the flat arrays of its program.

The first parameters of a program are constants that jit moved out of the function. The leaves of
the arguments follow. Leaves that the function does not use are left out. PRNG keys are integers.

References:
  jax, jax/_src/stages.py (Compiled.call) and jax/_src/interpreters/pxla.py (MeshExecutable).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib import _hlo  # type: ignore[attr-defined]


def full_text(compiled: jax.stages.Compiled) -> str:
    """The text of the program, with the constants that `as_text()` leaves out.

    Raises:
      ValueError: if `compiled` holds other than one program.
    """
    modules = compiled.runtime_executable().hlo_modules()  # type: ignore[union-attr]
    if len(modules) != 1:
        raise ValueError(
            f"compiled holds {len(modules)} programs, not one. Compile a function for one device."
        )
    options = _hlo.HloPrintOptions()
    options.print_large_constants = True
    return modules[0].to_string(options)


def flat_arguments(compiled: jax.stages.Compiled, arguments: Sequence[Any]) -> list[Any]:
    """The arrays that the program takes.

    Raises:
      ValueError: if the function was compiled for another tree, shape or dtype.
    """
    leaves, tree = jax.tree.flatten((tuple(arguments), {}))
    if tree != compiled.in_tree:  # type: ignore[operator]
        raise ValueError(
            f"arguments are the tree {tree}, but the function was compiled for {compiled.in_tree}. "
            "Pass that tree, by position, and compile the function without keyword arguments."
        )
    infos = jax.tree.leaves(compiled.args_info)
    pairs = enumerate(zip(leaves, infos, strict=True))
    given = [_argument(position, x, info) for position, (x, info) in pairs]
    kept = compiled._executable._kept_var_idx  # type: ignore[attr-defined]
    return [x for n, x in enumerate([*compiled._params.const_args, *given]) if n in kept]


def results_tree(compiled: jax.stages.Compiled, results: Sequence[jax.Array]) -> Any:
    """The results, in the tree that the function returns."""
    wanted = jax.tree.leaves(compiled.out_info)
    leaves = [_result(x, info.dtype) for x, info in zip(results, wanted, strict=True)]
    return jax.tree.unflatten(compiled.out_tree, leaves)


def _argument(position: int, x: Any, info: Any) -> Any:
    # A Python number has no dtype, so it gets that of the parameter. All others must have it.
    array = np.asarray(x, info.dtype) if isinstance(x, bool | int | float | complex) else x
    if not isinstance(array, jax.Array):
        array = np.asarray(array)
        array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    if array.dtype != info.dtype or array.shape != info.shape:
        raise ValueError(
            f"leaf {position} of the arguments is {array.dtype}{list(array.shape)}, but the "
            f"function was compiled for {info.dtype}{list(info.shape)}. Pass such an array, or "
            "compile the function for this one."
        )
    return jax.random.key_data(array) if _is_key(info.dtype) else array


def _result(x: jax.Array, dtype: Any) -> jax.Array:
    return jax.random.wrap_key_data(x, impl=dtype._impl) if _is_key(dtype) else x


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)
