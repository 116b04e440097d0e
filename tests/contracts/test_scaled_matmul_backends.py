"""What every backend of the scaled matmul has to do.

A new backend is tested by being in the table.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jaxfp8 as fp8
from jaxfp8.kernels.scaled_matmul._api import BACKENDS

# cuDNN's takes operands in tiles only, test_scaled_matmul_tiles.py; Mosaic's has to be interpreted,
# kernels/scaled_matmul/test_mosaic_rows.py.
HERE = [name for name in BACKENDS if name not in ("cudnn", "mosaic")]
of_each = pytest.mark.parametrize("backend", HERE)
# The reference widens its operands, and has the rest in common with XLA's.
of_each_but_reference = pytest.mark.parametrize(
    "backend",
    [pytest.param(name, marks=pytest.mark.slow if name == "reference" else ()) for name in HERE],
)

# The bound of the numerics page for CPUs, relative in Frobenius norm, before any rounding of the
# result.
CLOSE = 2e-6


def gaussian(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def quantized(x, format, granularity=None) -> fp8.QuantizedTensor:
    """What `fp8.quantize` gives, without compiling it for each shape."""
    granularity = granularity or fp8.PerTensor()
    kept = (
        tuple(a % x.ndim for a in granularity.axes)
        if isinstance(granularity, fp8.PerAxis)
        else None
    )
    codes, scale = oracle.quantize(np.asarray(x), format.name, kept)
    return fp8.QuantizedTensor(
        *jax.device_put((codes.view(format.dtype), scale)), granularity, jnp.dtype(x.dtype)
    )


def dequantized(q) -> np.ndarray:
    """`values * scale` in float64, the scale of a tile repeated over it."""
    scale = np.asarray(q.scale).astype(np.float64)
    if isinstance(q.granularity, fp8.PerBlock):
        for axis, side in enumerate(q.granularity.along(q.ndim)):
            scale = np.repeat(scale, side, axis=axis)
        scale = scale[tuple(map(slice, q.shape))]
    return np.asarray(q.values).astype(np.float64) * scale


def product(lhs, rhs, dimension_numbers=None) -> np.ndarray:
    """The product of the dequantized operands in float64, axes as in `lax.dot_general`.

    Batch, lhs kept, rhs kept.
    """
    (lc, rc), (lb, rb) = dimension_numbers or (((lhs.ndim - 1,), (0,)), ((), ()))
    left = [f"l{axis}" for axis in range(lhs.ndim)]
    right = [f"r{axis}" for axis in range(rhs.ndim)]
    for i, j in zip((*lc, *lb), (*rc, *rb), strict=True):
        right[j] = left[i]
    out = [left[a] for a in lb] + [x for a, x in enumerate(left) if a not in (*lc, *lb)]
    out += [x for a, x in enumerate(right) if a not in (*rc, *rb)]
    number = {name: index for index, name in enumerate({*left, *right})}
    axes = [[number[name] for name in names] for names in (left, right, out)]
    return np.einsum(dequantized(lhs), axes[0], dequantized(rhs), axes[1], axes[2])


def multiply(lhs, rhs, backend, dimension_numbers=None, **options):
    """Compiled, as in a layer."""
    options |= {"dimension_numbers": dimension_numbers} if dimension_numbers else {}
    kernels = fp8.Kernels(matmuls=backend)
    return jax.jit(lambda lhs, rhs: fp8.scaled_matmul(lhs, rhs, kernels=kernels, **options))(
        lhs, rhs
    )


def distance(actual, exact) -> float:
    return np.linalg.norm(np.asarray(actual, np.float64) - exact) / np.linalg.norm(exact)


def decibels(actual, exact) -> float:
    return -20 * np.log10(distance(actual, exact))


@of_each_but_reference
@pytest.mark.parametrize(
    ("formats", "least", "rows"),
    [
        ((fp8.E4M3, fp8.E4M3), 28, False),
        ((fp8.E4M3, fp8.E4M3), 28, True),
        ((fp8.E4M3, fp8.E5M2), 24, False),
        ((fp8.E5M2, fp8.E4M3), 24, False),
    ],
    ids=["E4M3 x E4M3", "rows", "E4M3 x E5M2", "E5M2 x E4M3"],
)
def test_signal_to_noise(backend, formats, least, rows):
    x, w = gaussian(0, 64, 4096), gaussian(1, 4096, 64)
    granularities = (fp8.PerAxis(0), fp8.PerAxis(1)) if rows else (None, None)
    lhs, rhs = (quantized(t, f, g) for t, f, g in zip((x, w), formats, granularities, strict=True))
    y = multiply(lhs, rhs, backend)
    assert distance(y, dequantized(lhs) @ dequantized(rhs)) <= CLOSE
    ratio = decibels(y, x.astype(np.float64) @ w.astype(np.float64))
    assert least <= ratio < least + 1.5


@of_each_but_reference
@pytest.mark.parametrize(
    "rhs_granularity", [fp8.PerTensor(), fp8.PerAxis(1), fp8.PerAxis(-1)], ids=repr
)
@pytest.mark.parametrize(
    "lhs_granularity", [fp8.PerTensor(), fp8.PerAxis(0), fp8.PerAxis(-2)], ids=repr
)
def test_granularities(backend, lhs_granularity, rhs_granularity):
    lhs = quantized(gaussian(0, 17, 33), fp8.E4M3, lhs_granularity)
    rhs = quantized(gaussian(1, 33, 5), fp8.E4M3, rhs_granularity)
    assert distance(multiply(lhs, rhs, backend), product(lhs, rhs)) <= CLOSE


GEOMETRIES = {
    "vectors": ((7,), (7,), (((0,), (0,)), ((), ()))),
    "matrix and vector": ((3, 7), (7,), (((1,), (0,)), ((), ()))),
    "three axes": ((2, 3, 7), (7, 5), (((2,), (0,)), ((), ()))),
    "transposed": ((7, 3), (5, 7), (((0,), (1,)), ((), ()))),
    "batch": ((4, 3, 7), (4, 7, 5), (((2,), (1,)), ((0,), (0,)))),
    "batch in the middle": ((3, 4, 7), (7, 5, 4), (((2,), (0,)), ((1,), (2,)))),
    "two batches, crossed": ((2, 4, 3, 7), (4, 5, 2, 7), (((3,), (3,)), ((0, 1), (2, 0)))),
    "two contracted, crossed": ((6, 3, 7), (7, 5, 6), (((2, 0), (0, 2)), ((), ()))),
    "outer product": ((3,), (5,), (((), ()), ((), ()))),
}


@pytest.mark.parametrize(
    ("backend", "rows"),
    [
        pytest.param(
            name,
            rows,
            id=f"{name}-{'per row' if rows else 'per tensor'}",
            marks=() if rows or name != "reference" else pytest.mark.slow,
        )
        for name in HERE
        for rows in (False, True)
    ],
)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_geometries(backend, geometry, rows):
    lhs_shape, rhs_shape, dimension_numbers = GEOMETRIES[geometry]
    operands = []
    for side, shape in enumerate((lhs_shape, rhs_shape)):
        kept = [a for a in range(len(shape)) if a not in dimension_numbers[0][side]]
        granularity = fp8.PerAxis(*kept) if rows and kept else fp8.PerTensor()
        operands.append(quantized(gaussian(side, *shape), fp8.E4M3, granularity))
    y = multiply(*operands, backend, dimension_numbers)
    exact = product(*operands, dimension_numbers)
    assert y.shape == exact.shape
    assert distance(y, exact) <= CLOSE


@of_each_but_reference
@pytest.mark.parametrize("shapes", [((0, 3), (3, 2)), ((2, 0), (0, 3)), ((2, 3), (3, 0))], ids=str)
def test_empty(backend, shapes):
    lhs, rhs = (quantized(np.ones(shape, np.float32), fp8.E4M3) for shape in shapes)
    y = multiply(lhs, rhs, backend)
    np.testing.assert_array_equal(
        y, np.zeros((shapes[0][0], shapes[1][1]), np.float32), strict=True
    )


@of_each
@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda dtype: jnp.dtype(dtype).name
)
def test_dtypes(backend, dtype):
    lhs, rhs = (quantized(gaussian(seed, 8, 8).astype(dtype), fp8.E4M3) for seed in (0, 1))
    full = multiply(lhs, rhs, backend, preferred_element_type=jnp.float32)
    assert full.dtype == jnp.float32
    assert distance(full, product(lhs, rhs)) <= CLOSE
    y = multiply(lhs, rhs, backend)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, np.asarray(full).astype(dtype))


@of_each_but_reference
@pytest.mark.usefixtures("standard_promotion")
def test_dtypes_promote(backend):
    lhs, rhs = (
        quantized(np.ones((2, 2), dtype), fp8.E4M3) for dtype in (jnp.bfloat16, jnp.float32)
    )
    assert multiply(lhs, rhs, backend).dtype == jnp.float32


@of_each
@pytest.mark.parametrize("rows", [False, True], ids=["per tensor", "per row"])
@pytest.mark.parametrize("order", [1, -1])
def test_huge_times_tiny_is_finite(backend, rows, order):
    granularities = (fp8.PerAxis(0), fp8.PerAxis(1)) if rows else (None, None)
    arrays = (np.full((2, 2), 3e38, np.float32), np.full((2, 2), 1e-30, np.float32))[::order]
    lhs, rhs = (quantized(x, fp8.E4M3, g) for x, g in zip(arrays, granularities, strict=True))
    y = multiply(lhs, rhs, backend)
    np.testing.assert_allclose(y, 6e8, rtol=1e-6)


@of_each_but_reference
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows(backend, bad):
    x = gaussian(0, 3, 4)
    x[1, 2] = bad
    y = multiply(quantized(x, fp8.E4M3), quantized(gaussian(1, 4, 2), fp8.E4M3), backend)
    np.testing.assert_array_equal(np.isfinite(y), [[True, True], [False, False], [True, True]])


@of_each
def test_vmap(backend):
    x, w = gaussian(0, 3, 4, 6), gaussian(1, 6, 5)
    rhs = quantized(w, fp8.E4M3)
    slices = [quantized(slice_, fp8.E4M3) for slice_ in x]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *slices)
    run = jax.jit(jax.vmap(lambda lhs: multiply(lhs, rhs, backend)))
    for y, lhs in zip(np.asarray(run(stacked)), slices, strict=True):
        assert distance(y, product(lhs, rhs)) <= CLOSE
