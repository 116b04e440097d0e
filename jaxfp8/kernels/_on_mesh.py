"""A kernel on the devices of a mesh: each runs it on its own shard, and nothing is gathered.

XLA does not know how a kernel's results depend on its operand. So in an Auto mesh it would give
every device all of the operand. Here every axis of every result is split as that axis of the
operand.
"""

import functools
import math
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from jaxfp8._typing import Array, Axes
from jaxfp8.sharding._amax import vary_as
from jaxfp8.sharding._specs import mesh_axes, whole_mesh_axes

Kernel: TypeAlias = Callable[..., tuple[Array, ...]]


def on_mesh(kernel: Kernel, sides: Axes, cells: tuple[Axes, ...]) -> Kernel:
    """`kernel`, on any mesh and under `jax.vmap`.

    Args:
      kernel: of x [...], and of arrays whose axes are those of x or 1, to results that have the
        axes of x. It takes any number of axes in front of those of `sides`.
      sides: of a tile along the trailing axes; parts of an axis must have whole tiles, all of it
        may have a ragged last one.
      cells: of each result, how many elements of x along each of these axes become one: 1 or the
        same in all of them.

    Raises:
      NotImplementedError: in a mesh of which some axes are manual and others not, or whose parts
        would cut tiles.
    """

    @custom_vmap
    def call(x: Array, *others: Array) -> tuple[Array, ...]:
        kinds = set(mesh_of(x, *others).axis_types)
        if kinds == {AxisType.Manual}:
            x, *beside = (functools.reduce(vary_as, (x, *others), each) for each in (x, *others))
            return tuple(vary_as(result, x) for result in kernel(x, *beside))
        # No kinds: no mesh is set. The type of another kernel's result names no mesh, but the
        # result may be on several devices.
        if len(kinds) > 1:
            raise NotImplementedError(f"a mesh with axes of the kinds {sorted(map(str, kinds))}")
        if kinds == {AxisType.Explicit}:
            return _explicit(kernel, sides, x, *others)
        return _auto(kernel, sides, cells, x, *others)(x, *others)

    @call.def_vmap
    def batched(
        size: int, is_mapped: list[bool], x: Array, *others: Array
    ) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
        x_mapped, *mapped = is_mapped
        x = x if x_mapped else jnp.broadcast_to(x, (size, *x.shape))
        beside = (each if there else each[None] for each, there in zip(others, mapped, strict=True))
        return call(x, *beside), (True,) * len(cells)

    return call


def mesh_of(*operands: Array) -> AbstractMesh:
    """The mesh that is set, or else the mesh in the type of an operand.

    `jax.jit` of sharded arrays sets none.
    """
    meshes = (
        jax.sharding.get_abstract_mesh(),
        *(jax.typeof(each).sharding.mesh for each in operands),
    )
    return next((mesh for mesh in meshes if not mesh.empty), meshes[0])


def _of_other(spec: Any, shape: Axes) -> Any:
    """The spec of an array whose axes are those of x, which lies as `spec` says, or 1."""
    return jax.P(*(entry if size > 1 else None for entry, size in zip(spec, shape, strict=True)))


def _explicit(kernel: Kernel, sides: Axes, x: Array, *others: Array) -> tuple[Array, ...]:
    sharding = jax.typeof(x).sharding
    spec = jax.P(*(*sharding.spec, *[None] * x.ndim)[: x.ndim])
    for axis, side in zip(range(x.ndim - len(sides), x.ndim), sides, strict=True):
        parts = math.prod(sharding.mesh.shape[name] for name in mesh_axes(spec[axis]))
        if parts > 1 and x.shape[axis] % (parts * side):
            raise NotImplementedError(
                f"axis {axis} of {list(x.shape)} split {parts} times cuts tiles of {side}"
            )
    in_specs = (spec, *(_of_other(spec, each.shape) for each in others))
    # What lies otherwise, a gain that is whole on every device for instance, is moved.
    others = tuple(
        jax.sharding.reshard(each, NamedSharding(sharding.mesh, lie))
        for each, lie in zip(others, in_specs[1:], strict=True)
    )
    # None takes the one that is set
    mesh = None if jax.sharding.get_abstract_mesh().axis_names else sharding.mesh
    return jax.shard_map(kernel, mesh=mesh, in_specs=in_specs, out_specs=spec, check_vma=False)(
        x, *others
    )


def _auto(kernel: Kernel, sides: Axes, cells: tuple[Axes, ...], x: Array, *others: Array) -> Kernel:
    """The kernel with what XLA has to know of it. An axis that tiles do not fit stays whole."""
    ndim = x.ndim

    def placed(mesh: Any, x: Any) -> NamedSharding:
        spec = list(whole_mesh_axes(x, mesh))
        sizes = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
        for axis, side in zip(range(ndim - len(sides), ndim), sides, strict=True):
            if x.shape[axis] % (side * math.prod(sizes[name] for name in spec[axis])):
                spec[axis] = ()
        return NamedSharding(mesh, jax.P(*spec))

    def infer(mesh: Any, arguments: Any, results: Any) -> tuple[NamedSharding, ...]:
        del results
        return (placed(mesh, arguments[0]),) * len(cells)

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        del results
        lie = placed(mesh, arguments[0])
        beside = (NamedSharding(mesh, _of_other(lie.spec, each.shape)) for each in others)
        return mesh, kernel, (lie,) * len(cells), (lie, *beside)

    call = custom_partitioning(lambda x, *others: kernel(x, *others))
    call.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        decode_shardings=False,  # JAX raises where XLA splits an axis by a part of a mesh axis
        **_rule(x.shape, cells, [each.shape for each in others]),
    )
    return call


def _rule(shape: Axes, cells: tuple[Axes, ...], others: list[Axes]) -> dict[str, Any]:
    """Shardy's rule.

    Along an axis with tiles a factor for them, and one, never split, for what is inside of one.

    An axis of a single tile or with a ragged last one is inside as a whole, and with a ragged one
    never split.
    """
    lead = len(shape) - len(cells[0])
    sides = [max(of[axis] for of in cells) for axis in range(len(cells[0]))]
    ragged = [axis for axis, side in enumerate(sides) if shape[lead + axis] % side]
    inside: dict[str, int] = {}

    def axis_of(axis: int, cell: int) -> str:
        side = sides[axis]
        if side == 1 or cell > 1:
            return f"t{axis}"
        inside[f"i{axis}"] = side
        if shape[lead + axis] == side or axis in ragged:  # a factor must divide, and not be 1
            return f"i{axis}"
        return f"(t{axis} i{axis})"

    def term(of: Axes) -> list[str]:
        return [f"l{axis}" for axis in range(lead)] + [
            axis_of(axis, cell) for axis, cell in enumerate(of)
        ]

    x = term((1,) * len(sides))
    operands = [x]
    for n, other in enumerate(others):
        operands.append(
            [
                each if size > 1 else f"u{n}{axis}"
                for axis, (each, size) in enumerate(zip(x, other, strict=True))
            ]
        )
    rule = " -> ".join(
        ", ".join(map(" ".join, terms)) for terms in (operands, [term(of) for of in cells])
    )
    compound = {name: side for name, side in inside.items() if f" {name})" in rule}
    whole = {*inside, *(f"t{axis}" for axis in ragged)}
    # which Shardy wants
    in_order = dict.fromkeys(factor for factor in re.findall(r"\w+", rule) if factor in whole)
    return {"sharding_rule": rule, "need_replication_factors": tuple(in_order), **compound}
