"""A kernel on the devices of a mesh: each runs it on its own part of an array, and nothing is gathered.

XLA does not know how a kernel's results depend on its operand, so that in an Auto mesh it would give every device all of
it. Here every axis of every result lies as that axis of the operand.
"""

import math
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding

from jaxfp8._typing import Array, Axes
from jaxfp8.sharding._amax import vary_as
from jaxfp8.sharding._specs import mesh_axes

Kernel: TypeAlias = Callable[[Array], tuple[Array, ...]]


def on_mesh(kernel: Kernel, sides: Axes, cells: tuple[Axes, ...]) -> Kernel:
    """`kernel`, on any mesh and under `jax.vmap`.

    Args:
      kernel: of x [...] to results that have the axes of x. It takes any number of axes in front of those of `sides`.
      sides: of a tile along the trailing axes; a part of x must have whole tiles, all of x may have a ragged last one.
      cells: of each result, how many elements of x along each of these axes become one.

    Raises:
      NotImplementedError: in a mesh of which some axes are manual and others not, or whose parts would cut tiles.
    """

    @custom_vmap
    def call(x: Array) -> tuple[Array, ...]:
        kinds = set(jax.sharding.get_abstract_mesh().axis_types)
        if kinds <= {AxisType.Manual}:
            return tuple(vary_as(result, x) for result in kernel(x))
        if len(kinds) > 1:
            raise NotImplementedError(f"a mesh with axes of the kinds {sorted(map(str, kinds))}")
        if kinds == {AxisType.Explicit}:
            return _explicit(kernel, sides, x)
        return _auto(kernel, sides, cells, x)(x)

    @call.def_vmap
    def batched(size: int, is_mapped: list[bool], x: Array) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
        del size, is_mapped
        return call(x), (True,) * len(cells)

    return call


def _explicit(kernel: Kernel, sides: Axes, x: Array) -> tuple[Array, ...]:
    sharding = jax.typeof(x).sharding
    spec = sharding.spec
    for axis, side in zip(range(x.ndim - len(sides), x.ndim), sides, strict=True):
        parts = math.prod(sharding.mesh.shape[name] for name in mesh_axes(spec[axis]))
        if parts > 1 and x.shape[axis] % (parts * side):
            raise NotImplementedError(f"axis {axis} of {list(x.shape)} split {parts} times cuts tiles of {side}")
    return jax.shard_map(kernel, in_specs=spec, out_specs=spec, check_vma=False)(x)


def _auto(kernel: Kernel, sides: Axes, cells: tuple[Axes, ...], x: Array) -> Kernel:
    """The kernel with what XLA has to know of it. An axis that tiles do not fit stays whole."""
    ndim = x.ndim

    def placed(mesh: Any, x: Any) -> NamedSharding:
        spec = [mesh_axes(entry) for entry in (*x.sharding.spec, *[None] * ndim)[:ndim]]
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
        return mesh, kernel, (lie,) * len(cells), (lie,)

    call = custom_partitioning(lambda x: kernel(x))
    call.def_partition(partition, infer_sharding_from_operands=infer, **_rule(x.shape, cells))
    return call


def _rule(shape: Axes, cells: tuple[Axes, ...]) -> dict[str, Any]:
    """Shardy's rule: along an axis with tiles a factor for them, and one, never split, for what is inside of one.

    An axis with a ragged tile is never split.
    """
    lead = len(shape) - len(cells[0])
    sides = [max(of[axis] for of in cells) for axis in range(len(cells[0]))]
    ragged = [axis for axis, side in enumerate(sides) if shape[lead + axis] % side]
    inside: dict[str, int] = {}

    def term(of: Axes) -> str:
        factors = [f"l{axis}" for axis in range(lead)]
        for axis, (cell, side) in enumerate(zip(of, sides, strict=True)):
            if side == 1 or cell > 1:
                factors.append(f"t{axis}")
            elif shape[lead + axis] == side or axis in ragged:  # a factor must divide, and not be 1
                factors.append(f"i{axis}")
                inside[f"i{axis}"] = shape[lead + axis]
            else:
                factors.append(f"(t{axis} i{axis})")
                inside[f"i{axis}"] = side
        return " ".join(factors)

    rule = f"{term((1,) * len(sides))} -> {', '.join(map(term, cells))}"
    compound = {name: side for name, side in inside.items() if f" {name})" in rule}
    whole = {*inside, *(f"t{axis}" for axis in ragged)}
    in_order = dict.fromkeys(factor for factor in re.findall(r"\w+", rule) if factor in whole)  # which Shardy wants
    return {"sharding_rule": rule, "need_replication_factors": tuple(in_order), **compound}
