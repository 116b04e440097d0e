"""Reshapes that keep the sharding of an array on an Explicit mesh.

JAX has a rule for the sharding of a reshape. It gives mesh axes to the new array axes from left to
right, until each is fully split. A mesh axis of size 1 splits nothing, so the rule moves it to a
neighbouring array axis, or drops it. The values are then on the right devices, but the array's type
names another sharding. JAX refuses to multiply values by scales with another sharding. So the
functions here name the sharding of the result. On other meshes a reshape needs no sharding.
"""

import math
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType

from jaxfp8._typing import Array, Axes


def split_axis(x: Array, axis: int, cells: int) -> Array:
    """Reshapes x [.., cells * side, ..] to [.., cells, side, ..]. Devices split the axis of cells.

    Example:
      >>> import jax.numpy as jnp
      >>> split_axis(jnp.ones((2, 6)), 1, 3).shape
      (2, 3, 2)
    """
    shape = (*x.shape[:axis], cells, x.shape[axis] // cells, *x.shape[axis + 1 :])
    if not is_explicit(x):
        return x.reshape(shape)
    spec = jax.typeof(x).sharding.spec
    # A single cell cannot be split. Its scale broadcasts along the values, however they are split.
    of_cells = spec[axis] if cells > 1 else None
    return _reshape(x, shape, [*spec[:axis], of_cells, None, *spec[axis + 1 :]])


def merge_axes(x: Array, counts: Axes) -> Array:
    """x with neighbouring axes merged.

    On an Explicit mesh devices may split the first axis of each group. If they split another one,
    JAX's rule decides about the sharding.

    Args:
      x: [...].
      counts: for each new axis, how many neighbouring axes it merges. 0 gives a new axis of size 1.

    Example:
      >>> import jax.numpy as jnp
      >>> merge_axes(jnp.ones((2, 3, 4)), (1, 2, 0)).shape
      (2, 12, 1)
    """
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    groups = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
    shape = tuple(math.prod(x.shape[axis] for axis in group) for group in groups)
    if x.shape == shape:
        return x
    if not is_explicit(x):
        return x.reshape(shape)
    sharding = jax.typeof(x).sharding
    entries = []
    for group in groups:
        # Axes of size 1 have no values to order, so they may stand anywhere in a group.
        longer = [axis for axis in group if x.shape[axis] != 1]
        if any(devices_of(sharding.mesh, sharding.spec[axis]) > 1 for axis in longer[1:]):
            return x.reshape(shape)
        entries.append(sharding.spec[longer[0]] if longer else None)
    return _reshape(x, shape, entries)


def is_explicit(x: Array) -> bool:
    """Whether x is on an Explicit mesh, so that its type says how it is split.

    Example:
      >>> import jax.numpy as jnp
      >>> is_explicit(jnp.ones(2))
      False
    """
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def devices_of(mesh: Any, entry: Any) -> int:
    """The number of devices over which one entry of a `jax.P` splits an array axis.

    Example:
      >>> import jax
      >>> mesh = jax.sharding.AbstractMesh((4, 2), ("data", "tensor"))
      >>> devices_of(mesh, None), devices_of(mesh, "data"), devices_of(mesh, ("data", "tensor"))
      (1, 4, 8)
    """
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return math.prod(mesh.shape[name] for name in names)


def _reshape(x: Array, shape: tuple[int, ...], entries: list[Any]) -> Array:
    sharding = jax.typeof(x).sharding
    spec = jax.P(*entries, unreduced=sharding.spec.unreduced, reduced=sharding.spec.reduced)
    return lax.reshape(x, shape, out_sharding=jax.NamedSharding(sharding.mesh, spec))
