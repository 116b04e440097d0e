"""How gradients are summed over devices: the methods of `all_reduce_gradients`."""

import dataclasses
import functools
import operator
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import jax.numpy as jnp
import numpy as np

from jaxfp8._check import check_bool, check_int, check_one_of, check_type
from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Array
from jaxfp8.comms._collectives import Slices, exchange, gather, sum_in_order
from jaxfp8.numerics._amax import amax
from jaxfp8.numerics._exact import LARGEST, factors_of
from jaxfp8.numerics._formats import E4M3, Format, check_value_format
from jaxfp8.numerics._granularity import PerAxis
from jaxfp8.numerics._rounding import saturating_cast
from jaxfp8.numerics._scale import ScaleRule

# The methods, which users pass as `method=`.

Scaling: TypeAlias = Literal["auto", "pre", "post"]
Reduction: TypeAlias = Literal["exchange", "all_reduce"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BFloat16Sum:
    """The sum in bfloat16, by one all-reduce. This is the default. It has no state.

    It sends half of the bytes of float32. Values are divided by a power of two before the sum, so
    that finite gradients have a finite sum. It is the number of devices, rounded up. Values below
    2^-126 times this power may become 0.

    Attributes:
      min_size: gradients with fewer values are summed in float32.

    Example:
      >>> BFloat16Sum().min_size
      4096
    """

    min_size: int = 4096
    group: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_int("BFloat16Sum.min_size", self.min_size, least=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoPhaseFP8:
    """Two exchanges of FP8 values, with a float32 sum between them. It has no state.

    Each device quantizes its gradient in groups of consecutive values and sends a slice to every
    other device (all-to-all). Each device adds the slices that it received, in float32, in the
    order of the devices. It quantizes the sum, and all devices gather it (all-gather).

    It sends 0.26 times the bytes of a float32 all-reduce: one byte for each value and one scale for
    each group. Each value is rounded twice. Finite gradients have finite sums.

    Attributes:
      format: the FP8 format of the values.
      group: how many consecutive values share a scale. The groups are cut from the flattened
        gradient, which is padded with zeros.
      scale: how the amax of a group becomes a scale. Powers of two make the sums exact to undo.
        `ScaleRule(scale_format=fp8.E8M0)` sends one byte for each scale.
      min_size: gradients with fewer values are summed in float32.

    Example:
      >>> TwoPhaseFP8().group
      128

    References:
      Dettmers et al., 8-bit optimizers via block-wise quantization, arXiv:2110.02861 (groups).
      Wang et al., ZeRO++, arXiv:2306.10209, section 3.3 (a quantized all-to-all, and a sum in high
      precision).
    """

    format: Format = E4M3
    group: int = 128
    scale: ScaleRule = ScaleRule(power_of_two=True)
    min_size: int = 4096

    def __post_init__(self) -> None:
        check_value_format(self.format)
        check_int("TwoPhaseFP8.group", self.group)
        check_int("TwoPhaseFP8.min_size", self.min_size, least=0)
        needed = "a ScaleRule, for instance fp8.ScaleRule(power_of_two=True)"
        check_type("TwoPhaseFP8.scale", self.scale, ScaleRule, needed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoScaledFP8:
    """FP8-LM's sum: one scale for all devices, and a factor mu that follows the gradients.

    The payload of a device is `FP8(mu * s * g)`. The multiplier s is the smallest of those of the
    devices, `format.max / amax`, so all payloads have one scale and can be added. The sum is stored
    in FP8 as well. It is divided by `mu * s`, and by the number of devices for a mean.

    mu is state, one number for each gradient. If more than `max_saturated` of the values of a step
    are clipped, mu is halved for the next step. Otherwise it grows by `2**(1 / growth_steps)`. A
    step with only zeros, or with inf or NaN, leaves it. mu stays between 2^-20 and 2^20.

    Finite gradients have finite sums. `GradientSumState` counts values that are clipped or become
    zero.

    Attributes:
      format: the FP8 format of payloads and sums.
      scaling: "auto" as above. "pre" and "post" have no mu, and are for comparison. "pre" divides
        by the number of devices before the cast, so small values become zero. "post" divides after
        the sum, so large sums are clipped.
      power_of_two: round s down to a power of two.
      max_saturated: the share of clipped values above which mu is halved. 1e-5 is the paper's
        0.001 %.
      growth_steps: mu doubles in this many steps without too many clipped values.
      patience: how many such steps must pass before mu grows. The paper's mu grows at once.
      reduction: how payloads are added. "exchange" sends bytes (all-to-all, all-gather), adds in
        float32 and rounds the sum once. It counts each clipped sum. "all_reduce" is one all-reduce
        of FP8 values. It may round and clip after each addition, in an order of its own. NVIDIA
        GPUs before Hopper cannot run it.
      min_size: gradients with fewer values are summed in float32. Their state does not change.

    Example:
      >>> AutoScaledFP8(scaling="pre").max_saturated
      1e-05

    References:
      Peng et al., FP8-LM: Training FP8 Large Language Models, arXiv:2310.18313, section 2.1.
    """

    format: Format = E4M3
    scaling: Scaling = "auto"
    power_of_two: bool = True
    max_saturated: float = 1e-5
    growth_steps: int = 1000
    patience: int = 0
    reduction: Reduction = "exchange"
    min_size: int = 4096
    group: ClassVar[int] = 128  # a slice is a number of whole groups

    def __post_init__(self) -> None:
        check_value_format(self.format)
        check_int("AutoScaledFP8.growth_steps", self.growth_steps)
        check_int("AutoScaledFP8.patience", self.patience, least=0)
        check_int("AutoScaledFP8.min_size", self.min_size, least=0)
        check_one_of("AutoScaledFP8.scaling", self.scaling, get_args(Scaling))
        check_one_of("AutoScaledFP8.reduction", self.reduction, get_args(Reduction))
        check_bool("AutoScaledFP8.power_of_two", self.power_of_two)
        if not 0 <= self.max_saturated < 1:
            raise ValueError(
                f"AutoScaledFP8.max_saturated={self.max_saturated!r} must be a share of at least "
                "0 and below 1. Write 1e-5 for 0.001 %."
            )


SumMethod: TypeAlias = BFloat16Sum | TwoPhaseFP8 | AutoScaledFP8


def check_method(method: Any) -> None:
    """Raise TypeError if `method` is not one of the methods."""
    known = "one of BFloat16Sum(), TwoPhaseFP8() and AutoScaledFP8() of fp8.comms"
    check_type("method", method, SumMethod, known)


# How sums of finite gradients stay finite.


def shrinking(devices: int) -> float:
    """The largest power of two of at most 1 / devices, which keeps a sum over devices finite."""
    return 2.0 ** -(devices - 1).bit_length()


# `TwoPhaseFP8` for one gradient.


def reduce_scatter_two_phase(
    x: Array, slices: Slices, names: tuple[str, ...], method: TwoPhaseFP8, factor: float
) -> Array:
    """The sum of this device's slice over all devices, times `factor`: [groups, group] float32."""
    values, scale = (exchange(each, names) for each in _quantized(slices.cut(x), method))
    # Where the sum of a group could overflow, even if its mean could not, all values are shrunk by
    # a power of two. Elsewhere the power is 1, so that no small value is lost.
    largest = jnp.max(functools.reduce(operator.mul, factors_of(scale)), axis=0)
    large = largest > LARGEST / (method.format.max * slices.devices)
    shrink = np.float32(shrinking(slices.devices))
    power = jnp.where(large, shrink, np.float32(1))
    total = sum_in_order(
        (values, scale), lambda values, scale: _dequantized(values, scale, method) * power
    )
    result = total * jnp.where(large, np.float32(factor) / shrink, np.float32(factor))
    return jnp.clip(result, -LARGEST, LARGEST)  # NaN stays


def all_reduce_two_phase(
    x: Array, slices: Slices, names: tuple[str, ...], method: TwoPhaseFP8, factor: float
) -> Array:
    """The sum over all devices, times `factor`: [slices.shape] float32, the same everywhere."""
    values, scale = _quantized(reduce_scatter_two_phase(x, slices, names, method, factor), method)
    return slices.join(_dequantized(gather(values, names), gather(scale, names), method))


def _quantized(x: Array, method: TwoPhaseFP8) -> tuple[Array, Array]:
    """The values [..., group] and scales [..., 1] of groups."""
    largest = amax(x, PerAxis(*range(x.ndim - 1)))
    multiplier, scale = method.scale.apply(largest, method.format)
    # A group with an inf or NaN gets the scale NaN. The rule gives it the multiplier 1, with which
    # its finite values could be far off.
    if method.scale.scale_format is None:  # the byte of an E8M0 scale is that of NaN already
        scale = jnp.where(largest < jnp.inf, scale, jnp.nan)
    return saturating_cast(x, multiplier, method.format), scale


def _dequantized(values: Array, scale: Array, method: TwoPhaseFP8) -> Array:
    """The float32 values [..., group] of groups."""
    cells = PerAxis(*range(values.ndim - 1))
    dtype = jnp.dtype(jnp.float32)
    return QuantizedTensor(values, scale, cells, dtype, method.scale.exact).dequantize()
