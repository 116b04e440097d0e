"""The Mosaic quantizer, interpreted: the bits of the reference."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hard_tiles import uneven
from interpreter import LOADS_TRANSPOSED, interpreted, needs_mosaic

import jaxfp8 as fp8

ROWS, COLUMNS, SQUARES = (fp8.PerBlock(tile) for tile in ((1, 128), (128, 1), (128, 128)))
DIRECTIONS = {"both": (ROWS, COLUMNS), "columns": (COLUMNS,), "squares": (SQUARES,), "all": (COLUMNS, SQUARES, ROWS)}


@needs_mosaic
@pytest.mark.parametrize(
    ("name", "dtype", "format", "power_of_two"),
    [
        ("both", jnp.bfloat16, fp8.E4M3, True),
        ("both", jnp.float32, fp8.E5M2, False),
        ("columns", jnp.float16, fp8.E4M3, False),
        ("squares", jnp.bfloat16, fp8.E4M3, True),
        ("squares", jnp.float32, fp8.E4M3, False),
        ("all", jnp.bfloat16, fp8.E5M2, True),
    ],
)
def test_has_the_bits_of_the_reference(name, dtype, format, power_of_two):
    x = jnp.asarray(uneven((2, 256, 384)), dtype)
    run = functools.partial(fp8.quantize, x, format, DIRECTIONS[name], power_of_two=power_of_two)
    mine = interpreted(lambda: run(implementation="mosaic"))
    for ours, theirs in zip(jax.tree.leaves(mine), jax.tree.leaves(run(implementation="reference")), strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_array_equal(np.asarray(ours).view(np.uint8), np.asarray(theirs).view(np.uint8))


@needs_mosaic
def test_under_vmap():
    x = jnp.asarray(uneven((2, 256, 256)), jnp.bfloat16)
    run = lambda x, **how: fp8.quantize(x, fp8.E4M3, (ROWS, COLUMNS), power_of_two=True, **how)
    mine = interpreted(
        lambda: jax.vmap(lambda x: run(x, implementation="mosaic"), in_axes=1, out_axes=0)(x.swapaxes(0, 1))
    )
    for ours, theirs in zip(jax.tree.leaves(mine), jax.tree.leaves(run(x)), strict=True):
        np.testing.assert_array_equal(np.asarray(ours).view(np.uint8), np.asarray(theirs).view(np.uint8))


WHOLE = jnp.ones((128, 128), jnp.bfloat16)
CANNOT = {
    "1x32": (WHOLE, fp8.PerBlock((1, 32)), {}, "(1, 32)"),
    "per row": (WHOLE, fp8.PerAxis(0), {}, "PerAxis(0)"),
    "ragged": (jnp.ones((128, 200), jnp.bfloat16), ROWS, {}, "[128, 200]"),
    "one axis": (jnp.ones(128), fp8.PerBlock((128,)), {}, "1 axes"),
    "E8M0": (WHOLE, ROWS, {"scale_format": fp8.E8M0}, "E8M0"),
    "stochastic": (WHOLE, ROWS, {"rounding": "stochastic", "key": jax.random.key(0)}, "'stochastic'"),
    "empty": (jnp.ones((0, 128)), ROWS, {}, "[0, 128]"),
}


@needs_mosaic
@pytest.mark.parametrize("case", CANNOT)
def test_what_it_cannot_do_fails_loudly(case):
    x, granularity, how, mentions = CANNOT[case]
    with pytest.raises(NotImplementedError, match=re.escape(mentions)):
        fp8.quantize(x, fp8.E4M3, granularity, implementation="mosaic", **how)


@pytest.mark.skipif(LOADS_TRANSPOSED, reason="jax 0.11 and later have the kernel")
def test_an_old_jax_says_so():
    with pytest.raises(NotImplementedError, match=r"jax before 0\.11"):
        fp8.quantize(WHOLE, fp8.E4M3, ROWS, implementation="mosaic")
