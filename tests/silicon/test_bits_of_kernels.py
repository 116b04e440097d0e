"""The Pallas kernels of Hopper give the predicted bits, with tensor cores that are modeled.

Two programs that share no line are compared. One is the kernel: interpreted, with its ring, its
tiles and its epilogue, and `wgmma` by `numerics/_tensor_cores.py`. The other is the rule in
`benchmarks/gpu/predicted.py`, a loop over K in NumPy, with tensor cores by MMA-Sim.
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))
import predicted
from contracts.test_scaled_matmul_tiles import tensor
from interpreter import interpreted, needs_mosaic
from jax.experimental import pallas as pl
from kernels.scaled_matmul.test_mosaic_matmul import tilings
from silicon import mmasim_cores, modeled
from silicon.operands import same_bits

import jaxfp8 as fp8
from jaxfp8._geometry import Geometry
from jaxfp8.kernels.scaled_matmul._call import MatmulCall
from jaxfp8.kernels.scaled_matmul.hopper import _consumer

pytestmark = [pytest.mark.silicon, needs_mosaic]
M, N, K = 328, 312, 136  # 102,336 results; ragged in tiles of 128 and of 32
FPROP, WGRAD = (((1,), (1,)), ((), ())), (((0,), (0,)), ((), ()))
TENSOR, ROWS, LAST = fp8.PerTensor(), fp8.PerAxis(0), fp8.PerAxis(1)

# Granularities of lhs and rhs, kind of scales, the rule, dimension numbers.
PATHS = {
    "tensor": (TENSOR, TENSOR, "float32", predicted.FULL, FPROP),
    "tensor, fast": (TENSOR, TENSOR, "float32", predicted.FAST, FPROP),
    "rows": (ROWS, ROWS, "float32", predicted.FULL, FPROP),
    "rows, wgrad, fast": (LAST, LAST, "float32", predicted.FAST, WGRAD),
    "1x128 @ 128x128": (
        fp8.PerBlock((1, 128)), fp8.PerBlock((128, 128)), "float32", predicted.tiles(128), FPROP,
    ),
    "1x128 @ 1x128, wgrad": (
        fp8.PerBlock((128, 1)), fp8.PerBlock((128, 1)), "float32", predicted.tiles(128), WGRAD,
    ),
    "1x32 @ 1x32": (
        fp8.PerBlock((1, 32)), fp8.PerBlock((1, 32)), "E8M0", predicted.tiles(32), FPROP,
    ),
    "1x32 @ 32x32": (
        fp8.PerBlock((1, 32)), fp8.PerBlock((32, 32)), "float32", predicted.tiles(32), FPROP,
    ),
}  # fmt: skip


def operands(path, m, n, k, formats=(fp8.E4M3, fp8.E4M3), *, one_sign=False):
    *granularities, scales, _, dimension_numbers = PATHS[path]
    shapes = ((m, k), (n, k)) if dimension_numbers == FPROP else ((k, m), (k, n))
    made = [
        tensor(i, shape, granularity, scales, format=format)
        for i, (shape, granularity, format) in enumerate(
            zip(shapes, granularities, formats, strict=True)
        )
    ]
    if one_sign:
        made = [fp8.QuantizedTensor(jnp.abs(q.values.astype(jnp.float32)).astype(q.values.dtype),
                q.scale, q.granularity, q.dtype, q.power_of_two) for q in made]  # fmt: skip
    return made


def kernel(path, tiling=None, out=jnp.float32):
    """The jitted kernel of a path."""
    from jaxfp8.kernels.scaled_matmul.hopper._door import scaled_matmul

    *_, rule, dimension_numbers = PATHS[path]
    call = MatmulCall(
        geometry=Geometry.of(dimension_numbers, 2, 2),
        out_dtype=jnp.dtype(out),
        fast_accumulation=rule.every is None,
    )
    return jax.jit(functools.partial(scaled_matmul, call=call, tiling=tiling))


def prediction(path, lhs, rhs, multiply=mmasim_cores.hopper):
    *_, rule, dimension_numbers = PATHS[path]
    values, scales = zip(
        *(predicted.matrix(q, dimension_numbers == FPROP, rule) for q in (lhs, rhs)), strict=True
    )
    return predicted.predicted(values, scales, rule, multiply)


@pytest.mark.parametrize("path", PATHS)
def test_each_path(path):
    given = operands(path, M, N, K)
    got = modeled.bits(kernel(path), *given)
    same_bits(got, prediction(path, *given))


# 20 shapes: few rows, one column, less than a tile, whole tiles, long K. Each with another tiling,
# pair of formats, and signs of operands.
SHAPES = (
    (1, 8, 32), (1, 128, 256), (3, 40, 70), (7, 16, 128), (8, 24, 40), (16, 200, 130), (33, 72, 96),
    (40, 8, 520), (64, 64, 64), (64, 32, 1000), (65, 72, 129), (100, 100, 100), (128, 128, 128),
    (128, 64, 256), (129, 40, 264), (72, 136, 31), (136, 72, 300), (256, 16, 512), (40, 200, 200),
    (130, 48, 384),
)  # fmt: skip
TILINGS = (None, "decode", "few", "small", "large")


@pytest.mark.parametrize("index", range(len(SHAPES)), ids=lambda i: "x".join(map(str, SHAPES[i])))
def test_shapes(index):
    path = [*PATHS][index % len(PATHS)]
    formats = [(fp8.E4M3, fp8.E4M3), (fp8.E4M3, fp8.E5M2), (fp8.E5M2, fp8.E4M3)][index % 3]
    given = operands(path, *SHAPES[index], formats, one_sign=index % 2 == 1)
    name = TILINGS[index % len(TILINGS)]
    got = modeled.bits(kernel(path, name and tilings()[name]), *given)
    same_bits(got, prediction(path, *given))


def test_the_widest_tiling_of_fast_accumulation():
    given = operands("tensor, fast", 264, 200, 384, one_sign=True)
    got = modeled.bits(kernel("tensor, fast", tilings()["wide"]), *given)
    same_bits(got, prediction("tensor, fast", *given))


@pytest.mark.parametrize("path", ["rows", "1x128 @ 128x128"])
def test_results_in_bfloat16_are_rounded_once(path):
    given = operands(path, 40, 48, 264)
    same_bits(modeled.bits(kernel(path, out=jnp.bfloat16), *given).astype(np.float32),
              prediction(path, *given).astype(jnp.bfloat16).astype(np.float32))  # fmt: skip


@pytest.mark.parametrize("path", ["tensor", "1x128 @ 1x128, wgrad"])
def test_is_added_to_what_was_there(path):
    """With powers of two, so that it does not matter whether the last product is fused."""
    (*granularities, _, _, dimension_numbers), shapes = PATHS[path], ((40, 264), (48, 264))
    if dimension_numbers == WGRAD:
        shapes = [shape[::-1] for shape in shapes]
    lhs, rhs = (tensor(i, shapes[i], granularities[i], "power of two") for i in (0, 1))
    c = np.random.default_rng(3).standard_normal((40, 48), np.float32) * 1000
    got = modeled.bits(
        lambda lhs, rhs, c: kernel(path)(lhs, rhs, add_to=c), lhs, rhs, jnp.asarray(c)
    )
    same_bits(got, prediction(path, lhs, rhs) + c)


# What would be a fault of a kernel: each must change bits.


def _promoted_every_64(lhs, rhs):
    halves = (pl.ds(0, 64), pl.ds(64, 64))
    return sum(PRODUCT(lhs.at[:, half], rhs.at[:, half]) for half in halves)


def _in_bfloat16(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def _larger_scale_first(sums, of_rows, of_columns):
    rows, columns = of_rows[:, None], of_columns[None]
    return sums * jnp.maximum(rows, columns) * jnp.minimum(rows, columns)


PRODUCT = _consumer._product
FAULTS = {
    "promoted every 64": ("tensor", "_product", _promoted_every_64),
    "never promoted": ("tensor", "_sums_in_registers", _consumer._sums_in_tensor_cores),
    "the larger scale first": ("rows", "_scaled_sum", _larger_scale_first),
    "scaled before it is added": (
        "1x128 @ 128x128", "_plus_scaled",
        modeled.on_host(lambda sums, product, scales: sums + product * scales),
    ),
    "sums in bfloat16": (
        "1x128 @ 128x128", "_plus_scaled",
        lambda *given: _in_bfloat16(modeled.plus_scaled(*given)),
    ),
    "products in bfloat16": (
        "tensor", "_product", lambda lhs, rhs: _in_bfloat16(PRODUCT(lhs, rhs)),
    ),
}  # fmt: skip


@functools.cache
def right_bits(path):
    """Operands, and the prediction that the kernel agrees with."""
    given = operands(path, 40, 48, 392)
    wanted = prediction(path, *given)
    same_bits(modeled.bits(kernel(path), *given), wanted)
    return given, wanted


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_bits(fault, monkeypatch):
    path, name, wrong = FAULTS[fault]
    given, wanted = right_bits(path)
    with modeled.tensor_cores():
        monkeypatch.setattr(_consumer, name, wrong)
        got = interpreted(kernel(path), *given)
    with pytest.raises(AssertionError, match="differ"):
        same_bits(got, wanted)
