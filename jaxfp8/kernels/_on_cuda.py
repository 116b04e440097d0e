"""A kernel for CUDA and its replacement on other platforms, in one program.

A program that is written for a GPU can be debugged on a CPU without a change. XLA compiles only the
branch of the platform. The kernel is traced on every platform, so what it needs must be installed.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.lax import platform_dependent

from jaxfp8.sharding._amax import varying, varying_type


def on_cuda(
    kernel: Callable[..., Any], elsewhere: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """`kernel(*args, **kwargs)` on CUDA, and `elsewhere(like, *args, **kwargs)` on other platforms.

    Args:
      kernel: returns a tree of arrays.
      elsewhere: returns a tree of the same structure, shapes and dtypes. `like` is that tree, with
        `jax.ShapeDtypeStruct`s as leaves.
      *args: trees. Leaves that are no arrays are static.
      **kwargs: trees, too.

    Raises:
      NotImplementedError: if the kernel raises it when it is traced.

    Example:
      >>> import jax.numpy as jnp
      >>> on_cuda(lambda x: x, lambda like, x: 2 * x, jnp.ones(2))  # on a CPU
      Array([2., 2.], dtype=float32)
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    dynamic = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    def of_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arrays: Any) -> Any:
            given = iter(arrays)
            args, kwargs = jax.tree.unflatten(
                structure, [next(given) if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
            )
            return function(*args, **kwargs)

        return run

    # The kernel is traced before the choice of a platform, because `elsewhere` needs the types of
    # its results. The branch for CUDA runs this trace.
    traced, like = jax.make_jaxpr(of_arrays(kernel), return_shape=True)(*dynamic)
    of_results: Any = jax.tree.structure(like)

    def cuda(*arrays: Any) -> list[Any]:
        return list(jaxpr_as_fun(traced)(*arrays))

    def other(*arrays: Any) -> list[Any]:
        results = of_arrays(lambda *a, **k: elsewhere(like, *a, **k))(*arrays)
        assert of_results == jax.tree.structure(results), (results, like)
        leaves = jax.tree.leaves(results)
        return [_as(x, aval) for x, aval in zip(leaves, traced.out_avals, strict=True)]

    return jax.tree.unflatten(of_results, platform_dependent(*dynamic, cuda=cuda, default=other))


def _as(x: jax.Array, aval: Any) -> jax.Array:
    """x with the mesh axes of a type: those over which it varies, and those that split it.

    The branches of `platform_dependent` must return equal types.
    """
    if missing := varying_type(aval) - varying(x):
        x = lax.pcast(x, tuple(sorted(missing)), to="varying")
    mesh = aval.sharding.mesh
    if not mesh.empty and jax.sharding.AxisType.Explicit in mesh.axis_types:
        x = jax.sharding.reshard(x, aval.sharding)
    return x
