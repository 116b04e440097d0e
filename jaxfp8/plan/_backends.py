"""Which backends are tried for each matmul and each cast of a training step.

A matmul first tries a kernel that is made for the chip if it is estimated to be faster than XLA's
program. A cast of tiles first tries the kernel, without an estimate. The choice depends on static
values only, so every process makes the same choice.

Letters: a layer (M, K, N) computes y [M, N] = x [M, K] @ w [K, N]. g [M, N] is the gradient of y.
"""

import functools
import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxfp8._geometry import OPERANDS, TrainingGeometry
from jaxfp8._typing import DType, Matmul, Tensor
from jaxfp8.kernels._dispatch import Chip, Route, chip_named, kernels_of
from jaxfp8.kernels.cast._api import BACKENDS as CASTS
from jaxfp8.kernels.grouped_matmul import _api as grouped_matmul
from jaxfp8.kernels.scaled_matmul._api import BACKENDS
from jaxfp8.kernels.scaled_matmul._call import MatmulCall
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.plan._costs import (
    MATMULS,
    PEAKS,
    Shape,
    Sides,
    cast_cost,
    has_known_cost,
    matmul_cost,
    route_of,
    sides_of,
)
from jaxfp8.recipes._recipe import Operands, Recipe

XLA = ("xla",)


class Backends(NamedTuple):
    """Names of backends for each matmul and for the casts of each tensor, in the order of trial."""

    fprop: tuple[str, ...] = XLA
    dgrad: tuple[str, ...] = XLA
    wgrad: tuple[str, ...] = XLA
    x: tuple[str, ...] = XLA
    w: tuple[str, ...] = XLA
    g: tuple[str, ...] = XLA

    def call(
        self, name: Matmul, geometry: TrainingGeometry, out_dtype: DType, *,
        fast_accumulation: bool, out_sharding: Any = None,
    ) -> MatmulCall:  # fmt: skip
        """The arguments of one matmul. `fast_accumulation` is for fprop only."""
        lhs, rhs = (CASTS[getattr(self, tensor)[0]] for tensor in OPERANDS[name])
        return MatmulCall(
            geometry=getattr(geometry, name),
            out_dtype=jnp.dtype(out_dtype),
            fast_accumulation=fast_accumulation and name == "fprop",
            out_sharding=out_sharding,
            written_transposed=(lhs.writes_transposed, rhs.writes_transposed),
        )


def check_shape(shape: object) -> Shape:
    """Raise ValueError unless it is three positive integers."""
    if not (
        isinstance(shape, tuple)
        and len(shape) == 3
        and all(type(size) is int and size > 0 for size in shape)
    ):
        raise ValueError(
            f"shape={shape!r} must be three positive integers (M, K, N): tokens, features in and "
            "features out on one device. Write for instance shape=(8192, 4096, 4096)."
        )
    return shape


def matmul_sizes(shape: Shape) -> dict[Matmul, Shape]:
    """The sizes (M, K, N) of each of the three matmuls of a layer (M, K, N)."""
    m, k, n = shape
    return {"fprop": (m, k, n), "dgrad": (m, n, k), "wgrad": (k, m, n)}


def value_counts(shape: Shape) -> dict[Tensor, int]:
    """The number of values of x, w and g."""
    m, k, n = shape
    return {"x": m * k, "w": k * n, "g": m * n}


def _kernels_for(sides: Sides, chip: Chip) -> tuple[str, ...]:
    """The kernels for a chip. They are for tiles, which XLA multiplies in bfloat16."""
    if not all(side.in_fp8 and side.granularity.in_tiles for side in sides):
        return ()
    # Blackwell's tensor cores read scales that are powers of two, one for each 32 values along K.
    fits = all(side.exact and side.granularity.along(2)[1] % 32 == 0 for side in sides)
    kernels = kernels_of(chip, BACKENDS)
    return tuple(n for n in kernels if fits or BACKENDS[n].route is not Route.BLOCK_SCALED)


def matmul_seconds(sides: Sides, chip: str | None, size: Shape) -> dict[str, float]:
    """Estimated seconds of a matmul, for each backend. Empty for a chip without figures."""
    if chip not in PEAKS or not _known(size):
        return {}
    peak, described = PEAKS[chip], chip_named(chip)
    return {
        name: matmul_cost(peak, route_of(sides, name, described, size), size, sides).seconds
        for name in (*_kernels_for(sides, described), "xla")
    }


def faster_than_xla(seconds: Mapping[str, float]) -> tuple[str, ...]:
    """Names of backends that are estimated to be faster than XLA's, fastest first, then XLA's."""
    faster = {name: s for name, s in seconds.items() if name != "xla" and s < seconds["xla"]}
    return (*(name for name, _ in sorted(faster.items(), key=operator.itemgetter(1))), "xla")


def casting_backends(
    chip: str | None, granularities: Iterable[AbstractGranularity], *sizes: int
) -> tuple[str, ...]:
    """Names of backends of the casts of one tensor, best first."""
    # Kernels are for tiles, and read the tensor once. XLA reads it twice or more. It is estimated
    # to be slower at every size, and was slower on an H200, by 2 to 12 times. With other scales XLA
    # fuses a cast with the operation that makes the tensor.
    tiles = [granularity.in_tiles for granularity in granularities]
    if chip not in PEAKS or not tiles or not all(tiles) or not _known(sizes):
        return XLA
    return (*(name for name in kernels_of(chip_named(chip), CASTS) if CASTS[name].estimated), *XLA)


def _granularities(recipe: Recipe, tensor: Tensor) -> list[AbstractGranularity]:
    """Those of the FP8 copies of a tensor. Empty if the cost of a quantizer is not known."""
    quantizers = [quantizer for _, quantizer in recipe.uses(tensor)]
    known = all(map(has_known_cost, quantizers))
    return [q.granularity for q in quantizers if q.value_format is not None and known]


