"""Recipes with one scale for a tile."""

import dataclasses
from typing import Literal, TypeAlias

from jaxfp8._typing import Rounding, ScaleRounding
from jaxfp8.numerics._formats import E4M3, E8M0, Format
from jaxfp8.numerics._per_block import PerBlock
from jaxfp8.quantizers._current import Current
from jaxfp8.recipes._recipe import Recipe, by_tensor

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
    """Blockwise scaling as DeepSeek-V3 trained.

    X and g in tiles of 1x128 along what is contracted, w of 128x128. No state.

    An outlier spoils its tile only. x and g are quantized twice, once for each direction in which
    matmuls read them; w once, for a square tile serves both. Amaxes never leave a device.

    Args:
      forward: format of x and w.
      gradient: format of output gradients; E5M2 is the HYBRID of TransformerEngine.
      power_of_two: scales are powers of two, and matmuls fold them exactly. Float32 scales use the
        format's range fully, but are multiplied tile by tile.
      x_tile_dim: 1 (1x128) or 2 (128x128) for activations.
      w_tile_dim: the same for weights.
      g_tile_dim: the same for output gradients. A matmul takes at most one operand in 2D tiles.
      gradient_rounding: of output gradients, "nearest" or "stochastic", which needs `key=` at each
        step and keeps small gradients unbiased.

    Raises:
      ValueError: for a matmul of 2D x 2D tiles, or E5M2 x E5M2.

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
            f"{dims}: each pair of x, w, g meets in a matmul, which takes one operand in 2D tiles; "
            "give 2 to one."
        )
    x, w, g = (
        Current(format=format, granularity=_tile(name, 128, dims[name]), power_of_two=power_of_two)
        for name, format in zip(dims, (forward, forward, gradient), strict=True)
    )
    g = dataclasses.replace(g, rounding=gradient_rounding)
    return by_tensor("blockwise", x, w, g)


def mxfp8(
    *,
    scale_rounding: ScaleRounding = "rceil",
    w_tile_dim: TileDim = 1,
    gradient_rounding: Rounding = "nearest",
) -> Recipe:
    """MXFP8: E4M3 in tiles of 1x32 along what is contracted, one byte (E8M0) a scale. No state.

    The format of Blackwell's tensor cores. Every operand is quantized twice, once for each
    direction; with `w_tile_dim=2` a tile of w is 32x32 and serves both, so that one FP8 copy of the
    weights is enough.

    Args:
      scale_rounding: "rceil" rounds scales up, so that nothing overflows; "floor" is the OCP
        paper's, finer by up to a binade, and saturates what is above.
      w_tile_dim: 1 (1x32) or 2 (32x32) for weights.
      gradient_rounding: of output gradients, "nearest" or "stochastic", which needs `key=` at each
        step and keeps small gradients unbiased.

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
    return by_tensor("mxfp8", x, w, dataclasses.replace(x, rounding=gradient_rounding))


def _tile(name: str, size: int, dim: object) -> PerBlock:
    if type(dim) is not int or dim not in (1, 2):
        raise ValueError(
            f"{name}={dim!r} is no dimension of a tile; use 1 (1x{size}) or 2 ({size}x{size})."
        )
    return PerBlock((1 if dim == 1 else size, size))
