"""Partition specs: of scales, from those of their values, and of arrays."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8.numerics._granularity import AbstractGranularity


def mesh_axes(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a `jax.P`, such as None, "data" or ("data", "fsdp")."""
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def whole_mesh_axes(
    x: jax.ShapeDtypeStruct, mesh: jax.sharding.Mesh
) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that split each axis of an array, in the order of a `jax.P`.

    XLA can split an array axis over a part of a mesh axis. No spec can say this, so the result is
    then () for that array axis.
    """
    assert x.sharding is not None
    places = x.sharding.devices_indices_map(x.shape)
    # The first index of each device's shard: [*mesh shape, array axis].
    first = np.array(
        [[along.start or 0 for along in places[device]] for device in mesh.devices.flat]
    )
    first = first.reshape(*mesh.devices.shape, x.ndim)
    origin = (0,) * mesh.devices.ndim
    found = []
    for axis in range(x.ndim):
        # A mesh axis splits the array axis if its next device has another first index. The
        # outermost mesh axis has the largest step.
        steps = []
        for n, name in enumerate(mesh.axis_names):
            if mesh.devices.shape[n] > 1 and (
                step := first[*origin[:n], 1, *origin[n + 1 :], axis]
            ):
                steps.append((-step, name))
        names = tuple(name for _, name in sorted(steps))
        # If there are fewer shards than devices, XLA split a mesh axis only in part.
        whole = math.prod(mesh.shape[name] for name in names) == np.unique(first[..., axis]).size
        found.append(names if whole else ())
    return tuple(found)


def check_borders(
    granularity: AbstractGranularity, shape: tuple[int, ...], axis: int, part: int
) -> None:
    """Raise ValueError if shards of size `part` along an axis of this shape cut tiles."""
    side = granularity.along(len(shape))[axis]
    if part % side:
        raise ValueError(
            f"shards of {part} along axis {axis} of {list(shape)} cut the tiles of "
            f"{granularity!r}. Each device needs whole tiles: cut shards at multiples of {side}."
        )


def quantized_specs(tensor: QuantizedTensor, spec: jax.P, *, mesh: Any = None) -> QuantizedTensor:
    """The partition specs of a QuantizedTensor, from the spec of its values.

    If scales vary along an axis, they are split as their values. Otherwise they are replicated.

    Args:
      tensor: [...], or its types (`jax.eval_shape`).
      spec: the partition spec of the values.
      mesh: a mesh for the checks below; default: the mesh that is set. Without one, they are left
        out.

    Returns:
      A QuantizedTensor whose leaves are specs. Use it for `in_specs` of `jax.shard_map`, for
      shardings of `jax.jit`, or for checkpoints.

    Raises:
      ValueError: if the spec has more entries than the tensor has axes, or names an axis that the
        mesh does not have. Also if shards would have unequal sizes, or would cut tiles.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8 as fp8
      >>> quantize = lambda w: fp8.quantize(w, fp8.E4M3, fp8.PerAxis(0))
      >>> rows = jax.eval_shape(quantize, jnp.ones((256, 64)))
      >>> specs = quantized_specs(rows, jax.P("fsdp", "tensor"))
      >>> specs.values, specs.scale
      (P('fsdp', 'tensor'), P('fsdp', None))
    """
    shape, granularity = tensor.shape, tensor.granularity
    if len(spec) > len(shape):
        raise ValueError(
            f"spec={spec} has {len(spec)} entries for a tensor of shape {list(shape)}. Give it at "
            "most one entry for each axis."
        )
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if not mesh.empty:
        for axis, entry in enumerate(spec):
            if mesh_axes(entry) and (part := _part(shape, spec, axis, mesh)) < shape[axis]:
                check_borders(granularity, shape, axis, part)
    entries = [
        entry if granularity.has_cells_along(axis, len(shape)) else None
        for axis, entry in enumerate(spec)
    ]
    # The scale of a whole tensor has no axes, and its spec must have no entries.
    scale = jax.P() if granularity.in_one else jax.P(*entries)
    return dataclasses.replace(tensor, values=spec, scale=scale)  # type: ignore[arg-type]


def _part(shape: tuple[int, ...], spec: jax.P, axis: int, mesh: Any) -> int:
    """The size of one device's shard along an axis that is split."""
    names = mesh_axes(spec[axis])
    if unknown := [name for name in names if name not in mesh.axis_names]:
        raise ValueError(
            f"spec={spec} names {unknown}, which are no axes of the mesh. Use some of "
            f"{list(mesh.axis_names)}."
        )
    devices = math.prod(mesh.shape[name] for name in names)
    if shape[axis] % devices:
        raise ValueError(
            f"spec={spec}: axis {axis} of {list(shape)} cannot be split into {devices} equal "
            f"parts; pad it to a multiple of {devices}."
        )
    return shape[axis] // devices
