"""Blackwell's block-scaled matmul.

What is handed to XLA's operation, evaluated by its definition on a CPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxfp8 as fp8
from jaxfp8.kernels.scaled_matmul import _cudnn

B200 = functools.partial(fp8.scaled_matmul, kernels=fp8.Kernels("b200", matmuls="cudnn"))


def definition(out_dtype, turned, a, b, a_scale, b_scale):
    """[B, M, K] x [B, N, K], scales [B, M, K/32] and [B, N, K/32] in E8M0."""
    del turned
    assert a_scale.dtype == b_scale.dtype == jnp.float8_e8m0fnu
    assert a_scale.shape == (*a.shape[:2], a.shape[2] // 32)
    assert b_scale.shape == (*b.shape[:2], b.shape[2] // 32)
    wide = (
        v.astype(jnp.float32) * jnp.repeat(s.astype(jnp.float32), 32, axis=2)
        for v, s in ((a, a_scale), (b, b_scale))
    )
    return jnp.einsum("bmk,bnk->bmn", *wide, precision="highest").astype(out_dtype)


@pytest.fixture
def on_blackwell(monkeypatch):
    """The CUDA branch is taken, and its call has the definition's result."""
    here = lax.platform_dependent

    def on_cuda(*arguments, **branches):
        chosen = branches.get("cuda")
        return chosen(*arguments) if chosen else here(*arguments, **branches)

    monkeypatch.setattr(lax, "platform_dependent", on_cuda)
    monkeypatch.setattr(_cudnn, "_call", definition)
    _cudnn._block_scaled_dot.cache_clear()
    yield
    _cudnn._block_scaled_dot.cache_clear()


def gaussian(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# As one program: eager code is a dozen for each shape.
quantize = jax.jit(
    fp8.quantize, static_argnums=(1, 2), static_argnames=("power_of_two", "scale_format")
)
dequantize = jax.jit(fp8.QuantizedTensor.dequantize)

MX = {"scale_format": fp8.E8M0}
POWER_OF_TWO = {"power_of_two": True}
# lhs shape and tile, rhs shape and tile, dimension numbers, scales.
CASES = {
    "mx fprop": ((48, 96), (1, 32), (96, 40), (32, 1), (((1,), (0,)), ((), ())), MX),
    "mx dgrad, 32x32": ((48, 40), (1, 32), (96, 40), (32, 32), (((1,), (1,)), ((), ())), MX),
    "mx wgrad": ((64, 24), (32, 1), (64, 40), (32, 1), (((0,), (0,)), ((), ())), MX),
    "mx ragged": ((33, 71), (1, 32), (71, 45), (32, 32), (((1,), (0,)), ((), ())), MX),
    "blocks fprop": (
        (200, 256),
        (1, 128),
        (256, 300),
        (128, 128),
        (((1,), (0,)), ((), ())),
        POWER_OF_TWO,
    ),
    "blocks wgrad": (
        (300, 24),
        (128, 1),
        (300, 40),
        (128, 1),
        (((0,), (0,)), ((), ())),
        POWER_OF_TWO,
    ),
    "tokens in rows": (
        (3, 70, 24),
        (32, 1),
        (3, 70, 40),
        (32, 1),
        (((0, 1), (0, 1)), ((), ())),
        MX,
    ),
    "batch": ((3, 48, 96), (1, 32), (3, 96, 40), (32, 32), (((2,), (1,)), ((0,), (0,))), MX),
    "scales of two kinds": ((48, 96), (1, 32), (96, 40), (32, 1), (((1,), (0,)), ((), ())), None),
}


@pytest.mark.usefixtures("on_blackwell")
@pytest.mark.parametrize(
    "case",
    [
        c
        if c in ("mx ragged", "blocks fprop", "tokens in rows")
        else pytest.param(c, marks=pytest.mark.slow)
        for c in CASES
    ],
)
def test_hands_over_what_it_was_given(case):
    lhs, lhs_tile, rhs, rhs_tile, dimension_numbers, scales = CASES[case]
    a = quantize(gaussian(*lhs), fp8.E4M3, fp8.PerBlock(lhs_tile), **(scales or MX))
    b = quantize(
        np.float32(1e-3) * gaussian(*rhs, seed=1),
        fp8.E4M3,
        fp8.PerBlock(rhs_tile),
        **(scales or POWER_OF_TWO),
    )
    product = jax.jit(functools.partial(B200, dimension_numbers=dimension_numbers))(a, b)
    high = (np.asarray(dequantize(q)) for q in (a, b))
    exact = np.asarray(lax.dot_general(*high, dimension_numbers, precision="highest"))
    np.testing.assert_allclose(product, exact, rtol=2e-6, atol=2e-6 * float(np.abs(exact).max()))


@pytest.mark.usefixtures("on_blackwell")
@pytest.mark.parametrize(
    "in_axes", [(0, 0), pytest.param((0, None), marks=pytest.mark.slow)], ids=str
)
def test_under_vmap(in_axes):
    a = quantize(gaussian(3, 48, 64), fp8.E4M3, fp8.PerBlock((1, 32)), **MX)
    b = quantize(gaussian(3, 64, 40, seed=1), fp8.E4M3, fp8.PerBlock((32, 32)), **MX)
    a, b = jax.device_get((a, b))
    one = lambda q, i: jax.tree.map(lambda leaf: leaf[i], q)
    arguments = [q if axis == 0 else one(q, 0) for q, axis in zip((a, b), in_axes, strict=True)]
    product = jax.jit(jax.vmap(B200, in_axes=in_axes))(*arguments)
    # a trace of its own: that of B200 is kept, and may be of no Blackwell
    alone = jax.jit(lambda a, b: B200(a, b))
    for i in range(3):
        each = (
            one(q, i) if axis == 0 else one(q, 0) for q, axis in zip((a, b), in_axes, strict=True)
        )
        np.testing.assert_allclose(product[i], alone(*each), rtol=1e-5, atol=1e-5)


def test_says_why_it_cannot():
    tiles = quantize(gaussian(64, 64), fp8.E4M3, fp8.PerBlock((1, 32)), **MX)
    other = quantize(gaussian(64, 64), fp8.E4M3, fp8.PerBlock((32, 32)), **MX)
    with pytest.raises(ValueError, match="'cudnn' is made for Blackwell, but chip='h200'"):
        B200(tiles, other, kernels=fp8.Kernels("h200", matmuls="cudnn"))
    with pytest.raises(ValueError, match="chip='abacus' is unknown"):
        B200(tiles, other, kernels=fp8.Kernels("abacus", matmuls="cudnn"))
    whole = quantize(gaussian(64, 64), fp8.E4M3)
    with pytest.raises(NotImplementedError, match="PerTensor"):
        B200(tiles, whole)
    floats = quantize(gaussian(64, 64), fp8.E4M3, fp8.PerBlock((32, 32)))
    with pytest.raises(NotImplementedError, match="power_of_two=False"):
        B200(tiles, floats)
    short = [
        quantize(gaussian(64, 64), fp8.E4M3, fp8.PerBlock(t), **MX) for t in ((1, 16), (16, 16))
    ]
    with pytest.raises(NotImplementedError, match="a tile of 16 along the contracted axis"):
        B200(*short)
