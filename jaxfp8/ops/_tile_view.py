"""The view of a dot_general in which tiles have an axis to run along.

A tile runs along one axis of each group: batch, kept by lhs (m), contracted (k), kept by rhs (n). Here lhs becomes
[*batch, *m, *k], rhs [*batch, *k, *n], and in each group the trailing axes that are too short for a tile are merged into
one: heads of 64 with their index, a token's few experts with the tokens. Leading axes are left alone, so that a mesh may
split them. An empty group gets an axis of 1.

The view is made of transposes and reshapes outside the custom gradient, which JAX differentiates itself.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array, Axes, DotDimensionNumbers
from jaxfp8.numerics._reshape import is_explicit, merge_axes


@dataclasses.dataclass(frozen=True)
class TileView:
    """How the axes of each group, batch, m, k, n, are merged.

    Attributes:
      lhs_order: axes of lhs as [*batch, *m, *k].
      rhs_order: axes of rhs as [*batch, *k, *n].
      sizes: of the axes of each group, as they are.
      merged: for each axis of the view how many it is made of; 0 for an axis of 1 that is new.
    """

    lhs_order: Axes
    rhs_order: Axes
    sizes: tuple[Axes, Axes, Axes, Axes]
    merged: tuple[Axes, Axes, Axes, Axes]

    @property
    def dimension_numbers(self) -> DotDimensionNumbers:
        batch, m, k, _ = map(len, self.merged)
        batches = tuple(range(batch))
        return (tuple(range(batch + m, batch + m + k)), tuple(range(batch, batch + k))), (batches, batches)

    def lhs(self, x: Array) -> Array:
        return _view(x, self.lhs_order, self.merged[0] + self.merged[1] + self.merged[2])

    def operand(self, part: Array, shape: tuple[int, ...]) -> Array:
        """The view of an array that has the axes of lhs, which has this shape, or 1; so has its view."""
        whole = jax.eval_shape(self.lhs, jax.ShapeDtypeStruct(shape, part.dtype)).shape
        view = self.lhs(part)
        if all(size in (1, full) for size, full in zip(view.shape, whole, strict=True)):
            return view
        return self.lhs(jnp.broadcast_to(part, shape))  # 1 and more than 1 are merged

    def rhs(self, w: Array) -> Array:
        return _view(w, self.rhs_order, self.merged[0] + self.merged[2] + self.merged[3])

    def bias(self, b: Array) -> Array:
        """[*batch, *n]."""
        return _view(b, tuple(range(b.ndim)), self.merged[0] + self.merged[3])

    def lhs_axis(self, axis: int) -> int:
        """Where an axis of lhs, along which it is split, is in the view.

        Raises:
          ValueError: if it is merged into another.
        """
        return _moved(axis, self.lhs_order, self.merged[0] + self.merged[1] + self.merged[2])

    def rhs_axis(self, axis: int) -> int:
        """The same of rhs."""
        return _moved(axis, self.rhs_order, self.merged[0] + self.merged[2] + self.merged[3])

    def result(
        self, y: Array, out_sharding: jax.sharding.NamedSharding | jax.P | None, high: Callable[[], Array]
    ) -> Array:
        """y [*batch, *m, *n] with the axes that it has without tiles; `high()` is the matmul in high precision."""
        shape = self.sizes[0] + self.sizes[1] + self.sizes[3]
        if y.shape == shape:
            return y
        if out_sharding is None and is_explicit(y):
            # JAX's rule for a reshape may give a mesh axis of size 1 to another axis than `lax.dot_general` does.
            out_sharding = jax.eval_shape(high).sharding
        return lax.reshape(y, shape, out_sharding=out_sharding)

    def out_sharding(
        self, given: jax.sharding.NamedSharding | jax.P | None
    ) -> jax.sharding.NamedSharding | jax.P | None:
        """The out_sharding of the view's product.

        Raises:
          ValueError: if it splits an axis that is merged into another.
        """
        counts = self.merged[0] + self.merged[1] + self.merged[3]
        if given is None or set(counts) <= {1}:
            return given
        spec = given.spec if isinstance(given, jax.sharding.NamedSharding) else given
        along = [*spec, *[None] * (sum(counts) - len(spec))]
        merged = []
        for count in counts:
            group, along = along[:count], along[count:]
            if any(axis is not None for axis in group[1:]):
                raise ValueError(
                    f"out_sharding={given} splits an axis that is merged into the one before it, for tiles; split the first "
                    "of them."
                )
            merged.append(group[0] if group else None)
        new = jax.P(*merged)
        return jax.sharding.NamedSharding(given.mesh, new) if isinstance(given, jax.sharding.NamedSharding) else new


def tile_view(
    lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...], dimension_numbers: DotDimensionNumbers, tile: int
) -> TileView:
    """The view for tiles of at most `tile` values a side.

    Example:
      >>> tile_view((8, 512, 12, 64), (12, 64, 768), (((2, 3), (0, 1)), ((), ())), 128).merged
      ((), (1, 1), (2,), (1,))
    """
    contracted, batch = dimension_numbers
    pairs = sorted(zip(*contracted, strict=True))
    x_contract, w_contract = (tuple(pair[side] for pair in pairs) for side in (0, 1))
    x_batch, w_batch = map(tuple, batch)
    m = tuple(axis for axis in range(len(lhs_shape)) if axis not in x_batch + x_contract)
    n = tuple(axis for axis in range(len(rhs_shape)) if axis not in w_batch + w_contract)
    sizes = [
        tuple(shape[axis] for axis in axes)
        for shape, axes in ((lhs_shape, x_batch), (lhs_shape, m), (lhs_shape, x_contract), (rhs_shape, n))
    ]
    return TileView(
        lhs_order=x_batch + m + x_contract,
        rhs_order=w_batch + w_contract + n,
        sizes=(sizes[0], sizes[1], sizes[2], sizes[3]),
        merged=((1,) * len(x_batch), _merge(sizes[1], tile), _merge(sizes[2], tile), _merge(sizes[3], tile)),
    )


def _merge(sizes: Axes, tile: int) -> Axes:
    """How many axes become one: the trailing ones, from the last that, with those after it, fills a tile."""
    first = max(len(sizes) - 1, 0)
    while first > 0 and math.prod(sizes[first:]) < tile:
        first -= 1
    return (1,) * first + (len(sizes) - first,)


def _view(x: Array, order: Axes, counts: Axes) -> Array:
    x = x if order == tuple(range(x.ndim)) else jnp.transpose(x, order)
    return merge_axes(x, counts)


def _moved(axis: int, order: Axes, counts: Axes) -> int:
    """The place in the view of an axis; of several that are merged, the first."""
    place = order.index(axis)
    for new, count in enumerate(counts):
        if place < count or place == 0 == count - 1:
            if place:
                raise ValueError(
                    f"axis {axis}, along which an operand is split, is merged into the one before it, for tiles; split "
                    "the first of them, or make tiles fit the axis."
                )
            return new
        place -= count
    raise AssertionError(f"axis {axis} is none of {order}")
