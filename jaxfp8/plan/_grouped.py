"""Grouped matmuls: rows of a tile, backends, and costs.

Letters: T rows (tokens) in E groups (experts); a group [T_e, K] @ [K, N]; P rows of a tile.
"""

import functools
import math

from jaxfp8._typing import Matmul
from jaxfp8.kernels._dispatch import chip_named
from jaxfp8.plan._backends import XLA, Backends, backends_for, best, matmul_seconds, sizes_of
from jaxfp8.plan._costs import LAUNCH, Cost, stream
from jaxfp8.plan._peaks import PEAKS, Peak
from jaxfp8.plan._report import Shape
from jaxfp8.plan._routes import matmul_cost, sides_of
from jaxfp8.recipes._recipe import Recipe

_SMALLEST, _LARGEST = 16, 1024  # rows of a tile
_OF_PALLAS = 128  # rows of a tile of kernels in Pallas
_XLA = Backends()


def tile_rows(tokens: int, experts: int, side: int | None, backends: Backends = _XLA) -> int:
    """P, the rows of a tile: about a quarter of a group of average size, in tiles of values.

    More rows read matrices less often. Fewer rows are padded less. Kernels in Pallas need whole
    tiles of 128 rows. Hopper's matmul takes no more than that: it keeps matrices in L2.

    Args:
      tokens: T.
      experts: E.
      side: how many rows all tiles of values divide (`Recipe.whole_tiles`); None without tiles.
      backends: what casts and multiplies.

    Example:
      >>> tile_rows(65536, 8, 128), tile_rows(65536, 64, None), tile_rows(8, 8, 32)
      (1024, 256, 32)
    """
    by_pallas = any("mosaic" in names for names in backends)
    tile = math.lcm(_SMALLEST if side is None else side, _OF_PALLAS if by_pallas else 1)
    if "mosaic" in (*backends.fprop, *backends.dgrad, *backends.wgrad):
        return tile
    while 2 * tile <= min(tokens // (4 * experts), _LARGEST):
        tile *= 2
    return tile


@functools.lru_cache(maxsize=4096)
def grouped_backends(
    chip: str | None, casts: str | None, matmuls: str | None, recipe: Recipe, shape: Shape,
    groups: int,
) -> Backends:  # fmt: skip
    """The backends of a grouped matmul.

    On Hopper the kernel in Pallas multiplies every FP8 matmul: XLA's program reads the matrix of a
    group once for each of its tiles. Elsewhere XLA loops over tiles, and estimates choose what
    multiplies one.

    Args:
      chip: name of the chip that the program is for. None: XLA's backends, for every chip.
      casts: name of the backend of all casts. None: estimates choose.
      matmuls: name of the backend of all matmuls. None: the choice above.
      recipe: which quantizer for which operand.
      shape: (T, K, N).
      groups: E.

    Example:
      >>> import jaxfp8 as fp8
      >>> shape, recipe = (65536, 4096, 2048), fp8.recipes.current()
      >>> grouped_backends("h200", None, None, recipe, shape, 8).fprop
      ('mosaic', 'xla')
      >>> grouped_backends("b200", None, None, recipe, shape, 8).fprop
      ('xla',)
    """
    tokens, k, n = shape
    chosen: dict[str, tuple[str, ...]] = {}
    hopper = chip is not None and chip_named(chip).is_hopper
    rows = tile_rows(tokens, groups, recipe.whole_tiles) if tokens and groups else 1
    for name, size in sizes_of((rows, k, n)).items():
        operands = getattr(recipe, name)
        if matmuls is not None:
            chosen[name] = (matmuls,)
        elif hopper and operands.in_fp8:
            chosen[name] = ("mosaic", "xla")
        elif chip is not None and not hopper:
            chosen[name] = best(matmul_seconds(sides_of(operands), chip, size, recipe.tile))
        else:
            chosen[name] = XLA
    by = "mosaic" if chosen["fprop"][0] == "mosaic" else None
    dense = backends_for(chip, casts, by if hopper else None, recipe, shape)
    return dense._replace(**chosen)


def cost_of_groups(of_group: Cost, groups: int) -> Cost:
    """The cost of one kernel for all groups, from that of a group of average size.

    Example:
      >>> cost_of_groups(Cost(bytes=2, flops=8, seconds=3e-6), 4)
      Cost(bytes=8, flops=32, seconds=6e-06)
    """
    whole = of_group.times(groups)
    return Cost(whole.bytes, whole.flops, round(whole.seconds - (groups - 1) * LAUNCH, 15))


def loop_cost(
    recipe: Recipe, name: Matmul, backend: str, chip: str, shape: Shape, groups: int
) -> Cost:
    """The cost of XLA's loop over tiles for one of the three matmuls.

    A step takes the matrix of a group, multiplies a tile, and writes its rows. In wgrad it adds the
    product of a tile to a sum in float32, and writes the sum as it is then.

    Args:
      recipe: which quantizer for which operand.
      name: the matmul.
      backend: what multiplies a tile, "xla" or "cudnn".
      chip: name of the chip.
      shape: (T, K, N).
      groups: E.

    Example:
      >>> import jaxfp8 as fp8
      >>> of = fp8.recipes.blockwise(), "fprop", "xla", "h200"
      >>> few, many = (loop_cost(*of, (65536, 4096, 2048), groups) for groups in (8, 64))
      >>> few.bytes < many.bytes
      True
    """
    tokens, k, n = shape
    rows = tile_rows(tokens, groups, recipe.whole_tiles)  # without casts in Pallas
    steps = tokens // rows + groups
    peak: Peak = PEAKS[chip]
    size = sizes_of((rows, k, n))[name]
    one = matmul_cost(
        sides_of(getattr(recipe, name)), backend, chip_named(chip), peak, size, recipe.tile
    )
    if name == "wgrad":
        # The float32 product and sum are read, and the sum is written in float32 and in bfloat16.
        one += stream(peak, (4 + 4 + 4 + 2) * k * n, kernels=2)
    else:
        written = rows * (n if name == "fprop" else k)
        one += stream(peak, 2 * k * n + 4 * written, kernels=2)
    return one.times(steps)


def group_sizes_of(shape: Shape, groups: int, rows: int) -> Shape:
    """(M, K, N) of a group of average size, with half a tile of padding.

    With padding M is a multiple of 16, as tiles are, so no operand is padded again.

    Example:
      >>> group_sizes_of((4096, 512, 512), 8, 128)
      (576, 512, 512)
      >>> group_sizes_of((4000, 512, 512), 8, 128), group_sizes_of((4000, 512, 512), 8, 0)
      ((576, 512, 512), (500, 512, 512))
    """
    tokens, k, n = shape
    padded = -(-tokens // groups) + rows // 2
    return -(-padded // _SMALLEST) * _SMALLEST if rows else padded, k, n
