"""Collectives of QuantizedTensors, and a sum in two exchanges, inside `jax.shard_map`.

To quantize shards and gather them gives the same bits as to gather them and quantize. This needs no
care if each scale cell is on one device. A tile is, unless a shard border cuts it. A row is, unless
it is split.

A scale cell may also span devices: one scale for a tensor, or rows that are split. Then its scale
must come from the amax of all shards. Types show that. The scale does not vary over the mesh axis.

FP8 values are sent as bytes (`sharding._place.in_bytes` says why).

The collectives are not differentiable, because the cotangent of FP8 values would be FP8.
`fp8.dot_general(x_shard=, w_shard=)` is differentiable. It gathers inside its own custom gradient.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import lax

from jaxfp8._quantized_tensor import QuantizedTensor, validate
from jaxfp8._typing import Array
from jaxfp8.sharding._amax import manual_axes, types_show_varying, varying_axes
from jaxfp8.sharding._place import in_bytes
from jaxfp8.sharding._specs import check_borders

# The collectives. They send FP8 values and their scales.


def all_gather(
    tensor: QuantizedTensor, axis_name: str, *, axis: int = 0, common_scale: bool = False
) -> QuantizedTensor:
    """The shards of all devices of a mesh axis, concatenated as by `lax.all_gather(tiled=True)`.

    Args:
      tensor: [..., n, ...] the local shard.
      axis_name: the name of the mesh axis.
      axis: the array axis that is split over the mesh axis.
      common_scale: True says that a scale that spans devices is the same on all of them. It is
        needed with `check_vma=False`, where types cannot show this.

    Returns:
      [..., devices * n, ...], the gathered tensor.

    Raises:
      ValueError: if shards cut tiles, or if devices have different scales where the whole axis
        needs one.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8 as fp8
      >>> mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> def gather(x):  # [rows of this device, columns]
      ...     q = fp8.quantize(x, fp8.E4M3, fp8.PerAxis(0))
      ...     return all_gather(q, "fsdp").dequantize()
      >>> gathered = jax.shard_map(
      ...     gather, mesh=mesh, in_specs=jax.P("fsdp"), out_specs=jax.P(), check_vma=False
      ... )
      >>> gathered(jnp.ones((4, 2))).shape
      (4, 2)
    """
    axis = _checked(tensor, axis)
    names_of((axis_name,))

    def gather(x: Array) -> Array:
        return in_bytes(lambda x: lax.all_gather(x, axis_name, axis=axis, tiled=True), x)

    if not tensor.granularity.has_cells_along(axis, tensor.ndim):
        _check_common_scale(tensor, axis_name, axis, common_scale)
        return dataclasses.replace(tensor, values=gather(tensor.values))
    check_borders(tensor.granularity, tensor.shape, axis, tensor.shape[axis])
    return dataclasses.replace(tensor, values=gather(tensor.values), scale=gather(tensor.scale))


def all_to_all(
    tensor: QuantizedTensor,
    axis_name: str,
    *,
    split_axis: int,
    concat_axis: int,
    common_scale: bool = False,
) -> QuantizedTensor:
    """Exchanges slices of a tensor among all devices, for instance tokens for their experts.

    Slice i along `split_axis` goes to device i. The slices that a device receives are concatenated
    along `concat_axis`, as by `lax.all_to_all(tiled=True)`.

    Scales that vary along both axes are exchanged with their values (one scale for each token, for
    instance). Scales that vary along neither are not sent, and must be the same on all devices.

    Args:
      tensor: [...] the local shard.
      axis_name: the name of the mesh axis.
      split_axis: the array axis that is cut into one slice for each device.
      concat_axis: the array axis along which received slices are concatenated.
      common_scale: as in `all_gather`.

    Returns:
      The exchanged tensor. `split_axis` is shorter, and `concat_axis` longer, by the number of
      devices.

    Raises:
      ValueError: if slices cut tiles, if scales vary along one of the axes only, or if devices have
        different scales where they need a common one.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8 as fp8
      >>> mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> def dispatch(tokens):  # [experts, tokens of this device, features]
      ...     q = fp8.quantize(tokens, fp8.E4M3, fp8.PerAxis(0, 1))
      ...     return all_to_all(q, "expert", split_axis=0, concat_axis=1).dequantize()
      >>> split = jax.shard_map(
      ...     dispatch, mesh=mesh, in_specs=jax.P(None, "expert"), out_specs=jax.P("expert")
      ... )
      >>> split(jnp.ones((2, 4, 8))).shape
      (2, 4, 8)
    """
    names_of((axis_name,))
    split_axis, concat_axis = (_checked(tensor, axis) for axis in (split_axis, concat_axis))

    def exchange(x: Array) -> Array:
        return in_bytes(
            lambda x: lax.all_to_all(x, axis_name, split_axis, concat_axis, tiled=True), x
        )

    along = [
        axis
        for axis in (split_axis, concat_axis)
        if tensor.granularity.has_cells_along(axis, tensor.ndim)
    ]
    if not along:
        for axis in (split_axis, concat_axis):
            _check_common_scale(tensor, axis_name, axis, common_scale)
        return dataclasses.replace(tensor, values=exchange(tensor.values))
    if len(along) == 1:
        raise ValueError(
            f"split_axis={split_axis} and concat_axis={concat_axis} are axes of a tensor "
            f"{list(tensor.shape)} with {tensor.granularity!r}. Its scales vary along axis "
            f"{along[0]} only. After the exchange, one scale cell would have several scales. "
            "Quantize with scales along both axes, or with one scale in all."
        )
    # Sent slices must hold whole tiles. So must the pieces that are concatenated.
    check_borders(
        tensor.granularity,
        tensor.shape,
        split_axis,
        tensor.shape[split_axis] // lax.axis_size(axis_name),
    )
    check_borders(tensor.granularity, tensor.shape, concat_axis, tensor.shape[concat_axis])
    return dataclasses.replace(tensor, values=exchange(tensor.values), scale=exchange(tensor.scale))


def ppermute(
    tensor: QuantizedTensor, axis_name: str, permutation: Sequence[tuple[int, int]]
) -> QuantizedTensor:
    """Sends a tensor from device to device, as `lax.ppermute` does.

    Args:
      tensor: [...].
      axis_name: the name of the mesh axis.
      permutation: (source, destination) pairs of device indices along the mesh axis.

    Returns:
      [...], the tensor that this device received. It is zero if the device received none.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8 as fp8
      >>> mesh = jax.make_mesh((1,), ("ring",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> def step(x):  # [rows of this device, columns]
      ...     q = fp8.quantize(x, fp8.E4M3, fp8.PerAxis(0))
      ...     return ppermute(q, "ring", [(0, 0)]).dequantize()
      >>> sent = jax.shard_map(step, mesh=mesh, in_specs=jax.P("ring"), out_specs=jax.P("ring"))
      >>> sent(jnp.ones((2, 2))).shape
      (2, 2)
    """
    validate(tensor)
    names_of((axis_name,))

    def send(x: Array) -> Array:
        return in_bytes(lambda x: lax.ppermute(x, axis_name, permutation), x)

    return dataclasses.replace(tensor, values=send(tensor.values), scale=send(tensor.scale))


def _checked(tensor: QuantizedTensor, axis: int) -> int:
    """The array axis as a non-negative number, after a check of tensor and axis."""
    validate(tensor)
    if not -tensor.ndim <= axis < tensor.ndim:
        raise ValueError(f"axis={axis} is out of range for a tensor of shape {list(tensor.shape)}.")
    return axis % tensor.ndim


def names_of(axis_name: str | Sequence[str], argument: str = "axis_name") -> tuple[str, ...]:
    """The names of mesh axes as a tuple. ValueError unless each is manual here and named once."""
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if len(set(names)) != len(names) or (not names and argument == "axis_name"):
        raise ValueError(
            f"{argument}={axis_name!r} must name each mesh axis once, and at least one. Write "
            '"data", or ("data", "fsdp").'
        )
    if unknown := [name for name in names if name not in manual_axes()]:
        raise ValueError(
            f"{argument}={axis_name!r}: {unknown} are no manual mesh axes here. The manual axes "
            f"are {list(manual_axes())}. Call this inside jax.shard_map, over some of its axes."
        )
    return names


def _check_common_scale(tensor: QuantizedTensor, axis_name: str, axis: int, common: bool) -> None:
    """Raise ValueError unless all devices have the same scale, by its type or by `common`."""
    if not types_show_varying() and not common:
        why = (
            "With check_vma=False types cannot show that all devices have the same scale. Quantize "
            "with the amax of all shards, and pass common_scale=True."
        )
    elif axis_name in varying_axes(tensor.scale):
        why = (
            "But each device has its own scale. Quantize with the amax of all shards: "
            "fp8.quantize(x, format, granularity, scale=...) with a scale from "
            f"lax.pmax(amax, {axis_name!r})."
        )
    else:
        return
    raise ValueError(
        f"the scale of a tensor {list(tensor.shape)} with {tensor.granularity!r} spans axis "
        f"{axis}, which is split over {axis_name!r}. {why}"
    )


# A sum over devices in two exchanges: slices to their device, a sum, the sum to all devices.

_UNROLLED = 64  # additions in one kernel; more devices are added in a loop of such kernels


@dataclasses.dataclass(frozen=True)
class Slices:
    """How an array of a shape is cut into one slice of groups for each device.

    A slice is padded with zeros to whole groups of `group` values. `axis=None` cuts the flattened
    array. A number cuts this array axis, so that a slice is a shard of it.
    """

    shape: tuple[int, ...]
    devices: int
    group: int
    axis: int | None = None

    def cut(self, x: Array) -> Array:
        """The slices of x [shape]: [devices, groups, group]."""
        if self.axis is not None:
            before, after = self.shape[: self.axis], self.shape[self.axis + 1 :]
            x = jnp.moveaxis(
                x.reshape(*before, self.devices, self._rows, *after), self.axis, 0
            ).reshape(self.devices, -1)
            groups = -(-x.shape[1] // self.group)
            x = jnp.pad(x, ((0, 0), (0, groups * self.group - x.shape[1])))
        else:
            groups = -(-x.size // (self.devices * self.group))
            x = jnp.pad(x.reshape(-1), (0, self.devices * groups * self.group - x.size))
        return x.reshape(self.devices, groups, self.group)

    def join(self, slices: Array) -> Array:
        """The array [shape] of all slices, [devices * groups, group]. It needs `axis=None`."""
        return slices.reshape(-1)[: math.prod(self.shape)].reshape(self.shape)

    def shard(self, own: Array) -> Array:
        """The shard of this device, of its slice [groups, group]. It needs an `axis`."""
        assert self.axis is not None
        shape = (*self.shape[: self.axis], self._rows, *self.shape[self.axis + 1 :])
        return own.reshape(-1)[: math.prod(shape)].reshape(shape)

    @property
    def _rows(self) -> int:
        assert self.axis is not None
        return self.shape[self.axis] // self.devices


def exchange(slices: Array, names: tuple[str, ...]) -> Array:
    """Sends slice i [devices, ...] to device i. Row i of the result came from device i."""
    return in_bytes(lambda x: lax.all_to_all(x, names, 0, 0, tiled=True), slices)


def gather(own: Array, names: tuple[str, ...]) -> Array:
    """The slices [n, ...] of all devices, concatenated: [devices * n, ...], the same everywhere."""
    # `to` makes the type say that all devices have the same result.
    return in_bytes(lambda x: lax.all_gather(x, names, axis=0, tiled=True, to="invarying"), own)


def sum_in_order(received: tuple[Array, ...], value: Callable[..., Array]) -> Array:
    """The sum of `value(*row)` over the rows of arrays [devices, ...], from the first row on."""

    # A sum in a fixed order has the same bits in every run. `jnp.sum` leaves the order to XLA.
    def add(total: Array, row: tuple[Array, ...]) -> tuple[Array, None]:
        return total + value(*row), None

    first = value(*(each[0] for each in received))
    rest = tuple(each[1:] for each in received)
    unroll = max(1, min(rest[0].shape[0], _UNROLLED))
    return lax.scan(add, first, rest, unroll=unroll)[0]
