"""XLA's matmuls on a CPU differ from tensor cores by no more than tensor cores can lose.

The bound is that of the model, for each result. Each of the 33 terms of a step loses less than a
unit. The sum of a step loses less than its last bit.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))
import predicted
from contracts.test_scaled_matmul_backends import product
from contracts.test_scaled_matmul_tiles import tensor
from silicon import mmasim_cores
from silicon.operands import values

import jaxfp8 as fp8

pytestmark = pytest.mark.silicon
M, N, K = 96, 80, 392
FPROP = (((1,), (1,)), ((), ()))
E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
STEP = 32
OF_FLOAT32 = 2.0**-23  # a unit in the last place, of each addition and each scale


def lost(values, scales, rule, *, terms_keep, sums_keep):
    """The most that tensor cores can lose of each result [M, N]: float64.

    They keep `terms_keep` bits of each term after the leading bit of the largest one, and
    `sums_keep` bits of each sum.
    """
    lhs, rhs = (np.pad(x.astype(np.float64), ((0, 0), (0, -K % 128))) for x in values)
    lowest = [int(ml_dtypes.finfo(x.dtype).minexp) for x in values]
    powers = [
        np.exp2(np.maximum(np.frexp(x)[1] - 1, least))
        for x, least in zip((lhs, rhs), lowest, strict=True)
    ]
    every = rule.every or lhs.shape[1]
    total, all_of = np.zeros((M, N)), np.zeros((M, N))
    for first in range(0, K, every):
        sums, gone = np.zeros((M, N)), np.zeros((M, N))
        for at in range(first, min(first + every, lhs.shape[1]), STEP):
            along = slice(at, at + STEP)
            terms = lhs[:, None, along] * rhs[None, :, along]
            largest = np.where(terms == 0, 0, powers[0][:, None, along] * powers[1][None, :, along])
            # The accumulator is off by what is lost already.
            unit = np.maximum(largest.max(-1), np.abs(sums) + gone) * 2.0**-terms_keep
            sums = sums + terms.sum(-1)
            gone += np.minimum(np.abs(terms), unit[..., None]).sum(-1) + unit
            gone += (np.abs(sums) + gone) * 2.0**-sums_keep
        cell = first // every if rule.fused else 0
        scale = scales[0][:, cell, None].astype(np.float64) * scales[1][None, :, cell]
        all_of += sums * scale
        total += gone * scale + (np.abs(all_of) + np.abs(sums * scale)) * 4 * OF_FLOAT32
    return total


HOPPER = {"terms_keep": 13, "sums_keep": 13}
BLACKWELL = {"terms_keep": 25, "sums_keep": 23}
TENSOR, ROWS, TILES_OF_32 = fp8.PerTensor(), fp8.PerAxis(0), fp8.PerBlock((1, 32))
PATHS = {
    "Hopper, tensor": (TENSOR, "float32", predicted.FULL, HOPPER),
    "Hopper, tensor, fast": (TENSOR, "float32", predicted.FAST, HOPPER),
    "Hopper, rows": (ROWS, "power of two", predicted.FULL, HOPPER),
    "Hopper, 1x128": (fp8.PerBlock((1, 128)), "float32", predicted.tiles(128), HOPPER),
    "Hopper, MXFP8": (TILES_OF_32, "E8M0", predicted.tiles(32), HOPPER),
    "Blackwell, tensor": (TENSOR, "float32", predicted.FAST, BLACKWELL),
}
signs = pytest.mark.parametrize(
    "one_sign",
    [
        pytest.param(False, id="mixed signs", marks=pytest.mark.slow),
        pytest.param(True, id="one sign"),
    ],
)


def operands(granularity, scales, one_sign):
    made = [tensor(i, (size, K), granularity, scales) for i, size in enumerate((M, N))]
    if not one_sign:
        return made
    positive = lambda x: jnp.abs(x.astype(jnp.float32)).astype(x.dtype)
    return [jax.tree.map(positive, q) for q in made]


def check(lhs, rhs, wanted, most, keeps):
    """XLA's result and the exact one are within `most` of what tensor cores give."""
    got = fp8.scaled_matmul(
        lhs,
        rhs,
        dimension_numbers=FPROP,
        preferred_element_type=jnp.float32,
        kernels=fp8.Kernels(matmuls="xla"),
    )
    exact = product(lhs, rhs, FPROP)
    assert (np.abs(np.asarray(got, np.float64) - wanted) <= most).all()
    assert (np.abs(wanted - exact) <= most).all()
    # A bound so wide that every result is within it would say nothing.
    assert most.max() < np.abs(exact).max() / (2 if keeps is HOPPER else 2000)


@signs
@pytest.mark.parametrize("path", PATHS)
def test_each_path(path, one_sign):
    granularity, kind, rule, keeps = PATHS[path]
    lhs, rhs = operands(granularity, kind, one_sign)
    given = [*zip(*(predicted.matrix(q, True, rule) for q in (lhs, rhs)), strict=True)]
    cores = mmasim_cores.blackwell if keeps is BLACKWELL else mmasim_cores.hopper
    wanted = predicted.predicted(*given, rule, cores)
    check(lhs, rhs, wanted, lost(*given, rule, **keeps), keeps)


@signs
def test_mxfp8_on_blackwell(one_sign):
    """Its tensor cores take the scales of 32 values with them."""
    lhs, rhs = operands(TILES_OF_32, "E8M0", one_sign)
    pairs = [predicted.matrix(q, True, predicted.tiles(32)) for q in (lhs, rhs)]
    padded = [np.pad(x, ((0, 0), (0, -K % STEP))) for x, _ in pairs]
    cells, zeros = [np.asarray(q.scale) for q in (lhs, rhs)], np.zeros((M, N), np.float32)
    how = {"kind": "mxf8f6f4", "block": 32, "k": 32}
    wanted = mmasim_cores.blackwell_scaled(*padded, zeros, *cells, **how)
    scaled = [x.astype(np.float64) * scale.repeat(32, 1)[:, :K] for x, scale in pairs]
    most = lost(scaled, [np.ones((size, 1)) for size in (M, N)], predicted.FAST, **BLACKWELL)
    check(lhs, rhs, wanted, most, BLACKWELL)


@pytest.mark.parametrize("kind", ["mxf4nvf4", "mxf4"])
def test_four_bits_keep_what_float32_keeps(kind):
    """NVFP4 and MXFP4 on Blackwell: 64 products with their scales are one sum."""
    random, k = np.random.default_rng(0), 256
    block = {"mxf4nvf4": 16, "mxf4": 32}[kind]
    lhs, rhs = (
        np.clip(random.standard_normal((size, k)) * 2, -6, 6).astype(ml_dtypes.float4_e2m1fn)
        for size in (M, N)
    )
    if kind == "mxf4nvf4":
        scales = [values("one sign", i, (size, k // block), E4M3) for i, size in enumerate((M, N))]
    else:
        scales = [
            random.integers(120, 134, (size, k // block)).astype(np.uint8).view(E8M0)
            for size in (M, N)
        ]
    zeros = np.zeros((M, N), np.float32)
    got = mmasim_cores.blackwell_scaled(lhs, rhs, zeros, *scales, kind=kind, block=block, k=64)
    lhs, rhs = (
        x.astype(np.float64) * scale.astype(np.float64).repeat(block, 1)
        for x, scale in zip((lhs, rhs), scales, strict=True)
    )
    assert (np.abs(got - lhs @ rhs.T) <= np.abs(lhs) @ np.abs(rhs).T * 2.0**-22).all()
