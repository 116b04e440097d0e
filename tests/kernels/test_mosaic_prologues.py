"""Prologues in Mosaic kernels, interpreted: the bits of the two steps, h and then its quantizer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hard_tiles import uneven
from interpreter import interpreted, needs_mosaic
from same_bits import assert_same_bits

import jaxfp8 as fp8

MOSAIC = fp8.Kernels(casts="mosaic")

ROWS, COLUMNS, SQUARES = (fp8.PerBlock(tile) for tile in ((1, 128), (128, 1), (128, 128)))
MX_ROWS, MX_COLUMNS = fp8.PerBlock((1, 32)), fp8.PerBlock((32, 1))
TENSOR, OF_ROWS, OF_COLUMNS = fp8.PerTensor(), fp8.PerAxis(0, 1), fp8.PerAxis(-1)
WHOLE, RAGGED = (2, 128, 256), (2, 160, 96)
MX = {"scale_format": fp8.E8M0}


PROLOGUES = {"swiglu": fp8.prologues.SwiGLU(), "rms_norm": fp8.prologues.RMSNorm()}


def arrays(name, shape, dtype):
    """With zeros, infs and values of every size.

    The other ones close to 1, or what is far from it hides the rest.
    """
    rng = np.random.default_rng(1)
    other = rng.normal(size=shape if name == "swiglu" else shape[-1:])
    x = np.clip(uneven(shape), -1e4, 1e4) if dtype == jnp.float16 else uneven(shape)
    return jnp.asarray(x, dtype), jnp.asarray(other, dtype if name == "swiglu" else jnp.float32)


def together(name, *given, **how):
    return fp8.quantize(given, fp8.E4M3, prologue=PROLOGUES[name], **how)


def two_steps(name, *given, **how):
    return fp8.quantize(PROLOGUES[name](*given), fp8.E4M3, **how)


@needs_mosaic
@pytest.mark.parametrize(
    ("name", "shape", "dtype", "granularity", "how"),
    [
        ("swiglu", RAGGED, jnp.bfloat16, (COLUMNS, SQUARES), {}),
        ("rms_norm", RAGGED, jnp.bfloat16, (MX_COLUMNS, MX_ROWS), MX),
        ("swiglu", RAGGED, jnp.float32, (OF_COLUMNS, TENSOR), {}),
        pytest.param(
            "rms_norm", WHOLE, jnp.bfloat16, (OF_ROWS, OF_COLUMNS), {}, marks=pytest.mark.slow
        ),
        ("swiglu", (128, 64), jnp.float16, TENSOR, {"scale": 0.5}),
        pytest.param("rms_norm", WHOLE, jnp.float32, (SQUARES, ROWS), {}, marks=pytest.mark.slow),
        pytest.param(
            "swiglu", WHOLE, jnp.bfloat16, (MX_COLUMNS, MX_ROWS), MX, marks=pytest.mark.slow
        ),
        pytest.param(
            "rms_norm",
            RAGGED,
            jnp.float16,
            OF_ROWS,
            {"scale": np.full((2, 160, 1), 0.5)},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_has_the_bits_of_two_steps(name, shape, dtype, granularity, how):
    given = arrays(name, shape, dtype)
    mine = interpreted(
        lambda: together(name, *given, granularity=granularity, kernels=MOSAIC, **how)
    )
    assert_same_bits(mine, two_steps(name, *given, granularity=granularity, **how))


@needs_mosaic
@pytest.mark.parametrize(
    "mapped", [(0, 0), pytest.param((None, 0), marks=pytest.mark.slow)], ids=["experts", "gains"]
)
def test_a_gain_for_each_matrix(mapped):
    """Whole tiles of two matrices are one matrix to a kernel, unless each has columns of its
    own.
    """
    x, _ = arrays("rms_norm", (2, 128, 64), jnp.bfloat16)
    gains = jnp.asarray(np.random.default_rng(2).normal(size=(2, 64)), jnp.float32)
    given = (x if mapped[0] == 0 else x[1], gains)
    run = lambda function, **how: jax.vmap(
        functools.partial(function, "rms_norm", granularity=(ROWS, COLUMNS), **how), in_axes=mapped
    )(*given)
    assert_same_bits(interpreted(lambda: run(together, kernels=MOSAIC)), run(two_steps))
