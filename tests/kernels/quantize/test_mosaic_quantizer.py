"""The Mosaic quantizer, interpreted: the bits of the reference."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hard_tiles import uneven
from interpreter import LOADS_TRANSPOSED, interpreted, needs_mosaic
from same_bits import assert_same_bits

import jaxfp8 as fp8

ROWS, COLUMNS, SQUARES = (fp8.PerBlock(tile) for tile in ((1, 128), (128, 1), (128, 128)))
MX_ROWS, MX_COLUMNS, MX_SQUARES = (fp8.PerBlock(tile) for tile in ((1, 32), (32, 1), (32, 32)))
DIRECTIONS = {
    "both": (ROWS, COLUMNS),
    "columns": (COLUMNS,),
    "squares": (SQUARES,),
    "all": (COLUMNS, SQUARES, ROWS),
    "mx both": (MX_ROWS, MX_COLUMNS),
    "mx squares": (MX_SQUARES,),
    "mx all": (MX_SQUARES, MX_COLUMNS, MX_ROWS),
}
MOSAIC, REFERENCE = fp8.Kernels(casts="mosaic"), fp8.Kernels(casts="reference")
WHOLE, RAGGED = (2, 128, 256), (2, 160, 224)  # in tiles of 128
FLOAT32, POWERS, MX = {}, {"power_of_two": True}, {"scale_format": fp8.E8M0}


@needs_mosaic
@pytest.mark.parametrize(
    ("name", "shape", "dtype", "format", "rule"),
    [
        ("both", WHOLE, jnp.bfloat16, fp8.E4M3, POWERS),
        ("both", RAGGED, jnp.float32, fp8.E5M2, FLOAT32),
        ("columns", RAGGED, jnp.float16, fp8.E4M3, FLOAT32),
        ("squares", RAGGED, jnp.bfloat16, fp8.E4M3, POWERS),
        ("squares", WHOLE, jnp.float32, fp8.E4M3, FLOAT32),
        ("squares", WHOLE, jnp.bfloat16, fp8.E5M2, MX),
        ("all", WHOLE, jnp.bfloat16, fp8.E5M2, POWERS),
        ("mx both", WHOLE, jnp.bfloat16, fp8.E4M3, MX),
        ("mx both", RAGGED, jnp.float32, fp8.E4M3, {**MX, "scale_rounding": "floor"}),
        ("mx squares", RAGGED, jnp.bfloat16, fp8.E5M2, MX),
        ("mx all", RAGGED, jnp.float32, fp8.E4M3, FLOAT32),
        # less than one tile of a block of threads
        ("mx both", (32, 96), jnp.bfloat16, fp8.E4M3, MX),
    ],
)
def test_has_the_bits_of_the_reference(name, shape, dtype, format, rule):
    x = jnp.asarray(uneven(shape), dtype)
    run = functools.partial(fp8.quantize, x, format, DIRECTIONS[name], **rule)
    assert_same_bits(interpreted(lambda: run(kernels=MOSAIC)), run(kernels=REFERENCE))


TENSOR, OF_ROWS, OF_COLUMNS, OF_EXPERTS = (
    fp8.PerTensor(),
    fp8.PerAxis(0, 1),
    fp8.PerAxis(-1),
    fp8.PerAxis(0, 2),
)


@needs_mosaic
@pytest.mark.parametrize(
    ("granularities", "shape", "dtype", "format", "rule"),
    [
        ((OF_ROWS, OF_COLUMNS), WHOLE, jnp.bfloat16, fp8.E4M3, POWERS),
        ((OF_COLUMNS, OF_ROWS), RAGGED, jnp.float32, fp8.E5M2, FLOAT32),
        ((OF_EXPERTS, OF_ROWS), RAGGED, jnp.bfloat16, fp8.E4M3, FLOAT32),
        ((TENSOR, OF_COLUMNS), WHOLE, jnp.float16, fp8.E4M3, FLOAT32),
    ],
)
def test_scales_that_span_tiles(granularities, shape, dtype, format, rule):
    for x in (
        uneven(shape),
        np.nan_to_num(uneven(shape), nan=0, neginf=0),
    ):  # one inf takes the scale of a whole tensor
        run = functools.partial(fp8.quantize, jnp.asarray(x, dtype), format, granularities, **rule)
        assert_same_bits(
            interpreted(lambda run=run: run(kernels=MOSAIC)),
            run(kernels=REFERENCE),
        )


@needs_mosaic
@pytest.mark.parametrize(
    "granularities", [(ROWS, COLUMNS), (OF_ROWS, OF_COLUMNS)], ids=["tiles", "spanning"]
)
def test_more_tiles_than_an_axis_of_a_grid_has(granularities, monkeypatch):
    from jaxfp8.kernels import _mosaic_tiles

    # CUDA launches no more than that along the second and third axis, and would fail when the
    # program runs.
    for shape in ((100_000, 32, 32), (1, 2**24, 128)):
        assert max(_mosaic_tiles.grid(shape)["grid"][:-1], default=0) <= 65535
    monkeypatch.setattr(_mosaic_tiles, "_MOST_BLOCKS", 1)
    x = jnp.asarray(uneven(RAGGED), jnp.bfloat16)
    run = functools.partial(fp8.quantize, x, fp8.E4M3, granularities)
    assert_same_bits(interpreted(lambda: run(kernels=MOSAIC)), run(kernels=REFERENCE))


@needs_mosaic
def test_under_vmap():
    x = jnp.asarray(uneven((2, 256, 256)), jnp.bfloat16)
    run = lambda x, **how: fp8.quantize(x, fp8.E4M3, (ROWS, COLUMNS), power_of_two=True, **how)
    mine = interpreted(
        lambda: jax.vmap(lambda x: run(x, kernels=MOSAIC), in_axes=1, out_axes=0)(x.swapaxes(0, 1))
    )
    assert_same_bits(mine, run(x))


ONES = jnp.ones((128, 128), jnp.bfloat16)
CANNOT = {
    "1x64": (ONES, fp8.PerBlock((1, 64)), {}, "(1, 64)"),
    "sides that differ": (ONES, (ROWS, MX_COLUMNS), {}, "[(1, 128), (32, 1)]"),
    "over experts": (jnp.ones((2, 128, 128)), fp8.PerBlock((2, 1, 128)), {}, "(2, 1, 128)"),
    "before the last axis": (
        jnp.ones((128, 128, 32)),
        fp8.PerBlock((128, 128, 1)),
        {},
        "(128, 128, 1)",
    ),
    "tiles and rows": (ONES, (ROWS, fp8.PerAxis(0)), {}, "PerAxis(0)"),
    "per value": (ONES, fp8.PerAxis(0, 1), {}, "[128, 128]"),
    "less than 32": (jnp.ones((128, 200), jnp.bfloat16), ROWS, {}, "[128, 200]"),
    "one axis": (jnp.ones(128), fp8.PerBlock((128,)), {}, "1 axes"),
    "stochastic": (
        ONES,
        ROWS,
        {"rounding": "stochastic", "key": jax.random.key(0)},
        "'stochastic'",
    ),
    "empty": (jnp.ones((0, 128)), ROWS, {}, "[0, 128]"),
}


@needs_mosaic
@pytest.mark.parametrize("case", CANNOT)
def test_what_it_cannot_do_fails_loudly(case):
    x, granularity, how, mentions = CANNOT[case]
    with pytest.raises(NotImplementedError, match=re.escape(mentions)):
        fp8.quantize(x, fp8.E4M3, granularity, kernels=MOSAIC, **how)


@pytest.mark.skipif(LOADS_TRANSPOSED, reason="jax 0.11 and later have the kernel")
def test_an_old_jax_says_so():
    with pytest.raises(NotImplementedError, match=r"jax before 0\.11"):
        fp8.quantize(ONES, fp8.E4M3, ROWS, kernels=MOSAIC)
