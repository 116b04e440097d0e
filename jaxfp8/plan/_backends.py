"""Which backends are tried for each matmul and each cast of a training step.

A kernel that is made for the chip is tried first if it is estimated to be faster than XLA's
program. The choice depends on static values only, so every process makes the same choice.

Letters: a layer (M, K, N) computes y [M, N] = x [M, K] @ w [K, N]. g [M, N] is the gradient of y.
"""

import functools
import math
import operator
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxfp8._typing import Matmul, Tensor
from jaxfp8.kernels._dispatch import Chip, Route, chip_named, kernels_of
from jaxfp8.kernels.cast._api import BACKENDS as CASTS
from jaxfp8.kernels.grouped_matmul import _api as grouped_matmul
from jaxfp8.kernels.scaled_matmul._api import BACKENDS
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.plan._cast_costs import Casts, cast_cost, has_known_cost
from jaxfp8.plan._costs import Shape, Sides, matmul_cost, route_of, sides_of, stream_cost
from jaxfp8.plan._peaks import PEAKS
from jaxfp8.recipes._recipe import Recipe

XLA = ("xla",)


class Backends(NamedTuple):
    """Names of backends for each matmul and for the casts of each tensor, in the order of trial."""

    fprop: tuple[str, ...] = XLA
    dgrad: tuple[str, ...] = XLA
    wgrad: tuple[str, ...] = XLA
    x: tuple[str, ...] = XLA
    w: tuple[str, ...] = XLA
    g: tuple[str, ...] = XLA


def matmul_sizes(shape: Shape) -> dict[Matmul, Shape]:
    """The sizes (M, K, N) of each of the three matmuls of a layer (M, K, N)."""
    m, k, n = shape
    return {"fprop": (m, k, n), "dgrad": (m, n, k), "wgrad": (k, m, n)}


def value_counts(shape: Shape) -> dict[Tensor, int]:
    """The number of values of x, w and g."""
    m, k, n = shape
    return {"x": m * k, "w": k * n, "g": m * n}


def row_counts(shape: Shape) -> dict[Tensor, int]:
    """The number of rows of x, w and g."""
    m, k, _ = shape
    return {"x": m, "w": k, "g": m}


_OF_BLACKWELL = 32
"""Values along the contracted axis that share a scale on Blackwell."""


def _kernels_for(sides: Sides, chip: Chip) -> tuple[str, ...]:
    """The kernels that are written for a chip, and chosen without timings.

    They are for tiles, which XLA multiplies in bfloat16. If a kernel cannot do a case, it raises an
    error when it is called.
    """
    if not all(side.in_fp8 and side.granularity.in_tiles for side in sides):
        return ()
    # Blackwell's tensor cores read scales that are powers of two, one for each 32 values.
    fits = all(side.exact and side.granularity.along(2)[1] % _OF_BLACKWELL == 0 for side in sides)
    kernels = kernels_of(chip, BACKENDS)
    return tuple(n for n in kernels if fits or BACKENDS[n].route is not Route.BLOCK_SCALED)


def matmul_seconds(sides: Sides, chip: str, size: Shape, tile: int | None) -> dict[str, float]:
    """Estimated seconds of a matmul, for each backend of a chip.

    The result is empty if the chip has no figures, or if a size is symbolic.
    """
    described = chip_named(chip)
    if chip not in PEAKS or not _known(size):
        return {}
    return {
        name: matmul_cost(sides, name, described, PEAKS[chip], size, tile).seconds
        for name in (*_kernels_for(sides, described), "xla")
    }


def cast_seconds(
    recipe: Recipe, tensor: Tensor, chip: str, shape: Shape, routes: Mapping[Matmul, Route]
) -> dict[str, float]:
    """Estimated seconds of the casts of a tensor, for each backend of a chip.

    The result is empty if nothing is cast, if a size is symbolic, or if the cost is not known.
    """
    quantizers = [quantizer for _, quantizer in recipe.uses(tensor)]
    casts = [q for q in quantizers if q.value_format is not None]
    if chip not in PEAKS or not _known(shape) or not casts:
        return {}
    if not all(map(has_known_cost, quantizers)):
        return {}
    described = chip_named(chip)
    values, rows = value_counts(shape)[tensor], row_counts(shape)[tensor]
    whole = Casts(recipe, tensor, values, rows, routes, described, PEAKS[chip])
    return {
        name: cast_cost(name, whole).seconds
        for name in _casting_backends(described, [q.granularity for q in casts])
    }


def copy_seconds(
    granularities: tuple[AbstractGranularity, ...], chip: str, values: int
) -> dict[str, float]:
    """Estimated seconds of a cast without a recipe, for each backend of a chip.

    The cost of the operations that read the copies is not counted.
    """
    if chip not in PEAKS or not _known((values,)):
        return {}
    peak, copies = PEAKS[chip], len(granularities)
    # XLA reads bfloat16 (2 bytes) once for each amax, and once more for the cast of all copies.
    # Each copy is written as 1 byte. The kernel finds amaxes in the pass in which it casts.
    by_xla = stream_cost(
        peak, (2 + 2 * copies + copies) * values, kernels=1 + copies, in_tiles=True
    )
    by_kernel = stream_cost(peak, (2 + copies) * values, by_pallas=True)
    return {
        name: (by_xla if name == "xla" else by_kernel).seconds
        for name in _casting_backends(chip_named(chip), granularities)
    }


