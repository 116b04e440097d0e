"""Our models of tensor cores have the bits of MMA-Sim, which was compared with the hardware."""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from silicon import mmasim_cores
from silicon.operands import FORMATS, KINDS, same_bits, values

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))
import predicted

pytestmark = pytest.mark.silicon
M, N, K = 40, 48, 96


def operands(kind, lhs, rhs):
    return values(kind, 0, (M, K), lhs), values(kind, 1, (N, K), rhs), np.zeros((M, N), np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rhs", FORMATS)
@pytest.mark.parametrize("lhs", FORMATS)
def test_hopper(lhs, rhs, kind):
    given = operands(kind, lhs, rhs)
    same_bits(predicted.hopper(*given), mmasim_cores.hopper(*given))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("lhs", "rhs"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_blackwell(lhs, rhs, kind):
    given = operands(kind, FORMATS[lhs], FORMATS[rhs])
    same_bits(predicted.tcgen05(*given), mmasim_cores.blackwell(*given))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("exponents", [(120, 134), (0, 255), (0, 20)])
def test_blackwell_with_scales(kind, exponents):
    """Large ones overflow, and small ones make subnormal sums."""
    random = np.random.default_rng(2)
    scales = [
        random.integers(*exponents, (size, K // 32)).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
        for size in (M, N)
    ]
    given = (*operands(kind, FORMATS[0], FORMATS[0]), *scales)
    how = {"kind": "mxf8f6f4", "block": 32, "k": 32}
    same_bits(predicted.tcgen05(*given), mmasim_cores.blackwell_scaled(*given, **how))
