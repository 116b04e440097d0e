"""Gathers of FP8 values as bytes, and the constraints that make XLA gather in an Auto mesh."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding

from jaxfp8._typing import Array


def in_bytes(collective: Callable[[Array], Array], x: Array) -> Array:
    """A collective on x [...]: FP8 values and E8M0 scales as bytes, wider dtypes as they are.

    XLA:CPU would widen FP8 values to float16 and lose the sign of a zero. It would widen E8M0
    scales to float32, flush the smallest to zero, and read it as NaN.
    """
    if x.dtype.itemsize > 1:
        return collective(x)
    return lax.bitcast_convert_type(collective(lax.bitcast_convert_type(x, jnp.uint8)), x.dtype)


@functools.cache
def constraint(
    axis: int, entry: tuple[str, ...] | None, mesh: jax.sharding.AbstractMesh
) -> Callable[[Array], Array]:
    """A sharding constraint on one array axis; None for `entry` makes it whole.

    The compiler decides about the other axes. The constraint has its own rule for `jax.vmap`,
    because JAX's rule leaves all axes to the compiler, also one that must be whole.
    """

    @custom_vmap
    def constrain(x: Array) -> Array:
        spec: list[Any] = [jax.P.UNCONSTRAINED] * x.ndim
        spec[axis] = entry
        return lax.with_sharding_constraint(x, NamedSharding(mesh, jax.P(*spec)))

    @constrain.def_vmap
    def batched(size: int, is_mapped: list[bool], x: Array) -> tuple[Array, bool]:
        del size, is_mapped
        return constraint(axis + 1, entry, mesh)(x), True

    return constrain


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_auto(where: tuple[int, tuple[str, ...], jax.sharding.AbstractMesh], x: Array) -> Array:
    """The whole x in an Auto mesh, gathered along an array axis that is split over mesh axes.

    Its gradient is scattered. FP8 values have no gradient here: a matmul gathers them inside its
    own custom gradient.

    Args:
      where: the array axis, the mesh axes and the mesh.
      x: [...], its global shape.
    """
    axis, axis_names, mesh = where
    return constraint(axis, None, mesh)(constraint(axis, axis_names, mesh)(x))


gather_auto.defvjp(
    lambda where, x: (gather_auto(where, x), None), lambda where, _, g: (constraint(*where)(g),)
)
