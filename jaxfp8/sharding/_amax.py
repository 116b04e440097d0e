"""The mesh axes over which values vary, and maxima over these axes.

In Auto and Explicit meshes an array is global, and so is its amax. Inside `jax.shard_map` an amax
is local. There the type of a value says over which mesh axes it varies. If a tensor varies over a
mesh axis and its state does not, the amax is reduced over that axis. So a pipeline stage with its
own state keeps its own amax, and nobody has to list axes. With `check_vma=False` types say nothing,
and the caller must name the axes.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array, FP8StateError


def varying_axes(x: Array) -> frozenset[str]:
    """The manual mesh axes over which x varies, by its type."""
    return varying_axes_of_type(jax.typeof(x))


def varying_axes_of_type(aval: Any) -> frozenset[str]:
    """The manual mesh axes over which a value of this type varies."""
    return frozenset(aval.manual_axis_type.varying)


def manual_axes() -> tuple[str, ...]:
    """The mesh axes that are manual here. There are some inside `jax.shard_map` (or pmap) only."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def check_axes(named: Iterable[str]) -> None:
    """Raise FP8StateError if a mesh is set and a name is none of its axes."""
    mesh = jax.sharding.get_abstract_mesh()
    unknown = sorted(set(named) - set(mesh.axis_names))
    if unknown and not mesh.empty:
        raise FP8StateError(
            f"reduce_axes={tuple(named)}: {unknown} are no axes of the mesh here. Use some of "
            f"{list(mesh.axis_names)}."
        )


def types_show_varying() -> bool:
    """Whether types say over which manual axes a value varies, as with `check_vma=True`."""
    axes = manual_axes()
    # With check_vma=False a type never shows a varying axis, not even after this cast.
    return not axes or bool(varying_axes(lax.pcast(jnp.zeros(()), axes[:1], to="varying")))


def pmax(x: Array, axes: Iterable[str]) -> Array:
    """`lax.pmax` over the axes, or x itself if there are none."""
    names = tuple(sorted(axes))
    return lax.pmax(x, names) if names else x


def vary_as(x: Array, like: Array) -> Array:
    """x with a type that varies also over every mesh axis over which `like` varies."""
    return vary_over(x, varying_axes(like))


def vary_everywhere(x: Array) -> Array:
    """x with a type that varies over all manual mesh axes.

    Backward rules then emit no collective for its cotangent.
    """
    return vary_over(x, manual_axes()) if types_show_varying() else x


def vary_over(x: Array, axes: Iterable[str]) -> Array:
    """x with a type that varies also over these mesh axes."""
    names = tuple(sorted(set(axes) - varying_axes(x)))
    return lax.pcast(x, names, to="varying") if names else x
