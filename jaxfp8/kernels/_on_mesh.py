"""A kernel on the devices of a mesh: each device runs it on its own shard.

XLA does not know how a kernel's results depend on its operand. So in an Auto mesh it would gather
the operand on every device. This module tells XLA that every axis of a result is split like the
same axis of the operand. Then nothing is gathered, unless a shard would cut a tile.
"""

import functools
import math
import re
from collections.abc import Callable, Collection
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from jaxfp8._typing import Array, Axes
from jaxfp8.sharding._amax import vary_as
from jaxfp8.sharding._specs import mesh_axes, whole_mesh_axes

_Kernel: TypeAlias = Callable[..., tuple[Array, ...]]
_Results = TypeVar("_Results", Array, tuple[Array, ...])


def on_mesh(kernel: _Kernel, sides: Axes, cells: tuple[Axes, ...]) -> _Kernel:
    """`kernel(x, *others)`, as a function that works on any mesh and under `jax.vmap`.

    Each axis of the others has the size of x's axis or size 1. The results have the axes of x.
    `sides` has the side of a tile along each trailing axis. Each shard of a split axis must hold
    whole tiles. `cells` has for each result how many values of x become one value, along these
    axes. Along one axis that is 1 or the same number in all results.

    Raises NotImplementedError in a mesh whose axes have different types, and in an Explicit mesh
    whose shards would cut tiles.
    """

    @custom_vmap
    def call(x: Array, *others: Array) -> tuple[Array, ...]:
        kinds = set(mesh_of(x, *others).axis_types)
        if kinds == {AxisType.Manual}:
            return on_this_device(kernel, x, *others)
        if len(kinds) > 1:
            raise NotImplementedError(
                f"The mesh has axes of the types {sorted(map(str, kinds))}. A kernel needs axes of "
                "one type. Inside jax.shard_map, make all axes manual."
            )
        if kinds == {AxisType.Explicit}:
            return _explicit(kernel, sides, x, *others)
        # This is also the path if no mesh is known (no kinds). The result of another kernel has a
        # type without a mesh, but it may be on several devices.
        return _auto(kernel, sides, cells, x, *others)(x, *others)

    @call.def_vmap
    def batched(
        size: int, is_mapped: list[bool], x: Array, *others: Array
    ) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
        # The kernel takes the mapped axis as one more leading axis. An operand that is not mapped
        # gets size 1 there, so it is not repeated in memory. x must have the full size.
        x_mapped, *mapped = is_mapped
        x = x if x_mapped else jnp.broadcast_to(x, (size, *x.shape))
        beside = (each if there else each[None] for each, there in zip(others, mapped, strict=True))
        return call(x, *beside), (True,) * len(cells)

    return call


def on_this_device(kernel: Callable[..., _Results], *operands: Array) -> _Results:
    """`kernel(*operands)` inside `jax.shard_map`."""
    # The types of a kernel's results may name no manual axes. The results depend on all operands,
    # so they vary over every axis that an operand varies over.
    first, *others = (functools.reduce(vary_as, operands, each) for each in operands)
    results: _Results = jax.tree.map(lambda each: vary_as(each, first), kernel(first, *others))
    return results


def partitioned(
    kernel: Callable[..., _Results],
    infer: Callable[[Any, Any], Any],
    partition: Callable[[Any, Any], Any],
    rule: str,
    whole: Collection[str],
    sizes: dict[str, int],
) -> Callable[..., _Results]:
    """The kernel with its partitioning rules for XLA: `infer` and `partition` of mesh and operands.

    `rule` is Shardy's, `sizes` has the sizes of its compound factors, and `whole` the factors that
    are not split.
    """
    call = custom_partitioning(lambda *operands: kernel(*operands))
    call.def_partition(
        lambda mesh, operands, results: partition(mesh, operands),
        infer_sharding_from_operands=lambda mesh, operands, results: infer(mesh, operands),
        # XLA may split an axis over part of a mesh axis. JAX cannot decode that and would raise.
        decode_shardings=False,
        sharding_rule=rule,
        # Shardy takes these factors only in the order in which the rule names them.
        need_replication_factors=tuple(
            dict.fromkeys(factor for factor in re.findall(r"\w+", rule) if factor in whole)
        ),
        **sizes,
    )
    return call


def mesh_of(*operands: Array) -> AbstractMesh:
    """The mesh that is set, or else that of an operand's type."""
    # `jax.jit` of sharded arrays sets no mesh.
    meshes = (
        jax.sharding.get_abstract_mesh(),
        *(jax.typeof(each).sharding.mesh for each in operands),
    )
    return next((mesh for mesh in meshes if not mesh.empty), meshes[0])


def _of_other(spec: Any, shape: Axes) -> Any:
    """The spec of an array whose axes have the size of x's axes or size 1. x has `spec`."""
    return jax.P(*(entry if size > 1 else None for entry, size in zip(spec, shape, strict=True)))


