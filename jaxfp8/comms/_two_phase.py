"""`TwoPhaseFP8` for one gradient."""

import functools
import operator

import jax.numpy as jnp
import numpy as np

from jaxfp8._typing import Array
from jaxfp8.comms._exchange import Slices, exchange, gather, sum_in_order
from jaxfp8.comms._plain_sums import shrinking
from jaxfp8.comms._sum_methods import TwoPhaseFP8
from jaxfp8.numerics._amax import amax
from jaxfp8.numerics._float32 import LARGEST
from jaxfp8.numerics._granularity import PerAxis
from jaxfp8.numerics._powers_of_two import factors_of
from jaxfp8.numerics._rounding import saturating_cast
from jaxfp8.tensors._quantized_tensor import QuantizedTensor


def slice_sum(
    x: Array, slices: Slices, names: tuple[str, ...], method: TwoPhaseFP8, factor: float
) -> Array:
    """The sum of this device's slice over all devices, times `factor`: [groups, group] float32.

    It is finite for finite gradients. A sum above the largest float32 is clipped to it.
    """
    values, scale = (exchange(each, names) for each in quantized(slices.cut(x), method))
    # Where the sum of a group could overflow, even if its mean could not, all values are shrunk by
    # a power of two. Elsewhere the power is 1, so that no small value is lost.
    largest = jnp.max(functools.reduce(operator.mul, factors_of(scale)), axis=0)
    large = largest > LARGEST / (method.format.max * slices.devices)
    shrink = np.float32(shrinking(slices.devices))
    power = jnp.where(large, shrink, np.float32(1))
    total = sum_in_order(
        (values, scale), lambda values, scale: dequantized(values, scale, method) * power
    )
    result = total * jnp.where(large, np.float32(factor) / shrink, np.float32(factor))
    return jnp.clip(result, -LARGEST, LARGEST)  # NaN stays


def whole_sum(
    x: Array, slices: Slices, names: tuple[str, ...], method: TwoPhaseFP8, factor: float
) -> Array:
    """The sum over all devices, times `factor`: [slices.shape] float32, the same everywhere."""
    values, scale = quantized(slice_sum(x, slices, names, method, factor), method)
    return slices.join(dequantized(gather(values, names), gather(scale, names), method))


def quantized(x: Array, method: TwoPhaseFP8) -> tuple[Array, Array]:
    """The values [..., group] and scales [..., 1] of groups.

    The scale of a group with an inf or NaN is NaN. The rule gives it the multiplier 1, with which
    its finite values could be far off.
    """
    largest = amax(x, PerAxis(*range(x.ndim - 1)))
    multiplier, scale = method.scale.apply(largest, method.format)
    if method.scale.scale_format is None:  # the byte of an E8M0 scale is that of NaN already
        scale = jnp.where(largest < jnp.inf, scale, jnp.nan)
    return saturating_cast(x, multiplier, method.format), scale


def dequantized(values: Array, scale: Array, method: TwoPhaseFP8) -> Array:
    """The float32 values [..., group] of groups."""
    cells = PerAxis(*range(values.ndim - 1))
    dtype = jnp.dtype(jnp.float32)
    return QuantizedTensor(values, scale, cells, dtype, method.scale.exact).dequantize()
