"""Where an operand of a matmul is in the mesh: whole, or split so that the matmul gathers it.

Inside `jax.shard_map` an array is one device's shard, and the gather is a collective. In an
Explicit mesh the type of an array says how it is split, and the gather changes the type. In an Auto
mesh the compiler decides, and two constraints guide it. The first says that the FP8 values are
split, the second that the result is whole. Without the first, XLA could gather before the cast, at
twice the bytes.
"""

import abc
import dataclasses
import math
from collections.abc import Callable

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding

from jaxfp8._typing import Array, Axes
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.sharding._gather import constraint, gather_auto, in_bytes
from jaxfp8.sharding._specs import check_borders, mesh_axes
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


class Place(abc.ABC):
    """Where an operand is in the mesh: what a matmul has to know, and the collectives for it."""

    @property
    @abc.abstractmethod
    def manual_axes(self) -> frozenset[str]:
        """The mesh axes over which the array here is one shard of several.

        There are such axes inside `jax.shard_map` only.
        """

    @abc.abstractmethod
    def whole_shape(self, shape: Axes) -> Axes:
        """The global shape of an array that has this shape here."""

    @abc.abstractmethod
    def amax_axes(self, granularity: AbstractGranularity, shape: Axes) -> frozenset[str]:
        """The mesh axes over which the cells of a scale span devices; `shape` is that of the array.

        Raises:
          ValueError: if a tile would span devices.
        """

    @abc.abstractmethod
    def along(self, axis_of: Callable[[int], int]) -> "Place":
        """The place of a view of the array. `axis_of` maps its axes to those of the view."""

    @abc.abstractmethod
    def gather(self, x: Array) -> Array:
        """The whole array, gathered from its shards x [...]."""

    @abc.abstractmethod
    def gather_operand(self, operand: QuantizedTensor | Array) -> QuantizedTensor | Array:
        """The whole operand, gathered from its shards; FP8 values travel as bytes."""

    @abc.abstractmethod
    def scatter(self, product: Array) -> Array:
        """A gradient [...] summed over the mesh axes, of which each device keeps its shard."""


@dataclasses.dataclass(frozen=True)
class Whole(Place):
    """The operand has no `Shard`: it is whole here, or the compiler gathers it as it likes."""

    @property
    def manual_axes(self) -> frozenset[str]:
        return frozenset()

    def whole_shape(self, shape: Axes) -> Axes:
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

    def scatter(self, product: Array) -> Array:
        return product


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedShard(Place):
    """A `Shard` of an array in a mesh.

    Attributes:
      axis: the axis of the array, not negative.
      axis_names: the mesh axes, all Manual, all Explicit or all Auto.
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

    def amax_axes(self, granularity: AbstractGranularity, shape: Axes) -> frozenset[str]:
        if not granularity.has_cells_along(self.axis, len(shape)):
            return self.manual_axes
        if self.devices > 1:
            size = shape[self.axis]
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
        return in_bytes(lambda x: gather_auto((self.axis, self.axis_names, self.mesh), x), x)

    def gather_operand(self, operand: QuantizedTensor | Array) -> QuantizedTensor | Array:
        # Devices already share a scale that spans them, so it is not gathered. Its type may hide
        # that: after an `optimization_barrier` each member varies over the axes of all members.
        if not isinstance(operand, QuantizedTensor):
            return self.gather(operand)
        split = operand.granularity.has_cells_along(self.axis, operand.ndim)
        scale = self.gather(operand.scale) if split else operand.scale
        return dataclasses.replace(operand, values=self.gather(operand.values), scale=scale)

    def scatter(self, product: Array) -> Array:
        if self.kind == AxisType.Manual:
            return lax.psum_scatter(
                product, self.axis_names, scatter_dimension=self.axis, tiled=True
            )
        if self.kind == AxisType.Explicit:
            return product  # its type says it already
        return constraint(self.axis, self.axis_names, self.mesh)(product)


def kinds_of(mesh: jax.sharding.AbstractMesh) -> dict[str, AxisType]:
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def spec_without(spec: jax.P, axis: int, axis_names: tuple[str, ...], given: str = "") -> jax.P:
    """A spec in which an array axis is no longer split over mesh axes.

    Raises:
      ValueError: if it is not split over all of them.
    """
    entries = list(spec)
    names = mesh_axes(entries[axis])
    if missing := [name for name in axis_names if name not in names]:
        raise ValueError(
            f"{given}: axis {axis} is not split over {missing}, by its type {spec}; reshard the "
            "operand so, or leave the shard out."
        )
    rest = tuple(name for name in names if name not in axis_names)
    entries[axis] = rest if len(rest) > 1 else rest[0] if rest else None
    return jax.P(*entries)
