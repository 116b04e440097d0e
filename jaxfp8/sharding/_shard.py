"""Shard: how an operand is split over mesh axes, so that its matmul gathers it in FP8.

A `Shard` means the same in every kind of mesh. The mesh is the one that is set, or else the one in
the types of the operands. If there is none, the operand is whole.

Inside `jax.shard_map` an array is one device's shard, and the gather is a collective. In an
Explicit mesh the type of an array says how it is split, and the gather changes the type. In an Auto
mesh the compiler decides, and two constraints guide it. The first constraint says that the FP8
values are split, the second that the result is whole. Without the first one, XLA could gather
before the cast and send twice the bytes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, NamedSharding

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, Axes
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.sharding._amax import types_show_varying, varying_axes
from jaxfp8.sharding._place import Place, Whole, in_bytes
from jaxfp8.sharding._specs import check_borders, mesh_axes


@dataclasses.dataclass(frozen=True)
class Shard:
    """How an operand is split over a mesh, so that its matmul gathers it in FP8.

    Each device quantizes its shard with global scales. The FP8 shards are gathered for fprop, and
    again in the backward pass. Only the shard is stored in between. The gradient is
    reduce-scattered: it is summed over the mesh axis, and each device keeps its shard.

    The `Shard` of a result does the reverse: the result is reduce-scattered, and its gradient is
    quantized and gathered in FP8.

    The mesh is that of `jax.set_mesh` or `jax.shard_map`. If none is set, it is the mesh on which
    the operand is placed, which jax keeps in the type of the array. If the operand is on no mesh,
    it is whole, and the `Shard` does nothing. So models can be made and traced before there is a
    mesh. `fp8.programs.assert_wire_dtype` finds a gather that was meant to be in FP8.

    Attributes:
      axis: the axis of the array that is split.
      axis_name: the mesh axis that splits it, or a tuple of mesh axes. The first one is outermost,
        as in `jax.P`.

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
        if (
            type(self.axis) is not int
            or not names
            or not all(isinstance(name, str) for name in names)
        ):
            raise TypeError(
                f"axis={self.axis!r}, axis_name={self.axis_name!r} must be an axis of the array "
                'and the name of a mesh axis: Shard(0, "fsdp").'
            )

    @property
    def axis_names(self) -> tuple[str, ...]:
        return (self.axis_name,) if isinstance(self.axis_name, str) else self.axis_name


# A `Shard` in a mesh, and the constraints that make XLA gather in an Auto mesh.

# XLA of jax 0.10 does not split an array that has a layout constraint, but gathers it before.
_SPLITS_CONSTRAINED = jax.__version_info__ >= (0, 12)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PlacedShard(Place):
    """A `Shard` of an array, whose axis is not negative, in the mesh under which it is traced.

    The mesh axes are all Manual, all Explicit, or all Auto.
    """

    axis: int
    axis_names: tuple[str, ...]
    mesh: jax.sharding.AbstractMesh

    @property
    def kind(self) -> AxisType:
        return _kinds_of(self.mesh)[self.axis_names[0]]

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
                self.mesh, _spec_without(jax.typeof(x).sharding.spec, self.axis, self.axis_names)
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


