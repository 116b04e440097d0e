"""`AutoScaledFP8`: the sum of one gradient, and the state of all."""

import fractions
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfp8._pytrees import register_node
from jaxfp8._typing import Array, PyTree
from jaxfp8.comms._collectives import Slices, exchange, gather, sum_in_order
from jaxfp8.comms._sum_methods import AutoScaledFP8, SumMethod, check_method
from jaxfp8.numerics._amax import amax
from jaxfp8.numerics._exact import LARGEST, TINY, widen
from jaxfp8.numerics._granularity import PerTensor
from jaxfp8.numerics._rounding import saturating_cast
from jaxfp8.numerics._scale import encoding_multiplier, inverse
from jaxfp8.sharding._amax import pmax

# The state of `AutoScaledFP8`: mu of each gradient, and what its last steps lost.

_LARGEST_MU = 2.0**20
_SMALLEST_MU = 2.0**-20


@register_node
class GradientSumState(NamedTuple):
    """What `AutoScaledFP8` remembers between steps. Each field is a tree like the gradients.

    Each leaf of these trees is one number. The state is the same on all devices that are summed.

    Attributes:
      mu: float32, the factor of the next step.
      quiet_steps: int32, how many steps did not halve mu since the last one that did.
      halved_steps: int32, how many steps halved mu.
      nonfinite_steps: int32, how many steps had an inf or NaN. Their gradients are NaN.
      saturated: float32, the share of values that the last finite step clipped. A value that
        several devices clip counts several times.
      underflowed: float32, the share of values that were not zero and became zero, in the last
        finite step. It is a mean over the devices. A value below 2^-126 becomes zero. A result
        below 2^-126 counts as a value of each device.

    Example:
      >>> import jax.numpy as jnp
      >>> state = init_gradient_sums({"w": jnp.ones((64, 64))}, AutoScaledFP8())
      >>> state.mu
      {'w': Array(1., dtype=float32)}
    """

    mu: PyTree
    quiet_steps: PyTree
    halved_steps: PyTree
    nonfinite_steps: PyTree
    saturated: PyTree
    underflowed: PyTree


class _Sums(NamedTuple):
    """The results of a step for one gradient of `size` values, the same on all `devices`."""

    amax: Array  # float32, the largest of all devices; inf if one has an inf or NaN
    saturated: Array  # float32, how many values were clipped to the range of the format
    beyond: Array  # float32, how many sums were clipped to float32's range. mu cannot change that
    underflowed: Array  # float32, how many values became zero, on all devices together
    size: int
    devices: int


def init_gradient_sums(grads_or_params: PyTree, method: SumMethod) -> GradientSumState | None:
    """The state of a method before the first step. mu is 1, and all counts are 0.

    Args:
      grads_or_params: a tree like the gradients, of arrays or `jax.ShapeDtypeStruct`s [...].
      method: how gradients will be summed.

    Returns:
      A `GradientSumState` for `AutoScaledFP8`. None for methods without state.

    Raises:
      TypeError: if `method` is not a method.

    Example:
      >>> import jax.numpy as jnp
      >>> init_gradient_sums({"w": jnp.ones(3)}, AutoScaledFP8()).nonfinite_steps
      {'w': Array(0, dtype=int32)}
    """
    check_method(method)
    if not isinstance(method, AutoScaledFP8):
        return None

    def tree_of(value: float, dtype: type) -> PyTree:
        return jax.tree.map(lambda _: jnp.full((), value, dtype), grads_or_params)

    return GradientSumState(
        mu=tree_of(1, jnp.float32),
        quiet_steps=tree_of(0, jnp.int32),
        halved_steps=tree_of(0, jnp.int32),
        nonfinite_steps=tree_of(0, jnp.int32),
        saturated=tree_of(0, jnp.float32),
        underflowed=tree_of(0, jnp.float32),
    )


def _next_row(row: GradientSumState, sums: _Sums, method: AutoScaledFP8) -> GradientSumState:
    """The state of one gradient after a step.

    References:
      Peng et al., FP8-LM, arXiv:2310.18313, section 2.1: mu is halved if more than 0.001 % of the
      values are at the maximum. Otherwise it grows exponentially, twofold in 1000 steps.
    """
    finite = sums.amax < jnp.inf
    # Zeros say nothing about mu. They would let it grow until the first other gradient is clipped.
    tells = finite & (sums.amax >= TINY)
    # Counts are compared, not shares: XLA:CPU divides by a constant with an error of one ulp.
    limit = math.floor(fractions.Fraction(repr(method.max_saturated)) * sums.size)
    halve = tells & (sums.saturated > limit)
    mu, quiet = row.mu, row.quiet_steps
    if method.scaling == "auto":
        growth = np.float32(2.0 ** (1 / method.growth_steps))
        quiet = jnp.where(tells, jnp.where(halve, 0, quiet + 1), quiet)
        grown = jnp.where(quiet > method.patience, jnp.minimum(mu * growth, _LARGEST_MU), mu)
        # The multiplier has a least value. At that, halving would go on until mu is 0 for ever.
        moved = jnp.where(halve, jnp.maximum(mu * 0.5, _SMALLEST_MU), grown)
        mu = jnp.where(tells, moved, mu)
    else:
        halve = jnp.zeros_like(halve)
    share = jnp.minimum((sums.saturated + sums.beyond) / sums.size, 1.0)
    lost = jnp.minimum(sums.underflowed / (float(sums.size) * sums.devices), 1.0)
    return GradientSumState(
        mu=mu,
        quiet_steps=quiet,
        halved_steps=row.halved_steps + halve.astype(jnp.int32),
        nonfinite_steps=row.nonfinite_steps + (~finite).astype(jnp.int32),
        saturated=jnp.where(finite, share, row.saturated),
        underflowed=jnp.where(finite, lost, row.underflowed),
    )


