"""The recipes that the field knows by name."""

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

from jaxfp8._typing import ScaleRounding
from jaxfp8.numerics._formats import E4M3, E5M2, E8M0, Format
from jaxfp8.numerics._granularity import PerRow
from jaxfp8.numerics._per_block import PerBlock
from jaxfp8.quantizers._base import AbstractQuantizer, check_bool
from jaxfp8.quantizers._current import Current
from jaxfp8.quantizers._delayed import Delayed
from jaxfp8.quantizers._identity import Identity
from jaxfp8.quantizers._static import Static, check_scale
from jaxfp8.recipes._recipe import Operands, Recipe

TileDim: TypeAlias = Literal[1, 2]


def _by_tensor(
    name: str, x: AbstractQuantizer, w: AbstractQuantizer, g: AbstractQuantizer, chip: str | None = None
) -> Recipe:
    fprop, dgrad, wgrad = Operands(lhs=x, rhs=w), Operands(lhs=g, rhs=w), Operands(lhs=x, rhs=g)
    return Recipe(name=name, fprop=fprop, dgrad=dgrad, wgrad=wgrad, chip=chip)


def delayed(
    *,
    forward: Format = E4M3,
    gradient: Format = E5M2,
    history_length: int = 16,
    algorithm: Literal["max", "most_recent"] = "max",
    margin: int = 0,
    power_of_two: bool = False,
) -> Recipe:
    """Delayed scaling per tensor: scales from the amaxes of the last steps, one read a cast. Has state.

    Args:
      forward: format of x and w.
      gradient: format of output gradients.
      history_length: H, steps remembered.
      algorithm: "max" of the window or the "most_recent" amax.
      margin: powers of two to stay below the largest value.
      power_of_two: scales are powers of two.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.recipes.delayed(history_length=1024).fprop.lhs.history_length
      1024

    References:
      Micikevicius et al., arXiv:2209.05433; TransformerEngine user guide, FP8 delayed scaling.
    """
    x = Delayed(
        format=forward, history_length=history_length, algorithm=algorithm, margin=margin, power_of_two=power_of_two
    )
    g = Delayed(
        format=gradient, history_length=history_length, algorithm=algorithm, margin=margin, power_of_two=power_of_two
    )
    return _by_tensor("delayed", x, x, g)


def current(*, forward: Format = E4M3, gradient: Format = E5M2, power_of_two: bool = False) -> Recipe:
    """Current scaling per tensor: the scale of a tensor from its own amax. No state.

    Args:
      forward: format of x and w.
      gradient: format of output gradients.
      power_of_two: scales are powers of two.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.recipes.current().dgrad.lhs.format
      E5M2

    References:
      NVIDIA, Nemotron-H, arXiv:2504.03624, section 2.4.
    """
    x = Current(format=forward, power_of_two=power_of_two)
    g = Current(format=gradient, power_of_two=power_of_two)
    return _by_tensor("current", x, x, g)


def rowwise(
    *, forward: Format = E4M3, gradient: Format = E4M3, power_of_two: bool = True, high_precision_wgrad: bool = False
) -> Recipe:
    """Row-wise scaling: one scale for each row that a matmul contracts, so an outlier spoils its own row only. No state.

    Rows differ from matmul to matmul, hence x, w and g are cast twice each. With `high_precision_wgrad` the weight
    gradient is computed in high precision from the unquantized x and g (x is then saved in high precision), dgrad reads
    w with one scale for the whole tensor, and w's rows are cast once.

    Args:
      forward: format of x and w.
      gradient: format of output gradients.
      power_of_two: scales are powers of two.
      high_precision_wgrad: torchao's `rowwise_with_gw_hp`.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.recipes.rowwise(high_precision_wgrad=True).fp8_matmuls
      2

    References:
      pytorch/ao, torchao/float8/config.py, recipes `rowwise` and `rowwise_with_gw_hp`.
    """
    check_bool("high_precision_wgrad", high_precision_wgrad)
    x = Current(format=forward, granularity=PerRow(), power_of_two=power_of_two)
    g = Current(format=gradient, granularity=PerRow(), power_of_two=power_of_two)
    if not high_precision_wgrad:
        return _by_tensor("rowwise", x, x, g)
    return Recipe(
        name="rowwise",
        fprop=Operands(lhs=x, rhs=x),
        dgrad=Operands(lhs=g, rhs=Current(format=forward, power_of_two=power_of_two)),
        wgrad=Operands(lhs=Identity(), rhs=Identity()),
    )


