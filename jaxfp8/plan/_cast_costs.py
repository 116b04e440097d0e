"""What a cast costs, and what XLA pads.

Letters: M tokens, K features in, N features out; a tensor is x [M, K], w [K, N] or g [M, N].
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from jaxfp8._geometry import TrainingGeometry
from jaxfp8._typing import Matmul, Tensor
from jaxfp8.kernels._dispatch import Chip, Route
from jaxfp8.kernels.cast._api import BACKENDS as CASTS
from jaxfp8.numerics._amax import rows_read_together
from jaxfp8.plan._costs import BOX, WHOLE_TILE, Cost, padded_size, stream_cost
from jaxfp8.plan._peaks import Peak
from jaxfp8.quantizers._base import AbstractQuantizer
from jaxfp8.quantizers._kinds import Current, Delayed, Identity, Static
from jaxfp8.recipes._recipe import Recipe, plan_casts


def _turns(chip: Chip) -> bool:
    """Whether XLA transposes FP8 operands whose contracted axis is not the last.

    It does so on Ada and Hopper. There cuBLASLt has FP8 matmuls in the "TN" layout only (cuBLAS
    documentation, `cublasLtMatmul`).
    """
    return chip.compute_capability is not None and (8, 9) <= chip.compute_capability < (10, 0)


# The cost of padding the FP8 operands of a matmul.
#
# Axes of cuBLASLt's FP8 matmuls are multiples of 16. XLA pads in two steps. The first one, to
# multiples of 8, comes before fusion is planned, and becomes a part of the cast. The second one, to
# multiples of 16, comes with the FP8 call. On Ada and Hopper it stays apart from a cast that also
# transposes.
#
# Hopper's Pallas matmul reads whole tiles of 128 along the contracted axis, and rows in boxes of 8.


def _padding(
    peak: Peak, chip: Chip, sides: tuple[int, int], layouts: set[bool], *, first: bool
) -> Cost:
    """The cost of padding the FP8 copies of a matrix with these sides.

    `layouts` are those in which matmuls read it; True stands for transposed. `first` says whether
    XLA writes FP8 to memory before another kernel transposes it.
    """
    rows, columns = sides
    before, after = rows * columns, padded_size(rows) * padded_size(columns)
    if before == after:
        return Cost()
    if not _turns(chip):
        return stream_cost(peak, before + after) if first else Cost()
    if len(layouts) == 1 and not first:
        # A copy with scales of its own, those of rows or columns. One kernel casts and pads it, or
        # casts and transposes it. Then another kernel pads it.
        return stream_cost(peak, before + after) if True in layouts else Cost()
    if any(padded_size(size, 8) != padded_size(size) for size in sides):
        cost = stream_cost(peak, (before + after) * len(layouts), kernels=len(layouts))
        if True in layouts and not first and any(size % 8 for size in sides):
            # The cast pads neither layout. So it writes one, which another kernel transposes.
            cost += stream_cost(peak, before)
        return cost
    # The kernel that transposes FP8 also writes the other layout, padded.
    return stream_cost(peak, after, kernels=0) if first and True in layouts else Cost()


def _padding_for_hopper(
    peak: Peak, sides: tuple[int, int], layouts: set[bool], *, by_kernel: bool
) -> Cost:
    """The cost of padding the FP8 copies of a matrix for Hopper's Pallas matmul.

    `layouts` are as in `_padding`. `by_kernel` says whether a kernel cast the matrix and wrote each
    layout. Otherwise XLA cast it.
    """
    rows, columns = sides
    before, cost = rows * columns, Cost()
    for transposed in layouts:
        kept, contracted = (columns, rows) if transposed else (rows, columns)
        after = padded_size(kept, BOX) * padded_size(contracted, WHOLE_TILE)
        if after == before:
            continue
        # XLA pads in the kernel that transposes. If nothing is transposed, it pads in the cast.
        fused = not by_kernel and (transposed or len(layouts) == 1)
        cost += stream_cost(peak, after - before if fused else after + before, kernels=not fused)
    return cost


# What the casts of a training step cost: amaxes, casts and transpositions of each tensor.

MATRICES = TrainingGeometry.of((((1,), (0,)), ((), ())), 2, 2)
"""The axes of y [M, N] = x [M, K] @ w [K, N]."""
# Bytes for each tile and direction. The amax is written and read, 2 + 2. With float32 scales the
# multiplier is, 4 + 4. So it is with E8M0 scales, unless a matmul in bfloat16 reads the copy. Then
# three steps to the multiplier are, 8 + 8.
_CELL = {False: 12, True: 20}
# Bytes for each tile of a copy that is widened to bfloat16. One kernel converts its scale to
# bfloat16, and another reads that scale.
_WIDENED_CELL = 8
# XLA fuses less if a tensor has fewer values. For an H200 the limit is between 6.3 and 7.3 million
# if it transposes in the cast, and between 8.4 and 15 million if it writes magnitudes.
_SMALL = 7e6
# A kernel whose cost is not known (`Backend.estimated`) is estimated like this one.
_LIKE = "mosaic"
# Matmuls of cuBLASLt, whose operands XLA pads.
_PADDED = (Route.FP8, Route.FP8_ROWS)


class Casts(NamedTuple):
    """The casts of one tensor, and the routes of all matmuls that read it."""

    recipe: Recipe
    tensor: Tensor
    values: int
    rows: int
    routes: Mapping[Matmul, Route]
    chip: Chip
    peak: Peak


def cast_cost(backend: str, casts: Casts) -> Cost:
    """The cost of the amaxes, casts and transpositions of one tensor.

    ValueError if a quantizer is not one of `fp8.quantizers`.
    """
    for name, quantizer in casts.recipe.uses(casts.tensor):
        if not has_known_cost(quantizer):
            raise ValueError(
                f"{name} quantizes {casts.tensor} by {quantizer!r}. The cost of its casts is not "
                "known. Use quantizers of fp8.quantizers."
            )
    return _by_xla(casts) if backend == "xla" else _by_kernel(casts, backend)


def has_known_cost(quantizer: AbstractQuantizer) -> bool:
    """Whether the casts of a quantizer can be estimated: it is one of `fp8.quantizers`."""
    return isinstance(quantizer, Current | Delayed | Static | Identity)


def _by_kernel(casts: Casts, backend: str) -> Cost:
    """The cost of a kernel that reads the tensor once and writes all copies.

    The kernel writes each copy in the layout that its matmuls read, so nothing is transposed later.
    """
    recipe, tensor, values, rows, routes, chip, peak = casts
    cost = Cost()
    by_xla = frozenset(name for name, route in routes.items() if not route.by_kernel)
    like = backend if CASTS[backend].estimated else _LIKE
    for planned in plan_casts(recipe, MATRICES, tensor, (like,), by_xla=by_xla):
        if planned.cast is None:
            continue
        granularities = planned.cast.granularities
        in_tiles = planned.quantizer.granularity.in_tiles
        if isinstance(planned.quantizer, Current) and not in_tiles:
            cost += _amaxes(peak, values, rows, len({*granularities}))
        # The number of scales of each copy. Tensors and rows have too few scales to count.
        scales = [values // math.prod(g.along(2)) if in_tiles else 0 for g in granularities]
        size = 4 if planned.cast.rule.scale_format is None else 1
        # The tensor is read as bfloat16, 2 bytes a value. Each copy is written, 1 byte a value.
        moved = (2 + len(granularities)) * values + size * sum(scales)
        cost += stream_cost(peak, moved, by_pallas=True)
        for readers, cells in zip(planned.readers, scales, strict=True):
            if any(routes[name] in _PADDED for name in readers):
                cost += _padding(peak, chip, (rows, values // rows), {False}, first=True)
            layouts = {MATRICES.axes(name, tensor).is_transposed for name in readers}
            if any(routes[name] is Route.HOPPER_PALLAS for name in readers):
                cost += _padding_for_hopper(peak, (rows, values // rows), layouts, by_kernel=True)
            widened = sum(not routes[name].reads_fp8 for name in readers)
            if widened:
                # The copy is read once, 1 byte a value. It is written as bfloat16 (2 bytes) for
                # each of its readers, or with tiles once for both.
                both = 1 if in_tiles else widened
                cost += stream_cost(peak, (1 + 2 * both) * values + _WIDENED_CELL * cells)
    return cost


def _by_xla(casts: Casts) -> Cost:
    recipe, tensor, values, rows, routes, chip, peak = casts
    copies = copies_of(recipe, tensor)
    if not copies:
        return Cost()
    cost, written, sides = Cost(), 0, (rows, values // rows)
    # For each amax, whether matmuls in bfloat16 read a copy with E8M0 scales.
    found = {
        (q.granularity, direction): q.rule.scale_format is not None
        and not all(routes[name].reads_fp8 for name in readers)
        for (q, direction), readers in copies.items()
        if isinstance(q, Current)
    }
    in_tiles = any(granularity.in_tiles for granularity, _ in found)
    if len({quantizer for quantizer, _ in copies}) == 1 and not in_tiles:
        cost += _amaxes(peak, values, rows, len(found))
        found = {}
    for (granularity, _), converted in found.items():
        tiles = granularity.in_tiles
        cells = values / math.prod(granularity.along(2)) if tiles else 0
        # A second, small kernel ends the reduction and makes the scale.
        moved = 2 * values + _CELL[converted] * cells
        cost += stream_cost(peak, moved, kernels=2, in_tiles=tiles)
    if len(found) == 2 and not in_tiles and values < _SMALL:
        cost += stream_cost(peak, 2 * values, kernels=0)  # one amax writes magnitudes for the other
    for (quantizer, _), readers in copies.items():
        # The layouts in which matmuls read FP8: False for that of the tensor, True for transposed.
        layouts = {
            MATRICES.axes(name, tensor).is_transposed and wants_contracted_last(routes[name], chip)
            for name in readers
            if routes[name].reads_fp8
        }
        transposed = True in layouts
        widened = [name for name in readers if not routes[name].reads_fp8]
        # Whether XLA writes FP8 to memory before another kernel transposes or widens it. If not,
        # the cast itself writes each layout.
        first = isinstance(quantizer, Delayed) or (layouts and quantizer.granularity.in_tiles)
        written += 1 if first else len(layouts)
        if first and transposed:  # FP8 is read and written once more
            cost += stream_cost(peak, 2 * values)
        if any(routes[name] in _PADDED for name in readers):
            cost += _padding(peak, chip, sides, layouts, first=bool(first))
        if any(routes[name] is Route.HOPPER_PALLAS for name in readers):
            cost += _padding_for_hopper(peak, sides, layouts, by_kernel=False)
        if quantizer.granularity.in_tiles:
            widened = widened[:1]  # tiles are widened once for both matmuls
        if isinstance(quantizer, Delayed) and widened:
            cost += stream_cost(peak, (1 + 2 * len(widened)) * values)
        else:
            written += 2 * len(widened)
    for_hopper = any(routes[name] is Route.HOPPER_PALLAS for name, _ in recipe.uses(tensor))
    if len(copies) == 2 and in_tiles and for_hopper and sides[1] % WHOLE_TILE:
        # The copy that is padded along its tiles has a kernel of its own, which reads the tensor.
        cost += stream_cost(peak, 2 * values, in_tiles=True)
    if len(copies) == 2 and not in_tiles and _turns(chip):
        cost += stream_cost(peak, 2 * values * _more_passes(sides), kernels=_more_passes(sides))
    return cost + stream_cost(peak, (2 + written) * values, in_tiles=in_tiles)


def copies_of(
    recipe: Recipe, tensor: Tensor
) -> dict[tuple[AbstractQuantizer, Matmul | None], list[Matmul]]:
    """The FP8 copies of a tensor, each with the matmuls that read it.

    Matmuls read the same copy if their quantizers and the cells of their scales are equal.
    """
    copies: dict[tuple[AbstractQuantizer, Matmul | None], list[Matmul]] = {}
    for name, quantizer in recipe.uses(tensor):
        if quantizer.value_format is not None:
            direction = name if quantizer.granularity.is_directed else None
            copies.setdefault((quantizer, direction), []).append(name)
    return copies


def _amaxes(peak: Peak, values: int, rows: int, granularities: int) -> Cost:
    """The cost of amaxes of the tensor, or of its rows, its columns or both."""
    together = rows_read_together(rows) if granularities == 2 else 0
    if together:  # the largest values of each group of rows are written, and read once more
        return stream_cost(peak, 2 * values + 2 * 2 * values / together, kernels=3)
    # XLA finds the amaxes of each granularity separately, with two kernels.
    return stream_cost(peak, 2 * values * granularities, kernels=2 * granularities)


def _more_passes(sides: tuple[int, int]) -> int:
    """The passes over a tensor besides the first, if its copies have different scales.

    One of the copies is transposed. A pass moves 2 bytes a value. It reads bfloat16, or it writes
    and reads FP8.
    """
    is_padded = any(padded_size(size) != size for size in sides)  # one kernel for each copy
    # XLA transposes small tensors in a kernel after the cast.
    is_small = math.prod(sides) < _SMALL and all(size % 8 == 0 for size in sides)
    return is_padded + is_small


def wants_contracted_last(route: Route, chip: Chip) -> bool:
    """Whether the route wants the contracted axis last."""
    return route in (Route.BLOCK_SCALED, Route.HOPPER_PALLAS) or (route.in_fp8 and _turns(chip))