def _kinds_of(mesh: jax.sharding.AbstractMesh) -> dict[str, AxisType]:
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def _spec_without(spec: jax.P, axis: int, axis_names: tuple[str, ...], given: str = "") -> jax.P:
    """The spec after a gather: an array axis is no longer split over `axis_names`.

    ValueError if it was not split over all of them. The message begins with `given`.
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


@functools.cache
def _constraint(
    axis: int, entry: tuple[str, ...] | None, mesh: jax.sharding.AbstractMesh
) -> Callable[[Array], Array]:
    """A sharding constraint on one array axis: split by the mesh axes `entry`, whole for None.

    The compiler decides about the other axes. JAX's own rule for `jax.vmap` would leave it all of
    them, even one that must be whole.
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
    """The whole x in an Auto mesh. `where`: the array axis, the mesh axes that split it, the mesh.

    The gradient of x is split again. FP8 values have no gradient here. A matmul gathers them inside
    its own custom gradient.
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


def place_operand(name: str, x: Array, shard: Shard | None) -> Place:
    """How x is placed in its mesh: whole, or split as `shard` says. Without a mesh x is whole.

    TypeError if `shard` is no `Shard`. ValueError if the array or the mesh lacks the axis, if
    shards would have unequal sizes, or if the type of x says another split.
    """
    if shard is None or (placed := _placed(name, x.shape, (x,), shard)) is None:
        return Whole()
    given = f"{name}_shard={shard!r}"
    if placed.kind == AxisType.Manual:
        if same := _same(placed, varying_axes(x)):
            raise ValueError(
                f"{given}: by its type every device along {same} has the same {name}, so it is no "
                "shard. Split it in in_specs of jax.shard_map, or leave the shard out. (flax's "
                "nn.scan traces a layer once without types, unless it is called with "
                "check_constancy_invariants=False.)"
            )
        return placed
    # Inside shard_map x is a shard already, so only global arrays can be unequal.
    _check_equal(name, x.shape, placed)
    if placed.kind == AxisType.Explicit:
        # Raises an error if the type of x says another split. The result is not needed.
        _spec_without(jax.typeof(x).sharding.spec, placed.axis, placed.axis_names, given)
    return placed


def place_result(shape: Axes, operands: tuple[Array, Array], shard: Shard | None) -> Place:
    """How the result of a matmul, of this shape, is placed: whole, or summed and split.

    Inside `jax.shard_map` x or w, the operands, must vary over the mesh axes. Errors: see
    `place_operand`.
    """
    if shard is None or (placed := _placed("y", shape, operands, shard)) is None:
        return Whole()
    _check_equal("y", shape, placed)
    if placed.kind == AxisType.Manual and (
        same := _same(placed, frozenset().union(*map(varying_axes, operands)))
    ):
        raise ValueError(
            f"y_shard={shard!r}: by their types every device along {same} has the same x and the "
            "same w, so y is no sum over devices. Split what the matmul contracts, or leave the "
            "shard out."
        )
    return placed


def _placed(
    name: str, shape: Axes, operands: tuple[Array, ...], shard: Shard
) -> _PlacedShard | None:
    """A shard of an array of this shape, in the mesh of the operands. None if there is no mesh."""
    given = f"{name}_shard={shard!r}"
    if not isinstance(shard, Shard):
        raise TypeError(f'{given} is no Shard; use fp8.sharding.Shard(0, "fsdp").')
    if not -len(shape) <= shard.axis < len(shape):
        raise ValueError(f"{given} is out of range for {name} of shape {list(shape)}.")
    meshes = jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in operands)
    mesh = next((mesh for mesh in meshes if not mesh.empty), None)
    if mesh is None:
        return None  # a model that is initialized or traced before there is a mesh
    kinds = _kinds_of(mesh)
    if not set(shard.axis_names) <= set(kinds):
        raise ValueError(
            f"{given} names no axis of the mesh here. Use some of its axes {list(mesh.axis_names)}."
        )
    if len({kinds[axis] for axis in shard.axis_names}) > 1:
        raise ValueError(
            f"{given} names mesh axes of several kinds: {kinds}. A shard needs axes of one kind; "
            "gather the operand over the others before."
        )
    return _PlacedShard(axis=shard.axis % len(shape), axis_names=shard.axis_names, mesh=mesh)


def _same(placed: _PlacedShard, varies: frozenset[str]) -> list[str]:
    """The mesh axes of the shard over which, by the types, an array does not vary."""
    return sorted(set(placed.axis_names) - varies) if types_show_varying() else []


def _check_equal(name: str, shape: Axes, placed: _PlacedShard) -> None:
    """Raise ValueError if shards would have unequal sizes."""
    if shape[placed.axis] % placed.devices:
        names = placed.axis_names
        raise ValueError(
            f"{name}_shard={Shard(placed.axis, names[0] if len(names) == 1 else names)!r}: axis "
            f"{placed.axis} of {name} {list(shape)} cannot be split into {placed.devices} equal "
            f"parts; pad it to a multiple of {placed.devices}."
        )
