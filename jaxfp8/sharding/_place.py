"""How an operand is placed in the mesh: whole, or split so that its matmul gathers it.

Inside `jax.shard_map` an array is one device's shard, and the gather is a collective. In an
Explicit mesh the type of an array says how it is split, and the gather changes the type. In an Auto
mesh the compiler decides, and two constraints guide it. The first constraint says that the FP8
values are split, the second that the result is whole. Without the first one, XLA could gather
before the cast and send twice the bytes.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, NamedSharding

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, Axes
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.sharding._specs import check_borders, mesh_axes

# Gathers of FP8 values as bytes, and the constraints that make XLA gather in an Auto mesh.


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
def _constraint(
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
        return _constraint(axis + 1, entry, mesh)(x), True

    return constrain


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_auto(where: tuple[int, tuple[str, ...], jax.sharding.AbstractMesh], x: Array) -> Array:
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
    return _constraint(axis, None, mesh)(_constraint(axis, axis_names, mesh)(x))


# The gradient is constrained to the split of x, so that XLA can reduce-scatter it.
_gather_auto.defvjp(
    lambda where, x: (_gather_auto(where, x), None), lambda where, _, g: (_constraint(*where)(g),)
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scatter_auto(where: tuple[int, tuple[str, ...], jax.sharding.AbstractMesh], x: Array) -> Array:
    """x in an Auto mesh, split along an array axis over mesh axes. It reverses `_gather_auto`.

    The gradient of x is gathered in its own dtype.
    """
    return _constraint(*where)(x)


_scatter_auto.defvjp(
    lambda where, x: (_scatter_auto(where, x), None), lambda where, _, g: (_gather_auto(where, g),)
)


# How an operand of a matmul is placed in the mesh: whole, or split so that the matmul gathers it.

# XLA of jax 0.10 does not split an array that has a layout constraint, but gathers it before.
_SPLITS_CONSTRAINED = jax.__version_info__ >= (0, 12)


class Place(abc.ABC):
    """How an operand is placed in the mesh, and the collectives that the placement needs."""

    @property
    @abc.abstractmethod
    def manual_axes(self) -> frozenset[str]:
        """The manual mesh axes that split the operand.

        There are such axes inside `jax.shard_map` only. There the array is one device's shard.
        """

    @abc.abstractmethod
    def whole_shape(self, shape: Axes) -> Axes:
        """The global shape of an array whose shape in the traced function is `shape`."""

    @abc.abstractmethod
    def shard_shape(self, shape: Axes) -> Axes:
        """The shape in the traced function of an array whose global shape is `shape`."""

    @abc.abstractmethod
    def amax_axes(self, granularity: AbstractGranularity, shape: Axes) -> frozenset[str]:
        """The mesh axes over which an amax must be reduced, because its scale cells span devices.

        Args:
          granularity: which values share a scale.
          shape: the shape of the array.

        Raises:
          ValueError: if a tile would span devices.
        """

    @abc.abstractmethod
    def along(self, axis_of: Callable[[int], int]) -> "Place":
        """The place of a view of the array. `axis_of` maps axes of the array to the view's."""

    @abc.abstractmethod
    def gather(self, x: Array) -> Array:
        """The whole array, gathered from its shards x [...]."""

    @abc.abstractmethod
    def gather_operand(self, operand: QuantizedTensor | Array) -> QuantizedTensor | Array:
        """The whole operand, gathered from its shards. FP8 values are sent as bytes."""

    @abc.abstractmethod
    def stored(self, x: Array) -> Array:
        """A shard x [...] of a parameter, read in the layout in which it is stored."""

    @abc.abstractmethod
    def scatter(self, product: Array) -> Array:
        """The result of a matmul, summed over the mesh axes. Each device keeps its shard of it."""


