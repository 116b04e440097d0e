"""The view of a matmul in which tiles have an axis to run along.

The axes of a matmul form four groups: batch, kept by lhs (m), contracted (k), kept by rhs (n). A
tile runs along one axis of a group. In the view lhs is [*batch, *m, *k] and rhs is [*batch, *k,
*n].

If the trailing axes of a group are too short for a tile, they are merged into one axis. For
instance, 12 heads of 64 values become an axis of 768. Leading axes stay separate, so that a mesh
may split them. An empty group becomes one axis of size 1.

Transposes and reshapes make the view. They are outside the custom gradient, so JAX differentiates
them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._geometry import TrainingGeometry, inverse_permutation
from jaxfp8._typing import Array, Axes
from jaxfp8.matmul._arrays import Arrays
from jaxfp8.matmul._call import Places
from jaxfp8.numerics._per_block import is_at_least, is_explicit, merge_axes
from jaxfp8.recipes._recipe import Recipe
from jaxfp8.sharding._place import Place
from jaxfp8.weights._quantized_weight import WeightAxes

Sharding: TypeAlias = jax.sharding.NamedSharding | jax.P | None


@dataclasses.dataclass(frozen=True)
class _Merge:
    """How the axes of one array become those of the view."""

    order: Axes  # the axes of the array, in the order of the view
    counts: Axes  # for each axis of the view, how many are merged into it; 0 is a new axis of 1

    def __call__(self, x: Array) -> Array:
        x = x if self.order == tuple(range(x.ndim)) else jnp.transpose(x, self.order)
        return x if set(self.counts) <= {1} else merge_axes(x, self.counts)

    @property
    def first_axes(self) -> tuple[int | None, ...]:
        """For each axis of the view, the first axis that is merged into it; None for a new axis."""
        ends = [sum(self.counts[:i]) for i in range(len(self.counts))]
        return tuple(
            self.order[first] if count else None
            for first, count in zip(ends, self.counts, strict=True)
        )

    def undo(self, x: Array, like: Array) -> Array:
        """Reverses a call whose argument had the shape and the sharding of `like`."""
        shape = tuple(like.shape[axis] for axis in self.order)
        if x.shape != shape:
            spec = None
            if is_explicit(like):
                sharding = jax.typeof(like).sharding
                entries = (*sharding.spec, *[None] * like.ndim)
                spec = jax.sharding.NamedSharding(
                    sharding.mesh, jax.P(*(entries[axis] for axis in self.order))
                )
            x = lax.reshape(x, shape, out_sharding=spec)
        return jnp.transpose(x, inverse_permutation(self.order))

    def axis(self, axis: int) -> int:
        """The axis of the view that an axis becomes. ValueError if it is merged into another."""
        first = 0
        for new, count in enumerate(self.counts):
            if axis in self.order[first : first + count]:
                if axis != self.order[first]:
                    raise ValueError(
                        f"axis {axis}, along which an operand is split, is merged into the one "
                        "before it, because tiles do not fit it. Split the first of the merged "
                        "axes, or make tiles fit the axis."
                    )
                return new
            first += count
        raise AssertionError(f"axis {axis} is none of {self.order}")


@dataclasses.dataclass(frozen=True)
class View:
    """The operands and the result of a matmul as tiles need them. Without tiles nothing changes."""

    geometry: TrainingGeometry
    of_x: _Merge  # [*batch, *m, *k]
    of_w: _Merge  # [*batch, *k, *n]
    of_bias: _Merge  # [*batch, *n]
    of_y: _Merge  # [*batch, *m, *n]
    y_shape: Axes  # of the result of the matmul; inside `jax.shard_map` that of its shard

    def arrays(self, given: Arrays) -> Arrays:
        """The arrays of the view's matmul."""
        return given._replace(
            x=self.of_x(given.x),
            w=self.of_w(given.w),
            bias=None if given.bias is None else self.of_bias(given.bias),
            parts=given.parts and tuple(self._part(each, given.x.shape) for each in given.parts),
        )

    def _part(self, part: Array, x_shape: Axes) -> Array:
        """The view of an array of a prologue. Each axis has size 1, or its size in `x_shape`."""
        if part.shape == x_shape or set(self.of_x.counts) <= {1}:
            return self.of_x(part)
        whole = jax.eval_shape(self.of_x, jax.ShapeDtypeStruct(x_shape, part.dtype)).shape
        view = self.of_x(part)
        if all(size in (1, full) for size, full in zip(view.shape, whole, strict=True)):
            return view
        # An axis of size 1 is merged with a longer one. The merged axis would be neither 1 nor
        # whole, and could not broadcast to x. So the array is broadcast first.
        return self.of_x(jnp.broadcast_to(part, x_shape))

    def places(self, places: Places) -> Places:
        """The places of the view's operands. ValueError if one is split along a merged axis."""
        x, w = places.x.along(self.of_x.axis), places.w.along(self.of_w.axis)
        return places._replace(x=x, w=w, g=places.g.along(self.of_y.axis))

    def out_sharding(self, given: Sharding) -> Sharding:
        """The out_sharding of the view's result. ValueError if it splits a merged axis."""
        counts = self.of_y.counts
        if given is None or set(counts) <= {1}:  # no axis is merged or added
            return given
        spec = given.spec if isinstance(given, jax.sharding.NamedSharding) else given
        along = [*spec, *[None] * (sum(counts) - len(spec))]
        merged = []
        for count in counts:
            group, along = along[:count], along[count:]
            if any(axis is not None for axis in group[1:]):
                raise ValueError(
                    f"out_sharding={given} splits an axis that is merged into the one before it, "
                    "because tiles do not fit it. Split the first of the merged axes."
                )
            merged.append(group[0] if group else None)
        new = jax.P(*merged)
        if isinstance(given, jax.sharding.NamedSharding):
            return jax.sharding.NamedSharding(given.mesh, new)
        return new

    def result(self, y: Array, out_sharding: Sharding, high: Callable[[], Array]) -> Array:
        """The view's result, reshaped to that of the matmul, which has the type of `high()`."""
        if y.shape == self.y_shape:
            return y
        if out_sharding is None and is_explicit(y):
            # JAX's rule for a reshape may give a mesh axis of size 1 to another axis than
            # `lax.dot_general` does.
            out_sharding = jax.eval_shape(high).sharding
        return lax.reshape(y, self.y_shape, out_sharding=out_sharding)


