"""The time of kernels, against sums by hand."""

import dataclasses

import pytest
from hard_inputs import mentions
from hypothesis import given
from hypothesis import strategies as st

from jaxfp8.kernels._dispatch import CHIPS, Route
from jaxfp8.plan._cast_costs import _padding_for_hopper, _turns
from jaxfp8.plan._costs import (
    _ATTAINED_BANDWIDTH,
    _ATTAINED_PEAK,
    _XLA_TILE_RATE,
    LAUNCH,
    Cost,
    _matmul,
    gemm_cost,
    stream_cost,
)
from jaxfp8.plan._peaks import _HOPPER, PEAKS, Peak, _SplitK
from jaxfp8.plan._roofline import _estimable

# Round figures: 1e12 operations/s and 1e9 bytes/s once derated.
ROUND = Peak(
    bf16=1e12 / _ATTAINED_PEAK,
    fp8=2e12 / _ATTAINED_PEAK,
    bandwidth=1e9 / _ATTAINED_BANDWIDTH,
    split_k=_SplitK(132, *_HOPPER),
)
sizes = st.integers(1, 64).map(lambda n: 128 * n)


def test_figures():
    assert set(PEAKS) == {name for name, chip in CHIPS.items() if chip.platform == "cuda"}
    for name, peak in PEAKS.items():
        assert (peak.fp8 is not None) == CHIPS[name].fp8_matmul
        # Units: tensor cores do 1e14 to 1e16 operations/s, memories move 1e11 to 1e13 bytes/s.
        assert 1e14 < peak.bf16 < 1e16
        assert 1e11 < peak.bandwidth < 1e13
        # FP8 units are twice as fast as bfloat16 ones, on all of them.
        assert peak.fp8 is None or peak.fp8 == pytest.approx(2 * peak.bf16, rel=0.02)


@pytest.mark.parametrize("name", ["cpu", "tpu", "mi300x"])
def test_a_chip_without_figures(name):
    with pytest.raises(ValueError, match=mentions(name, "no figures", "h200")):
        _estimable(name)


def test_an_unknown_chip():
    with pytest.raises(ValueError, match=mentions("h300", "unknown", "h200")):
        _estimable("h300")


def test_which_chips_want_transposed_operands():
    assert {name for name, chip in CHIPS.items() if _turns(chip)} == {"l4", "l40s", "h100", "h200"}


def test_bytes_take_their_time():
    assert stream_cost(ROUND, 2e9, kernels=3) == Cost(
        bytes=2_000_000_000, seconds=pytest.approx(2 + 3 * LAUNCH)
    )
    assert stream_cost(PEAKS["h200"], 1e12, in_tiles=True).seconds == pytest.approx(
        1e12 / _XLA_TILE_RATE, rel=1e-5
    )
    # A memory that is slower than XLA's quantizer is what limits it.
    assert stream_cost(ROUND, 1e9, in_tiles=True) == stream_cost(ROUND, 1e9)


def test_padding_is_a_launch_unless_xla_pads_in_another_kernel():
    """[333, 1024] becomes [384, 1024]."""
    before, after = 333 * 1024, 384 * 1024
    alone, fused = (
        _padding_for_hopper(ROUND, (333, 1024), {True}, by_kernel=each) for each in (True, False)
    )
    copied, added = before + after, after - before
    assert alone == Cost(bytes=copied, seconds=pytest.approx(copied / 1e9 + LAUNCH))
    assert fused == Cost(bytes=added, seconds=pytest.approx(added / 1e9))


