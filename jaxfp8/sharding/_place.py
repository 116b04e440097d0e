"""`Place`: how an operand is placed in the mesh. Collectives that move FP8 values."""

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
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, Axes
from jaxfp8.numerics._formats import E8M0
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.sharding._specs import check_borders, mesh_axes

# FP8 values and scales, moved bit for bit.


def in_bytes(collective: Callable[[Array], Array], x: Array) -> Array:
    """A collective on x [...]. It sends E8M0 scales as bytes, and FP8 values too, but for TPUs."""
    if x.dtype.itemsize > 1:
        return collective(x)

    # XLA:CPU would widen FP8 values to float16 and lose the sign of a zero. It would widen E8M0
    # scales to float32, flush the smallest scale to zero, and convert that zero to NaN.
    def as_bytes(x: Array) -> Array:
        return lax.bitcast_convert_type(collective(lax.bitcast_convert_type(x, jnp.uint8)), x.dtype)

    if x.dtype == E8M0.dtype:
        return as_bytes(x)
    # XLA for TPUs would copy bytes that two matmuls read as FP8.
    return lax.platform_dependent(x, tpu=collective, default=as_bytes)


def take_rows(x: Array, index: Array, fill: float = 0.0) -> Array:
    """Entries of x [n, ...] at an index of any shape, moved as bytes. From n on they are `fill`."""
    if x.dtype.itemsize > 1:
        return x.at[index].get(mode="fill", fill_value=fill)
    filler = int(np.asarray(fill, x.dtype).view(np.uint8))
    taken = lax.bitcast_convert_type(x, jnp.uint8).at[index]
    return lax.bitcast_convert_type(taken.get(mode="fill", fill_value=filler), x.dtype)


# How an operand of a matmul is placed in the mesh: whole, or split so that the matmul gathers it.