@functools.lru_cache(maxsize=4096)  # equal layers of a model share their views
def view_for(
    tile: int | None,
    geometry: TrainingGeometry,
    shapes: tuple[Axes, Axes],
    y_place: Place = Place(),  # noqa: B008
) -> View:
    """The view for tiles of at most `tile` values a side; None for recipes without tiles."""
    x, w = geometry.fprop.sides
    y_shape = y_place.shard_shape(geometry.fprop.out_shape(*shapes))
    y_axes, bias_axes = tuple(range(len(x.batch + x.kept + w.kept))), w.batch + w.kept
    if tile is None:
        of_x, of_w, of_bias, of_y = (
            _Merge(tuple(range(len(axes))), (1,) * len(axes))
            for axes in (x.order, w.order, bias_axes, y_axes)
        )
        return View(geometry, of_x, of_w, of_bias, of_y, y_shape)
    # Contracted axes are in the order of lhs. Neighbours in lhs can then be merged without a
    # transpose of lhs.
    pairs = sorted(zip(x.contracted, w.contracted, strict=True))
    x_contract, w_contract = (tuple(pair[side] for pair in pairs) for side in (0, 1))
    sizes_m = tuple(shapes[0][axis] for axis in x.kept)
    sizes_k = tuple(shapes[0][axis] for axis in x_contract)
    sizes_n = tuple(shapes[1][axis] for axis in w.kept)
    batch, m, k, n = (1,) * len(x.batch), *(_counts(s, tile) for s in (sizes_m, sizes_k, sizes_n))
    return View(
        geometry=_trailing(len(batch), len(m), len(k), len(n)),
        of_x=_Merge(x.batch + x.kept + x_contract, batch + m + k),
        of_w=_Merge(w.batch + w_contract + w.kept, batch + k + n),
        of_bias=_Merge(tuple(range(len(bias_axes))), batch + n),
        of_y=_Merge(y_axes, batch + m + n),
        y_shape=y_shape,
    )


def view_of_weight(recipe: Recipe, axes: WeightAxes, shape: Axes) -> View:
    """The view of the matmul of a weight of this whole shape, with one row of activations."""
    geometry = axes.geometry(len(shape))  # first, because it checks the axes
    x_shape = tuple(shape[axis] for axis in axes.batch)
    x_shape = (*x_shape, 1, *(shape[axis] for axis in axes.contracted))
    return view_for(recipe.tile, geometry, (x_shape, shape))


def _trailing(batch: int, m: int, k: int, n: int) -> TrainingGeometry:
    """The axes of [*batch, *m, *k] @ [*batch, *k, *n]. Arguments are the sizes of the groups."""
    batches = tuple(range(batch))
    contracted = tuple(range(batch + m, batch + m + k)), tuple(range(batch, batch + k))
    return TrainingGeometry.of((contracted, (batches, batches)), batch + m + k, batch + k + n)


def _counts(sizes: Axes, tile: int) -> Axes:
    """How many axes of a group are merged into each axis of the view."""
    # Only trailing axes are merged: the fewest that fill a tile, or all of them if none fill it.
    first = max(len(sizes) - 1, 0)
    while first > 0 and not is_at_least(math.prod(sizes[first:]), tile):
        first -= 1
    return (1,) * first + (len(sizes) - first,)
