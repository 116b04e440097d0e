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

import jax
from jax.sharding import AxisType

from jaxfp8._check import check_bool, check_type
from jaxfp8._pytrees import register_value
from jaxfp8._typing import Array, Axes
from jaxfp8.sharding._amax import types_show_varying, varying_axes
from jaxfp8.sharding._place import Place, kinds_of, spec_without


@register_value
@dataclasses.dataclass(frozen=True)
class Shard:
    """How an operand is split over a mesh, so that its matmul gathers it in FP8.

    Each device quantizes its shard with global scales. The FP8 shards are gathered for fprop, and
    again in the backward pass. Only the shard is stored in between. The gradient is
    reduce-scattered: it is summed over the mesh axis, and each device keeps its shard.

    A `jax.checkpoint` that computes the matmul again gathers in the backward pass for fprop, too,
    so twice. `reshard_after_forward=False` makes it one gather.

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
      reshard_after_forward: whether only the shard of x or w is stored for the backward pass. With
        False it is the whole FP8 copy, if both passes read the same one. Use False for w inside of
        a `jax.checkpoint` that does not store weights, such as one with `fp8.save_fp8_residuals()`.
        Elsewhere each device would store all weights. A result has no copy: leave it True there.
        (The name is that of PyTorch's `fully_shard`.)

    Example:
      >>> Shard(0, "fsdp")  # fully sharded data parallelism: rows of w
      Shard(axis=0, axis_name='fsdp')
      >>> Shard(0, ("data", "fsdp")).axis_names
      ('data', 'fsdp')
    """

    axis: int
    axis_name: str | tuple[str, ...]
    reshard_after_forward: bool = True

    def __repr__(self) -> str:
        stored = "" if self.reshard_after_forward else ", reshard_after_forward=False"
        return f"Shard(axis={self.axis!r}, axis_name={self.axis_name!r}{stored})"

    def __post_init__(self) -> None:
        check_bool("reshard_after_forward", self.reshard_after_forward)
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


# Where operands and results are, by their `Shard`.

_WHOLE = Place()


def place_operand(name: str, x: Array, shard: Shard | None) -> Place:
    """How x is placed in its mesh: whole, or split as `shard` says. Without a mesh x is whole.

    TypeError if `shard` is no `Shard`. ValueError if the array or the mesh lacks the axis, if
    shards would have unequal sizes, or if the type of x says another split.
    """
    if shard is None:
        return _WHOLE
    placed = _placed(name, x.shape, (x,), shard)
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
    _check_equal(given, name, x.shape, placed)
    if placed.kind == AxisType.Explicit:
        # Raises an error if the type of x says another split. The result is not needed.
        spec_without(jax.typeof(x).sharding.spec, placed, given)
    return placed


def place_result(shape: Axes, operands: tuple[Array, Array], shard: Shard | None) -> Place:
    """How the result of a matmul, of this shape, is placed: whole, or summed and split.

    Inside `jax.shard_map` x or w, the operands, must vary over the mesh axes. Errors: see
    `place_operand`.
    """
    placed = _placed("y", shape, operands, shard)
    given = f"y_shard={shard!r}"
    if placed.stored_whole:
        raise ValueError(f"{given}: a result is not stored. Leave reshard_after_forward out.")
    _check_equal(given, "y", shape, placed)
    if placed.kind == AxisType.Manual and (
        same := _same(placed, frozenset().union(*map(varying_axes, operands)))
    ):
        raise ValueError(
            f"{given}: by their types every device along {same} has the same x and the same w, so "
            "y is no sum over devices. Split what the matmul contracts, or leave the shard out."
        )
    return placed


def _placed(name: str, shape: Axes, operands: tuple[Array, ...], shard: Shard | None) -> Place:
    """The place of an array of this shape, in the mesh of the operands."""
    if shard is None:
        return Place()
    given = f"{name}_shard={shard!r}"
    check_type(f"{name}_shard", shard, Shard, 'a Shard, for instance fp8.sharding.Shard(0, "fsdp")')
    if not -len(shape) <= shard.axis < len(shape):
        raise ValueError(f"{given} is out of range for {name} of shape {list(shape)}.")
    meshes = jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in operands)
    mesh = next((mesh for mesh in meshes if not mesh.empty), None)
    if mesh is None:  # a model that is initialized or traced before there is a mesh
        return Place()
    kinds = kinds_of(mesh)
    if not set(shard.axis_names) <= set(kinds):
        raise ValueError(
            f"{given} names no axis of the mesh here. Use some of its axes {list(mesh.axis_names)}."
        )
    if len({kinds[axis] for axis in shard.axis_names}) > 1:
        raise ValueError(
            f"{given} names mesh axes of several kinds: {kinds}. A shard needs axes of one kind; "
            "gather the operand over the others before."
        )
    return Place(
        axis=shard.axis % len(shape),
        axis_names=shard.axis_names,
        mesh=mesh,
        stored_whole=not shard.reshard_after_forward,
    )


def _same(placed: Place, varies: frozenset[str]) -> list[str]:
    """The mesh axes of the shard over which, by the types, an array does not vary."""
    return sorted(set(placed.axis_names) - varies) if types_show_varying() else []


def _check_equal(given: str, name: str, shape: Axes, placed: Place) -> None:
    """Raise ValueError if shards would have unequal sizes."""
    if placed.devices > 1 and shape[placed.axis] % placed.devices:
        raise ValueError(
            f"{given}: axis {placed.axis} of {name} {list(shape)} cannot be split into "
            f"{placed.devices} equal parts; pad it to a multiple of {placed.devices}."
        )
