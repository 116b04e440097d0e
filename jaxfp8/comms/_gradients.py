"""`all_reduce_gradients`: sums of gradients over devices, inside `jax.shard_map`."""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from jaxfp8._typing import Array, PyTree
from jaxfp8.comms import _auto_scaled, _two_phase
from jaxfp8.comms._exchange import Slices
from jaxfp8.comms._plain_sums import ALIGNED, in_bfloat16, in_high_precision, is_small
from jaxfp8.comms._sum_leaves import (
    check_state_varies_not,
    has_no_values,
    local_gradients,
    names_of,
    not_differentiated,
)
from jaxfp8.comms._sum_methods import BFloat16Sum, SumMethod, TwoPhaseFP8, check_method
from jaxfp8.comms._sum_state import GradientSumState, rows_of, state_from
from jaxfp8.sharding._amax import manual_axes, types_tell, varying


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
    paths, leaves, structure = local_gradients(grads, names)
    rows = rows_of(state, structure, method)
    devices = lax.axis_size(names)
    factor = 1 / devices if mean else 1.0

    def psum(x: Array) -> Array:
        return lax.psum(x, names)

    def reduced(
        path: str, x: Array, row: GradientSumState | None
    ) -> tuple[Array, GradientSumState | None]:
        if has_no_values(x):
            return x, row
        x = jnp.asarray(x)
        if not isinstance(method, BFloat16Sum):
            x = not_differentiated(x)
        if devices == 1 or is_small(x, devices, method):
            return in_high_precision(x, method, devices, factor, psum), row
        if isinstance(method, BFloat16Sum):
            return in_bfloat16(x, devices, factor, psum), row
        slices = Slices(x.shape, devices, getattr(method, "group", ALIGNED))
        if isinstance(method, TwoPhaseFP8):
            return _two_phase.whole_sum(x, slices, names, method, factor), row
        assert row is not None
        check_state_varies_not(path, row, names)
        also = _also_split_over(x, row, names, also_split_over)
        return _auto_scaled.whole_sum(x, slices, names, method, row, also, mean)

    results = [reduced(*each) for each in zip(paths, leaves, rows, strict=True)]
    next_state = state_from([row for _, row in results], structure, method)
    return structure.unflatten([leaf for leaf, _ in results]), next_state


def _also_split_over(
    x: Array, row: GradientSumState, names: tuple[str, ...], named: Sequence[str] | None
) -> tuple[str, ...]:
    """The mesh axes over which a gradient is split and its state is not, without `names`."""
    if named is not None:
        return tuple(name for name in names_of(named, "also_split_over") if name not in names)
    if types_tell():
        return tuple(sorted(varying(x) - varying(row.mu) - set(names)))
    others = [name for name in manual_axes() if name not in names and lax.axis_size(name) > 1]
    if others:
        raise ValueError(
            f"also_split_over=None with check_vma=False: types cannot show whether gradients are "
            f"split over {others}, too. Then AutoScaledFP8 needs one scale for all shards. Write "
            f"also_split_over={tuple(others)} if they are split, and () if they are not."
        )
    return ()