@dataclasses.dataclass(frozen=True)
class Whole(Place):
    """An operand without a `Shard`. It is whole here, or the compiler decides when to gather it."""

    @property
    def manual_axes(self) -> frozenset[str]:
        return frozenset()

    def whole_shape(self, shape: Axes) -> Axes:
        return shape

    def shard_shape(self, shape: Axes) -> Axes:
        return shape

    def amax_axes(self, granularity: AbstractGranularity, shape: Axes) -> frozenset[str]:
        del granularity, shape
        return frozenset()

    def along(self, axis_of: Callable[[int], int]) -> Place:
        del axis_of
        return self

    def gather(self, x: Array) -> Array:
        return x

    def gather_operand(self, operand: QuantizedTensor | Array) -> QuantizedTensor | Array:
        return operand

    def stored(self, x: Array) -> Array:
        return x

    def scatter(self, product: Array) -> Array:
        return product


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedShard(Place):
    """A `Shard` of an array in a mesh.

    Attributes:
      axis: the array axis that is split, not negative.
      axis_names: the mesh axes that split it. All are Manual, all are Explicit, or all are Auto.
      mesh: the mesh under which the call is traced.
    """

    axis: int
    axis_names: tuple[str, ...]
    mesh: jax.sharding.AbstractMesh

    @property
    def kind(self) -> AxisType:
        return kinds_of(self.mesh)[self.axis_names[0]]

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.shape[name] for name in self.axis_names)

    @property
    def manual_axes(self) -> frozenset[str]:
        return frozenset(self.axis_names if self.kind == AxisType.Manual else ())

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.kind != AxisType.Manual:
            return shape
        return (*shape[: self.axis], shape[self.axis] * self.devices, *shape[self.axis + 1 :])

    def shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.kind != AxisType.Manual:
            return shape
        return (*shape[: self.axis], shape[self.axis] // self.devices, *shape[self.axis + 1 :])

    def amax_axes(self, granularity: AbstractGranularity, shape: Axes) -> frozenset[str]:
        if not granularity.has_cells_along(self.axis, len(shape)):
            return self.manual_axes
        if self.devices > 1:
            size = shape[self.axis]
            # Inside shard_map the shape is that of a shard, elsewhere it is global.
            part = size if self.kind == AxisType.Manual else size // self.devices
            check_borders(granularity, shape, self.axis, part)
        return frozenset()

    def along(self, axis_of: Callable[[int], int]) -> Place:
        return dataclasses.replace(self, axis=axis_of(self.axis))

    def gather(self, x: Array) -> Array:
        if self.kind == AxisType.Manual:
            return in_bytes(
                lambda x: lax.all_gather(x, self.axis_names, axis=self.axis, tiled=True), x
            )
        if self.kind == AxisType.Explicit:
            lie = NamedSharding(
                self.mesh, spec_without(jax.typeof(x).sharding.spec, self.axis, self.axis_names)
            )
            return in_bytes(lambda x: jax.sharding.reshard(x, lie), x)
        return in_bytes(lambda x: _gather_auto((self.axis, self.axis_names, self.mesh), x), x)

    def gather_operand(self, operand: QuantizedTensor | Array) -> QuantizedTensor | Array:
        # A scale that spans devices is the same on all of them, so it is not gathered. The
        # granularity decides, because the type may hide this. After an `optimization_barrier` each
        # array varies over the axes of all arrays in it.
        if not isinstance(operand, QuantizedTensor):
            return self.gather(operand)
        split = operand.granularity.has_cells_along(self.axis, operand.ndim)
        scale = self.gather(operand.scale) if split else operand.scale
        return dataclasses.replace(operand, values=self.gather(operand.values), scale=scale)

    def stored(self, x: Array) -> Array:
        # XLA:GPU gathers along the first axis of a layout. For another axis it would choose the
        # layout of the parameter to fit. In a loop over layers that is a second copy of all of
        # them, in high precision. With the constraint, XLA transposes FP8 shards, one at a time.
        if self.axis == 0 or (self.kind != AxisType.Manual and not _SPLITS_CONSTRAINED):
            return x
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    def scatter(self, product: Array) -> Array:
        if self.kind == AxisType.Manual:
            return lax.psum_scatter(
                product, self.axis_names, scatter_dimension=self.axis, tiled=True
            )
        if self.kind == AxisType.Explicit:
            # The matmul was called with the sharding of the result, so nothing is left to do.
            spec = jax.typeof(product).sharding.spec
            if set(self.axis_names) - set(mesh_axes(spec[self.axis])):
                raise ValueError(
                    f"y_shard= splits the result over {list(self.axis_names)}, but its type is "
                    f"{spec}. Pass out_sharding= with this split, or leave y_shard= out."
                )
            return product
        return _scatter_auto((self.axis, self.axis_names, self.mesh), product)


def kinds_of(mesh: jax.sharding.AbstractMesh) -> dict[str, AxisType]:
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def spec_without(spec: jax.P, axis: int, axis_names: tuple[str, ...], given: str = "") -> jax.P:
    """The spec after a gather: an array axis is no longer split over `axis_names`.

    Raises:
      ValueError: if the array axis is not split over all of `axis_names`. The message begins with
        `given`.
    """
    entries = list(spec)
    names = mesh_axes(entries[axis])
    if missing := [name for name in axis_names if name not in names]:
        raise ValueError(
            f"{given}: axis {axis} is not split over {missing}, by its type {spec}. Use "
            "jax.sharding.reshard to reshard the operand, or leave the shard out."
        )
    rest = tuple(name for name in names if name not in axis_names)
    entries[axis] = rest if len(rest) > 1 else rest[0] if rest else None
    return jax.P(*entries)
