"""What a recipe costs on a chip: its three matmuls and its casts, read off its table.

The counts are those of programs that XLA compiles a layer to (jax 0.10.2 and 0.12, for H200, B200
and A100), a layer's forward and backward pass in one program;
`tests/deviceless/test_roofline_traffic.py` holds them against such programs.

Letters: M tokens, K features in, N features out, of y [M, N] = x [M, K] @ w [K, N]; T the side of a
  tile.
"""

import math

from jaxfp8._typing import Matmul, Tensor
from jaxfp8.kernels._platform import Chip
from jaxfp8.plan._costs import PEAKS, Cost, Peak, Route, estimable, gemm, matmul, stream, turns
from jaxfp8.plan._report import MATMULS, Part, Roofline, Shape
from jaxfp8.quantizers._base import AbstractQuantizer
from jaxfp8.quantizers._current import Current
from jaxfp8.quantizers._delayed import Delayed
from jaxfp8.quantizers._identity import Identity
from jaxfp8.quantizers._static import Static
from jaxfp8.recipes._operands import Operands
from jaxfp8.recipes._presets import check_recipe
from jaxfp8.recipes._recipe import Recipe

# Operands that are stored with another axis last than the one their matmul contracts.
_TRANSPOSED: frozenset[tuple[Matmul, Tensor]] = frozenset(
    {("fprop", "w"), ("wgrad", "x"), ("wgrad", "g")}
)
# Bytes for each tile and direction: its amax and its multiplier, written and read.
_CELL = 12
# Bytes for each value of a w that is turned and has scales of rows, beyond its amaxes and casts:
# XLA moves the transposition up through the cast, and so writes and reads masks of w (3 + 4 bytes
# to make them, 3 more in each of two casts that it parts).
_MASKS = 13


def roofline(shape: Shape, *, recipe: Recipe, chip: str) -> Roofline:
    """An estimate, not a measurement.

    How long a dense layer takes in a recipe and in bfloat16, forward and backward.

    A kernel takes `max(flops / peak, bytes / bandwidth)` and a launch; a step takes the sum of its
    kernels. Peak and bandwidth are those of data sheets, times what large kernels attain
    (`plan/_costs.py` has every figure with its source).

    Assumed:
      - x, w and g are bfloat16, and so are y, dx and dw. Whatever else uses an operand (a norm
        before, a sum after) is not fused with its cast. Both passes are compiled into one program,
        under `fp8.compiler_options(recipe, chip)`.
      - Casts by XLA, as it compiles them today. An amax reads a tensor once (delayed scaling: not
        at all, it rides along with the cast; static: there is none); scales of rows and of tiles
        along one axis take one for each direction. One kernel then casts the tensor in all
        directions.
      - Ada and Hopper multiply FP8 with the contracted axis last on both sides: w for fprop, x and
        g for wgrad are transposed, in the cast, or (delayed scaling) after it. Blackwell needs that
        of block-scaled matmuls only.
      - XLA quantizes tiles at 1 TB/s, as it was measured once, on a GB200. A kernel of one's own
        may be several times faster.
      - Random bits cost nothing. Stochastic rounding draws them in the cast, so its casts take
        longer than estimated. Nobody has timed by how much.
      - Matmuls take the route that the recipe gets today: with scales of rows the product is read
        and written once more; in tiles they run in bfloat16, unless recipe and chip are "b200";
        float32 scales of tiles in a loop. A chip without FP8 units multiplies in bfloat16. A matmul
        with one row or column is no FP8 call. Other sizes than multiples of 16 are padded.
      - Quantizer state is in its steady state. No communication, no remat; a GPU that keeps its
        clocks and does nothing else.

    Args:
      shape: (M, K, N) of y [M, N] = x [M, K] @ w [K, N] on one device: tokens, features in,
        features out.
      recipe: a Recipe, made of the quantizers of `fp8.quantizers`.
      chip: its name ("h200", "h100", "b200", "l4", "l40s", "a100"). An argument, never detected.

    Returns:
      A frozen dataclass: `speedup` (bf16 time / recipe time), and `fprop`, `dgrad`, `wgrad`,
      `casts`, `total`, each with `bf16` and `recipe`, which have `bytes`, `flops` and `seconds`,
      and with `how`. `print` shows it as a table.

    Raises:
      ValueError: for a shape that is not three positive integers; an unknown chip, one without
        figures (cpu, tpu, mi300x), or another GPU than the recipe is made for; a quantizer of a
        kind that is not known.
      TypeError: for a recipe that is none.

    Example:
      >>> import jaxfp8 as fp8
      >>> print(fp8.roofline((8192, 4096, 14336), recipe=fp8.recipes.delayed(), chip="h200"))
      [8192, 4096] @ [4096, 14336], delayed on h200: 1.76x of bf16's speed, estimated
               GFLOP   bf16 MB   bf16 us        MB        us  how
      fprop      962     419.4    1248.5     327.2     625.3  FP8
      dgrad      962     419.4    1248.5     243.3     625.3  FP8
      wgrad      962     419.4    1248.5     268.4     625.3  FP8
      casts        0       0.0       0.0    1048.6     249.4  x 5, w 5, g 5 bytes a value
      total     2886    1258.3    3745.5    1887.4    2125.2
      >>> fp8.roofline((8192, 1024, 1024), recipe=fp8.recipes.rowwise(), chip="h200").speedup < 1
      True

    References:
      Williams, Waterman, Patterson, Roofline, CACM 52 (2009).
      torchao, torchao/testing/training/roofline_utils.py.
      TransformerEngine, GEMM profiling: measured on an H200 NVL over a 5B model's layers, delayed
      1.69x and current 1.58x.
    """
    shape = _check_shape(shape)
    check_recipe(recipe)
    described = estimable(chip)
    if recipe.chip not in (None, chip):
        raise ValueError(
            f"chip={chip!r}, but recipe {recipe.name!r} is made for chip={recipe.chip!r}; make one "
            "for this chip, or without chip=."
        )
    m, k, n = shape
    sizes: dict[Matmul, Shape] = {"fprop": (m, k, n), "dgrad": (m, n, k), "wgrad": (k, m, n)}
    values: dict[Tensor, int] = {"x": m * k, "w": k * n, "g": m * n}
    peak = PEAKS[chip]
    routes = {
        name: _route(getattr(recipe, name), described, recipe, sizes[name]) for name in MATMULS
    }
    parts = {
        name: Part(
            bf16=gemm(peak, *sizes[name]),
            recipe=matmul(peak, routes[name], *sizes[name], tile=recipe.tile),
            how=routes[name].value,
        )
        for name in MATMULS
    }
    each = {
        tensor: _casts(tensor, values[tensor], recipe, routes, described, peak) for tensor in values
    }
    how = ", ".join(
        f"{tensor} {cost.bytes / values[tensor]:.3g}" for tensor, cost in each.items() if cost.bytes
    )
    casts = Part(
        bf16=Cost(),
        recipe=sum(each.values(), Cost()),
        how=f"{how} bytes a value" if how else "none",
    )
    return Roofline(shape=shape, recipe=recipe.name, chip=chip, casts=casts, **parts)


