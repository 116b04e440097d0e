"""`reduce_scatter_gradients`: sums of gradients of which each device keeps its shard."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array, PyTree
from jaxfp8.comms import _two_phase
from jaxfp8.comms._exchange import Slices
from jaxfp8.comms._plain_sums import in_bfloat16, in_high_precision, is_small
from jaxfp8.comms._sum_leaves import (
    has_no_values,
    local_gradients,
    names_of,
    not_differentiated,
)
from jaxfp8.comms._sum_methods import AutoScaledFP8, BFloat16Sum, TwoPhaseFP8, check_method


def reduce_scatter_gradients(
    grads: PyTree,
    axis_name: str | Sequence[str],
    *,
    axis: PyTree = 0,
    method: BFloat16Sum | TwoPhaseFP8 = BFloat16Sum(),  # noqa: B008  # frozen
    mean: bool = True,
) -> PyTree:
    """The mean or sum of gradients over mesh axes, of which each device keeps its shard.

    For loops in which each device updates a shard of the parameters (ZeRO, FSDP). Device i gets
    shard i, as with `jax.P(axis_name)`. `TwoPhaseFP8` stops after its float32 sum, so gradients are
    rounded once.

    Args:
      grads: a tree of [..., n, ...] floating point, one gradient of each device.
      axis_name: the name of the mesh axis, or the names of several.
      axis: the array axis that is split: one number, or a tree of numbers, a prefix of `grads`.
      method: how the gradients are sent and added.
      mean: True divides the sum by the number of devices.

    Returns:
      A tree of [..., n / devices, ...]. `BFloat16Sum` keeps the dtype of the gradients.
      `TwoPhaseFP8` returns float32.

    Raises:
      ValueError, TypeError: as in `all_reduce_gradients`. Also if devices do not split the axis
        evenly, and for `AutoScaledFP8`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8 as fp8
      >>> mesh = jax.make_mesh((1,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> def shard(g):  # [1, n, ...], the gradient of this device
      ...     return reduce_scatter_gradients(g[0], "fsdp", method=fp8.comms.TwoPhaseFP8())
      >>> specs = dict(in_specs=jax.P("fsdp"), out_specs=jax.P("fsdp"))
      >>> jax.shard_map(shard, mesh=mesh, **specs)(jnp.ones((1, 4, 2))).shape
      (4, 2)
    """
    check_method(method)
    if isinstance(method, AutoScaledFP8):
        raise ValueError(
            f"method={method!r} has no reduce-scatter: its mu limits how many values of an FP8 sum "
            "are clipped, and a shard is summed in float32. Use fp8.comms.TwoPhaseFP8()."
        )
    names = names_of(axis_name)
    paths, leaves, structure = local_gradients(grads, names)
    devices = lax.axis_size(names)
    factor = 1 / devices if mean else 1.0
    numbered = structure.unflatten(range(len(leaves)))
    axes = jax.tree.leaves(jax.tree.broadcast(axis, numbered))

    def scattered(path: str, x: Array, axis: Any) -> Array:
        if has_no_values(x):
            return x
        x = jnp.asarray(x)
        axis = _checked_axis(path, x, axis, devices)

        def scatter(x: Array) -> Array:
            return lax.psum_scatter(x, names, scatter_dimension=axis, tiled=True)

        if devices == 1 or is_small(x, devices, method):
            return in_high_precision(x, method, devices, factor, scatter)
        if isinstance(method, BFloat16Sum):
            return in_bfloat16(x, devices, factor, scatter)
        x = not_differentiated(x)
        slices = Slices(x.shape, devices, method.group, axis)
        return slices.shard(_two_phase.slice_sum(x, slices, names, method, factor))

    results = [scattered(*each) for each in zip(paths, leaves, axes, strict=True)]
    return structure.unflatten(results)


def _checked_axis(path: str, x: Array, axis: Any, devices: int) -> int:
    if isinstance(axis, bool) or not isinstance(axis, int) or not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"axis={axis!r} is no axis of the gradient {path or 'grads'} {list(x.shape)}. Name "
            "the axis along which each device has a shard. Sum gradients that are not split with "
            "all_reduce_gradients."
        )
    if x.shape[axis] % devices:
        raise ValueError(
            f"axis={axis} of the gradient {path or 'grads'} {list(x.shape)} cannot be split evenly "
            f"among {devices} devices. Choose another axis, or use all_reduce_gradients."
        )
    return axis % x.ndim
