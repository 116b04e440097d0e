"""The route of a matmul, which is the way that it is computed.

The route depends on operands, chip and backend.
"""

from typing import NamedTuple

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8.kernels._dispatch import Chip
from jaxfp8.numerics._formats import E8M0
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.plan._costs import Cost, Route, matmul
from jaxfp8.plan._peaks import Peak
from jaxfp8.quantizers._base import AbstractQuantizer
from jaxfp8.recipes._recipe import Operands

_TILE = 32
"""Values along the contracted axis that share a scale on Blackwell."""


class Side(NamedTuple):
    """The properties of one operand that decide the route of its matmul.

    Attributes:
      in_fp8: whether the operand is quantized.
      granularity: which values share a scale.
      exact: whether every scale is a power of two. Then the matmul may multiply the values by the
        scale before it, without rounding.
      in_bytes: whether scales are E8M0.
    """

    in_fp8: bool
    granularity: AbstractGranularity
    exact: bool
    in_bytes: bool

    @classmethod
    def by(cls, quantizer: AbstractQuantizer) -> "Side":
        """The side of an operand that this quantizer makes."""
        if quantizer.value_format is None:
            return cls(False, quantizer.granularity, exact=False, in_bytes=False)
        rule = quantizer.rule
        return cls(True, quantizer.granularity, rule.exact, rule.scale_format is not None)

    @classmethod
    def of(cls, tensor: QuantizedTensor) -> "Side":
        """The side of a tensor that is already quantized."""
        in_bytes = tensor.scale.dtype == E8M0.dtype
        return cls(True, tensor.granularity, tensor.power_of_two, in_bytes)


Sides = tuple[Side, Side]


def sides_of(operands: Operands) -> Sides:
    """The sides of both operands of a matmul.

    Example:
      >>> import jaxfp8 as fp8
      >>> sides_of(fp8.recipes.mxfp8().fprop)[0].exact
      True
    """
    return Side.by(operands.lhs), Side.by(operands.rhs)


def kernels_of(chip: Chip) -> tuple[str, ...]:
    """The backends of matmuls that are written for a chip, besides XLA's.

    Example:
      >>> from jaxfp8.kernels._dispatch import chip_named
      >>> [kernels_of(chip_named(name)) for name in ("l4", "h200", "b200")]
      [(), ('mosaic',), ('cudnn',)]
    """
    if chip.is_hopper:
        return ("mosaic",)
    return ("cudnn",) if chip.block_scaled_matmul else ()


def kernels_for(sides: Sides, chip: Chip) -> tuple[str, ...]:
    """The kernels of `kernels_of` that are chosen without timings.

    They are for tiles, which XLA multiplies in bfloat16. If a kernel cannot do a case, it raises an
    error when it is called.

    Example:
      >>> import jaxfp8 as fp8
      >>> from jaxfp8.kernels._dispatch import chip_named
      >>> recipes, h200 = (fp8.recipes.blockwise(), fp8.recipes.rowwise()), chip_named("h200")
      >>> [kernels_for(sides_of(recipe.fprop), h200) for recipe in recipes]
      [('mosaic',), ()]
    """
    if not all(side.in_fp8 and side.granularity.in_tiles for side in sides):
        return ()
    # Blackwell's tensor cores read scales that are powers of two, one for each 32 values.
    fits = all(side.exact and side.granularity.along(2)[1] % _TILE == 0 for side in sides)
    return tuple(name for name in kernels_of(chip) if fits or name != "cudnn")


def route_of(sides: Sides, backend: str, chip: Chip, size: tuple[int, int, int]) -> Route:
    """How a backend computes a matmul on a chip.

    Args:
      sides: both operands.
      backend: name of the backend: "xla", "mosaic" or "cudnn".
      chip: the chip that the matmul runs on.
      size: (M, K, N) of the matmul.

    Example:
      >>> import jaxfp8 as fp8
      >>> from jaxfp8.kernels._dispatch import chip_named
      >>> sides, h200 = sides_of(fp8.recipes.blockwise().fprop), chip_named("h200")
      >>> [route_of(sides, name, h200, (512, 512, 512)).in_fp8 for name in ("xla", "mosaic")]
      [False, True]
    """
    tiles = [side.granularity.in_tiles for side in sides]
    if not all(side.in_fp8 for side in sides):
        return Route.DEQUANTIZED if any(side.in_fp8 for side in sides) else Route.PLAIN
    if backend == "mosaic":
        return Route.PALLAS
    if any(tiles):
        if backend == "cudnn":
            return Route.BLOCK_SCALED
        return Route.FOLDED if all(side.exact for side in sides) else Route.TILE_BY_TILE
    # XLA makes no FP8 call for a matmul with one row or one column.
    in_fp8 = chip.fp8_matmul and 1 not in (size[0], size[2])
    if any(side.granularity.in_rows for side in sides):
        return Route.FP8_ROWS if in_fp8 else Route.DEQUANTIZED_ROWS
    return Route.FP8 if in_fp8 else Route.DEQUANTIZED


def matmul_cost(
    sides: Sides,
    backend: str,
    chip: Chip,
    peak: Peak,
    size: tuple[int, int, int],
    tile: int | None,
    *,
    by_triton: bool = True,
) -> Cost:
    """The cost of a matmul by a backend.

    Args:
      sides: both operands.
      backend: name of the backend.
      chip: the chip that the matmul runs on.
      peak: data-sheet figures of the chip.
      size: (M, K, N) of the matmul.
      tile: size of a tile along K, for operands in tiles.
      by_triton: whether XLA may multiply bfloat16 by Triton.
    """
    route, (lhs, rhs) = route_of(sides, backend, chip, size), sides
    square, in_bytes = rhs.granularity.is_square, lhs.in_bytes and rhs.in_bytes
    return matmul(
        peak, route, *size, tile=tile, square=square, in_bytes=in_bytes, by_triton=by_triton
    )