def blockwise(
    *,
    forward: Format = E4M3,
    gradient: Format = E4M3,
    power_of_two: bool = True,
    x_tile_dim: TileDim = 1,
    w_tile_dim: TileDim = 2,
    g_tile_dim: TileDim = 1,
    chip: str | None = None,
) -> Recipe:
    """Blockwise scaling as DeepSeek-V3 trained: x and g in tiles of 1x128 along what is contracted, w of 128x128. No state.

    An outlier spoils its tile only. x and g are quantized twice, once for each direction in which matmuls read them; w once,
    for a square tile serves both. Amaxes never leave a device.

    Args:
      forward: format of x and w.
      gradient: format of output gradients; E5M2 is the HYBRID of TransformerEngine.
      power_of_two: scales are powers of two, and matmuls fold them exactly. Float32 scales use the format's range fully, but
        are multiplied tile by tile.
      x_tile_dim: 1 (1x128) or 2 (128x128) for activations.
      w_tile_dim: the same for weights.
      g_tile_dim: the same for output gradients. A matmul takes at most one operand in 2D tiles.
      chip: "b200" to run on Blackwell's block-scaled tensor cores (see `Recipe.chip`).

    Raises:
      ValueError: for a matmul of 2D x 2D tiles, or E5M2 x E5M2.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.recipes.blockwise().fprop.rhs.granularity
      PerBlock(tile=(128, 128))

    References:
      DeepSeek-V3, arXiv:2412.19437, section 3.3; TransformerEngine user guide, FP8 blockwise scaling.
    """
    dims = {"x_tile_dim": x_tile_dim, "w_tile_dim": w_tile_dim, "g_tile_dim": g_tile_dim}
    if sum(dim == 2 for dim in dims.values()) > 1:
        raise ValueError(
            f"{dims}: each pair of x, w, g meets in a matmul, which takes one operand in 2D tiles; give 2 to one."
        )
    x, w, g = (
        Current(format=format, granularity=_tile(name, 128, dim), power_of_two=power_of_two)
        for name, format, dim in (
            ("x_tile_dim", forward, x_tile_dim), ("w_tile_dim", forward, w_tile_dim), ("g_tile_dim", gradient, g_tile_dim),
        )
    )  # fmt: skip
    return _by_tensor("blockwise", x, w, g, chip)


def mxfp8(*, scale_rounding: ScaleRounding = "rceil", w_tile_dim: TileDim = 1, chip: str | None = None) -> Recipe:
    """MXFP8: E4M3 in tiles of 1x32 along what is contracted, one byte (E8M0) a scale. No state.

    The format of Blackwell's tensor cores. Every operand is quantized twice, once for each direction; with `w_tile_dim=2`
    a tile of w is 32x32 and serves both, so that one FP8 copy of the weights is enough.

    Args:
      scale_rounding: "rceil" rounds scales up, so that nothing overflows; "floor" is the OCP paper's, finer by up to a
        binade, and saturates what is above.
      w_tile_dim: 1 (1x32) or 2 (32x32) for weights.
      chip: "b200" to run on Blackwell's block-scaled tensor cores (see `Recipe.chip`).

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.recipes.mxfp8(w_tile_dim=2).dgrad.rhs.granularity
      PerBlock(tile=(32, 32))

    References:
      OCP Microscaling Formats (MX) v1.0; Mishra et al., Recipes for pre-training LLMs with MXFP8, arXiv:2506.08027 (RCEIL).
    """

    def quantizer(dim: TileDim) -> Current:
        granularity = _tile("w_tile_dim", 32, dim)
        return Current(
            format=E4M3, granularity=granularity, power_of_two=True, scale_format=E8M0, scale_rounding=scale_rounding
        )

    return _by_tensor("mxfp8", quantizer(1), quantizer(w_tile_dim), quantizer(1), chip)


def _tile(name: str, size: int, dim: object) -> PerBlock:
    if type(dim) is not int or dim not in (1, 2):
        raise ValueError(f"{name}={dim!r} is no dimension of a tile; use 1 (1x{size}) or 2 ({size}x{size}).")
    return PerBlock((1 if dim == 1 else size, size))


def static(
    *, x_scale: float, w_scale: float, g_scale: float, forward: Format = E4M3, gradient: Format = E5M2
) -> Recipe:
    """Calibrated constants per tensor. No amax, no state; what is beyond `scale * format.max` saturates.

    Args:
      x_scale: of activations; multiplies stored values back to real ones.
      w_scale: of weights.
      g_scale: of output gradients.
      forward: format of x and w.
      gradient: format of output gradients.

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
        Static(format=gradient, scale=g_scale),
    )


def identity() -> Recipe:
    """No quantization at all: bit-equal to `jax.lax.dot_general`. For layers that stay out, and for controls.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.recipes.identity().is_identity
      True
    """
    return _by_tensor("identity", Identity(), Identity(), Identity())


PRESETS: dict[str, Callable[..., Recipe]] = {
    "delayed": delayed,
    "current": current,
    "rowwise": rowwise,
    "blockwise": blockwise,
    "mxfp8": mxfp8,
    "static": static,
    "identity": identity,
}


def get(name: str, **fields: Any) -> Recipe:
    """The preset of that name, for command lines and config files.

    Args:
      name: a key of the presets.
      **fields: of that preset; an unknown one is a TypeError.

    Raises:
      ValueError: for an unknown name.
      TypeError: for an unknown field.

    Example:
      >>> import jaxfp8 as fp8
      >>> fp8.recipes.get("delayed", margin=1) == fp8.recipes.delayed(margin=1)
      True
    """
    if name not in PRESETS:
        raise ValueError(f"recipe {name!r} is unknown; use one of {sorted(PRESETS)}.")
    known = list(inspect.signature(PRESETS[name]).parameters)
    if unknown := sorted(set(fields) - set(known)):
        raise TypeError(f"recipe {name!r} has no fields {unknown}; it has {known}.")
    return PRESETS[name](**fields)


def check_recipe(recipe: object) -> None:
    """Raise TypeError unless it is a Recipe.

    Example:
      >>> import jaxfp8 as fp8
      >>> check_recipe(fp8.recipes.current())
    """
    if isinstance(recipe, Recipe):
        return
    name = recipe if isinstance(recipe, str) else getattr(recipe, "__name__", None)
    meant = name if name in PRESETS else "delayed"
    raise TypeError(
        f"recipe={recipe!r} is of type {type(recipe).__name__}, but a Recipe is needed; write recipe=fp8.recipes.{meant}()."
    )
