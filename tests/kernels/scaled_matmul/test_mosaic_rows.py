"""Hopper's matmul of operands scaled by rows, or as a whole, interpreted.

A float64 product, XLA's bits, and no races.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts.test_scaled_matmul_backends import distance, product
from contracts.test_scaled_matmul_tiles import MATRICES, made, tensor
from interpreter import interpreted, needs_mosaic
from kernels.scaled_matmul.test_mosaic_matmul import CLOSE, ROUNDED, mosaic, tiled, tilings

import jaxfp8 as fp8

pytestmark = needs_mosaic
M, K, N = 136, 272, 200  # ragged in tiles of 128
ROWS, COLUMNS, TENSOR = fp8.PerAxis(0), fp8.PerAxis(1), fp8.PerTensor()


def run(lhs, rhs, dimension_numbers=MATRICES, out=jnp.float32, fast=False):
    options = {
        "dimension_numbers": dimension_numbers,
        "preferred_element_type": out,
        "fast_accumulation": fast,
    }
    return interpreted(jax.jit(lambda lhs, rhs: mosaic(lhs, rhs, **options)), lhs, rhs)


# shapes, granularities, dimension numbers
FORMS = {
    "fprop": ((M, K), (K, N), ROWS, COLUMNS, MATRICES),
    "wgrad": ((M, K), (M, N), COLUMNS, COLUMNS, (((0,), (0,)), ((), ()))),
    "per tensor": ((3, 70), (70, 40), TENSOR, TENSOR, MATRICES),
    "rows and a tensor": ((40, 70), (30, 70), ROWS, TENSOR, (((1,), (1,)), ((), ()))),
    "experts": (
        (2, 40, 130),
        (2, 130, 72),
        fp8.PerAxis(0, 1),
        fp8.PerAxis(2),
        (((2,), (1,)), ((0,), (0,))),
    ),
    "two contracted": (
        (3, 150, 40),
        (3, 150, 72),
        fp8.PerAxis(2),
        fp8.PerAxis(2),
        (((1, 0), (1, 0)), ((), ())),
    ),
    "two kept": ((40, 130), (130, 3, 24), ROWS, fp8.PerAxis(1, 2), MATRICES),
}
SLOW = ("wgrad", "two contracted", "two kept")


@pytest.mark.parametrize(
    "form", [pytest.param(f, marks=[pytest.mark.slow] * (f in SLOW)) for f in FORMS]
)
def test_forms(form):
    lhs_shape, rhs_shape, *granularities, dimension_numbers = FORMS[form]
    lhs, rhs = (
        tensor(i, shape, granularities[i], "float32")
        for i, shape in enumerate((lhs_shape, rhs_shape))
    )
    y = run(lhs, rhs, dimension_numbers)
    exact = product(lhs, rhs, dimension_numbers)
    assert (y.shape, y.dtype) == (exact.shape, jnp.float32)
    assert distance(y, exact) <= CLOSE


@pytest.mark.parametrize(
    ("out", "fast"),
    [(jnp.bfloat16, True), pytest.param(jnp.float16, False, marks=pytest.mark.slow)],
)
def test_formats_and_results(out, fast):
    lhs = tensor(0, (40, 200), ROWS, "power of two")
    rhs = tensor(1, (200, 72), COLUMNS, "power of two", format=fp8.E5M2)
    lhs = dataclasses.replace(lhs, scale=lhs.scale * 2.0**-18)  # so that float16 holds the result
    y = run(lhs, rhs, out=out, fast=fast)
    assert y.dtype == out
    assert distance(y, product(lhs, rhs)) <= ROUNDED


def cuts():
    """Tilings and modes. The widest has no registers for both sums and a product."""
    for name in tilings():
        for fast in (False, True):
            if fast or name != "wide":
                marks = () if name == "wide" else (pytest.mark.slow,)
                yield pytest.param(
                    name, fast, id=f"{name}, {'fast' if fast else 'precise'}", marks=marks
                )


@pytest.mark.parametrize(("name", "fast"), list(cuts()))
def test_every_tiling_has_the_bits_of_xla(name, fast):
    """Sums of integers are exact, and scales multiply in the same order."""
    random = np.random.default_rng(0)
    lhs, rhs = (
        dataclasses.replace(
            tensor(i, shape, granularity, "float32"),
            values=jnp.asarray(
                random.integers(-8, 9, shape).astype(np.float32).astype(fp8.E4M3.dtype)
            ),
        )
        for i, (shape, granularity) in enumerate((((264, 384), ROWS), ((384, 200), COLUMNS)))
    )
    np.testing.assert_array_equal(
        interpreted(tiled(name, fast), lhs, rhs), fp8.scaled_matmul(lhs, rhs)
    )


@pytest.mark.parametrize("order", [1, pytest.param(-1, marks=pytest.mark.slow)])
def test_huge_times_tiny_is_finite_and_zeros_are_zero(order):
    scales = (np.float32(1.1 * 2.0**126), np.float32(1.3 * 2.0**-126))[::order]
    values = np.ones((8, 16)), np.ones((16, 24))
    values[0][2], values[1][:, 3] = 0, 0
    lhs = made(values[0], np.full((8, 1), scales[0]), ROWS, False)
    rhs = made(values[1], np.full((1, 24), scales[1]), COLUMNS, False)
    y = run(lhs, rhs)
    np.testing.assert_allclose(y, product(lhs, rhs), rtol=1e-6)


@pytest.mark.parametrize("fast", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_is_not_finite_shows_where_it_is(fast):
    lhs, rhs = tensor(0, (40, 200), ROWS, "float32"), tensor(1, (200, 72), COLUMNS, "float32")
    spoilt = np.asarray(lhs.values).copy(), np.asarray(rhs.values).copy()
    spoilt[0][3, 190], spoilt[1][5, 60] = np.nan, np.nan
    y = run(
        *(
            dataclasses.replace(q, values=jnp.asarray(v))
            for q, v in zip((lhs, rhs), spoilt, strict=True)
        ),
        fast=fast,
    )
    want = np.ones((40, 72), bool)
    want[3], want[:, 60] = False, False
    np.testing.assert_array_equal(np.isfinite(y), want)


def test_vmap():
    """Experts with one scale each."""
    experts = [
        [
            tensor(2 * i + s, shape, TENSOR, "float32")
            for s, shape in enumerate(((9, 150), (150, 40)))
        ]
        for i in (0, 1)
    ]
    stacked = [
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_side)
        for of_side in zip(*experts, strict=True)
    ]
    for y, (lhs, rhs) in zip(
        interpreted(jax.jit(jax.vmap(mosaic)), *stacked), experts, strict=True
    ):
        assert distance(y, product(lhs, rhs)) <= CLOSE


@pytest.mark.slow
def test_a_layer_forward_and_backward():
    x, w, g = (
        jax.random.normal(jax.random.key(i), s)
        for i, s in enumerate(((160, 256), (256, 96), (160, 96)))
    )

    def step(matmuls):
        kernels = fp8.Kernels(matmuls=matmuls)
        dot = functools.partial(fp8.dot, recipe=fp8.recipes.rowwise(), state=(), kernels=kernels)
        y, pullback = jax.vjp(dot, x, w)
        return y, *pullback(g)

    for mine, theirs in zip(interpreted(jax.jit(lambda: step("mosaic"))), step("xla"), strict=True):
        assert distance(mine, np.asarray(theirs, np.float64)) <= CLOSE


def test_nothing_contracted_is_refused():
    lhs, rhs = tensor(0, (3,), TENSOR, "float32"), tensor(1, (5,), TENSOR, "float32")
    with pytest.raises(NotImplementedError, match="no axis is contracted"):
        mosaic(lhs, rhs, dimension_numbers=(((), ()), ((), ())))