# XLA of jax 0.10 does not split an array that has a layout constraint, but gathers it before.
_SPLITS_CONSTRAINED = jax.__version_info__ >= (0, 12)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """How an operand is placed in the mesh, and the collectives that the placement needs.

    `Place()` is that of an operand without a `Shard`. It is whole here, or the compiler decides
    when to gather it.

    Attributes:
      axis: the array axis that is split, not negative.
      axis_names: the mesh axes that split it. They are all Manual, all Explicit, or all Auto.
      mesh: the mesh under which the operand is traced.
      stored_whole: whether the backward pass finds the operand whole, see `Shard`.
    """

    axis: int = 0
    axis_names: tuple[str, ...] = ()
    mesh: AbstractMesh | None = None
    stored_whole: bool = False

    @functools.cached_property
    def kind(self) -> AxisType | None:
        """That of the mesh axes; None for an operand that is whole."""
        return None if self.mesh is None else kinds_of(self.mesh)[self.axis_names[0]]

    @property
    def devices(self) -> int:
        """The number of shards."""
        if self.mesh is None:
            return 1
        return math.prod(self.mesh.shape[name] for name in self.axis_names)

    @property
    def manual_axes(self) -> frozenset[str]:
        """The manual mesh axes that split the operand. Only `jax.shard_map` has some."""
        return frozenset(self.axis_names if self.kind == AxisType.Manual else ())

    def whole_shape(self, shape: Axes) -> Axes:
        """The global shape of an array whose shape in the traced function is `shape`."""
        return self._resized(shape, lambda size: size * self.devices)

    def shard_shape(self, shape: Axes) -> Axes:
        """The shape in the traced function of an array whose global shape is `shape`."""
        return self._resized(shape, lambda size: size // self.devices)

    def _resized(self, shape: Axes, size_of: Callable[[int], int]) -> Axes:
        if self.kind != AxisType.Manual:
            return shape
        return (*shape[: self.axis], size_of(shape[self.axis]), *shape[self.axis + 1 :])

    def amax_axes(self, granularity: AbstractGranularity, shape: Axes) -> frozenset[str]:
        """The mesh axes to reduce an amax over, because scale cells of the array span devices.

        ValueError if a tile would.
        """
        if self.mesh is None or not granularity.has_cells_along(self.axis, len(shape)):
            return self.manual_axes
        if self.devices > 1:
            # Inside shard_map the shape is that of a shard, elsewhere it is global.
            whole = self.whole_shape(shape)[self.axis]
            check_borders(granularity, shape, self.axis, whole // self.devices)
        return frozenset()

    def along(self, axis_of: Callable[[int], int]) -> "Place":
        """The place of a view of the array. `axis_of` maps axes of the array to the view's."""
        return self if self.mesh is None else dataclasses.replace(self, axis=axis_of(self.axis))

    def gather(self, x: Array) -> Array:
        """The whole array, gathered from its shards x [...], as `in_bytes` sends them."""
        mesh = self.mesh
        if mesh is None:
            return x

        def gathered(x: Array) -> Array:
            if self.kind == AxisType.Manual:
                return lax.all_gather(x, self.axis_names, axis=self.axis, tiled=True)
            if self.kind == AxisType.Explicit:
                spec = spec_without(jax.typeof(x).sharding.spec, self)
                return jax.sharding.reshard(x, NamedSharding(mesh, spec))
            return _gather_auto(self, x)

        return in_bytes(gathered, x)

    def gather_operand(self, operand: QuantizedTensor | Array) -> QuantizedTensor | Array:
        """The whole operand, gathered from its shards."""
        if not isinstance(operand, QuantizedTensor):
            return self.gather(operand)
        # A scale that spans devices is the same on all of them, so it is not gathered. The
        # granularity decides, because the type may hide this. After an `optimization_barrier` each
        # array varies over the axes of all arrays in it.
        split = operand.granularity.has_cells_along(self.axis, operand.ndim)
        scale = self.gather(operand.scale) if split else operand.scale
        return dataclasses.replace(operand, values=self.gather(operand.values), scale=scale)

    def stored(self, x: Array) -> Array:
        """A shard x [...] of a parameter, read in the layout in which it is stored."""
        # XLA:GPU gathers along the first axis of a layout. For another axis it would choose the
        # layout of the parameter to fit. In a loop over layers that is a second copy of all of
        # them, in high precision. With the constraint, XLA transposes FP8 shards, one at a time.
        if self.axis == 0 or (self.kind != AxisType.Manual and not _SPLITS_CONSTRAINED):
            return x
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    def scatter(self, product: Array) -> Array:
        """The result of a matmul, summed over the mesh axes. Each device keeps its shard of it."""
        if self.mesh is None:
            return product
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
        return _scatter_auto(self, product)


def kinds_of(mesh: AbstractMesh) -> dict[str, AxisType]:
    """The kind of each mesh axis."""
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def spec_without(spec: jax.P, place: Place, given: str = "") -> jax.P:
    """The spec after a gather: the array axis is no longer split over the mesh axes of a place.

    ValueError if it was not split over all of them. The message begins with `given`.
    """
    entries = list(spec)
    names = mesh_axes(entries[place.axis])
    if missing := [name for name in place.axis_names if name not in names]:
        raise ValueError(
            f"{given}: axis {place.axis} is not split over {missing}, by its type {spec}. Use "
            "jax.sharding.reshard to reshard the operand, or leave the shard out."
        )
    entries[place.axis] = tuple(name for name in names if name not in place.axis_names)
    return jax.P(*entries)


@functools.cache
def _constraint(
    axis: int, entry: tuple[str, ...] | None, mesh: AbstractMesh
) -> Callable[[Array], Array]:
    """A sharding constraint on one array axis: split by the mesh axes `entry`, whole for None."""

    @custom_vmap
    def constrain(x: Array) -> Array:
        spec: list[Any] = [jax.P.UNCONSTRAINED] * x.ndim
        spec[axis] = entry
        return lax.with_sharding_constraint(x, NamedSharding(mesh, jax.P(*spec)))

    # The compiler decides about the other axes. JAX's own rule for `jax.vmap` would leave it all of
    # them, even one that must be whole.
    @constrain.def_vmap
    def batched(size: int, is_mapped: list[bool], x: Array) -> tuple[Array, bool]:
        del size, is_mapped
        # The mapped axis is the first one here, so the array axis is one further.
        return _constraint(axis + 1, entry, mesh)(x), True

    return constrain


def _split(place: Place, x: Array) -> Array:
    assert place.mesh is not None
    return _constraint(place.axis, place.axis_names, place.mesh)(x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_auto(place: Place, x: Array) -> Array:
    """The whole x in an Auto mesh.

    FP8 values have no gradient here. A matmul gathers them inside its own custom gradient.
    """
    # The inner constraint makes x split, the outer one makes it whole. Without the inner one, XLA
    # could gather before x is cast.
    assert place.mesh is not None
    return _constraint(place.axis, None, place.mesh)(_split(place, x))


# The gradient is constrained to the split of x, so that XLA can reduce-scatter it.
_gather_auto.defvjp(
    lambda place, x: (_gather_auto(place, x), None), lambda place, _, g: (_split(place, g),)
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scatter_auto(place: Place, x: Array) -> Array:
    """x in an Auto mesh, split. Its gradient is gathered in its own dtype."""
    return _split(place, x)


_scatter_auto.defvjp(
    lambda place, x: (_scatter_auto(place, x), None), lambda place, _, g: (_gather_auto(place, g),)
)