def cast_seconds(
    recipe: Recipe, tensor: Tensor, chip: str | None, shape: Shape, routes: Mapping[Matmul, Route]
) -> dict[str, float]:
    """Estimated seconds of the casts of a tensor, for each backend. Empty if unknown."""
    granularities = _granularities(recipe, tensor)
    if chip not in PEAKS or not granularities:
        return {}
    of_tensor = recipe, tensor, value_counts(shape)[tensor], routes, chip_named(chip)
    names = casting_backends(chip, granularities)
    return {name: cast_cost(name, *of_tensor).seconds for name in names}


# Every matmul asks at every trace. A model has many layers, and few recipes and shapes.
@functools.lru_cache(maxsize=4096)
def backends_for(
    chip: str | None, casts: str | None, matmuls: str | None, recipe: Recipe, shape: Shape
) -> Backends:
    """The backends of a layer (M, K, N). The user may name that of all `casts` or `matmuls`."""
    chosen: dict[str, tuple[str, ...]] = {}
    for name, size in matmul_sizes(shape).items():
        seconds = matmul_seconds(sides_of(getattr(recipe, name)), chip, size)
        chosen[name] = faster_than_xla(seconds) if matmuls is None else (matmuls,)
    for tensor in value_counts(shape):
        chosen[tensor] = casting_backends(chip, _granularities(recipe, tensor), *shape)
        if casts is not None:
            chosen[tensor] = (casts,)
    return Backends(**chosen)


def _known(shape: tuple[int, ...]) -> bool:
    # An exported program may have symbolic sizes.
    return all(isinstance(size, int) for size in shape)


# Grouped matmuls: rows of a tile, and backends.
#
# Letters: T rows (tokens) in E groups (experts); a group [T_e, K] @ [K, N]; P rows of a tile.

SMALLEST, _LARGEST = 16, 1024  # rows of a tile
_XLA = Backends()


def tile_rows(tokens: int, experts: int, side: int | None, backends: Backends = _XLA) -> int:
    """P, the rows of a tile: about a quarter of a group of average size, in tiles of values.

    More rows read matrices less often. Fewer rows are padded less. Kernels may need whole tiles of
    more rows (`Backend.rows`), or tiles of one row (`Backend.in_place`). A grouped kernel takes no
    more than it needs, because it keeps matrices in L2. `side` is the number of rows that all tiles
    of values divide (`Recipe.whole_tiles`); None without tiles.
    """
    if any(_is_in_place(by[0]) for by in (backends.fprop, backends.dgrad, backends.wgrad)):
        return 1
    casts = (*backends.x, *backends.w, *backends.g)
    matmuls = {*backends.fprop, *backends.dgrad, *backends.wgrad} & grouped_matmul.BACKENDS.keys()
    tile = math.lcm(SMALLEST if side is None else side, *(CASTS[name].rows for name in casts))
    if any(grouped_matmul.BACKENDS[name].rows > 1 for name in matmuls):
        return math.lcm(tile, *(grouped_matmul.BACKENDS[name].rows for name in matmuls))
    while 2 * tile <= min(tokens // (4 * experts), _LARGEST):
        tile *= 2
    return tile


def rows_wasted(tile: int, backends: Backends) -> int:
    """How many rows a matmul multiplies for each group beyond its own, on average.

    It is half a tile. If rows are read where they are, the blocks at both ends of a group hold rows
    of others.
    """
    return tile // 2 if tile > 1 else grouped_matmul.BACKENDS[backends.fprop[0]].rows


@functools.lru_cache(maxsize=4096)
def grouped_backends(
    chip: str | None, casts: str | None, matmuls: str | None, recipe: Recipe, shape: Shape,
    groups: int,
) -> Backends:  # fmt: skip
    """The backends of a grouped matmul of shape (T, K, N), as `backends_for`.

    If a kernel for all groups is written for the chip, it multiplies every FP8 matmul that it
    takes: XLA's loop reads the matrix of a group once for each of its tiles. Otherwise XLA loops
    over tiles, and estimates choose what multiplies one.
    """
    tokens, k, n = shape
    rows = tile_rows(tokens, groups, recipe.whole_tiles) if tokens and groups else 1
    found = backends_for(chip, casts, matmuls, recipe, (rows, k, n))
    if chip is None or matmuls is not None:
        return found
    kernels = {name: _grouped_kernels(getattr(recipe, name), chip_named(chip)) for name in MATMULS}
    in_place = all(any(map(_is_in_place, names)) for names in kernels.values())
    chosen = {}
    for name in MATMULS:
        of_groups = [by for by in kernels[name] if in_place or not _is_in_place(by)]
        by_tile = (by for by in getattr(found, name) if by in grouped_matmul.BACKENDS)
        chosen[name] = (*of_groups, *XLA) if of_groups else tuple(by_tile)
    return found._replace(**chosen)


def _is_in_place(name: str) -> bool:
    return name in grouped_matmul.BACKENDS and grouped_matmul.BACKENDS[name].in_place


def _grouped_kernels(operands: Operands, chip: Chip) -> tuple[str, ...]:
    """The kernels for a chip that multiply all groups, in the order of their table."""
    if not operands.in_fp8:
        return ()
    rows = any(side.granularity.in_rows for side in (operands.lhs, operands.rhs))
    scales = "tiles" if operands.in_tiles else "rows" if rows else "tensors"
    kernels = kernels_of(chip, grouped_matmul.BACKENDS)
    return tuple(name for name in kernels if scales in grouped_matmul.BACKENDS[name].takes)
