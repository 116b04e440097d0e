"""Recipes with one scale for each tensor or row, and `identity`, which quantizes nothing."""

import dataclasses
import functools
from typing import Literal

from jaxfp8._typing import Rounding
from jaxfp8.numerics._formats import E4M3, E5M2, Format
from jaxfp8.numerics._granularity import PerRow
from jaxfp8.quantizers._base import check_bool
from jaxfp8.quantizers._current import Current
from jaxfp8.quantizers._delayed import Delayed
from jaxfp8.quantizers._identity import Identity
from jaxfp8.quantizers._static import Static, check_scale
from jaxfp8.recipes._operands import Operands
from jaxfp8.recipes._recipe import Recipe, by_tensor


def delayed(
    *,
    forward: Format = E4M3,
    gradient: Format = E5M2,
    history_length: int = 16,
    algorithm: Literal["max", "most_recent"] = "max",
    margin: int = 0,
    power_of_two: bool = False,
    gradient_rounding: Rounding = "nearest",
) -> Recipe:
    """Delayed scaling per tensor: scales come from the amaxes of the last steps.

    A cast reads its tensor once. The recipe has state.

    Args:
      forward: the format of x and w.
      gradient: the format of output gradients.
      history_length: how many steps are remembered.
      algorithm: which amax gives the scale, the "max" of the history or the "most_recent".
      margin: how many powers of two to stay below the format's largest value, 0 to 64.
      power_of_two: whether scales are powers of two.
      gradient_rounding: how output gradients are rounded, "nearest" or "stochastic". Stochastic
        rounding keeps small gradients unbiased, and needs `key=` at each step.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.recipes.delayed(history_length=1024).fprop.lhs.history_length
      1024

    References:
      Micikevicius et al., arXiv:2209.05433; TransformerEngine user guide, FP8 delayed scaling.
    """
    delayed_by = functools.partial(
        Delayed,
        history_length=history_length,
        algorithm=algorithm,
        margin=margin,
        power_of_two=power_of_two,
    )
    x, g = delayed_by(format=forward), delayed_by(format=gradient, rounding=gradient_rounding)
    return by_tensor("delayed", x, x, g)


def current(
    *,
    forward: Format = E4M3,
    gradient: Format = E5M2,
    power_of_two: bool = False,
    gradient_rounding: Rounding = "nearest",
) -> Recipe:
    """Current scaling per tensor: the scale of a tensor comes from its own amax. No state.

    Args:
      forward: the format of x and w.
      gradient: the format of output gradients.
      power_of_two: whether scales are powers of two.
      gradient_rounding: how output gradients are rounded, "nearest" or "stochastic". Stochastic
        rounding keeps small gradients unbiased, and needs `key=` at each step.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.recipes.current().dgrad.lhs.format
      E5M2

    References:
      NVIDIA, Nemotron-H, arXiv:2504.03624, section 2.4.
    """
    x = Current(format=forward, power_of_two=power_of_two)
    g = Current(format=gradient, power_of_two=power_of_two, rounding=gradient_rounding)
    return by_tensor("current", x, x, g)


def rowwise(
    *,
    forward: Format = E4M3,
    gradient: Format = E4M3,
    power_of_two: bool = True,
    high_precision_wgrad: bool = False,
    gradient_rounding: Rounding = "nearest",
) -> Recipe:
    """Row-wise scaling: one scale for each row that a matmul contracts. No state.

    An outlier affects the precision of its own row only. The two matmuls that read a tensor
    contract different axes, so x, w and g (the output gradient) are each cast twice.

    With `high_precision_wgrad` the weight gradient is computed in high precision. Then x is saved
    in high precision and cast once, for fprop. g is cast once, for dgrad. dgrad reads w with one
    scale for the whole tensor.

    Args:
      forward: the format of x and w.
      gradient: the format of output gradients.
      power_of_two: whether scales are powers of two.
      high_precision_wgrad: whether wgrad is in high precision, as in torchao's
        `rowwise_with_gw_hp`.
      gradient_rounding: how output gradients are rounded, "nearest" or "stochastic". Stochastic
        rounding keeps small gradients unbiased, and needs `key=` at each step.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.recipes.rowwise(high_precision_wgrad=True).fp8_matmuls
      2

    References:
      pytorch/ao, torchao/float8/config.py, recipes `rowwise` and `rowwise_with_gw_hp`.
    """
    check_bool("high_precision_wgrad", high_precision_wgrad)
    x = Current(format=forward, granularity=PerRow(), power_of_two=power_of_two)
    g = dataclasses.replace(x, format=gradient, rounding=gradient_rounding)
    if not high_precision_wgrad:
        return by_tensor("rowwise", x, x, g)
    return Recipe(
        name="rowwise",
        fprop=Operands(lhs=x, rhs=x),
        dgrad=Operands(lhs=g, rhs=Current(format=forward, power_of_two=power_of_two)),
        wgrad=Operands(lhs=Identity(), rhs=Identity()),
    )


def static(
    *,
    x_scale: float,
    w_scale: float,
    g_scale: float,
    forward: Format = E4M3,
    gradient: Format = E5M2,
    gradient_rounding: Rounding = "nearest",
) -> Recipe:
    """Static scaling per tensor: scales are constants that were calibrated before. No state.

    No amax is computed. Values beyond `scale * format.max` saturate.

    Args:
      x_scale: the scale of activations. It multiplies stored values back to real ones, and is in
        [2^-126, 2^126], as are the others.
      w_scale: the scale of weights.
      g_scale: the scale of output gradients.
      forward: the format of x and w.
      gradient: the format of output gradients.
      gradient_rounding: how output gradients are rounded, "nearest" or "stochastic". Stochastic
        rounding keeps small gradients unbiased, and needs `key=` at each step.

    Raises:
      ValueError: if a scale is out of range.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.recipes.static(x_scale=0.05, w_scale=0.001, g_scale=1e-6).fprop.rhs.scale
      0.001

    References:
      Narayan et al., munit Scaling, arXiv:2502.05967 (constants, no amax at all).
    """
    for name, scale in (("x_scale", x_scale), ("w_scale", w_scale), ("g_scale", g_scale)):
        check_scale(name, scale)
    return by_tensor(
        "static",
        Static(format=forward, scale=x_scale),
        Static(format=forward, scale=w_scale),
        Static(format=gradient, scale=g_scale, rounding=gradient_rounding),
    )


def identity() -> Recipe:
    """No quantization: results are bit-equal to `jax.lax.dot_general`.

    Use it for layers that stay in high precision, and for control runs.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.recipes.identity().is_identity
      True
    """
    return by_tensor("identity", Identity(), Identity(), Identity())
