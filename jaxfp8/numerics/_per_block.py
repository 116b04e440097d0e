"""`PerBlock`: one scale for each tile, and the reshapes that give each tile axes of its own.

Letters: T, the number of values along a side of a tile.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from jaxfp8._pytrees import register_value
from jaxfp8._typing import Array, Axes
from jaxfp8.numerics._granularity import AbstractGranularity

# Reshapes that keep the sharding of an array on an Explicit mesh.
#
# JAX has a rule for the sharding of a reshape. It gives mesh axes to the new array axes from left
# to right, until each is fully split. A mesh axis of size 1 splits nothing, so the rule moves it to
# a neighbouring array axis, or drops it. The values are then on the right devices, but the array's
# type names another sharding. JAX refuses to multiply values by scales with another sharding. So
# the functions here name the sharding of the result. On other meshes a reshape needs no sharding.


def split_axis(x: Array, axis: int, cells: int) -> Array:
    """x [.., cells * side, ..] as [.., cells, side, ..]. Devices split the axis of cells."""
    shape = (*x.shape[:axis], cells, x.shape[axis] // cells, *x.shape[axis + 1 :])
    if not is_explicit(x):
        return x.reshape(shape)
    spec = jax.typeof(x).sharding.spec
    # A single cell cannot be split. Its scale broadcasts along the values, however they are split.
    of_cells = spec[axis] if cells > 1 else None
    return _reshape(x, shape, [*spec[:axis], of_cells, None, *spec[axis + 1 :]])


def merge_axes(x: Array, counts: Axes) -> Array:
    """x with neighbouring axes merged. Counts (1, 2, 0) make [2, 12, 1] of [2, 3, 4]."""
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
            return x.reshape(shape)  # only the first axis of a group may be split. JAX decides
        entries.append(sharding.spec[longer[0]] if longer else None)
    return _reshape(x, shape, entries)


def is_explicit(x: Array) -> bool:
    """Whether x is on an Explicit mesh, so that its type says how it is split."""
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def devices_of(mesh: Any, entry: Any) -> int:
    """The number of devices over which one entry of a `jax.P` splits an array axis."""
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return math.prod(mesh.shape[name] for name in names)


def _reshape(x: Array, shape: tuple[int, ...], entries: list[Any]) -> Array:
    sharding = jax.typeof(x).sharding
    spec = jax.P(*entries, unreduced=sharding.spec.unreduced, reduced=sharding.spec.reduced)
    return lax.reshape(x, shape, out_sharding=jax.NamedSharding(sharding.mesh, spec))


# Sizes of a program that `jax.export` makes for any batch are symbols.


def is_at_least(size: Any, least: int) -> bool:
    """Whether an axis has `least` values or more. A symbol that may have fewer counts as more."""
    try:
        return bool(size >= least)
    except jax.errors.InconclusiveDimensionOperation:
        return True


def fitting_side(side: int, size: Any) -> int:
    """The side of tiles along an axis. A tile longer than the axis needs no padding."""
    # Along a symbolic axis tiles are never shortened. Padding fills them.
    return side if is_at_least(size, side) else max(size, 1)


def missing_values(size: Any, side: int) -> int:
    """How many values fill the last tile along an axis."""
    # JAX knows how this difference and a symbolic size are related, and not `-size % side`.
    return -(-size // side) * side - size


# PerBlock: one scale for each tile of an array.


@register_value
@dataclasses.dataclass(frozen=True)
class PerBlock(AbstractGranularity):
    """One scale for each tile.

    An array [.., M, K] in tiles of (m, k) has a scale [.., ceil(M/m), ceil(K/k)]. A tile at an edge
    may be ragged: missing values count as zeros. DeepSeek-V3 uses `PerBlock((1, 128))` and
    `PerBlock((128, 128))`, MXFP8 uses `PerBlock((1, 32))`.

    A recipe does not name axes. There a tile has two sides, (1, T) or (T, T). The first side is
    along the last kept axis of the matmul that reads the operand. The second side is along the last
    contracted axis.

    Attributes:
      tile: one side for each trailing axis, in values. Along leading axes a side is 1.

    Example:
      >>> PerBlock((1, 128)).scale_shape((8, 300))
      (8, 3)
      >>> PerBlock((128, 128)).scale_shape((2, 256, 300))
      (2, 2, 3)

    References:
      DeepSeek-V3, arXiv:2412.19437, section 3.3.2; OCP Microscaling Formats (MX) v1.0.
    """

    in_tiles: ClassVar[bool] = True
    tile: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = self.tile
        if (
            not isinstance(sizes, tuple)
            or not sizes
            or any(type(size) is not int or size < 1 for size in sizes)
        ):
            raise ValueError(
                f"tile={sizes!r} must be a tuple of positive integers, one for each trailing axis, "
                "for instance (1, 128)."
            )
        if all(size == 1 for size in sizes):
            raise ValueError(
                f"tile={sizes!r} would give every value a scale of its own; make one of its sides "
                "longer."
            )

    @functools.lru_cache(maxsize=1024)  # noqa: B019  # tiles are few, and hashable
    def along(self, ndim: int) -> tuple[int, ...]:
        if len(self.tile) > ndim:
            raise ValueError(
                f"granularity {self!r} does not fit an array of {ndim} axes. Its tile has "
                f"{len(self.tile)} sides. Give the tile one side for each trailing axis."
            )
        return (1,) * (ndim - len(self.tile)) + self.tile

    @property
    def tiled_axes(self) -> Axes:
        """The axes along which a scale cell has more than one value, counted from the last (-1)."""
        return tuple(axis - len(self.tile) for axis, size in enumerate(self.tile) if size > 1)

    def has_cells_along(self, axis: int, ndim: int) -> bool:
        del axis, ndim
        return True

    @property
    def is_square(self) -> bool:
        return len(self.tiled_axes) > 1

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(
            -(-size // side) for size, side in zip(shape, self.along(len(shape)), strict=True)
        )

    def maximum(self, magnitude: Array) -> Array:
        # One axis after the other, from the last to the first. Several at once would lose the
        # sharding on an Explicit mesh.
        for axis, side in reversed(list(enumerate(self.along(magnitude.ndim)))):
            size = magnitude.shape[axis]
            side = fitting_side(side, size)
            if side > 1:
                _refuse_cut_tiles(magnitude, axis, side)
                if (missing := missing_values(size, side)) != 0:
                    # Zeros never change the maximum of magnitudes.
                    pads = [(0, missing if i == axis else 0) for i in range(magnitude.ndim)]
                    magnitude = jnp.pad(magnitude, pads)
                magnitude = split_axis(magnitude, axis, -(-size // side))
                magnitude = jnp.max(magnitude, axis=axis + 1, initial=0)
        return magnitude

    def expand(self, scale: Array, shape: tuple[int, ...]) -> Array:
        # One axis after the other. Several at once would lose the sharding on an Explicit mesh.
        for axis, (size, side) in enumerate(zip(shape, self.along(len(shape)), strict=True)):
            before, cells, after = scale.shape[:axis], scale.shape[axis], scale.shape[axis + 1 :]
            if side > 1 and is_at_least(cells, 2):  # a single cell broadcasts by itself
                scale = jnp.broadcast_to(
                    jnp.expand_dims(scale, axis + 1), (*before, cells, side, *after)
                )
                scale = merge_axes(scale, (1,) * len(before) + (2,) + (1,) * len(after))
                # The last tile may be ragged. Its scale must not reach past the end of the axis.
                scale = (
                    scale if cells * side == size else lax.slice_in_dim(scale, 0, size, axis=axis)
                )
        return scale

    def for_matmul(self, kept: Axes, ndim: int) -> "PerBlock":
        contracted = [axis for axis in range(ndim) if axis not in kept]
        sides = dict.fromkeys(range(ndim), 1) | {
            kept[-1]: self.tile[0],
            contracted[-1]: self.tile[1],
        }
        return _trailing(tuple(sides.values()))

    def transpose(self, permutation: Axes) -> "PerBlock":
        tile = self.along(len(permutation))
        moved = tuple(tile[old] for old in permutation)
        if len(self.tiled_axes) == 1 and moved != tile:
            raise ValueError(
                f"a tensor in tiles of {self.tile} cannot be transposed by {permutation}. A matmul "
                "that reads it in the other direction needs other tiles. Quantize the "
                "high-precision array in both directions: fp8.quantize(x, format, (PerBlock((1, "
                "T)), PerBlock((T, 1)))). Or use tiles with two equal sides."
            )
        return self if moved == tile else _trailing(moved)


def _trailing(tile: tuple[int, ...]) -> PerBlock:
    """The granularity with this tile, in the one form in which equal tiles compare equal."""
    first = next(axis for axis, size in enumerate(tile) if size > 1)
    return PerBlock(tile[min(first, max(len(tile) - 2, 0)) :])


def _refuse_cut_tiles(x: Array, axis: int, side: int) -> None:
    """Raise ValueError if an Explicit mesh splits an axis inside a tile."""
    if not is_explicit(x):
        return
    sharding = jax.typeof(x).sharding
    split = sharding.spec[axis]
    devices = devices_of(sharding.mesh, split)
    if devices > 1 and x.shape[axis] // devices % side:
        raise ValueError(
            f"an axis of {x.shape[axis]} of an array {list(x.shape)} is split over {split!r}, "
            f"{devices} devices, which cuts tiles of {side}. Give each device whole tiles: cut "
            "shards on the borders of tiles."
        )
