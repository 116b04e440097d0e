"""Collectives of QuantizedTensors, inside `jax.shard_map`: FP8 values and their scales on the wire.

The law: what is quantized on a shard and gathered is, bit for bit, what is gathered and quantized.
It holds by itself where a scale cell lies on one device: tiles cut on their borders, rows that are
not split. A cell that spans devices (one scale a tensor, split rows) needs a scale from the amax of
all shards, which types then show: it does not vary over the mesh axis.

FP8 values travel as bytes (`sharding._gather.in_bytes` says why).

None of these is differentiable, for the cotangent of FP8 values would be FP8.
`fp8.dot_general(x_shard=, w_shard=)` gathers inside its own gradient.
"""

import dataclasses
from collections.abc import Sequence

from jax import lax

from jaxfp8._typing import Array
from jaxfp8.sharding._amax import manual_axes, types_tell, varying
from jaxfp8.sharding._gather import in_bytes
from jaxfp8.sharding._specs import check_borders
from jaxfp8.tensors._quantized_tensor import QuantizedTensor, validate


def all_gather(
    tensor: QuantizedTensor, axis_name: str, *, axis: int = 0, common_scale: bool = False
) -> QuantizedTensor:
    """The shards of all devices along a mesh axis, concatenated along `axis`.

    `lax.all_gather(tiled=True)`.

    Args:
      tensor: [..., n, ...] the local shard.
      axis_name: of the mesh.
      axis: of the array, along which it is split.
      common_scale: a scale that spans devices is the same on all of them, which types cannot show
        with `check_vma=False`.

    Returns:
      [..., devices * n, ...].

    Raises:
      ValueError: if shards cut tiles; if a scale that belongs to the whole axis is that of this
        shard alone.

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
    _check_axis_name(axis_name)

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
    """Exchange parts of a tensor between all devices: tokens for their experts.

    Part i along `split_axis` goes to device i. What arrives is concatenated along `concat_axis`, as
    by `lax.all_to_all(tiled=True)`. Scales travel if they have cells along both axes (a scale a
    token, say), and stay if the tensor has one scale in all.

    Args:
      tensor: [...] the local shard.
      axis_name: of the mesh.
      split_axis: of the array, cut into one part for each device.
      concat_axis: of the array.
      common_scale: as in `all_gather`.

    Raises:
      ValueError: if parts cut tiles, or what arrives would have scales that its granularity cannot
        hold.

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
    _check_axis_name(axis_name)
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
            f"split_axis={split_axis} and concat_axis={concat_axis} of a tensor "
            f"{list(tensor.shape)} with {tensor.granularity!r}: scales vary along axis {along[0]} "
            "only, so what arrives has several scales where its granularity has one; quantize with "
            "scales along both, or with one in all."
        )
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
    """The tensor of another device, (source, destination) pairs as in `lax.ppermute`.

    Zeros where none arrives.

    Args:
      tensor: [...].
      axis_name: of the mesh.
      permutation: pairs of device indices along it.

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
    _check_axis_name(axis_name)

    def send(x: Array) -> Array:
        return in_bytes(lambda x: lax.ppermute(x, axis_name, permutation), x)

    return dataclasses.replace(tensor, values=send(tensor.values), scale=send(tensor.scale))


def _checked(tensor: QuantizedTensor, axis: int) -> int:
    """The axis, not negative."""
    validate(tensor)
    if not -tensor.ndim <= axis < tensor.ndim:
        raise ValueError(f"axis={axis} is out of range for a tensor of shape {list(tensor.shape)}.")
    return axis % tensor.ndim


def _check_axis_name(axis_name: str) -> None:
    if axis_name not in manual_axes():
        raise ValueError(
            f"axis_name={axis_name!r} is no manual mesh axis here, which are "
            f"{list(manual_axes())}; call this inside jax.shard_map, over one of its axes."
        )


def _check_common_scale(tensor: QuantizedTensor, axis_name: str, axis: int, common: bool) -> None:
    """Raise ValueError unless devices share a scale of the whole axis, by its type or `common`."""
    if not types_tell() and not common:
        raise ValueError(
            f"the scale of a tensor {list(tensor.shape)} with {tensor.granularity!r} spans axis "
            f"{axis}, which is split over {axis_name!r}. With check_vma=False types cannot show "
            "that devices share it: quantize with the amax of all shards and say common_scale=True."
        )
    if axis_name in varying(tensor.scale):
        raise ValueError(
            f"the scale of a tensor {list(tensor.shape)} with {tensor.granularity!r} spans axis "
            f"{axis}, which is split over {axis_name!r}, but each device has a scale of its own; "
            "quantize with the amax of all shards: fp8.quantize(x, format, granularity, scale=...) "
            f"with a scale that lax.pmax(amax, {axis_name!r}) gives."
        )
