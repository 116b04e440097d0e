"""How long kernels take at best: figures of chips, and the cost of a matmul by each route.

A kernel takes the larger of operations / peak and bytes / bandwidth, and a launch. Nothing here was
measured. `_routes.py` says which route a matmul takes, and `_cast_costs.py` what casts cost.

Letters: M, K, N of one matmul [M, K] @ [K, N]; T the tile along K.
"""

import dataclasses
import enum
import math

from jaxfp8.kernels._platform import Chip, chip_named

# Of a GEMM's peak. torchao takes it from large matmuls on an H100
# (torchao/testing/training/roofline_utils.py); published cuBLAS figures lie between 0.59 (FBGEMM,
# bf16, 8192^3) and 0.81. It is the same in bf16 and FP8, and so hardly moves a ratio.
ATTAINED_PEAK = 0.78
# Of HBM's bandwidth, by elementwise kernels on large arrays (torchao, the same file; 85 to 94 % in
# its cast benchmarks).
ATTAINED_BANDWIDTH = 0.92
# Another factor, for the kernels in Pallas of this library: an assumption, since nobody has timed
# them. A kernel of the same kind in CUDA needs no such factor: DeepGEMM attains up to 1550 of 1979
# TFLOP/s on an H800 (its README), 0.78.
UNTIMED = 0.75
# Seconds that a kernel of one element takes on an H100 (torchao, the same file,
# KERNEL_LAUNCH_OVERHEAD_SEC).
LAUNCH = 2e-6
# Bytes/s at which XLA quantizes tiles: about 1 TB/s of a GB200's 8 (marin-community/marin issue
# 7282, MX), the only published figure. It is not memory that limits it there, so it is taken as a
# rate for every chip, and not as a share.
XLA_TILE_RATE = 1e12
# Bytes for each E8M0 scale that XLA converts for a kernel that reads float32: 1 read, 4 written.
_CONVERTED = 5
# Of bfloat16's rate, what Hopper's matmul in Pallas reaches at most with tiles of 32 on both sides,
# and with squares on the right: each 32 products are scaled in float32, which keeps those lanes as
# busy as the tensor cores.
_OF_BF16 = {False: 0.67, True: 1.6}
# Of the Pallas matmul for Hopper: the length of a step along K, and the most rows of lhs with which
# it reads E8M0 scales of rhs as bytes.
_WHOLE_TILE = 128
_FEW_ROWS = 128
# Axes that cuBLASLt multiplies in FP8 are multiples of 16 (cuBLAS documentation); XLA pads others,
# and slices the result.
ALIGNMENT = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peak:
    """What a chip can do at most, by its data sheet, without sparsity.

    Attributes:
      bf16: operations/s of bfloat16 matmuls.
      fp8: operations/s of FP8 matmuls; None without FP8 units.
      bandwidth: bytes/s of device memory.
    """

    bf16: float
    fp8: float | None
    bandwidth: float


# NVIDIA's data sheets; where they give a figure with sparsity, half of it.
PEAKS = {
    "a100": Peak(bf16=312e12, fp8=None, bandwidth=2.039e12),  # A100 80GB SXM
    "l4": Peak(bf16=121e12, fp8=242.5e12, bandwidth=0.3e12),  # L4
    "l40s": Peak(bf16=362e12, fp8=733e12, bandwidth=0.864e12),  # L40S
    "h100": Peak(bf16=989.5e12, fp8=1979e12, bandwidth=3.35e12),  # H100 SXM
    "h200": Peak(bf16=989.5e12, fp8=1979e12, bandwidth=4.8e12),  # H200 SXM
    "b200": Peak(bf16=2.25e15, fp8=4.5e15, bandwidth=8e12),  # DGX B200, an eighth
}


