"""The time of kernels, against sums by hand."""

import pytest
from hard_inputs import mentions
from hypothesis import given
from hypothesis import strategies as st

import jaxfp8 as fp8
from jaxfp8.kernels._dispatch import CHIPS, Route
from jaxfp8.plan._costs import (
    _ATTAINED_BANDWIDTH,
    _ATTAINED_PEAK,
    LAUNCH,
    PEAKS,
    Cost,
    Peak,
    _contracted_last,
    kernel,
    matmul_cost,
    sides_of,
)
from jaxfp8.plan._roofline import check_estimable

# Round figures: 1e12 operations/s and 1e9 bytes/s once derated.
ROUND = Peak(bf16=1e12 / _ATTAINED_PEAK, fp8=2e12 / _ATTAINED_PEAK, bandwidth=1e9 / 0.92)
IN_TILES = sides_of(fp8.recipes.blockwise().fprop)
sizes = st.integers(1, 64).map(lambda n: 128 * n)


def test_figures():
    assert set(PEAKS) == {n for n, chip in CHIPS.items() if chip.platform in ("cuda", "tpu")}
    for name, peak in PEAKS.items():
        assert (peak.fp8 is not None) == CHIPS[name].fp8_matmul
        # Units: tensor cores do 1e14 to 1e16 operations/s, memories move 1e11 to 1e13 bytes/s.
        assert 1e14 < peak.bf16 < 1e16
        assert 1e11 < peak.bandwidth < 1e13
        # FP8 units are twice as fast as bfloat16 ones, on all of them.
        assert peak.fp8 is None or peak.fp8 == pytest.approx(2 * peak.bf16, rel=0.02)


@pytest.mark.parametrize("name", ["cpu", "mi300x"])
def test_a_chip_without_figures(name):
    with pytest.raises(ValueError, match=mentions(name, "no figures", "h200")):
        check_estimable(fp8.Kernels(name))


def test_which_chips_want_transposed_operands():
    found = {name for name, chip in CHIPS.items() if _contracted_last(Route.FP8, chip)}
    assert found == {"l4", "l40s", "h100", "h200"}


def test_bytes_and_operations_take_their_time():
    assert _ATTAINED_BANDWIDTH == 0.92
    assert kernel(ROUND, 2e9, launches=3) == Cost(
        bytes=2_000_000_000, seconds=pytest.approx(2 + 3 * LAUNCH)
    )
    assert kernel(ROUND, 2e9, at_most=1e8, share=0.5).seconds == pytest.approx(40 + LAUNCH)
    # A memory that is slower than the bound is what limits it.
    assert kernel(ROUND, 1e9, at_most=1e12) == kernel(ROUND, 1e9)


def test_a_matmul_takes_the_larger_of_operations_and_bytes():
    # 2 * 1000^3 = 2e9 operations: 2 ms; 6e6 bytes: 6 ms.
    assert matmul_cost(ROUND, Route.PLAIN, (1000, 1000, 1000)) == Cost(
        6_000_000, 2_000_000_000, pytest.approx(6e-3 + LAUNCH)
    )
    # 2 * 10000^3: 2 s; 6e8 bytes: 0.6 s. In FP8 1 s; 4e8 bytes.
    large = (10_000, 10_000, 10_000)
    assert matmul_cost(ROUND, Route.PLAIN, large).seconds == pytest.approx(2 + LAUNCH)
    assert matmul_cost(ROUND, Route.FP8, large) == Cost(
        4 * 10**8, 2 * 10**12, pytest.approx(1 + LAUNCH)
    )
    # One kernel does the matmuls of all groups.
    eight = matmul_cost(ROUND, Route.PLAIN, large, groups=8)
    assert eight == Cost(8 * 6 * 10**8, 8 * 2 * 10**12, pytest.approx(16 + LAUNCH))


M, K, N = 256, 512, 128
OPERANDS, RESULT = M * K + K * N, M * N


@pytest.mark.parametrize(
    ("route", "moved", "kernels"),
    [
        (Route.PLAIN, 2 * OPERANDS + 2 * RESULT, 1),
        (Route.DEQUANTIZED, 2 * OPERANDS + 2 * RESULT, 1),
        (Route.FOLDED, 2 * OPERANDS + 2 * RESULT, 1),
        (Route.DEQUANTIZED_ROWS, 2 * OPERANDS + 6 * RESULT, 2),
        (Route.FP8, OPERANDS + 2 * RESULT, 1),
        (Route.WIDENED, OPERANDS + 2 * RESULT, 1),
        (Route.FP8_ROWS, OPERANDS + 6 * RESULT, 2),
        (Route.BLOCK_SCALED, OPERANDS + OPERANDS // 8 + 2 * RESULT, 3),
        # Four tiles: FP8 tiles cut out (read, write) and read as bfloat16 by a matmul that writes
        # float32; the sum is read, written, and the product read.
        (Route.TILE_BY_TILE, 4 * OPERANDS + 4 * (4 + 12) * RESULT, 16),
    ],
    ids=lambda value: value.name if isinstance(value, Route) else "",
)
def test_what_a_route_moves(route, moved, kernels):
    cost = matmul_cost(ROUND, route, (M, K, N), IN_TILES)
    assert cost.bytes == moved
    assert cost.flops == 2 * M * K * N
    # Memory-bound all through, so that launches can be told from the rest.
    assert cost.seconds == pytest.approx(moved / 1e9 + kernels * LAUNCH)


def test_hopper_pads_what_is_no_multiple_of_128():
    """The copies take two kernels, which XLA's matmul of a small layer does not have."""
    whole, ragged = (
        matmul_cost(ROUND, Route.HOPPER_PALLAS, (M, k, N), IN_TILES) for k in (K, K - 8)
    )
    operands = (M + N) * (K - 8)
    assert ragged.bytes == 3 * operands + 2 * RESULT
    assert ragged.seconds > whole.seconds + 2 * LAUNCH


def test_hopper_scales_short_tiles_slowly():
    """At shares of bfloat16's rate. The kernel for groups reads squares as 1D tiles."""
    bf16 = matmul_cost(PEAKS["h200"], Route.PLAIN, (8192, 8192, 8192)).seconds - LAUNCH
    for w_tile_dim, groups, share in ((1, 1, 0.38), (2, 1, 0.69), (2, 8, 0.38)):
        sides = sides_of(fp8.recipes.mxfp8(w_tile_dim=w_tile_dim).fprop)
        cost = matmul_cost(PEAKS["h200"], Route.HOPPER_PALLAS, (8192,) * 3, sides, groups)
        assert groups * bf16 / (cost.seconds - LAUNCH) == pytest.approx(share)


@given(m=sizes, k=sizes, n=sizes, more=st.floats(1, 10))
def test_more_bandwidth_never_hurts(m, k, n, more):
    faster = ROUND._replace(bandwidth=ROUND.bandwidth * more)
    for route in Route:
        slow, fast = (matmul_cost(peak, route, (m, k, n), IN_TILES) for peak in (ROUND, faster))
        assert fast.seconds <= slow.seconds
        assert (fast.bytes, fast.flops) == (slow.bytes, slow.flops)
