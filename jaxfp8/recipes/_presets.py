"""The presets, and recipes by name."""

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

from jaxfp8._check import check_bool
from jaxfp8._typing import Rounding, ScaleRounding
from jaxfp8.numerics._formats import E4M3, E5M2, E8M0, Format
from jaxfp8.numerics._granularity import PerRow
from jaxfp8.numerics._per_block import PerBlock
from jaxfp8.quantizers._base import AbstractQuantizer
from jaxfp8.quantizers._kinds import Current, Delayed, Identity, Static, check_scale
from jaxfp8.recipes._recipe import Operands, Recipe

# Recipes with one scale for each tensor or row, and `identity`, which quantizes nothing.


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
      gradient_rounding: "nearest", or "stochastic", which keeps small gradients unbiased and needs
        `key=` at each step.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.recipes.delayed(history_length=1024).fprop.lhs.history_length
      1024

    References:
      Micikevicius et al., arXiv:2209.05433; TransformerEngine user guide, FP8 delayed scaling.
    """
    x = Delayed(
        format=forward,
        history_length=history_length,
        algorithm=algorithm,
        margin=margin,
        power_of_two=power_of_two,
    )
    g = dataclasses.replace(x, format=gradient, rounding=gradient_rounding)
    return _by_tensor("delayed", x, x, g)


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
      gradient_rounding: "nearest", or "stochastic", which keeps small gradients unbiased and needs
        `key=` at each step.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.recipes.current().dgrad.lhs.format
      E5M2

    References:
      NVIDIA, Nemotron-H, arXiv:2504.03624, section 2.4.
    """
    x = Current(format=forward, power_of_two=power_of_two)
    g = Current(format=gradient, power_of_two=power_of_two, rounding=gradient_rounding)
    return _by_tensor("current", x, x, g)


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
      gradient_rounding: "nearest", or "stochastic", which keeps small gradients unbiased and needs
        `key=` at each step.

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
        return _by_tensor("rowwise", x, x, g)
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
      gradient_rounding: "nearest", or "stochastic", which keeps small gradients unbiased and needs
        `key=` at each step.

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
    return _by_tensor(
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
    return _by_tensor("identity", Identity(), Identity(), Identity())


# Recipes with one scale for each tile.

TileDim: TypeAlias = Literal[1, 2]


def blockwise(
    *,
    forward: Format = E4M3,
    gradient: Format = E4M3,
    power_of_two: bool = True,
    x_tile_dim: TileDim = 1,
    w_tile_dim: TileDim = 2,
    g_tile_dim: TileDim = 1,
    gradient_rounding: Rounding = "nearest",
) -> Recipe:
    """Blockwise scaling, as DeepSeek-V3 was trained. No state.

    x and g (the output gradient) have tiles of 1x128 along the contracted axis. w has tiles of
    128x128. An outlier affects the precision of its tile only. x and g are quantized twice, once
    for each direction in which matmuls read them. w is quantized once, because a square tile serves
    both directions. If each device holds whole tiles, amaxes need no communication.

    Args:
      forward: the format of x and w.
      gradient: the format of output gradients. E5M2 is the HYBRID format of TransformerEngine.
      power_of_two: whether scales are powers of two. Matmuls can multiply values by these exactly.
        Float32 scales use all of the format's range, but are multiplied tile by tile.
      x_tile_dim: 1 (1x128) or 2 (128x128), for activations.
      w_tile_dim: the same for weights.
      g_tile_dim: the same for output gradients. A matmul takes at most one operand in 2D tiles.
      gradient_rounding: "nearest", or "stochastic", which keeps small gradients unbiased and needs
        `key=` at each step.

    Raises:
      ValueError: if both operands of a matmul would be in 2D tiles, or both in E5M2.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.recipes.blockwise().fprop.rhs.granularity
      PerBlock(tile=(128, 128))

    References:
      DeepSeek-V3, arXiv:2412.19437, section 3.3; TransformerEngine user guide, FP8 blockwise
      scaling.
    """
    dims = {"x_tile_dim": x_tile_dim, "w_tile_dim": w_tile_dim, "g_tile_dim": g_tile_dim}
    if sum(dim == 2 for dim in dims.values()) > 1:
        raise ValueError(
            f"{dims} has 2 more than once. Each pair of x, w, g is multiplied, and a matmul takes "
            "one operand in 2D tiles; give 2 to one at most."
        )
    x, w, g = (
        Current(format=format, granularity=_tile(name, 128, dims[name]), power_of_two=power_of_two)
        for name, format in zip(dims, (forward, forward, gradient), strict=True)
    )
    g = dataclasses.replace(g, rounding=gradient_rounding)
    return _by_tensor("blockwise", x, w, g)


def mxfp8(
    *,
    scale_rounding: ScaleRounding = "rceil",
    w_tile_dim: TileDim = 1,
    gradient_rounding: Rounding = "nearest",
) -> Recipe:
    """MXFP8: E4M3 in tiles of 1x32 along the contracted axis, with E8M0 scales. No state.

    An E8M0 scale is a power of two in one byte. Blackwell's tensor cores read this format. Every
    operand is quantized twice, once for each direction. With `w_tile_dim=2` tiles of w are 32x32
    and serve both directions. Then one FP8 copy of the weights is enough.

    Args:
      scale_rounding: "rceil" rounds scales up, so that no value overflows. "floor" is the OCP
        specification's rule. Its scales are up to a factor of 2 smaller, and values above the
        format's largest value saturate.
      w_tile_dim: 1 (1x32) or 2 (32x32), for weights.
      gradient_rounding: "nearest", or "stochastic", which keeps small gradients unbiased and needs
        `key=` at each step.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.recipes.mxfp8(w_tile_dim=2).dgrad.rhs.granularity
      PerBlock(tile=(32, 32))

    References:
      OCP Microscaling Formats (MX) v1.0; Mishra et al., Recipes for pre-training LLMs with MXFP8,
      arXiv:2506.08027 (RCEIL).
    """
    x, w = (
        Current(
            format=E4M3,
            granularity=_tile("w_tile_dim", 32, dim),
            power_of_two=True,
            scale_format=E8M0,
            scale_rounding=scale_rounding,
        )
        for dim in (1, w_tile_dim)
    )
    return _by_tensor("mxfp8", x, w, dataclasses.replace(x, rounding=gradient_rounding))


def _tile(name: str, size: int, dim: object) -> PerBlock:
    if type(dim) is not int or dim not in (1, 2):
        raise ValueError(
            f"{name}={dim!r} is no dimension of a tile; use 1 (1x{size}) or 2 ({size}x{size})."
        )
    return PerBlock((1 if dim == 1 else size, size))


def _by_tensor(
    name: str,
    x: AbstractQuantizer,
    w: AbstractQuantizer,
    g: AbstractQuantizer,
) -> Recipe:
    """A recipe in which each tensor has one quantizer for all matmuls."""
    fprop, dgrad, wgrad = Operands(lhs=x, rhs=w), Operands(lhs=g, rhs=w), Operands(lhs=x, rhs=g)
    return Recipe(name=name, fprop=fprop, dgrad=dgrad, wgrad=wgrad)


# Recipes by name.

PRESETS: dict[str, Callable[..., Recipe]] = {
    preset.__name__: preset
    for preset in (delayed, current, rowwise, blockwise, mxfp8, static, identity)
}


def get(name: str, **fields: Any) -> Recipe:
    """A recipe by its name, with fields as keyword arguments.

    `fp8.recipes.parse` reads a whole recipe from a command line, and `fp8.recipes.from_dict` from a
    config file.

    Args:
      name: "delayed", "current", "rowwise", "blockwise", "mxfp8", "static" or "identity".
      **fields: keyword arguments of the function `fp8.recipes.<name>`.

    Raises:
      ValueError: if the name is unknown.
      TypeError: if a field is unknown.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.recipes.get("delayed", margin=1) == fp8.recipes.delayed(margin=1)
      True
    """
    return make_preset(name, fields)


def make_preset(name: str, fields: dict[str, Any]) -> Recipe:
    """`get`, with the fields as a dict: one of them may be called "name", which is an error."""
    if name not in PRESETS:
        raise ValueError(
            f"recipe {name!r} is unknown; use one of {sorted(PRESETS)}."
            + suggest_name(name, PRESETS)
        )
    known = list(parameters_of(name))
    if unknown := sorted(set(fields) - set(known)):
        raise TypeError(
            f"recipe {name!r} has no fields {unknown}; it has {known}."
            + suggest_name(unknown[0], known)
        )
    return PRESETS[name](**fields)


def parameters_of(name: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(PRESETS[name]).parameters)


def suggest_name(name: object, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known name that is most like it, if any."""
    found = difflib.get_close_matches(str(name), list(known), n=1)
    return f" Did you mean {found[0]!r}?" if found else ""


def check_recipe(recipe: object) -> None:
    """Raise TypeError unless it is a Recipe."""
    if isinstance(recipe, Recipe):
        return
    name = recipe if isinstance(recipe, str) else getattr(recipe, "__name__", None)
    # The message names the recipe that was meant, if it was passed as a string or a function.
    meant = name if name in PRESETS else "delayed"
    raise TypeError(
        f"recipe={recipe!r} is of type {type(recipe).__name__}, but a Recipe is needed; write "
        f"recipe=fp8.recipes.{meant}()."
    )
