"""Recipes with one scale for each tile."""

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
      gradient_rounding: how output gradients are rounded, "nearest" or "stochastic". Stochastic
        rounding keeps small gradients unbiased, and needs `key=` at each step.

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
    return by_tensor("blockwise", x, w, g)


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
      gradient_rounding: how output gradients are rounded, "nearest" or "stochastic". Stochastic
        rounding keeps small gradients unbiased, and needs `key=` at each step.

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