# `AutoScaledFP8` for one gradient.


def all_reduce_auto_scaled(
    x: Array,
    slices: Slices,
    names: tuple[str, ...],
    method: AutoScaledFP8,
    row: GradientSumState,
    also: tuple[str, ...],
    mean: bool,
) -> tuple[Array, GradientSumState]:
    """The sum or mean of x over `names` [slices.shape] float32, and the next state."""
    # The gradient is split over `also`, too, and its state is not.
    everywhere = names + also
    # The smallest multiplier of all devices is that of the largest amax. It is found like this
    # because a device whose gradient is zero has the multiplier 1, which may be the smallest.
    largest = pmax(amax(x, PerTensor()), everywhere)
    multiplier = _multiplier(largest, row.mu, slices.devices, method)
    payload = saturating_cast(x, multiplier, method.format)
    total, clipped_sums = _sum(payload, slices, names, also, method)

    share = total * np.float32(1 / slices.devices) if mean else total
    # This changes no value. Without it XLA multiplies the inverse by the number first, and the
    # product may be below 2^-126. Then it is zero, and so are all gradients.
    share = jnp.clip(share, -method.format.max, method.format.max)
    result = share * inverse(multiplier)

    # `widen` would clip a float64 above the largest float32, and nothing would count that.
    magnitude = jnp.abs(x if x.dtype == jnp.float64 else widen(x))
    # A mean is in the range of float32. Above it, it is rounded, not clipped.
    beyond = jnp.float32(0) if mean else _count(jnp.abs(result) > LARGEST)
    counts = jnp.stack(
        [
            _count(magnitude * multiplier.astype(magnitude.dtype) > method.format.max),
            clipped_sums,
            # All devices have the same sums. The first one counts those that are clipped. All count
            # those that are lost, because `underflowed` is a mean over the devices.
            jnp.where(lax.axis_index(names) == 0, beyond, 0.0),
            _count(_is_not_zero(x) & (payload.astype(jnp.float32) == 0)),
            _count((total != 0) & (jnp.abs(result) < TINY)),
        ]
    )
    clipped, clipped_sums, beyond, underflowed, lost_sums = lax.psum(counts, everywhere)
    size = math.prod(slices.shape) * (lax.axis_size(also) if also else 1)
    sums = _Sums(
        largest, clipped + clipped_sums, beyond, underflowed + lost_sums, size, slices.devices
    )
    # Finite gradients have a finite multiplier. Without the select, a NaN of one device would be
    # the NaN of its element only, and all others would have a scale that means nothing.
    result = jnp.where(largest < jnp.inf, jnp.clip(result, -LARGEST, LARGEST), jnp.nan)
    return result, _next_row(row, sums, method)


def _multiplier(largest: Array, mu: Array, devices: int, method: AutoScaledFP8) -> Array:
    """What the gradient is multiplied by before the cast, in [2^-126, 2^126]."""
    common = encoding_multiplier(largest, method.format, power_of_two=method.power_of_two)
    if method.scaling == "auto":
        common = common * mu
    elif method.scaling == "pre":
        common = common * np.float32(1 / devices)
    return jnp.clip(common, TINY, 1 / TINY)


def _sum(
    payload: Array,
    slices: Slices,
    names: tuple[str, ...],
    also: tuple[str, ...],
    method: AutoScaledFP8,
) -> tuple[Array, Array]:
    """The sum of payloads in FP8, as float32 [slices.shape], and this device's part of the count.

    The sum of the parts over all devices is how many values of the sum were clipped.
    """
    largest = method.format.max

    def by_exchange(payload: Array) -> tuple[Array, Array]:
        received = exchange(slices.cut(payload), names)
        own = sum_in_order((received,), lambda values: values.astype(jnp.float32))
        rounded = saturating_cast(own, jnp.float32(1), method.format)
        whole = slices.join(gather(rounded, names)).astype(jnp.float32)
        return whole, _count(jnp.abs(own) > largest)

    if method.reduction == "exchange":
        return by_exchange(payload)
    total = lax.psum(payload, names).astype(jnp.float32)
    # Payloads of finite gradients are finite. So an inf (E5M2), or a NaN, whose sign is unknown, is
    # a sum that overflowed. (NCCL clips such sums, by its src/device/reduce_kernel.h. XLA:CPU does
    # not.) If gradients are not finite, the result does not matter.
    overflowed = pmax(jnp.any(~jnp.isfinite(total)).astype(jnp.float32), also) > 0

    def as_it_is(payload: Array) -> tuple[Array, Array]:
        del payload
        at_limit = _count(jnp.abs(total) >= largest)
        return total, jnp.where(lax.axis_index(names) == 0, at_limit, 0.0)

    branches: tuple[Callable[[Array], tuple[Array, Array]], ...] = (by_exchange, as_it_is)
    return lax.cond(overflowed, *branches, payload)


def _is_not_zero(x: Array) -> Array:
    """Whether values are not zero. A subnormal is not."""
    # XLA:CPU compares a subnormal like a zero. LLVM makes such a comparison of a test of all bits,
    # so only the mantissa is tested. A subnormal has one.
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return (x != 0) | (bits & ((1 << jnp.finfo(x.dtype).nmant) - 1) != 0)


def _count(which: Array) -> Array:
    """How many are True, float32 []. It is exact below 2^24."""
    return jnp.sum(which, dtype=jnp.int32).astype(jnp.float32)
