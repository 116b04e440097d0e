"""Sums of gradients without FP8: which gradients they are for, and how finite ones stay finite."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfp8._typing import Array
from jaxfp8.comms._sum_methods import BFloat16Sum, SumMethod
from jaxfp8.numerics._float32 import LARGEST, is_finite, widened

ALIGNED = 128
"""Values of a group, where the method has no groups. A slice is a number of whole groups."""


def is_small(x: Array, devices: int, method: SumMethod) -> bool:
    """Whether a gradient is summed in float32, because it is small.

    In FP8 each device needs a whole group. With at least one group for each device, the padding is
    at most as long as the gradient.
    """
    group = 1 if isinstance(method, BFloat16Sum) else getattr(method, "group", ALIGNED)
    return x.size < max(method.min_size, devices * group)


def shrinking(devices: int) -> float:
    """The largest power of two of at most 1 / devices.

    A sum over devices of finite values, each times this number, is finite.

    Example:
      >>> shrinking(8), shrinking(5)
      (0.125, 0.125)
    """
    return 2.0 ** -(devices - 1).bit_length()


def in_high_precision(
    x: Array, method: SumMethod, devices: int, factor: float, collective: Callable[[Array], Array]
) -> Array:
    """The sum in float32, times `factor`, in the dtype in which the method returns gradients."""
    dtype = x.dtype if isinstance(method, BFloat16Sum) else jnp.dtype(jnp.float32)
    x = widened(x)
    if devices == 1:
        return _scaled(collective(x), factor, dtype)
    # The first sum may overflow, even if the mean does not. The second may lose values near 2^-126.
    # Both are one collective.
    shrink = shrinking(devices)
    both = collective(jnp.stack([x, x * np.float32(shrink)], axis=-1))
    total = both[..., 0]
    shrunk = _scaled(both[..., 1], factor / shrink, dtype)
    return jnp.where(is_finite(total), _scaled(total, factor, dtype), shrunk)


def in_bfloat16(
    x: Array, devices: int, factor: float, collective: Callable[[Array], Array]
) -> Array:
    """The sum in bfloat16, times `factor`, in the dtype of x.

    Values are shrunk before they are sent. So the sum of finite values does not overflow.
    """
    shrink = shrinking(devices)
    # Without the clip to its range, bfloat16 rounds the largest float32 values up to inf.
    clipped = _scaled(widened(x), 1.0, jnp.bfloat16).astype(jnp.float32)
    shrunk = (clipped * np.float32(shrink)).astype(jnp.bfloat16)
    return _scaled(collective(shrunk), factor / shrink, x.dtype)


def _scaled(x: Array, factor: float, dtype: Any) -> Array:
    """`x * factor` in a dtype. What is finite is clipped to the range of the dtype."""
    x = x.astype(jnp.float32)
    limit = min(float(jnp.finfo(dtype).max), LARGEST)
    product = x * np.float32(factor)
    return jnp.where(is_finite(x), jnp.clip(product, -limit, limit), product).astype(dtype)