def estimable(name: str) -> Chip:
    """The chip of that name, if its figures are known.

    Raises:
      ValueError: for an unknown chip, or one without figures.

    Example:
      >>> estimable("h200").compute_capability
      (9, 0)
    """
    chip = chip_named(name)
    if name not in PEAKS:
        raise ValueError(
            f"chip={name!r} has no figures to estimate from ({chip.platform}: nothing here was "
            f"compiled for FP8 units of it); use one of {sorted(PEAKS)}."
        )
    return chip


def turns(chip: Chip) -> bool:
    """Whether XLA transposes FP8 operands whose contracted axis is not the last.

    True of Ada and Hopper, where cuBLASLt knows the "TN" layout alone (cuBLAS documentation,
    `cublasLtMatmul`).

    Example:
      >>> turns(chip_named("h200")), turns(chip_named("b200"))
      (True, False)
    """
    return chip.compute_capability is not None and (8, 9) <= chip.compute_capability < (10, 0)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What kernels do, and how long that takes at best.

    Attributes:
      bytes: read from and written to device memory.
      flops: operations of matmuls, two for each multiplication and addition.
      seconds: estimated.

    Example:
      >>> Cost(bytes=2, seconds=1e-6) + Cost(bytes=3, flops=4, seconds=1e-6)
      Cost(bytes=5, flops=4, seconds=2e-06)
    """

    bytes: int = 0
    flops: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.bytes + other.bytes, self.flops + other.flops, self.seconds + other.seconds
        )


class Route(enum.Enum):
    """How a matmul is computed. The value is what tables say of it."""

    PLAIN = "bf16"
    DEQUANTIZED = "bf16, operands dequantized"
    DEQUANTIZED_ROWS = "bf16, then a pass for scales of rows"
    FOLDED = "bf16, scales of tiles folded in"
    TILE_BY_TILE = "bf16, tile by tile"
    FP8 = "FP8"
    FP8_ROWS = "FP8, then a pass for scales of rows"
    BLOCK_SCALED = "FP8, block-scaled"
    PALLAS = "FP8, scaled by the Pallas kernel"

    @property
    def in_fp8(self) -> bool:
        """Whether FP8 units multiply."""
        return self in (Route.FP8, Route.FP8_ROWS, Route.BLOCK_SCALED, Route.PALLAS)

    @property
    def reads_fp8(self) -> bool:
        """Whether operands come to it as FP8 values. Otherwise they come as bfloat16 values."""
        return self.in_fp8 or self is Route.TILE_BY_TILE


def stream(
    peak: Peak, moved: float, *, kernels: int = 1, in_tiles: bool = False, by_pallas: bool = False
) -> Cost:
    """Elementwise kernels and reductions that read and write `moved` bytes.

    `in_tiles`: quantizing tiles, as XLA does. `by_pallas`: by a kernel of this library.

    Example:
      >>> stream(PEAKS["h200"], 4.416e9).seconds
      0.001002
    """
    rate = peak.bandwidth * ATTAINED_BANDWIDTH
    rate = min(rate, XLA_TILE_RATE) if in_tiles else rate
    rate *= UNTIMED if by_pallas else 1
    return Cost(bytes=round(moved), seconds=moved / rate + kernels * LAUNCH)


def gemm(peak: Peak, m: int, k: int, n: int, *, fp8: bool = False) -> Cost:
    """One matmul [M, K] @ [K, N].

    Operands of 2 bytes, or 1 in FP8, are read once, 2 bytes a value written.

    Example:
      >>> gemm(PEAKS["h200"], 8192, 8192, 8192).flops
      1099511627776
    """
    moved = (m * k + k * n) * (1 if fp8 else 2) + 2 * m * n
    flops = 2 * m * k * n
    operations = peak.fp8 if fp8 else peak.bf16
    assert operations is not None, "no FP8 units, but a route that needs them"
    busy = max(flops / (operations * ATTAINED_PEAK), moved / (peak.bandwidth * ATTAINED_BANDWIDTH))
    return Cost(bytes=moved, flops=flops, seconds=busy + LAUNCH)


def matmul(
    peak: Peak,
    route: Route,
    m: int,
    k: int,
    n: int,
    *,
    tile: int | None = None,
    square: bool = False,
    in_bytes: bool = False,
) -> Cost:
    """[M, K] @ [K, N] by a route, with the passes over operands and result that the route needs.

    Args:
      peak: of the chip.
      route: how it is computed.
      m: M.
      k: K, the contracted axis.
      n: N.
      tile: T, of operands in tiles.
      square: whether tiles of the right operand are T x T.
      in_bytes: whether scales are E8M0.

    Example:
      >>> matmul(PEAKS["h200"], Route.FP8, 8192, 8192, 8192).bytes == (1 + 1 + 2) * 8192**2
      True
    """
    if route is Route.PALLAS:
        return _by_pallas(peak, m, k, n, tile, square=square, in_bytes=in_bytes)
    if route is Route.TILE_BY_TILE:
        return _tile_by_tile(peak, m, k, n, tile or k)
    cost = _padded(peak, m, k, n) if route.in_fp8 else gemm(peak, m, k, n)
    if route is Route.BLOCK_SCALED:
        # A byte for each 1x32, written, put in the order that the hardware wants (read and
        # written), and read.
        cost += stream(peak, 4 * (m * k + k * n) / 32, kernels=2)
    if route in (Route.FP8_ROWS, Route.DEQUANTIZED_ROWS):
        cost += stream(peak, 4 * m * n)  # the bare product is read, scaled in float32 and written
    return cost


def _by_pallas(
    peak: Peak, m: int, k: int, n: int, tile: int | None, *, square: bool, in_bytes: bool
) -> Cost:
    """The kernel for Hopper (`kernels/scaled_matmul/hopper/`), and XLA's conversion of scales."""
    best = gemm(peak, m, k, n, fp8=True)
    busy = (best.seconds - LAUNCH) / UNTIMED
    side = tile or k
    if side < _WHOLE_TILE:
        busy = max(busy, best.flops / (_OF_BF16[square] * peak.bf16 * ATTAINED_PEAK))
    scales = m * k // side, k * n // (side * side if square else side)
    # It reads the bytes of E8M0 scales of 1x32 itself: those of lhs, and those of rhs if lhs has
    # few rows.
    small = in_bytes and side % _WHOLE_TILE > 0
    as_bytes = small, small and not square and m <= _FEW_ROWS
    read = sum(n if is_byte else 4 * n for n, is_byte in zip(scales, as_bytes, strict=True))
    cost = Cost(best.bytes + read, best.flops, busy + LAUNCH)
    for number, is_byte in zip(scales, as_bytes, strict=True):
        if in_bytes and not is_byte:
            cost += stream(peak, _CONVERTED * number)
    return cost


