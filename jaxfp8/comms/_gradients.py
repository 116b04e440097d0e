"""Sums of gradients over devices, inside `jax.shard_map`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array, PyTree
from jaxfp8.comms import _auto_scaled, _sum_methods
from jaxfp8.comms._auto_scaled import GradientSumState
from jaxfp8.comms._collectives import Slices, names_of
from jaxfp8.comms._sum_methods import (
    AutoScaledFP8,
    BFloat16Sum,
    SumMethod,
    TwoPhaseFP8,
    check_method,
    shrinking,
)
from jaxfp8.numerics._exact import LARGEST, is_finite, widen
from jaxfp8.numerics._rounding import undifferentiable
from jaxfp8.sharding._amax import manual_axes, types_show_varying, varying_axes

# Which gradients can be summed over which mesh axes: the checks of `all_reduce_gradients`.


def _local_gradients(grads: PyTree, names: tuple[str, ...]) -> tuple[list[str], list[Any], Any]:
    """What messages call each leaf, the leaves, and their structure. They are checked."""
    found, structure = jax.tree_util.tree_flatten_with_path(grads, is_leaf=_is_quantized)
    leaves = [leaf for _, leaf in found]
    called = [f"the gradient {jax.tree_util.keystr(path) or 'grads'}" for path, _ in found]
    for name, leaf in zip(called, leaves, strict=True):
        if not _has_no_values(leaf):
            _check_leaf(name, leaf, names)
    return called, leaves, structure


# A cast to FP8 would have the derivative 0.
_not_differentiated = undifferentiable(
    lambda _: NotImplementedError(
        "sums of gradients in FP8 have no derivative. Use method=BFloat16Sum(), or "
        "jax.lax.stop_gradient around the gradients."
    )
)


def _has_no_values(leaf: Any) -> bool:
    """Whether a leaf is the gradient of an integer parameter, which has no values (float0)."""
    return getattr(leaf, "dtype", None) == jax.dtypes.float0


def _check_leaf(where: str, leaf: Any, names: tuple[str, ...]) -> None:
    """Raise TypeError or ValueError if a leaf is no local gradient, to be summed over `names`."""
    if _is_quantized(leaf):
        raise TypeError(
            f"{where} is a QuantizedTensor. Its values have scales of their own, so they cannot be "
            "added. Pass the gradient that leaf.dequantize() returns."
        )
    if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
        found = getattr(leaf, "dtype", type(leaf).__name__)
        raise TypeError(
            f"{where} has the dtype {found}, and a gradient must be real floating point. Take "
            "other leaves out, for instance with jax.tree.map or eqx.partition."
        )
    if jnp.dtype(leaf.dtype).itemsize == 1:
        raise TypeError(
            f"{where} has the dtype {leaf.dtype}, which has no scale. Pass the gradient in "
            "bfloat16 or float32. The method casts it to FP8."
        )
    if types_show_varying() and (
        missing := [name for name in names if name not in varying_axes(leaf)]
    ):
        raise ValueError(
            f"{where} does not vary over {missing}. JAX has already summed it, because the "
            "parameters do not vary over these axes. Differentiate with respect to "
            f'jax.lax.pcast(params, {tuple(missing)}, to="varying").'
        )


def _check_state_varies_not(where: str, state: Sequence[Array], names: tuple[str, ...]) -> None:
    """Raise ValueError if the state of a gradient differs between the devices that are summed."""
    found = sorted({name for leaf in state for name in varying_axes(leaf)} & set(names))
    if found:
        raise ValueError(
            f"the state of {where} varies over {found}, over which the gradient is summed. All "
            "devices of a sum need the same mu. Pass the state with in_specs=jax.P() and "
            "out_specs=jax.P()."
        )


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QuantizedTensor)


# The state of each gradient.


def _rows_of(
    state: GradientSumState | None, structure: Any, method: SumMethod
) -> list[GradientSumState | None]:
    """The state of each gradient, in the order of the leaves. It is checked."""
    name = type(method).__name__
    if not isinstance(method, AutoScaledFP8):
        if state is not None:
            raise TypeError(
                f"state is a {type(state).__name__}, but {name} has no state. Leave state= out, or "
                "pass the method that the state was made for."
            )
        return [None] * structure.num_leaves
    if not isinstance(state, GradientSumState):
        raise TypeError(
            f"state is {'missing' if state is None else f'a {type(state).__name__}'}, and {name} "
            "needs a GradientSumState. Pass state=fp8.comms.init_gradient_sums(params, method) in "
            "the first step, and the returned state afterwards."
        )
    for field, tree in zip(state._fields, state, strict=True):
        if (found := jax.tree.structure(tree)) != structure:
            raise ValueError(
                f"state.{field} has the structure {found}, and the gradients have {structure}. "
                "Make the state from the parameters that are differentiated: "
                "fp8.comms.init_gradient_sums(params, method)."
            )
    if wrong := {np.shape(leaf) for leaf in jax.tree.leaves(state)} - {()}:
        raise ValueError(
            f"state has leaves of the shapes {sorted(wrong)}, and each must be one number. Pass "
            "the state unchanged, with in_specs=jax.P()."
        )
    return list(structure.flatten_up_to(jax.tree.map(GradientSumState, *state)))


# `all_reduce_gradients`: sums of gradients that every device gets.


def all_reduce_gradients(
    grads: PyTree,
    axis_name: str | Sequence[str],
    *,
    method: SumMethod = BFloat16Sum(),  # noqa: B008  # frozen
    state: GradientSumState | None = None,
    mean: bool = True,
    also_split_over: Sequence[str] | None = None,
) -> tuple[PyTree, GradientSumState | None]:
    """The mean or sum of gradients over mesh axes, with the same bits on all devices.

    Call it inside `jax.shard_map`, with the gradients of each device's own batch. The types of the
    results do not vary over the mesh axes. On a mesh axis of one device nothing is rounded. Leaves
    of dtype float0 (gradients of integers) are returned as they are. Finite gradients give finite
    results: a sum above the largest value of its dtype, float32 at most, is clipped to it.

    Args:
      grads: a tree of [...] floating point, one gradient of each device.
      axis_name: the name of the mesh axis, or the names of several.
      method: how the gradients are sent and added.
      state: the state of `AutoScaledFP8`, from `init_gradient_sums`. None for other methods.
      mean: True divides the sum by the number of devices.
      also_split_over: other mesh axes over which gradients are split, as with tensor parallelism.
        `AutoScaledFP8` needs one scale for all their shards. It reads these axes from JAX's types.
        With `check_vma=False` types cannot show them, so name them, or write ().

    Returns:
      The gradients, a tree of [...], and the state for the next step. `BFloat16Sum` keeps the dtype
      of the gradients. The others return float32. The state is None for methods without state.

    Raises:
      ValueError: outside of `jax.shard_map`, for an unknown mesh axis, for a gradient that is
        already summed, or for a state of other gradients.
      TypeError: for a leaf that is no gradient, or a state of another method.

    Example:
      >>> import jax, jax.numpy as jnp, jaxfp8 as fp8
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> def gradient(w, x):  # x is the batch of this device
      ...     w = jax.lax.pcast(w, "data", to="varying")  # JAX would sum the gradient itself
      ...     grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
      ...     return all_reduce_gradients(grads, "data", method=fp8.comms.TwoPhaseFP8())[0]
      >>> specs = dict(in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())
      >>> jax.shard_map(gradient, mesh=mesh, **specs)(jnp.ones((2, 1)), jnp.ones((4, 2)))
      Array([[4.],
             [4.]], dtype=float32)

    References:
      Peng et al., FP8-LM, arXiv:2310.18313, section 2.1 (`AutoScaledFP8`).
      Wang et al., ZeRO++, arXiv:2306.10209, section 3.3 (`TwoPhaseFP8`).
    """
    check_method(method)
    names = names_of(axis_name)
    called, leaves, structure = _local_gradients(grads, names)
    rows = _rows_of(state, structure, method)
    devices = lax.axis_size(names)
    factor = 1 / devices if mean else 1.0

    def reduced(name: str, x: Array, row: GradientSumState | None) -> tuple[Array, Any]:
        plain = _sum_without_fp8(x, method, devices, factor, lambda x: lax.psum(x, names))
        if plain is not None:
            return plain, row
        x = _not_differentiated(jnp.asarray(x))
        slices = Slices(x.shape, devices, method.group)
        if isinstance(method, TwoPhaseFP8):
            return _sum_methods.all_reduce_two_phase(x, slices, names, method, factor), row
        assert isinstance(method, AutoScaledFP8)
        assert row is not None  # `_rows_of` has checked it
        _check_state_varies_not(name, row, names)
        also = _also_split_over(x, row, names, also_split_over)
        return _auto_scaled.all_reduce_auto_scaled(x, slices, names, method, row, also, mean)

    results = [reduced(*each) for each in zip(called, leaves, rows, strict=True)]
    sums = structure.unflatten([leaf for leaf, _ in results])
    if state is None:
        return sums, None
    new = structure.unflatten([row for _, row in results])
    of_one: Any = jax.tree.structure(GradientSumState(*range(6)))
    return sums, jax.tree.transpose(structure, of_one, new)


def _also_split_over(
    x: Array, row: GradientSumState, names: tuple[str, ...], named: Sequence[str] | None
) -> tuple[str, ...]:
    """The mesh axes over which a gradient is split and its state is not, without `names`."""
    if named is not None:
        return tuple(name for name in names_of(named, "also_split_over") if name not in names)
    if types_show_varying():
        return tuple(sorted(varying_axes(x) - varying_axes(row.mu) - set(names)))
    others = [name for name in manual_axes() if name not in names and lax.axis_size(name) > 1]
    if others:
        raise ValueError(
            f"also_split_over=None with check_vma=False: types cannot show whether gradients are "
            f"split over {others}, too. Then AutoScaledFP8 needs one scale for all shards. Write "
            f"also_split_over={tuple(others)} if they are split, and () if they are not."
        )
    return ()


# Sums of gradients without FP8, and how finite ones stay finite.


def _sum_without_fp8(
    x: Array, method: SumMethod, devices: int, factor: float, collective: Callable[[Array], Array]
) -> Array | None:
    """The sum of a gradient, times `factor`. None for one that the method sums in FP8."""
    if _has_no_values(x):
        return x
    x = jnp.asarray(x)
    # In FP8 each device needs a whole group. With at least one group for each device, the padding
    # is at most as long as the gradient.
    if devices == 1 or x.size < max(method.min_size, devices * method.group):
        return _sum_in_float32(x, method, devices, factor, collective)
    if isinstance(method, BFloat16Sum):
        return _sum_in_bfloat16(x, devices, factor, collective)
    return None


def _sum_in_float32(
    x: Array, method: SumMethod, devices: int, factor: float, collective: Callable[[Array], Array]
) -> Array:
    """The sum in float32, times `factor`, in the dtype in which the method returns gradients."""
    dtype = x.dtype if isinstance(method, BFloat16Sum) else jnp.dtype(jnp.float32)
    x = widen(x)
    if devices == 1:
        return _scaled(collective(x), factor, dtype)
    # The first sum may overflow, even if the mean does not. The second may lose values near 2^-126.
    # Both are one collective.
    shrink = shrinking(devices)
    both = collective(jnp.stack([x, x * np.float32(shrink)], axis=-1))
    total = both[..., 0]
    shrunk = _scaled(both[..., 1], factor / shrink, dtype)
    return jnp.where(is_finite(total), _scaled(total, factor, dtype), shrunk)


def _sum_in_bfloat16(
    x: Array, devices: int, factor: float, collective: Callable[[Array], Array]
) -> Array:
    """The sum in bfloat16, times `factor`, in the dtype of x."""
    # Values are shrunk before they are sent. So the sum of finite values does not overflow.
    shrink = shrinking(devices)
    # Without the clip to its range, bfloat16 rounds the largest float32 values up to inf.
    clipped = _scaled(widen(x), 1.0, jnp.bfloat16).astype(jnp.float32)
    shrunk = (clipped * np.float32(shrink)).astype(jnp.bfloat16)
    return _scaled(collective(shrunk), factor / shrink, x.dtype)


def _scaled(x: Array, factor: float, dtype: Any) -> Array:
    """`x * factor` in a dtype. What is finite is clipped to the range of the dtype."""
    x = x.astype(jnp.float32)
    limit = min(float(jnp.finfo(dtype).max), LARGEST)
    product = x * np.float32(factor)
    return jnp.where(is_finite(x), jnp.clip(product, -limit, limit), product).astype(dtype)


# `reduce_scatter_gradients`: sums of gradients of which each device keeps its shard.


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
    called, leaves, structure = _local_gradients(grads, names)
    devices = lax.axis_size(names)
    factor = 1 / devices if mean else 1.0
    numbered = structure.unflatten(range(len(leaves)))
    axes = jax.tree.leaves(jax.tree.broadcast(axis, numbered))

    def scattered(name: str, x: Array, axis: Any) -> Array:
        axis = 0 if _has_no_values(x) else _checked_axis(name, x, axis, devices)

        def scatter(x: Array) -> Array:
            return lax.psum_scatter(x, names, scatter_dimension=axis, tiled=True)

        plain = _sum_without_fp8(x, method, devices, factor, scatter)
        if plain is not None:
            return plain
        assert isinstance(method, TwoPhaseFP8)
        x = _not_differentiated(jnp.asarray(x))
        slices = Slices(x.shape, devices, method.group, axis)
        return slices.shard(_sum_methods.reduce_scatter_two_phase(x, slices, names, method, factor))

    return structure.unflatten(list(map(scattered, called, leaves, axes)))


def _checked_axis(where: str, x: Array, axis: Any, devices: int) -> int:
    if isinstance(axis, bool) or not isinstance(axis, int) or not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"axis={axis!r} is no axis of {where} {list(x.shape)}. Name the axis along which each "
            "device has a shard. Sum gradients that are not split with all_reduce_gradients."
        )
    if x.shape[axis] % devices:
        raise ValueError(
            f"axis={axis} of {where} {list(x.shape)} cannot be split evenly among {devices} "
            "devices. Choose another axis, or use all_reduce_gradients."
        )
    return axis % x.ndim
