"""Shard: how an operand of a matmul is split over a mesh axis, so that the matmul gathers it in FP8.

One meaning in every kind of mesh; what differs is who says where an array lies. Inside `jax.shard_map` an array is one
device's part and collectives are written out. In an Explicit mesh its type says where it lies and is changed. In an Auto mesh
the compiler decides, and is told twice: that the cast is done where the part lies, and that its result is whole. Without the
first it could gather what is cast, at twice the bytes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType, NamedSharding

from jaxfp8._typing import Array
from jaxfp8.sharding._amax import types_tell, varying
from jaxfp8.sharding._specs import mesh_axes


@dataclasses.dataclass(frozen=True)
class Shard:
    """An operand is split along an array axis over a mesh axis, and the matmul that reads it needs the whole.

    It is quantized where it lies, with the scales of the whole, and gathered in FP8: for fprop, and once more for the matmul
    of the backward pass that reads it, so that only the part is saved. Its gradient is reduce-scattered: summed over the
    mesh axis, each device keeping its part.

    Attributes:
      axis: of the array, along which it is split.
      axis_name: of the mesh, over which it is split; or several, the first one outermost, as in `jax.P`.

    Example:
      >>> Shard(0, "fsdp")  # fully sharded data parallelism: rows of w
      Shard(axis=0, axis_name='fsdp')
      >>> Shard(0, ("data", "fsdp")).axis_names
      ('data', 'fsdp')
    """

    axis: int
    axis_name: str | tuple[str, ...]

    def __post_init__(self) -> None:
        names = self.axis_names if isinstance(self.axis_name, str | tuple) else ()
        if type(self.axis) is not int or not names or not all(isinstance(name, str) for name in names):
            raise TypeError(
                f"axis={self.axis!r}, axis_name={self.axis_name!r} must be an axis of the array and the name of a mesh axis: "
                'Shard(0, "fsdp").'
            )

    @property
    def axis_names(self) -> tuple[str, ...]:
        return (self.axis_name,) if isinstance(self.axis_name, str) else self.axis_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedShard:
    """A `Shard` of an array in a mesh.

    Attributes:
      axis: of the array, not negative.
      axis_names: of the mesh, all of one kind.
      mesh: where the call is traced.
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
        """Those over which the array here is one part of several: inside `jax.shard_map` only."""
        return frozenset(self.axis_names if self.kind == AxisType.Manual else ())

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the whole of an array [...] here."""
        if self.kind != AxisType.Manual:
            return shape
        return (*shape[: self.axis], shape[self.axis] * self.devices, *shape[self.axis + 1 :])

    def part(self, shape: tuple[int, ...]) -> int:
        """How long the part of one device is, of an array [...] here."""
        return shape[self.axis] if self.kind == AxisType.Manual else shape[self.axis] // self.devices

    def gather(self, x: Array) -> Array:
        """The whole of x."""
        if self.kind == AxisType.Manual:
            return in_bytes(lambda x: lax.all_gather(x, self.axis_names, axis=self.axis, tiled=True), x)
        if self.kind == AxisType.Explicit:
            lie = NamedSharding(self.mesh, _without(jax.typeof(x).sharding.spec, self.axis, self.axis_names))
            return in_bytes(lambda x: jax.sharding.reshard(x, lie), x)
        return in_bytes(lambda x: _gather_auto(self, x), x)

    def scatter(self, product: Array) -> Array:
        """What this device keeps of the sum of a gradient over the mesh axis."""
        if self.kind == AxisType.Manual:
            return lax.psum_scatter(product, self.axis_names, scatter_dimension=self.axis, tiled=True)
        if self.kind == AxisType.Explicit:
            return product  # its type says it already
        return _constraint(self.axis, self.axis_names, self.mesh)(product)


def place(name: str, x: Array, shard: Shard) -> PlacedShard:
    """The shard of x in the mesh here.

    Args:
      name: of the operand, for errors.
      x: [...].
      shard: how it is split.

    Raises:
      TypeError: if `shard` is none.
      ValueError: for an axis that the array or the mesh does not have, a mesh that is not set, parts that are not equal, or an
        array whose type says that it lies otherwise.
    """
    given = f"{name}_shard={shard!r}"
    if not isinstance(shard, Shard):
        raise TypeError(f'{given} is no Shard; use fp8.sharding.Shard(0, "fsdp").')
    if not -x.ndim <= shard.axis < x.ndim:
        raise ValueError(f"{given} is out of range for {name} of shape {list(x.shape)}.")
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise ValueError(
            f"{given} needs a mesh, and none is set: call it under jax.set_mesh(mesh), or inside jax.shard_map."
        )
    kinds = kinds_of(mesh)
    if not set(shard.axis_names) <= set(kinds):
        raise ValueError(f"{given} names no axis of the mesh here, which has {list(mesh.axis_names)}.")
    if len({kinds[axis] for axis in shard.axis_names}) > 1:
        raise ValueError(f"{given} names mesh axes of several kinds: {kinds}; gather over one kind of them at a time.")
    placed = PlacedShard(axis=shard.axis % x.ndim, axis_names=shard.axis_names, mesh=mesh)
    if placed.kind == AxisType.Manual:
        if types_tell() and (same := sorted(set(placed.axis_names) - varying(x))):
            raise ValueError(
                f"{given}: by its type every device along {same} has the same {name}, which is then no part of a "
                "whole; split it in in_specs of shard_map, or leave the shard out. (flax's nn.scan traces a layer once without "
                "types, unless it is given check_constancy_invariants=False.)"
            )
        return placed
    if x.shape[placed.axis] % placed.devices:
        raise ValueError(
            f"{given}: axis {placed.axis} of {name} {list(x.shape)} cannot be split into {placed.devices} equal parts; pad it "
            f"to a multiple of {placed.devices}."
        )
    if placed.kind == AxisType.Explicit:
        _without(jax.typeof(x).sharding.spec, placed.axis, placed.axis_names, given)
    return placed


def in_bytes(collective: Callable[[Array], Array], x: Array) -> Array:
    """A collective of FP8 values or E8M0 scales, moved as bytes; of wider ones as they are.

    XLA:CPU would widen FP8 values to float16, which loses the sign of a zero, and E8M0 scales to float32, whose smallest it
    flushes to zero and reads as NaN.
    """
    if x.dtype.itemsize > 1:
        return collective(x)
    return lax.bitcast_convert_type(collective(lax.bitcast_convert_type(x, jnp.uint8)), x.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_auto(shard: PlacedShard, x: Array) -> Array:
    split, whole = (_constraint(shard.axis, entry, shard.mesh) for entry in (shard.axis_names, None))
    return whole(split(x))


# For operands that stay in high precision; what is quantized is gathered inside the gradient of its matmul.
_gather_auto.defvjp(lambda shard, x: (_gather_auto(shard, x), None), lambda shard, _, g: (shard.scatter(g),))


@functools.cache
def _constraint(axis: int, entry: tuple[str, ...] | None, mesh: jax.sharding.AbstractMesh) -> Callable[[Array], Array]:
    """What tells the compiler where one array axis lies, and leaves the others to it.

    With a rule of its own for `jax.vmap`: JAX's leaves all axes to the compiler, the one that shall be whole too.
    """

    @custom_vmap
    def constrain(x: Array) -> Array:
        spec: list[Any] = [jax.P.UNCONSTRAINED] * x.ndim
        spec[axis] = entry
        return lax.with_sharding_constraint(x, NamedSharding(mesh, jax.P(*spec)))

    @constrain.def_vmap
    def batched(size: int, is_mapped: list[bool], x: Array) -> tuple[Array, bool]:
        del size, is_mapped
        return _constraint(axis + 1, entry, mesh)(x), True

    return constrain


def kinds_of(mesh: jax.sharding.AbstractMesh) -> dict[str, AxisType]:
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def _without(spec: jax.P, axis: int, axis_names: tuple[str, ...], given: str = "") -> jax.P:
    """A spec in which an array axis is no longer split over mesh axes.

    Raises:
      ValueError: if it is not.
    """
    entries = list(spec)
    names = mesh_axes(entries[axis])
    if missing := [name for name in axis_names if name not in names]:
        raise ValueError(
            f"{given}: axis {axis} is not split over {missing}, by its type {spec}; reshard the operand so, or leave the "
            "shard out."
        )
    rest = tuple(name for name in names if name not in axis_names)
    entries[axis] = rest if len(rest) > 1 else rest[0] if rest else None
    return jax.P(*entries)
