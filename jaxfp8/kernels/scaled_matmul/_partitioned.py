"""A scaled matmul of matrices on the devices of a mesh: how operands and result are split.

XLA does not know how a kernel's result depends on its operands. So it would gather all of them on
every device. Here rows, columns and batch stay split as they are. K stays split if both operands
are split alike, and into whole steps. Then partial products are added across devices.

In an Explicit mesh all of this is traced inside an Auto mesh. Outside of that, types are those of
`jax.lax.dot_general`.

Letters: B batch, M N K the axes of a matmul, C = K / step.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType, NamedSharding

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.kernels._on_mesh import mesh_of, on_this_device, partitioned
from jaxfp8.kernels.scaled_matmul._call import MatmulCall
from jaxfp8.sharding._specs import whole_mesh_axes

_Dot: TypeAlias = Callable[..., Array]
"""(values [B, M, K], values [B, N, K], scales of lhs, scales of rhs) -> [B, M, N]"""
_Spec: TypeAlias = tuple[tuple[str, ...], ...]  # mesh axes along each axis


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cells:
    """Which values share a scale, and which values must stay on one device."""

    step: int  # the values along K that stay on one device; K is a multiple
    # How many scales a row has in each step; scales are [B, M, parts C]. With 0 a row has one scale
    # for all of K, [B, M, 1].
    parts: int = 1
    # How many columns of rhs share a scale; scales are [B, ceil(N / columns), parts C].
    columns: int = 1

    def rule(
        self, lhs: tuple[int, ...], rhs: tuple[int, ...]
    ) -> tuple[str, Collection[str], dict[str, int]]:
        """Shardy's rule for these shapes, factors that stay whole, and the sizes that it needs.

        For instance 'b m (t k), b (c j) (t k), b m t, b c t -> b m (c j)'. The factors b, m and n
        are B, M and N. Along K, t counts steps, k the values of one step, and p its scales. Along
        N, c counts tiles of columns, and j the columns of one tile. u is an axis of size 1.
        """
        # A factor in parentheses must not be 1. So if there is only one step, or one tile of
        # columns, the rule has one whole factor for it.
        steps, n = lhs[2] // self.step, rhs[1]
        inner = "(t k)" if steps > 1 else "k"
        cells = {0: "u", 1: "t"}.get(self.parts, "(t p)" if steps > 1 else "p")
        kept, scaled = "n", "n"
        whole = {"k": self.step, "p": self.parts}
        if self.columns > 1:
            tiled = n % self.columns == 0 and n > self.columns
            kept, scaled = ("(c j)" if tiled else "j"), "c"
            whole |= {"j": self.columns} if tiled else {"j": n, "c": -(-n // self.columns)}
        rule = f"b m {inner}, b {kept} {inner}, b m {cells}, b {scaled} {cells} -> b m {kept}"
        sizes = {"t": steps, **whole}
        # Shardy sees the size of a factor that is an axis by itself. It must get all other sizes.
        alone = {*re.findall(r"\w+", re.sub(r"\(.*?\)", "", rule))}
        told = {
            name: size
            for name, size in sizes.items()
            if name not in alone and re.search(rf"\b{name}\b", rule)
        }
        return rule, whole, told


def check_not_empty(operand: QuantizedTensor) -> None:
    """Raise NotImplementedError for an operand without values."""
    if 0 in operand.shape:
        raise NotImplementedError(
            f"An operand is empty, {list(operand.shape)}. This kernel needs values. Write "
            "matmuls='xla' in fp8.Kernels."
        )


def check_mesh(mesh: Any) -> None:
    """Raise NotImplementedError for a mesh with only some axes Manual."""
    if AxisType.Manual in mesh.axis_types and len({*mesh.axis_types}) > 1:
        raise NotImplementedError(
            f"The mesh is {mesh}. Inside jax.shard_map this kernel needs a mesh with all axes "
            "manual. Name all axes in jax.shard_map."
        )


def in_auto_mesh(
    scaled_matmul: Callable[[QuantizedTensor, QuantizedTensor, MatmulCall], Array],
    lhs: QuantizedTensor,
    rhs: QuantizedTensor,
    call: MatmulCall,
) -> Array:
    """`scaled_matmul(lhs, rhs, call)` of operands on an Explicit mesh, traced in an Auto mesh.

    The result has the type that `jax.lax.dot_general` would give it. JAX raises ShardingTypeError
    if the types do not determine it and `call.out_sharding` is None.
    """
    dot = functools.partial(
        lax.dot_general,
        dimension_numbers=call.geometry.dimension_numbers,
        out_sharding=call.out_sharding,
    )
    (result,) = jax.make_jaxpr(dot)(lhs.values, rhs.values).out_avals
    # Inside an Auto mesh no type says how the result is split.
    untyped = dataclasses.replace(call, out_sharding=None)
    inside = jax.sharding.auto_axes(
        lambda lhs, rhs: scaled_matmul(lhs, rhs, untyped), out_sharding=result.sharding
    )
    return inside(lhs, rhs)


def partition_matmul(local: _Dot, cells: Cells) -> _Dot:
    """`local` on the devices of an Auto mesh."""

    def partition(mesh: Any, arguments: Any) -> Any:
        lhs, rhs, out, summed = _specs(mesh, cells, *arguments[:2])

        def on_device(*arguments: Array) -> Array:
            # Without a mesh, types have no shardings. Types of an Explicit mesh would put sharding
            # constraints into the sum, and XLA would not recognise it as a sum.
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                product = local(*arguments)
                return lax.psum(product, summed) if summed else product

        beside = [spec if cells.parts else (*spec[:2], ()) for spec in (lhs, rhs)]
        placed = tuple(NamedSharding(mesh, jax.P(*spec)) for spec in (lhs, rhs, *beside))
        return mesh, on_device, NamedSharding(mesh, jax.P(*out)), placed

    def infer(mesh: Any, arguments: Any) -> Any:
        return NamedSharding(mesh, jax.P(*_specs(mesh, cells, *arguments[:2])[2]))

    def dot(*arguments: Array) -> Array:
        rule = cells.rule(*(x.shape for x in arguments[:2]))
        return partitioned(local, infer, partition, *rule)(*arguments)

    return dot


def mapped(local: _Dot, split: _Dot, cells: Cells) -> _Dot:
    """`local` inside `jax.shard_map`, `split` elsewhere. It is one call under `jax.vmap`, too.

    A fifth argument [B, M, N] may be added to the result.
    """

    @custom_vmap
    def dot(*arguments: Array) -> Array:
        if {*mesh_of(*arguments).axis_types} == {AxisType.Manual}:
            return on_this_device(local, *arguments)
        # This is also the path if no mesh is known. The result of another kernel has a type without
        # a mesh, but it may be on several devices.
        return split(*arguments)

    @dot.def_vmap
    def batched(size: int, is_mapped: list[bool], *arguments: Array) -> tuple[Array, bool]:
        sides = [is_mapped[side] or is_mapped[side + 2] for side in (0, 1)]  # values or scales
        # If only one operand is mapped, its rows grow, so that the other one is not repeated. Tiles
        # of columns may be ragged, and then they cannot follow each other.
        if len(arguments) > 4 or (sides[1] and cells.columns > 1):
            sides = [True, True]
        full = [
            jnp.broadcast_to(x, (size, *x.shape))
            if not is_mapped[n] and (n == 4 or sides[n % 2])
            else x
            for n, x in enumerate(arguments)
        ]
        if all(sides):
            product = dot(*(x.reshape(-1, *x.shape[2:]) for x in full))
            return product.reshape(size, -1, *product.shape[1:]), True
        product = dot(
            *(x.swapaxes(0, 1).reshape(x.shape[1], -1, x.shape[3]) if x.ndim == 4 else x
              for x in full)
        )  # fmt: skip
        axis = 1 if sides[0] else 2
        shape = *product.shape[:axis], size, -1, *product.shape[axis + 1 :]
        return jnp.moveaxis(product.reshape(shape), axis, 0), True

    return dot


def _specs(mesh: Any, cells: Cells, a: Any, b: Any) -> tuple[_Spec, _Spec, _Spec, tuple[str, ...]]:
    """Specs of a [B, M, K], b [B, N, K] and the result, and the mesh axes that split K."""
    lhs, rhs = (whole_mesh_axes(x, mesh) for x in (a, b))
    taken: set[str] = set()

    def free(axes: tuple[str, ...], size: int, unit: int) -> tuple[str, ...]:
        """The mesh axes among `axes` that are still free, if each device gets whole units."""
        left = tuple(axis for axis in axes if axis not in taken)
        if unit > 1 and size % (unit * math.prod(mesh.shape[axis] for axis in left)):
            return ()
        taken.update(left)
        return left

    batch = free(lhs[0] or rhs[0], 0, 1)
    # K stays split if both operands are split alike. It takes all of its mesh axes or none: if the
    # batch has taken one of them, K is not split.
    agreed = lhs[2] if lhs[2] == rhs[2] and not taken & {*lhs[2]} else ()
    contracted = free(agreed, a.shape[2], cells.step)
    rows, columns = free(lhs[1], 0, 1), free(rhs[1], b.shape[1], cells.columns)
    return (
        (batch, rows, contracted),
        (batch, columns, contracted),
        (batch, rows, columns),
        contracted,
    )
