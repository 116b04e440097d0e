"""Prologues: what they compute, what differentiating them saves, and what they refuse."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest

import jaxfp8 as fp8
from jaxfp8.prologues._prologue import produce
from jaxfp8.quantizers._kinds import _wide_operands

SWIGLU, RMS_NORM = fp8.prologues.SwiGLU(), fp8.prologues.RMSNorm(epsilon=1e-5)
M, K = 48, 160
# Of the float64 result: half a step of the dtype, and what float32 loses before, or all that it
# loses.
CLOSE = {"bfloat16": 2.0**-8 * 1.01, "float16": 2.0**-11 * 1.01, "float32": 2.0**-20}


def arrays(name, dtype):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(2, M, K)) * np.exp2(rng.integers(-3, 4, (2, M, 1)))).astype(dtype)
    other = rng.normal(size=x.shape if name == "swiglu" else (K,)).astype(
        dtype if name == "swiglu" else np.float32
    )
    return x, other


def in_float64(name, x, other):
    x, other = x.astype(np.float64), other.astype(np.float64)
    if name == "swiglu":
        return x / (1 + np.exp(-x)) * other
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5) * other


def prologue_of(name):
    return SWIGLU if name == "swiglu" else RMS_NORM


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("name", ["swiglu", "rms_norm"])
def test_against_numpy(name, dtype):
    given = arrays(name, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    h = jax.jit(prologue_of(name).__call__)(*given)
    assert (h.shape, h.dtype) == ((2, M, K), dtype)
    wanted = in_float64(name, *given)
    tiny = 2.0**-24 if dtype == "float16" else 0.0  # its subnormal numbers are as far apart
    assert np.all(
        np.abs(np.asarray(h).astype(np.float64) - wanted) <= CLOSE[dtype] * np.abs(wanted) + tiny
    )


@pytest.mark.parametrize("name", ["swiglu", "rms_norm"])
def test_quantized_in_one_call(name):
    """Values by the oracle, of h rounded to bfloat16 also where XLA fuses all of it."""
    given = arrays(name, ml_dtypes.bfloat16)
    prologue = prologue_of(name)

    def quantize(arrays, *args, **how):
        one = lambda *arrays: fp8.quantize(arrays, fp8.E4M3, *args, prologue=prologue, **how)
        return jax.jit(one)(*arrays)

    tiles = fp8.PerBlock((1, 32)), fp8.PerBlock((32, 1))
    rows, columns = quantize(given, tiles, power_of_two=True)
    h = np.asarray(jax.jit(prologue)(*given)).astype(np.float32)
    for q, tile in ((rows, (1, 32)), (columns, (32, 1))):
        multiplier = oracle.spread(1 / np.asarray(q.scale), h.shape, (1, *tile))
        np.testing.assert_array_equal(oracle.codes(q.values), oracle.cast(h, multiplier, "E4M3"))
        assert q.dtype == jnp.bfloat16
    (alone,) = quantize(given, (fp8.PerTensor(),))
    np.testing.assert_array_equal(
        np.asarray(alone.scale), jax.jit(lambda h: fp8.quantize(h, fp8.E4M3).scale)(h)
    )
    given_scale = quantize(given, scale=0.25)
    assert given_scale.scale == 0.25


@pytest.mark.usefixtures("standard_promotion")  # for flax
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_the_bits_of_flax(dtype):
    x, gain = (jnp.asarray(each) for each in arrays("rms_norm", np.float32))
    x = x.astype(dtype)
    wanted = nn.RMSNorm(epsilon=1e-5, dtype=dtype).apply({"params": {"scale": gain}}, x)
    np.testing.assert_array_equal(RMS_NORM(x, gain), wanted)


def test_edges():
    gate = np.float32([-200.0, -90.0, 0.0, 200.0, -np.inf, np.inf, np.nan])

    @jax.jit
    def all_of_them(gate, ones):
        h, gradient = jax.vjp(SWIGLU, gate, ones)
        return h, gradient(ones)[0], RMS_NORM(jnp.zeros((2, 4)), jnp.ones(4))

    h, gradient, zeros = map(np.asarray, all_of_them(gate, np.ones(7, np.float32)))
    np.testing.assert_array_equal(h, np.float32([-0.0, -0.0, 0.0, 200.0, np.nan, np.inf, np.nan]))
    np.testing.assert_array_equal(gradient[:4], np.float32([0, 0, 0.5, 1]))
    assert not np.any(zeros)


@pytest.mark.parametrize("name", ["swiglu", "rms_norm"])
def test_gradients(name):
    given = arrays(name, np.float32)
    c = np.cos(np.arange(2 * M * K, dtype=np.float32)).reshape(2, M, K)

    def plain(x, other):
        if name == "swiglu":
            return jax.nn.silu(x) * other
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * other.reshape(1, 1, K)

    mine, wanted = (
        jax.jit(jax.grad(lambda *a, f=f: jnp.sum(f(*a) * c), (0, 1)))(*given)
        for f in (prologue_of(name), plain)
    )
    for got, want in zip(mine, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("name", "wide"), [("swiglu", 2), ("rms_norm", 1)])
def test_only_its_arrays_are_saved(name, wide):
    given = tuple(map(jnp.asarray, arrays(name, ml_dtypes.bfloat16)))
    saved = jax.tree.leaves(jax.vjp(prologue_of(name), *given)[1])
    large = [leaf for leaf in saved if leaf.size >= M * K]
    assert [leaf.dtype for leaf in large] == [jnp.bfloat16] * wide
    assert _wide_operands(produce(prologue_of(name), *given)) == wide
    # The inverse norm of each row: it is not summed again, which would take another read.
    assert sum(leaf.shape == (2, M, 1) for leaf in saved) == (name == "rms_norm")


X, W = jnp.ones((4, 8)), jnp.ones((8, 2))
CURRENT = fp8.recipes.current()
MISTAKES = {
    "one array": (
        TypeError,
        lambda: fp8.dot(X, W, recipe=CURRENT, prologue=SWIGLU),
        "lhs is an array float32[4, 8]|Pass the tuple (gate, up)",
    ),
    "three": (
        TypeError,
        lambda: fp8.dot((X, X, X), W, recipe=CURRENT, prologue=SWIGLU),
        "a tuple of 3",
    ),
    "no prologue": (TypeError, lambda: fp8.dot((X, X), W, recipe=CURRENT), "lhs is a tuple of 2"),
    "einsum": (TypeError, lambda: fp8.einsum("mk,kn->mn", (X, X), W, recipe=CURRENT), "prologue="),
    "no such": (
        TypeError,
        lambda: fp8.dot((X, X), W, recipe=CURRENT, prologue=jax.nn.silu),
        "Use fp8.prologues.SwiGLU()",
    ),
    "the class": (
        TypeError,
        lambda: fp8.dot((X, X), W, recipe=CURRENT, prologue=fp8.prologues.SwiGLU),
        "Use fp8.prologues.SwiGLU()",
    ),
    "shapes": (
        ValueError,
        lambda: fp8.dot((X, X[:2]), W, recipe=CURRENT, prologue=SWIGLU),
        "up float32[2, 8] differ",
    ),
    "dtypes": (ValueError, lambda: SWIGLU(X, X.astype(jnp.bfloat16)), "up bfloat16[4, 8] differ"),
    "integers": (TypeError, lambda: SWIGLU(X.astype(jnp.int32), X), "gate has dtype int32"),
    "integers in dot": (
        TypeError,
        lambda: fp8.dot((X, X.astype(jnp.int8)), W, recipe=CURRENT, prologue=SWIGLU),
        "lhs, up",
    ),
    "gain": (ValueError, lambda: RMS_NORM(X, jnp.ones(4)), "gain has shape [4], x [4, 8]"),
    "too few": (ValueError, lambda: RMS_NORM(X), "got 1"),
    "epsilon": (
        ValueError,
        lambda: fp8.prologues.RMSNorm(epsilon=0.0),
        "epsilon=0.0 must be a positive number",
    ),
    "epsilon that is 0 in float32": (
        ValueError,
        lambda: fp8.prologues.RMSNorm(epsilon=1e-60),
        "epsilon=1e-60",
    ),
    "infinite epsilon": (
        ValueError,
        lambda: fp8.prologues.RMSNorm(epsilon=float("inf")),
        "epsilon=inf",
    ),
    "format": (
        ValueError,
        lambda: fp8.quantize((X, X), fp8.E8M0, prologue=SWIGLU),
        "cannot hold values",
    ),
    "scale": (
        ValueError,
        lambda: fp8.quantize((X, X), fp8.E4M3, scale=jnp.ones(3), prologue=SWIGLU),
        "scale has shape [3]",
    ),
    "gradient": (
        TypeError,
        lambda: jax.grad(lambda x: fp8.quantize((x, x), fp8.E4M3, prologue=SWIGLU).scale)(X),
        "no gradient",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(case):
    error, call, mentions = MISTAKES[case]
    with pytest.raises(error, match="|".join(map(re.escape, mentions.split("|")))):
        call()


def test_triton_reads_one_array():
    pytest.importorskip("jax_triton")
    with pytest.raises(NotImplementedError, match=re.escape("prologue=SwiGLU()")):
        fp8.quantize(
            (jnp.ones((128, 128)),) * 2,
            fp8.E4M3,
            kernels=fp8.Kernels(casts="triton"),
            prologue=fp8.prologues.SwiGLU(),
        )


def test_they_are_values():
    assert fp8.prologues.RMSNorm(epsilon=1e-5) == RMS_NORM != fp8.prologues.RMSNorm()
    assert fp8.prologues.RMSNorm(epsilon=np.float64(1e-5)) == RMS_NORM
    assert len({fp8.prologues.SwiGLU(), SWIGLU, fp8.prologues.RMSNorm()}) == 2
