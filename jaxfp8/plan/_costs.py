"""What a matmul costs, and by which route a backend computes it.

A kernel takes max(operations / peak, bytes / bandwidth), plus the time of a launch. Of what this
project measured on an H200 (docs/when-fp8-pays.md), only the rates of tiles of 32 are used.
`_peaks.py` has the figures of chips. `route_of` chooses the route of a matmul. `_cast_costs.py` has
the cost of casts.

Letters: M, K, N are the sizes of one matmul [M, K] @ [K, N]. T is the size of a tile along K.
"""

import dataclasses
import math
from typing import NamedTuple, TypeAlias

from jaxfp8._quantized_tensor import QuantizedTensor
from jaxfp8._typing import Matmul
from jaxfp8.kernels._dispatch import Chip, Route
from jaxfp8.kernels.scaled_matmul._api import BACKENDS
from jaxfp8.numerics._formats import E8M0
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.plan._peaks import Peak
from jaxfp8.quantizers._base import AbstractQuantizer
from jaxfp8.recipes._recipe import Operands

Shape: TypeAlias = tuple[int, int, int]

MATMULS: tuple[Matmul, ...] = ("fprop", "dgrad", "wgrad")


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


# How long kernels take at best: what they attain, and the cost of a matmul by each route.

# The share of the peak that a matmul attains. torchao found it for large matmuls on an H100
# (torchao/testing/training/roofline_utils.py). Published cuBLAS figures are between 0.59 (FBGEMM,
# bf16, 8192^3) and 0.81. The same share holds for bf16 and FP8, so it hardly changes a ratio.
_ATTAINED_PEAK = 0.78
# The share of HBM's bandwidth that elementwise kernels attain on large arrays (torchao, the same
# file). The cast benchmarks of torchao attain 85 to 94 %.
_ATTAINED_BANDWIDTH = 0.92
# Another factor, for the Pallas kernels of this library. It is an assumption that was made before
# they were timed. An H200 measured 0.79 for fprop of tiles, and 0.53 to 0.58 for wgrad. A similar
# kernel in CUDA needs no such factor. DeepGEMM attains up to 1550 of 1979 TFLOP/s on an H800 (its
# README), which is 0.78.
_UNTIMED = 0.75
# Seconds that a kernel of one element takes on an H100 (torchao, the same file,
# KERNEL_LAUNCH_OVERHEAD_SEC).
LAUNCH = 2e-6
# Bytes/s at which XLA quantizes tiles. The only published figure is about 1 TB/s on a GB200, whose
# memory has 8 TB/s (marin-community/marin issue 7282, MX). So memory is not the limit. The figure
# is used for every chip as a rate, not as a share of bandwidth.
_XLA_TILE_RATE = 1e12
# Bytes for each E8M0 scale that XLA converts for a kernel that reads float32. 1 is read, and 4 are
# written.
_CONVERTED = 5
# What Hopper's Pallas matmul reaches with tiles of 32, as a share of bfloat16's rate, measured on
# an H200 (benchmarks/gpu/results/h200.json, 8192 cubed). Key: whether the tiles of the right
# operand are squares. Every sum of 32 products is scaled in float32. That keeps the float32 lanes
# busier than the tensor cores. (By the rates of both, 0.67 and 1.6 would be possible.)
_OF_BF16 = {False: 0.38, True: 0.69}
# Limits of the Pallas matmul for Hopper. It steps along K by 128. It copies boxes of 8 rows. It
# reads E8M0 scales of rhs as bytes if lhs has at most 128 rows.
WHOLE_TILE = 128
BOX = 8
_FEW_ROWS = 128
# cuBLASLt multiplies FP8 if all axes are multiples of 16 (cuBLAS documentation). XLA pads other
# axes and slices the result.
_ALIGNMENT = 16
_ALIGNMENT_OF_BF16 = 8


@dataclasses.dataclass(frozen=True)
class Cost:
    """The work of kernels, and the time that it takes at best.

    Attributes:
      bytes: bytes that are read from and written to device memory.
      flops: operations of matmuls. A multiplication and its addition are two.
      seconds: the estimated time.
    """

    bytes: int = 0
    flops: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.bytes + other.bytes, self.flops + other.flops, self.seconds + other.seconds
        )

    def times(self, number: float) -> "Cost":
        """The cost of the same work, done `number` times."""
        return Cost(round(self.bytes * number), round(self.flops * number), self.seconds * number)


