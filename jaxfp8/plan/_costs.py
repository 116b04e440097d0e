"""Figures of chips, and what a matmul and a cast cost on one of them.

`kernel` is the only function of seconds: max(operations / rate, bytes / bandwidth), and launches. A
matmul is one kernel, and some routes add a pass. A cast is passes over its tensor, of some bytes a
value. What XLA does differently with small arrays is not counted. Of scales and padding only those
of block-scaled matmuls are, and the copy by which Hopper's kernel pads K to 128.

Letters: M, K, N are the sizes of one matmul [M, K] @ [K, N].
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from jaxfp8._geometry import TrainingGeometry
from jaxfp8._typing import Matmul, Tensor
from jaxfp8.kernels._dispatch import Chip, Route
from jaxfp8.kernels.grouped_matmul import _api as grouped_matmul
from jaxfp8.kernels.scaled_matmul._api import BACKENDS
from jaxfp8.numerics._granularity import AbstractGranularity
from jaxfp8.quantizers._base import AbstractQuantizer
from jaxfp8.quantizers._kinds import Current, Delayed, Identity, Static
from jaxfp8.recipes._recipe import Operands, Recipe, plan_casts

Shape: TypeAlias = tuple[int, int, int]

MATMULS: tuple[Matmul, ...] = ("fprop", "dgrad", "wgrad")


class Peak(NamedTuple):
    """What a chip can do at most."""

    bf16: float  # operations/s of bfloat16 matmuls
    fp8: float | None  # operations/s of FP8 matmuls; None without FP8 units for E4M3
    bandwidth: float  # bytes/s of device memory
    # Of what other kernels attain, the share of XLA's FP8 matmuls, and of its casts and amaxes.
    matmuls: float = 1.0
    casts: float = 1.0


# Estimates of XLA's compiler for TPUs (`estimated_cycles`, libtpu 0.0.50), for a layer of
# [8192, 5120] @ [5120, 13824]. Casts attain 0.34 to 0.37 of the bandwidth on each of these chips.
# The FP8 matmuls of a TPU 7x attain 0.80 of the peak, and wgrad, which reads x transposed, 0.63.
_ON_TPUS = 0.38  # of the 0.92 below

# From NVIDIA's data sheets. If a data sheet gives a figure with sparsity, half of it is used.
PEAKS = {
    "a100": Peak(bf16=312e12, fp8=None, bandwidth=2.039e12),  # 80GB SXM
    "l4": Peak(bf16=121e12, fp8=242.5e12, bandwidth=0.3e12),
    "l40s": Peak(bf16=362e12, fp8=733e12, bandwidth=0.864e12),
    "h100": Peak(bf16=989.5e12, fp8=1979e12, bandwidth=3.35e12),  # SXM
    "h200": Peak(bf16=989.5e12, fp8=1979e12, bandwidth=4.8e12),
    "b200": Peak(bf16=2.25e15, fp8=4.5e15, bandwidth=8e12),  # an eighth of a DGX B200
    # From Google Cloud's pages of TPU7x, v6e and v5e, for one device of jax. That is a chip. Of
    # TPU7x it is one of the two cores of a chip, so half of the figures of the page.
    "tpu7x": Peak(2307e12 / 2, 4614e12 / 2, bandwidth=7.38e12 / 2, matmuls=0.80, casts=_ON_TPUS),
    "v6e": Peak(bf16=918e12, fp8=None, bandwidth=1.638e12, casts=_ON_TPUS),
    "v5p": Peak(bf16=459e12, fp8=None, bandwidth=2.765e12, casts=_ON_TPUS),
    "v5e": Peak(bf16=197e12, fp8=None, bandwidth=0.819e12, casts=_ON_TPUS),
}

# The share of the peak that a matmul attains. torchao found it for large matmuls on an H100
# (torchao/testing/training/roofline_utils.py). An H200 attained 0.86 in bfloat16
# (docs/when-fp8-pays.md).
_ATTAINED_PEAK = 0.78
# The share of HBM's bandwidth that elementwise kernels attain on large arrays (torchao, the same
# file).
_ATTAINED_BANDWIDTH = 0.92
# Another factor, for the Pallas kernels of this library. It was assumed before they were timed. An
# H200 measured 0.79 for fprop of tiles of 128, and 0.53 to 0.58 for wgrad.
_OF_OTHERS = 0.75
# Seconds that a kernel of one element takes on an H100 (torchao, the same file).
LAUNCH = 2e-6
# Bytes/s at which XLA quantizes tiles, on every chip: about 1 TB/s on a GB200, whose memory has 8
# TB/s (marin-community/marin issue 7282, MX). So memory is not the limit.
_XLA_TILE_RATE = 1e12
# What Hopper's Pallas matmul reaches with tiles of less than 128 values, as a share of bfloat16's
# rate. Key: whether the tiles of the right operand are squares. An H200 measured it with tiles of
# 32 (benchmarks/gpu/results/h200.json, 8192 cubed). Every sum of 32 products is scaled in float32,
# which keeps the float32 lanes busier than the tensor cores.
_OF_BF16 = {False: 0.38, True: 0.69}
# That matmul steps along K by 128. XLA copies other operands to whole steps first.
_STEP = 128


@dataclasses.dataclass(frozen=True)
class Cost:
    """The work of kernels, and the time that it takes at best."""

    bytes: int = 0  # read from and written to device memory
    flops: int = 0  # of matmuls; a multiplication and its addition are two
    seconds: float = 0.0  # estimated

    def __add__(self, other: "Cost") -> "Cost":
        bytes, flops = self.bytes + other.bytes, self.flops + other.flops
        return Cost(bytes, flops, self.seconds + other.seconds)

    def times(self, number: float) -> "Cost":
        """The cost of the same work, done `number` times."""
        return Cost(round(self.bytes * number), round(self.flops * number), self.seconds * number)


def kernel(
    peak: Peak, moved: float, flops: int = 0, rate: float = math.inf, *, launches: int = 1,
    at_most: float = math.inf, share: float = 1.0,
) -> Cost:  # fmt: skip
    """The cost of kernels that move some bytes, and do `flops` at a `rate` of a data sheet.

    `at_most` bounds the bytes/s. `share` is the share of both rates that these kernels attain.
    """
    bandwidth = min(peak.bandwidth * _ATTAINED_BANDWIDTH, at_most)
    busy = max(flops / (rate * _ATTAINED_PEAK), moved / bandwidth) / share
    return Cost(round(moved), flops, busy + launches * LAUNCH)


class Side(NamedTuple):
    """What decides the route of a matmul, of one operand."""

    in_fp8: bool
    granularity: AbstractGranularity
    exact: bool  # scales are powers of two, and XLA may multiply values by them without rounding


Sides: TypeAlias = tuple[Side, Side]


def sides_of(operands: Operands) -> Sides:
    lhs, rhs = (
        Side(each.value_format is not None, each.granularity, each.rule.exact)
        for each in (operands.lhs, operands.rhs)
    )
    return lhs, rhs


def route_of(sides: Sides, backend: str, chip: Chip, size: Shape) -> Route:
    """How a backend computes a matmul of size (M, K, N) on a chip."""
    tiles = [side.granularity.in_tiles for side in sides]
    if not all(side.in_fp8 for side in sides):
        return Route.DEQUANTIZED if any(side.in_fp8 for side in sides) else Route.PLAIN
    # A kernel for all groups may have no dense matmul of its name.
    route = (BACKENDS.get(backend) or grouped_matmul.BACKENDS[backend]).route
    if route is not None and (any(tiles) or route is not Route.BLOCK_SCALED):
        return route
    if any(tiles):
        return Route.FOLDED if all(side.exact for side in sides) else Route.TILE_BY_TILE
    # XLA makes no FP8 call for a matmul with one row or one column.
    in_fp8 = chip.fp8_matmul and 1 not in (size[0], size[2])
    if chip.platform == "tpu":  # scales of rows are applied before the result is written
        return Route.FP8 if in_fp8 else Route.WIDENED
    if any(side.granularity.in_rows for side in sides):
        return Route.FP8_ROWS if in_fp8 else Route.DEQUANTIZED_ROWS
    return Route.FP8 if in_fp8 else Route.DEQUANTIZED


def matmul_cost(
    peak: Peak, route: Route, size: Shape, sides: Iterable[Side] = (), groups: int = 1
) -> Cost:
    """The cost of [M, K] @ [K, N] by a route. One kernel does the matmuls of all `groups`."""
    m, k, n = size
    flops, operands, result = 2 * m * k * n * groups, (m + n) * k * groups, m * n * groups
    in_tiles = [side.granularity for side in sides if side.granularity.in_tiles]
    tile = max((granularity.along(2)[1] for granularity in in_tiles), default=_STEP)
    if route is Route.TILE_BY_TILE:
        # A loop over tiles along K. Each step cuts a tile out of both operands (read and written),
        # and multiplies both as bfloat16. It writes float32, scales it, and adds it to a sum.
        steps = -(-k // tile)
        moved = 4 * operands + (4 + 8 + 4) * result * steps
        return kernel(peak, moved, flops, peak.bf16, launches=4 * steps)
    rate, share = (peak.fp8, peak.matmuls) if route.in_fp8 else (peak.bf16, 1.0)
    assert rate is not None, "the chip has no FP8 units, but this route needs them"
    if route is Route.HOPPER_PALLAS:
        share = _OF_OTHERS
        if tile < _STEP:
            # The kernel for groups reads squares as 1D tiles.
            square = groups == 1 and in_tiles[-1].is_square
            rate = min(rate, _OF_BF16[square] * peak.bf16 / share)
    # Operands have 2 bytes a value, or 1 in FP8. The result has 2.
    moved = (1 if route.reads_fp8 else 2) * operands + 2 * result
    cost = kernel(peak, moved, flops, rate, share=share)
    if route is Route.HOPPER_PALLAS and k % _STEP and groups == 1:
        cost += kernel(peak, 2 * operands, launches=2)
    if route is Route.BLOCK_SCALED:
        # A scale of 1 byte for each 32 values is moved 4 times. The cast writes it. A kernel for
        # each operand reads it and writes it in the order of the hardware. The matmul reads it.
        cost += kernel(peak, 4 * operands / 32, launches=2)
    if route in (Route.FP8_ROWS, Route.DEQUANTIZED_ROWS):
        cost += kernel(peak, 4 * result)  # a pass scales the result: 2 bytes read, 2 written
    return cost


# The axes of y [M, N] = x [M, K] @ w [K, N].
MATRICES = TrainingGeometry.of((((1,), (0,)), ((), ())), 2, 2)


def _contracted_last(route: Route, chip: Chip) -> bool:
    """Whether a route reads operands with the contracted axis last."""
    # On Ada and Hopper cuBLASLt has FP8 matmuls in the "TN" layout only (cuBLAS documentation,
    # `cublasLtMatmul`).
    capability = chip.compute_capability
    only_tn = capability is not None and (8, 9) <= capability < (10, 0)
    return route.by_kernel or (route.in_fp8 and only_tn)


def has_known_cost(quantizer: AbstractQuantizer) -> bool:
    """Whether the casts of a quantizer can be estimated: it is one of `fp8.quantizers`."""
    return isinstance(quantizer, Current | Delayed | Static | Identity)


def cast_cost(
    backend: str, recipe: Recipe, tensor: Tensor, values: int, routes: Mapping[Matmul, Route],
    chip: Chip, *, held: bool = False,
) -> Cost:  # fmt: skip
    """The cost of the amaxes, casts and transpositions of one tensor.

    `routes` are those of the matmuls that read it. `held`: the model holds the FP8 copies, which
    are laid out as the tensor is. Then only what follows a cast is left.

    ValueError if a quantizer is not one of `fp8.quantizers`.
    """
    for name, quantizer in recipe.uses(tensor):
        if not has_known_cost(quantizer):
            raise ValueError(
                f"{name} quantizes {tensor} by {quantizer!r}. The cost of its casts is not known. "
                "Use quantizers of fp8.quantizers."
            )

    def passes(bytes_a_value: float, **how: Any) -> Cost:
        peak = PEAKS[chip.name]
        return kernel(peak, bytes_a_value * values, **{"share": peak.casts} | how)

    cost, written, in_tiles, by_kernel = Cost(), 0, False, backend != "xla"
    by_xla = frozenset(name for name, route in routes.items() if not route.by_kernel)
    planned = plan_casts(recipe, MATRICES, tensor, (backend,), by_xla=by_xla)
    casts = [(each.quantizer, each.cast.directions, each.readers) for each in planned if each.cast]
    for quantizer, directions, all_readers in casts:
        tiles = quantizer.granularity.in_tiles
        in_tiles |= tiles
        if by_kernel and not held:  # a kernel reads the tensor once and writes all copies
            cost += passes(2 + len(directions), share=_OF_OTHERS)
        for direction, readers in zip(directions, all_readers, strict=True):
            # The layouts in which matmuls read FP8. True is transposed.
            layouts = {
                MATRICES.axes(name, tensor).is_transposed and _contracted_last(routes[name], chip)
                for name in readers
                if routes[name].reads_fp8
            }
            # A copy is written as bfloat16 for each matmul that reads that, or with tiles for both.
            widened = sum(not routes[name].reads_fp8 for name in readers)
            widened = min(widened, 1) if tiles else widened
            if by_kernel or held or isinstance(quantizer, Delayed) or (tiles and layouts):
                # FP8 is written to memory once. Other kernels of XLA transpose and widen it.
                written += 1
                if True in layouts and not direction.transposed:
                    cost += passes(2)
                if widened:
                    cost += passes(1 + 2 * widened)
            else:  # XLA's cast itself writes each layout
                written += len(layouts) + 2 * widened
    if held or not casts:
        return cost
    at_most = _XLA_TILE_RATE if in_tiles else math.inf
    # Amaxes of tiles need a read for each direction. Those of the tensor, its rows and its columns
    # share one. A second, small kernel ends each reduction. XLA finds the amax for the next step in
    # the kernel that casts.
    amaxes = {each.granularity for q, of, _ in casts if isinstance(q, Current) for each in of}
    reads = len(amaxes) if in_tiles else min(1, len(amaxes))
    if by_kernel:  # it finds amaxes of tiles in the same read
        return cost if in_tiles else cost + passes(2 * reads, launches=2 * reads)
    cost += passes(2 * reads, launches=2 * reads, at_most=at_most)
    return cost + passes(2 + written, at_most=at_most)
