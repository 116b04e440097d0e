"""Gathers of FP8 values as bytes, and the constraints that make XLA gather in an Auto mesh."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding

from jaxfp8._typing import Array


def in_bytes(collective: Callable[[Array], Array], x: Array) -> Array:
    """A collective on x [...], which sends FP8 values and E8M0 scales as bytes.

    XLA:CPU would widen FP8 values to float16 and lose the sign of a zero. It would widen E8M0
    scales to float32, flush the smallest scale to zero, and convert that zero to NaN. Wider dtypes
    are sent as they are.
    """
    if x.dtype.itemsize > 1:
        return collective(x)
    return lax.bitcast_convert_type(collective(lax.bitcast_convert_type(x, jnp.uint8)), x.dtype)


def take_rows(x: Array, index: Array, fill: float = 0.0) -> Array:
    """Entries of x [n, ...] at an index of any shape. An index of n or more gives `fill`.

    FP8 values and E8M0 scales are moved as bytes, for the reason above.
    """
    if x.dtype.itemsize > 1:
        return x.at[index].get(mode="fill", fill_value=fill)
    filler = int(np.asarray(fill, x.dtype).view(np.uint8))
    taken = lax.bitcast_convert_type(x, jnp.uint8).at[index]
    return lax.bitcast_convert_type(taken.get(mode="fill", fill_value=filler), x.dtype)


@functools.cache
def constraint(
    axis: int, entry: tuple[str, ...] | None, mesh: jax.sharding.AbstractMesh
) -> Callable[[Array], Array]:
    """A sharding constraint on one array axis. The compiler decides about the other axes.

    The constraint has its own rule for `jax.vmap`, because JAX's rule leaves all axes to the
    compiler, even an axis that must be whole.

    Args:
      axis: the array axis.
      entry: the mesh axes that split it; None if it must be whole.
      mesh: the mesh.
    """

    @custom_vmap
    def constrain(x: Array) -> Array:
        spec: list[Any] = [jax.P.UNCONSTRAINED] * x.ndim
        spec[axis] = entry
        return lax.with_sharding_constraint(x, NamedSharding(mesh, jax.P(*spec)))

    @constrain.def_vmap
    def batched(size: int, is_mapped: list[bool], x: Array) -> tuple[Array, bool]:
        del size, is_mapped
        # The mapped axis is the first one here, so the array axis is one further.
        return constraint(axis + 1, entry, mesh)(x), True

    return constrain


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_auto(where: tuple[int, tuple[str, ...], jax.sharding.AbstractMesh], x: Array) -> Array:
    """The whole x in an Auto mesh, gathered along an array axis that mesh axes split.

    The gradient of x is split again. FP8 values have no gradient here. A matmul gathers them inside
    its own custom gradient.

    Args:
      where: the array axis, the mesh axes and the mesh.
      x: [...], of global shape.
    """
    # The inner constraint makes x split, the outer one makes it whole. Without the inner one, XLA
    # could gather before x is cast.
    axis, axis_names, mesh = where
    return constraint(axis, None, mesh)(constraint(axis, axis_names, mesh)(x))


# The gradient is constrained to the split of x, so that XLA can reduce-scatter it.
gather_auto.defvjp(
    lambda where, x: (gather_auto(where, x), None), lambda where, _, g: (constraint(*where)(g),)
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scatter_auto(where: tuple[int, tuple[str, ...], jax.sharding.AbstractMesh], x: Array) -> Array:
    """x in an Auto mesh, split along an array axis over mesh axes. It reverses `gather_auto`.

    The gradient of x is gathered in its own dtype.
    """
    return constraint(*where)(x)


scatter_auto.defvjp(
    lambda where, x: (scatter_auto(where, x), None), lambda where, _, g: (gather_auto(where, g),)
)