def stream_cost(
    peak: Peak, moved: float, *, kernels: int = 1, in_tiles: bool = False, by_pallas: bool = False
) -> Cost:
    """The cost of elementwise kernels and reductions that read and write `moved` bytes.

    Args:
      peak: data-sheet figures of the chip.
      moved: bytes that are read and written.
      kernels: number of launches.
      in_tiles: whether XLA quantizes tiles, which limits its rate.
      by_pallas: whether the kernels are Pallas kernels of this library.
    """
    rate = peak.bandwidth * _ATTAINED_BANDWIDTH
    rate = min(rate, _XLA_TILE_RATE) if in_tiles else rate
    rate *= _UNTIMED if by_pallas else 1
    return Cost(bytes=round(moved), seconds=moved / rate + kernels * LAUNCH)


def gemm_cost(
    peak: Peak, m: int, k: int, n: int, *, fp8: bool = False, by_triton: bool = False
) -> Cost:
    """The cost of one matmul [M, K] @ [K, N].

    Each operand is read once, with 2 bytes a value, or 1 in FP8. The result is written with 2 bytes
    a value. If Triton's matmul is split along K, its float32 sums are written and read besides.
    """
    moved = (m * k + k * n) * (1 if fp8 else 2) + 2 * m * n
    flops = 2 * m * k * n
    operations = peak.fp8 if fp8 else peak.bf16
    assert operations is not None, "the chip has no FP8 units, but this route needs them"
    busy = max(
        flops / (operations * _ATTAINED_PEAK), moved / (peak.bandwidth * _ATTAINED_BANDWIDTH)
    )
    cost = Cost(bytes=moved, flops=flops, seconds=busy + LAUNCH)
    parts = peak.split_k.parts(m, k, n) if by_triton and peak.split_k else 1
    return cost + stream_cost(peak, 2 * 4 * parts * m * n) if parts > 1 else cost


def _matmul(
    peak: Peak,
    route: Route,
    m: int,
    k: int,
    n: int,
    *,
    tile: int | None = None,
    square: bool = False,
    in_bytes: bool = False,
    by_triton: bool = False,
) -> Cost:
    """The cost of [M, K] @ [K, N] by a route, with all passes over operands and result.

    Operands in tiles have tiles of T along K, `tile`. `square`: tiles of the right operand are
    T x T. `in_bytes`: scales are E8M0. `by_triton`: XLA multiplies bfloat16 by Triton, not by
    cuBLASLt.
    """
    if route is Route.HOPPER_PALLAS:
        return _by_hopper(peak, m, k, n, tile, square=square, in_bytes=in_bytes)
    if route is Route.TILE_BY_TILE:
        return _tile_by_tile(peak, m, k, n, tile or k)
    multiple = _ALIGNMENT if route.in_fp8 else 1 if by_triton else _ALIGNMENT_OF_BF16
    wide = [padded_size(size, multiple) for size in (m, k, n)]
    cost = gemm_cost(peak, *wide, fp8=route.in_fp8, by_triton=by_triton and not route.in_fp8)
    if route is Route.BLOCK_SCALED:
        # Each tile 1x32 has a scale of 1 byte, which is moved 4 times. The cast writes it. One
        # kernel reads it and writes it in the order of the hardware. The matmul reads it.
        cost += stream_cost(peak, 4 * (m * k + k * n) / 32, kernels=2)
    if route is Route.BLOCK_SCALED or not route.in_fp8:
        # `_cast_costs.py` has the padding for other matmuls.
        cost += _padded_operand(peak, route, m, k, multiple)
        cost += _padded_operand(peak, route, k, n, multiple)
    by_rows = route in (Route.FP8_ROWS, Route.DEQUANTIZED_ROWS)
    if by_rows or m * n != wide[0] * wide[2]:
        # One pass scales the result in float32, and slices it. It reads and writes bfloat16.
        cost += stream_cost(peak, 2 * (wide[0] * wide[2] + m * n))
    return cost


def _padded_operand(peak: Peak, route: Route, rows: int, columns: int, multiple: int) -> Cost:
    """The cost of padding an operand."""
    before, after = rows * columns, padded_size(rows, multiple) * padded_size(columns, multiple)
    if before == after:
        return Cost()
    size = 1 if route.in_fp8 else 2
    if not route.in_fp8 and after == padded_size(rows) * padded_size(columns):
        # Other matmuls read the operand in FP8. The kernel that casts and pads it pads this one.
        return stream_cost(peak, size * after, kernels=0)
    return stream_cost(peak, size * (before + after))


