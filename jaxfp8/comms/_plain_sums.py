"""Sums of gradients without FP8: which gradients they are for, and their scaling."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfp8._typing import Array
from jaxfp8.comms._sum_methods import BFloat16Sum, SumMethod
from jaxfp8.numerics._float32 import widened

ALIGNED = 128
"""Values of a group, where the method has no groups. A slice is a number of whole groups."""


def is_small(x: Array, devices: int, method: SumMethod) -> bool:
    """Whether a gradient is summed in float32, because it is small.

    In FP8 each device needs a whole group. With at least one group for each device, the padding is
    at most as long as the gradient.
    """
    group = 1 if isinstance(method, BFloat16Sum) else getattr(method, "group", ALIGNED)
    return x.size < max(method.min_size, devices * group)


def in_high_precision(
    x: Array, method: SumMethod, factor: float, collective: Callable[[Array], Array]
) -> Array:
    """The sum in float32, in the dtype in which the method returns gradients."""
    dtype = x.dtype if isinstance(method, BFloat16Sum) else jnp.dtype(jnp.float32)
    return scaled(collective(widened(x)), factor, dtype)


def scaled(total: Array, factor: float, dtype: Any) -> Array:
    return (total.astype(jnp.float32) * np.float32(factor)).astype(dtype)