def test_a_gemm_takes_the_larger_of_operations_and_bytes():
    # 2 * 1000^3 = 2e9 operations: 2 ms; 6e6 bytes: 6 ms.
    assert gemm_cost(ROUND, 1000, 1000, 1000) == Cost(
        6_000_000, 2_000_000_000, pytest.approx(6e-3 + LAUNCH)
    )
    # 2 * 10000^3: 2 s; 6e8 bytes: 0.6 s. In FP8 1 s; 4e8 bytes.
    assert gemm_cost(ROUND, 10_000, 10_000, 10_000).seconds == pytest.approx(2 + LAUNCH)
    assert gemm_cost(ROUND, 10_000, 10_000, 10_000, fp8=True) == Cost(
        4 * 10**8, 2 * 10**12, pytest.approx(1 + LAUNCH)
    )


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
        (Route.FP8_ROWS, OPERANDS + 6 * RESULT, 2),
        (Route.BLOCK_SCALED, OPERANDS + OPERANDS // 8 + 2 * RESULT, 3),
        # Four tiles: FP8 tiles cut out (read, write) and read as bfloat16 by a matmul that writes
        # float32; the sum is read, written, and the product read. At the end float32 becomes
        # bfloat16.
        (Route.TILE_BY_TILE, 4 * OPERANDS + 4 * (4 + 12) * RESULT + 6 * RESULT, 17),
    ],
    ids=lambda value: value.name if isinstance(value, Route) else "",
)
def test_what_a_route_moves(route, moved, kernels):
    cost = _matmul(ROUND, route, M, K, N, tile=128)  # bfloat16 by cuBLASLt
    assert cost.bytes == moved
    assert cost.flops == 2 * M * K * N
    # Memory-bound all through, so that launches can be told from the rest.
    assert cost.seconds == pytest.approx(moved / 1e9 + kernels * LAUNCH)


def test_ragged_sizes_are_padded():
    # 250 -> 256 rows of lhs, 520 -> 528 of both; the result is sliced. 128 columns stay.
    m, k = 250, 520
    wide = 256 * 528 + 528 * 128
    moved = (wide + 2 * 256 * 128) + 2 * (256 * 128 + m * 128)
    assert _matmul(ROUND, Route.FP8, m, k, 128).bytes == moved
    assert _matmul(ROUND, Route.FP8, 256, 528, 128).bytes == wide + 2 * 256 * 128


def test_what_a_small_matmul_of_triton_moves():
    # 333 x 1024 are 24 tiles for 132 multiprocessors: 4 parts of K, summed in float32.
    assert ROUND.split_k.parts(333, 2048, 1024) == 4
    cost = _matmul(ROUND, Route.PLAIN, 333, 2048, 1024, by_triton=True)
    plain = 2 * (333 * 2048 + 2048 * 1024 + 333 * 1024)
    assert cost.bytes == plain + 2 * 4 * 4 * 333 * 1024
    assert cost.seconds == pytest.approx(cost.bytes / 1e9 + 2 * LAUNCH)
    # 2,048 x 1,024 are 128 tiles, enough.
    assert ROUND.split_k.parts(2048, 333, 1024) == 1


def test_ragged_sizes_are_padded_for_pallas():
    # 333 -> 336 rows in boxes of 8; 333 -> 384 along K, in tiles of 128. The result is sliced.
    moved = 336 * 384 + 384 * 1024 + 2 * 336 * 1024 + 2 * (336 + 333) * 1024
    scales = 4 * (333 * 333 // 128 + 333 * 1024 // 128)
    assert _matmul(ROUND, Route.HOPPER_PALLAS, 333, 333, 1024, tile=128).bytes == moved + scales


@given(m=sizes, k=sizes, n=sizes, more=st.floats(1, 10))
def test_more_bandwidth_never_hurts(m, k, n, more):
    faster = dataclasses.replace(ROUND, bandwidth=ROUND.bandwidth * more)
    for route in Route:
        slow, fast = (_matmul(peak, route, m, k, n, tile=128) for peak in (ROUND, faster))
        assert fast.seconds <= slow.seconds
        assert (fast.bytes, fast.flops) == (slow.bytes, slow.flops)
    assert stream_cost(faster, m * k).seconds <= stream_cost(ROUND, m * k).seconds