def _casting_backends(chip: Chip, granularities: Iterable[AbstractGranularity]) -> tuple[str, ...]:
    """The backends of casts that are estimated for a chip.

    Kernels are for tiles. With scales of whole tensors and of rows, XLA fuses a cast
    with the operation that makes the tensor. So XLA casts.
    """
    if not all(granularity.in_tiles for granularity in granularities):
        return XLA
    return (*(name for name in kernels_of(chip, CASTS) if CASTS[name].estimated), *XLA)


def faster_than_xla(seconds: Mapping[str, float]) -> tuple[str, ...]:
    """Names of backends that are estimated to be faster than XLA's, fastest first, then XLA's."""
    faster = {name: s for name, s in seconds.items() if name != "xla" and s < seconds["xla"]}
    return (*(name for name, _ in sorted(faster.items(), key=operator.itemgetter(1))), "xla")


# Every matmul asks at every trace. A model has many layers, and few recipes and shapes.
@functools.lru_cache(maxsize=4096)
def backends_for(
    chip: str | None, casts: str | None, matmuls: str | None, recipe: Recipe, shape: Shape
) -> Backends:
    """The backends of a layer (M, K, N).

    `casts` and `matmuls` are names that the user gives; None: estimates choose. Without a chip
    XLA's backends run, for every chip.
    """
    chosen: dict[str, tuple[str, ...]] = {}
    routes: dict[Matmul, Route] = {}
    for name, size in matmul_sizes(shape).items():
        sides = sides_of(getattr(recipe, name))
        if matmuls is not None:
            chosen[name] = (matmuls,)
        elif chip is not None:
            chosen[name] = faster_than_xla(matmul_seconds(sides, chip, size, recipe.tile))
        if chip is not None:  # what a cast costs depends on the route of the matmuls that read it
            first = chosen[name][0]
            routes[name] = route_of(sides, first, chip_named(chip), size)
    for tensor in value_counts(shape):
        if casts is not None:
            chosen[tensor] = (casts,)
        elif chip is not None:
            chosen[tensor] = faster_than_xla(cast_seconds(recipe, tensor, chip, shape, routes))
    return Backends(**chosen)


def _known(shape: tuple[int, ...]) -> bool:
    """Whether all sizes are numbers. An exported program may have symbolic sizes."""
    return all(isinstance(size, int) for size in shape)


# Grouped matmuls: rows of a tile, and backends.
#
# Letters: T rows (tokens) in E groups (experts); a group [T_e, K] @ [K, N]; P rows of a tile.

SMALLEST, _LARGEST = 16, 1024  # rows of a tile
_XLA = Backends()


def tile_rows(tokens: int, experts: int, side: int | None, backends: Backends = _XLA) -> int:
    """P, the rows of a tile: about a quarter of a group of average size, in tiles of values.

    More rows read matrices less often. Fewer rows are padded less. Kernels may need whole tiles of
    more rows (`Backend.rows`). A grouped kernel takes no more than it needs, because it keeps
    matrices in L2. `side` is the number of rows that all tiles of values divide
    (`Recipe.whole_tiles`); None without tiles.
    """
    casts = (*backends.x, *backends.w, *backends.g)
    matmuls = {*backends.fprop, *backends.dgrad, *backends.wgrad} & grouped_matmul.BACKENDS.keys()
    tile = math.lcm(SMALLEST if side is None else side, *(CASTS[name].rows for name in casts))
    if any(grouped_matmul.BACKENDS[name].rows > 1 for name in matmuls):
        return math.lcm(tile, *(grouped_matmul.BACKENDS[name].rows for name in matmuls))
    while 2 * tile <= min(tokens // (4 * experts), _LARGEST):
        tile *= 2
    return tile


@functools.lru_cache(maxsize=4096)
def grouped_backends(
    chip: str | None, casts: str | None, matmuls: str | None, recipe: Recipe, shape: Shape,
    groups: int,
) -> Backends:  # fmt: skip
    """The backends of a grouped matmul of shape (T, K, N), as `backends_for`.

    If a kernel for all groups is written for the chip, it multiplies every FP8 matmul: XLA's
    program reads the matrix of a group once for each of its tiles. On other chips XLA loops over
    tiles, and estimates choose what multiplies one.
    """
    tokens, k, n = shape
    chosen: dict[str, tuple[str, ...]] = {}
    kernels = () if chip is None else kernels_of(chip_named(chip), grouped_matmul.BACKENDS)
    rows = tile_rows(tokens, groups, recipe.whole_tiles) if tokens and groups else 1
    for name, size in matmul_sizes((rows, k, n)).items():
        operands = getattr(recipe, name)
        if matmuls is not None:
            chosen[name] = (matmuls,)
        elif kernels and operands.in_fp8:
            chosen[name] = (*kernels, *XLA)
        elif chip is not None and not kernels:
            seconds = matmul_seconds(sides_of(operands), chip, size, recipe.tile)
            chosen[name] = faster_than_xla(
                {by: s for by, s in seconds.items() if by in grouped_matmul.BACKENDS}
            )
        else:
            chosen[name] = XLA
    by = chosen["fprop"][0] if chosen["fprop"][0] in kernels else None
    dense = backends_for(chip, casts, by, recipe, shape)
    return dense._replace(**chosen)