def _explicit(kernel: _Kernel, sides: Axes, x: Array, *others: Array) -> tuple[Array, ...]:
    sharding = jax.typeof(x).sharding
    spec = jax.P(*(*sharding.spec, *[None] * x.ndim)[: x.ndim])
    for axis, side in zip(range(x.ndim - len(sides), x.ndim), sides, strict=True):
        parts = math.prod(sharding.mesh.shape[name] for name in mesh_axes(spec[axis]))
        if parts > 1 and x.shape[axis] % (parts * side):
            raise NotImplementedError(
                f"Axis {axis} of {list(x.shape)} is split over {parts} devices, and that cuts "
                f"tiles of {side}. Each shard needs whole tiles. Pad the axis or split another one."
            )
    in_specs = (spec, *(_of_other(spec, each.shape) for each in others))
    # `jax.shard_map` takes Explicit arrays only with the specs of `in_specs`. An operand may have
    # another one: a gain, for instance, is often replicated.
    others = tuple(
        jax.sharding.reshard(each, NamedSharding(sharding.mesh, lie))
        for each, lie in zip(others, in_specs[1:], strict=True)
    )
    # None stands for the mesh that is set. Otherwise the mesh comes from the operand's type.
    mesh = None if jax.sharding.get_abstract_mesh().axis_names else sharding.mesh
    return jax.shard_map(kernel, mesh=mesh, in_specs=in_specs, out_specs=spec, check_vma=False)(
        x, *others
    )


def _auto(
    kernel: _Kernel, sides: Axes, cells: tuple[Axes, ...], x: Array, *others: Array
) -> _Kernel:
    """The kernel with its partitioning rules for XLA."""
    ndim = x.ndim

    def placed(mesh: Any, x: Any) -> NamedSharding:
        spec = list(whole_mesh_axes(x, mesh))
        for axis, side in zip(range(ndim - len(sides), ndim), sides, strict=True):
            # If shards would cut tiles, each device gets all of the axis.
            if x.shape[axis] % (side * math.prod(mesh.shape[name] for name in spec[axis])):
                spec[axis] = ()
        return NamedSharding(mesh, jax.P(*spec))

    def infer(mesh: Any, arguments: Any) -> tuple[NamedSharding, ...]:
        return (placed(mesh, arguments[0]),) * len(cells)

    def partition(mesh: Any, arguments: Any) -> Any:
        lie = placed(mesh, arguments[0])
        beside = (NamedSharding(mesh, _of_other(lie.spec, each.shape)) for each in others)
        return mesh, kernel, (lie,) * len(cells), (lie, *beside)

    return partitioned(
        kernel, infer, partition, *_rule(x.shape, cells, [each.shape for each in others])
    )


def _rule(
    shape: Axes, cells: tuple[Axes, ...], others: list[Axes]
) -> tuple[str, set[str], dict[str, int]]:
    """Shardy's rule, the factors that stay whole, and the sizes of compound ones."""
    # The factors of the rule, numbered by axis:
    #
    # - l: a leading axis
    # - t: the tiles of an axis, or the axis itself if it has no tiles
    # - i: the values inside one tile; never split
    # - u: an axis of size 1 of another operand
    #
    # An axis with a single tile, or with a ragged last tile, has only `i` in x, so it is never
    # split. A ragged axis has `t` in results with one value a tile, and that is not split either.
    lead = len(shape) - len(cells[0])
    sides = [max(of[axis] for of in cells) for axis in range(len(cells[0]))]
    ragged = [axis for axis, side in enumerate(sides) if shape[lead + axis] % side]
    inside: dict[str, int] = {}

    def axis_of(axis: int, cell: int) -> str:
        side = sides[axis]
        if side == 1 or cell > 1:
            return f"t{axis}"
        inside[f"i{axis}"] = side
        # In parentheses a factor must divide the axis, and must not be 1.
        if shape[lead + axis] == side or axis in ragged:
            return f"i{axis}"
        return f"(t{axis} i{axis})"

    def term(of: Axes) -> list[str]:
        return [f"l{axis}" for axis in range(lead)] + [
            axis_of(axis, cell) for axis, cell in enumerate(of)
        ]

    x = term((1,) * len(sides))
    beside = [
        [
            each if size > 1 else f"u{n}{axis}"
            for axis, (each, size) in enumerate(zip(x, other, strict=True))
        ]
        for n, other in enumerate(others)
    ]
    rule = " -> ".join(
        ", ".join(map(" ".join, terms)) for terms in ([x, *beside], [term(of) for of in cells])
    )
    compound = {name: side for name, side in inside.items() if f" {name})" in rule}
    return rule, {*inside, *(f"t{axis}" for axis in ragged)}, compound


# FP8 values that XLA writes in the order of their axes, before a kernel reads them transposed.


def write_in_order(x: Array) -> Array:
    """x [...], written to memory in the order of its axes, on one device."""
    # A kernel may read x transposed. Without the barrier XLA moves the transposition before the
    # cast that made x. Then it also writes masks, magnitudes and the other copy in that order, in
    # wider dtypes: three times the bytes on Hopper. No transposition passes a reshape to one axis.
    return lax.optimization_barrier(x.reshape(-1)).reshape(x.shape)