def _padded(peak: Peak, m: int, k: int, n: int) -> Cost:
    """An FP8 matmul of padded operands: the padding, the matmul, and the slice of the result.

    Padding costs a read and a write of FP8.
    """
    wide = [math.ceil(size / ALIGNMENT) * ALIGNMENT for size in (m, k, n)]
    cost = gemm(peak, *wide, fp8=True)
    for before, after in ((m * k, wide[0] * wide[1]), (k * n, wide[1] * wide[2])):
        if before != after:
            cost += stream(peak, before + after)
    return (
        cost if m * n == wide[0] * wide[2] else cost + stream(peak, 2 * (wide[0] * wide[2] + m * n))
    )


def _tile_by_tile(peak: Peak, m: int, k: int, n: int, tile: int) -> Cost:
    """The loop over K.

    Cut the tiles out (FP8), multiply them into float32, scale that and add it to a float32 sum.
    """
    steps = math.ceil(k / tile)
    product = gemm(peak, m, tile, n)
    # 2 m n: the product is float32, twice what gemm counts
    moved = 2 * (m + n) * tile + 2 * m * n + 12 * m * n
    step = product + stream(peak, moved, kernels=3)
    return Cost(step.bytes * steps, 2 * m * k * n, step.seconds * steps) + stream(peak, 6 * m * n)