def padded_size(size: int, multiple: int = _ALIGNMENT) -> int:
    """The size to which XLA pads an axis of an FP8 matmul."""
    return -(-size // multiple) * multiple


def _by_hopper(
    peak: Peak, m: int, k: int, n: int, tile: int | None, *, square: bool, in_bytes: bool
) -> Cost:
    """The cost of Hopper's kernel (`kernels/scaled_matmul/hopper/`) and of converted scales."""
    wide = padded_size(m, BOX), padded_size(k, WHOLE_TILE), padded_size(n)
    best = gemm_cost(peak, *wide, fp8=True)
    busy = (best.seconds - LAUNCH) / _UNTIMED
    side = tile or k
    if side < WHOLE_TILE:
        busy = max(busy, best.flops / (_OF_BF16[square] * peak.bf16 * _ATTAINED_PEAK))
    scales = m * k // side, k * n // (side * side if square else side)
    # With tiles 1x32 the kernel reads E8M0 scales of lhs as bytes. It reads those of rhs as bytes
    # if lhs has few rows. XLA converts all other E8M0 scales to float32 first.
    small = in_bytes and side % WHOLE_TILE > 0
    as_bytes = small, small and not square and m <= _FEW_ROWS
    read = sum(n if is_byte else 4 * n for n, is_byte in zip(scales, as_bytes, strict=True))
    cost = Cost(best.bytes + read, best.flops, busy + LAUNCH)
    for number, is_byte in zip(scales, as_bytes, strict=True):
        if in_bytes and not is_byte:
            cost += stream_cost(peak, _CONVERTED * number)
    if m * n != wide[0] * wide[2]:
        cost += stream_cost(peak, 2 * (wide[0] * wide[2] + m * n))  # the result is sliced
    return cost


def _tile_by_tile(peak: Peak, m: int, k: int, n: int, tile: int) -> Cost:
    """The cost of XLA's loop over the tiles along K.

    Each step slices one tile of each operand in FP8, and multiplies both. It scales the float32
    result, and adds it to a float32 sum.
    """
    steps = math.ceil(k / tile)
    product = gemm_cost(peak, m, tile, n)
    # 2 (m + n) tile: the slices are read and written. 2 m n: the result is float32, twice what
    # `gemm_cost` counts. 12 m n: result and sum are read, and the sum is written.
    moved = 2 * (m + n) * tile + 2 * m * n + 12 * m * n
    step = product + stream_cost(peak, moved, kernels=3)
    # After the loop the float32 sum is read (4 bytes) and written as bfloat16 (2 bytes).
    return Cost(step.bytes * steps, 2 * m * k * n, step.seconds * steps) + stream_cost(
        peak, 6 * m * n
    )


# The route of a matmul, which is the way that it is computed.
#
# The route depends on operands, chip and backend.


class Side(NamedTuple):
    """The properties of one operand that decide the route of its matmul.

    `exact`: every scale is a power of two. Then the matmul may multiply the values by the scale
    before it, without rounding. `in_bytes`: scales are E8M0.
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
    """The sides of both operands of a matmul."""
    return Side.by(operands.lhs), Side.by(operands.rhs)


def route_of(sides: Sides, backend: str, chip: Chip, size: tuple[int, int, int]) -> Route:
    """How a backend computes a matmul of size (M, K, N) on a chip."""
    tiles = [side.granularity.in_tiles for side in sides]
    if not all(side.in_fp8 for side in sides):
        return Route.DEQUANTIZED if any(side.in_fp8 for side in sides) else Route.PLAIN
    route = BACKENDS[backend].route
    if route is not None and (any(tiles) or route is not Route.BLOCK_SCALED):
        return route
    if any(tiles):
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
    """The cost of a matmul of size (M, K, N) by a backend.

    `tile` is the size of a tile along K, for operands in tiles. `by_triton` says whether XLA may
    multiply bfloat16 by Triton.
    """
    route, (lhs, rhs) = route_of(sides, backend, chip, size), sides
    square, in_bytes = rhs.granularity.is_square, lhs.in_bytes and rhs.in_bytes
    return _matmul(
        peak, route, *size, tile=tile, square=square, in_bytes=in_bytes, by_triton=by_triton
    )