def _check_shape(shape: object) -> Shape:
    if not (
        isinstance(shape, tuple)
        and len(shape) == 3
        and all(type(size) is int and size > 0 for size in shape)
    ):
        raise ValueError(
            f"shape={shape!r} must be three positive integers (M, K, N): tokens, features in, "
            "features out of one device."
        )
    return shape


def _exact(quantizer: AbstractQuantizer) -> bool:
    """Whether its scales are known to be powers of two, so that a matmul of tiles may fold them."""
    return quantizer.rule.exact


def _route(operands: Operands, chip: Chip, recipe: Recipe, size: Shape) -> Route:
    """How the library computes a product of these operands on the chip."""
    sides = (operands.lhs, operands.rhs)
    if not operands.in_fp8:
        return Route.DEQUANTIZED if any(q.value_format is not None for q in sides) else Route.PLAIN
    if operands.in_tiles:
        if recipe.chip is not None:
            return Route.BLOCK_SCALED
        return Route.FOLDED if all(map(_exact, sides)) else Route.TILE_BY_TILE
    in_fp8 = chip.fp8_matmul and 1 not in (size[0], size[2])
    if any(q.granularity.in_rows for q in sides):
        return Route.FP8_ROWS if in_fp8 else Route.DEQUANTIZED_ROWS
    return Route.FP8 if in_fp8 else Route.DEQUANTIZED


def _casts(
    tensor: Tensor, values: int, recipe: Recipe, routes: dict[Matmul, Route], chip: Chip, peak: Peak
) -> Cost:
    """Amaxes, casts and transpositions of one tensor, for all matmuls that read it."""
    # Matmuls that read the same copy: equal quantizers, and equal scale cells.
    copies: dict[tuple[AbstractQuantizer, Matmul | None], list[Matmul]] = {}
    for name, quantizer in recipe.uses(tensor):
        if not isinstance(quantizer, Current | Delayed | Static | Identity):
            raise ValueError(
                f"{name} reads {tensor} by {quantizer!r}, of whose casts nothing is known; use "
                "quantizers of fp8.quantizers."
            )
        if quantizer.value_format is not None:
            direction = name if quantizer.granularity.is_directed else None
            copies.setdefault((quantizer, direction), []).append(name)
    if not copies:
        return Cost()
    cost, written, in_tiles = Cost(), 0, False
    for granularity, _ in {
        (q.granularity, direction): None for q, direction in copies if isinstance(q, Current)
    }:
        tiles = granularity.in_tiles
        cells = values / math.prod(granularity.along(2)) if tiles else 0
        # A second, small kernel ends the reduction and makes the scale.
        cost += stream(peak, 2 * values + _CELL * cells, kernels=2, in_tiles=tiles)
        in_tiles = in_tiles or tiles
    for (quantizer, _), readers in copies.items():
        # The layouts in which matmuls read FP8: as the tensor is (False), or transposed (True).
        layouts = {
            (name, tensor) in _TRANSPOSED and _wants_contracted_last(routes[name], chip)
            for name in readers
            if routes[name].reads_fp8
        }
        transposed, by_rows = True in layouts, quantizer.granularity.in_rows
        widened = [name for name in readers if not routes[name].reads_fp8]
        # FP8 that is written to memory before it is transposed or widened, not on the way to that.
        first = isinstance(quantizer, Delayed) or (layouts and quantizer.granularity.in_tiles)
        written += 1 if first else len(layouts)
        if first and transposed:
            cost += stream(peak, 2 * values)
        if quantizer.granularity.in_tiles:
            widened = widened[:1]  # folded once for both matmuls
        if isinstance(quantizer, Delayed) and widened:
            cost += stream(peak, (1 + 2 * len(widened)) * values)
        else:
            written += 2 * len(widened)
        if by_rows and tensor == "w" and transposed:
            cost += stream(peak, _MASKS * values, kernels=3)
    return cost + stream(peak, (2 + written) * values, in_tiles=in_tiles)


def _wants_contracted_last(route: Route, chip: Chip) -> bool:
    """Whether the route wants the contracted axis last."""
    return route is Route.BLOCK_SCALED or (route.in_fp8 and turns(chip))
