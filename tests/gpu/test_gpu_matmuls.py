"""Matmuls on the chip.

Within the bounds of the numerics page, and in FP8 where FP8 was promised.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8 as fp8
from jaxfp8.kernels.scaled_matmul import _api as matmul

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

# Relative in Frobenius norm, before rounding: partial sums in float32, and with Hopper's fast
# accumulation.
CLOSE, FAST = 1e-3, 1e-2
ROUNDING = 2.0**-9  # of bfloat16
M, N, K = 256, 384, 1024
FPROP, WGRAD = (((1,), (1,)), ((), ())), (((0,), (0,)), ((), ()))

KINDS = {  # recipe, granularities of fprop and of wgrad, format of g, how scales are made
    "tensor": (fp8.recipes.current, (fp8.PerTensor(),) * 2, (fp8.PerTensor(),) * 2, fp8.E5M2, {}),
    "rows": (
        fp8.recipes.rowwise,
        (fp8.PerAxis(0),) * 2,
        (fp8.PerAxis(1),) * 2,
        fp8.E4M3,
        {"power_of_two": True},
    ),
    "tiles of 128": (
        fp8.recipes.blockwise,
        (fp8.PerBlock((1, 128)), fp8.PerBlock((128, 128))),
        (fp8.PerBlock((128, 1)),) * 2,
        fp8.E4M3,
        {"power_of_two": True},
    ),
    "tiles of 128, float32 scales": (
        fp8.recipes.blockwise,
        (fp8.PerBlock((1, 128)), fp8.PerBlock((128, 128))),
        (fp8.PerBlock((128, 1)),) * 2,
        fp8.E4M3,
        {},
    ),
    "MXFP8": (
        fp8.recipes.mxfp8,
        (fp8.PerBlock((1, 32)),) * 2,
        (fp8.PerBlock((32, 1)),) * 2,
        fp8.E4M3,
        {"scale_format": fp8.E8M0},
    ),
    "MXFP8, weights in 32x32": (
        functools.partial(fp8.recipes.mxfp8, w_tile_dim=2),
        (fp8.PerBlock((1, 32)), fp8.PerBlock((32, 32))),
        (fp8.PerBlock((32, 1)),) * 2,
        fp8.E4M3,
        {"scale_format": fp8.E8M0},
    ),
    "tiles of 32, float32 scales": (
        fp8.recipes.mxfp8,
        (fp8.PerBlock((1, 32)), fp8.PerBlock((32, 32))),
        (fp8.PerBlock((32, 1)),) * 2,
        fp8.E4M3,
        {},
    ),
}
IN_FP8 = ("tensor", "rows")  # on every chip with FP8 units


def dequantized(q):
    scale = np.asarray(q.scale).astype(np.float64)
    if isinstance(q.granularity, fp8.PerBlock):
        for axis, side in enumerate(q.granularity.along(q.ndim)):
            scale = scale.repeat(side, axis)
        scale = scale[tuple(map(slice, q.shape))]
    return np.asarray(q.values).astype(np.float64) * scale


def kernels_by(backend, chip):
    """Those of a chip with a backend of matmuls; skips one that is made for another chip."""
    try:
        return fp8.Kernels(chip, matmuls=backend)
    except ValueError as reason:
        pytest.skip(f"{backend}: {reason}")


@pytest.mark.parametrize(
    ("dtype", "fast"),
    [(jnp.bfloat16, False), (jnp.float32, False), (jnp.bfloat16, True)],
    ids=["bfloat16", "float32", "bfloat16 fast"],
)
@pytest.mark.parametrize("operation", ["fprop", "wgrad"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", matmul.BACKENDS)
def test_within_bounds(backend, kind, operation, fast, dtype, chip):
    if fast and kind not in IN_FP8:
        pytest.skip("tiles have no fast accumulation")
    make, fprop, wgrad, gradient, scales = KINDS[kind]
    dimensions, granularities = (FPROP, fprop) if operation == "fprop" else (WGRAD, wgrad)
    shapes = ((M, K), (N, K)) if operation == "fprop" else ((K, M), (K, N))
    kernels = kernels_by(backend, chip)
    random = np.random.default_rng(0)
    x, y = (random.standard_normal(shape, np.float32) for shape in shapes)
    lhs = fp8.quantize(jnp.asarray(x, jnp.bfloat16), fp8.E4M3, granularities[0], **scales)
    rhs = fp8.quantize(
        jnp.asarray(y, jnp.bfloat16),
        fp8.E4M3 if operation == "fprop" else gradient,
        granularities[1],
        **scales,
    )

    def run(lhs, rhs):
        return fp8.scaled_matmul(
            lhs,
            rhs,
            dimension_numbers=dimensions,
            preferred_element_type=dtype,
            fast_accumulation=fast,
            kernels=kernels,
        )

    try:
        lowered = jax.jit(run).lower(lhs, rhs)
    except NotImplementedError as reason:
        pytest.skip(f"{backend}: {reason}")
    compiled = lowered.compile(compiler_options=fp8.Kernels(chip).compiler_options(make()))
    if backend == "cudnn" or (backend == "xla" and kind in IN_FP8):
        fp8.programs.assert_fp8_gemms(compiled, 1)
    a, b = dequantized(lhs), dequantized(rhs)
    exact = a @ b.T if operation == "fprop" else a.T @ b
    distance = np.linalg.norm(np.asarray(compiled(lhs, rhs), np.float64) - exact) / np.linalg.norm(
        exact
    )
    bound = FAST if fast else CLOSE
    assert distance <= bound + (ROUNDING * (1 + bound) if dtype == jnp.bfloat16 else 0)


@pytest.mark.parametrize("donated", [True, False], ids=["donated", "kept"])
@pytest.mark.parametrize("given", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", matmul.BACKENDS)
def test_is_added_to_what_was_there(backend, kind, given, donated, chip):
    """Into float32, ragged; in place where it is that already. What is kept, stays."""
    make, _, granularities, gradient, scales = KINDS[kind]
    kernels = kernels_by(backend, chip)
    random = np.random.default_rng(0)
    x, y = (random.standard_normal((K, side), np.float32) for side in (M - 8, N - 24))
    lhs = fp8.quantize(jnp.asarray(x), fp8.E4M3, granularities[0], **scales)
    rhs = fp8.quantize(jnp.asarray(y), gradient, granularities[1], **scales)
    c = np.asarray(
        jnp.asarray(30 * random.standard_normal((M - 8, N - 24), np.float32)).astype(given)
    )

    def run(lhs, rhs, c):
        return fp8.scaled_matmul(
            lhs,
            rhs,
            dimension_numbers=WGRAD,
            preferred_element_type=jnp.float32,
            add_to=c,
            kernels=kernels,
        )

    jitted = jax.jit(
        run,
        donate_argnums=2 if donated and given == jnp.float32 else (),
        compiler_options=fp8.Kernels(chip).compiler_options(make()),
    )
    before = jnp.asarray(c)
    try:
        result = np.asarray(jitted(lhs, rhs, before), np.float64)
    except NotImplementedError as reason:
        pytest.skip(f"{backend}: {reason}")
    product = dequantized(lhs).T @ dequantized(rhs)
    distance = np.linalg.norm(result - c.astype(np.float64) - product) / np.linalg.norm(product)
    assert distance <= CLOSE
    if not donated:
        np.testing.assert_array_equal(np.asarray(before), c)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("kind", IN_FP8)
def test_what_is_not_finite_shows(kind, bad, chip):
    make, granularities, _, _, scales = KINDS[kind]
    x = np.random.default_rng(0).standard_normal((M, K), np.float32)
    x[1, 2] = bad
    lhs, rhs = (
        fp8.quantize(jnp.asarray(t, jnp.bfloat16), fp8.E4M3, g, **scales)
        for t, g in zip((x, np.ones((N, K), np.float32)), granularities, strict=True)
    )
    run = jax.jit(
        lambda lhs, rhs: fp8.scaled_matmul(lhs, rhs, dimension_numbers=FPROP),
        compiler_options=fp8.Kernels(chip).compiler_options(make()),
    )
    finite = np.isfinite(np.asarray(run(lhs, rhs), np.float32))
    np.testing.assert_array_equal(finite, np.broadcast_to((np.arange(M) != 1)[:, None], (M, N)))
