"""Sums of columns that kernels make beside their copies, interpreted.

Exact of integers, and nothing else changes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casts import cast_in, known
from interpreter import interpreted, needs_mosaic
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.kernels.cast._api import cast_copies

ROWS, COLUMNS, SQUARES = (fp8.PerBlock(tile) for tile in ((1, 128), (128, 1), (128, 128)))
MX_ROWS, MX_COLUMNS, MX_SQUARES = (fp8.PerBlock(tile) for tile in ((1, 32), (32, 1), (32, 32)))
WHOLE, RAGGED = (2, 128, 256), (2, 160, 224)
CASES = {
    "rows alone": (WHOLE, jnp.bfloat16, (ROWS,)),
    "both": (RAGGED, jnp.float32, (ROWS, COLUMNS)),
    "squares": (RAGGED, jnp.bfloat16, (SQUARES,)),
    "mx rows alone": (RAGGED, jnp.bfloat16, (MX_ROWS,)),
    "mx both": (WHOLE, jnp.float16, (MX_COLUMNS, MX_ROWS)),
    "mx squares": ((96, 32), jnp.bfloat16, (MX_SQUARES,)),
    "tensor": (RAGGED, jnp.bfloat16, (fp8.PerTensor(),)),
    "rows and columns": (WHOLE, jnp.float32, (fp8.PerAxis(0, 1), fp8.PerAxis(-1))),
}


def integers(shape, dtype):
    return jnp.asarray(np.random.default_rng(0).integers(-9, 10, shape), dtype)


def quantized(x, granularities, **how):
    return cast_copies(x, cast_in(fp8.E4M3, *granularities, backends=("mosaic",), **how))


@needs_mosaic
@pytest.mark.parametrize("name", CASES)
def test_of_a_quantizer(name):
    shape, dtype, granularities = CASES[name]
    x = integers(shape, dtype)
    copies, (_, sums) = interpreted(lambda: quantized(x, granularities, column_sums=True))
    assert sums.shape[-1] == shape[-1]
    assert sums.shape[-2] < shape[-2]
    assert_same_bits(sums.sum(-2), np.asarray(x, np.float64).sum(-2).astype(np.float32))
    assert_same_bits(copies, interpreted(lambda: quantized(x, granularities))[0])


@needs_mosaic
@pytest.mark.parametrize("transposed", [(False, True), (False,), (True,)])
@pytest.mark.parametrize("shape", [WHOLE, RAGGED])
def test_of_a_cast(shape, transposed):
    x, count = integers(shape, jnp.bfloat16), len(transposed)

    def cast(*, column_sums):
        how = cast_in(
            fp8.E4M3,
            *[fp8.PerTensor()] * count,
            transposed=transposed,
            column_sums=column_sums,
            backends=("mosaic",),
        )
        return cast_copies(x, how, known(*[jnp.float32(3.0)] * count))

    copies, (largest, sums) = interpreted(lambda: cast(column_sums=True))
    assert_same_bits(sums.sum(-2), np.asarray(x, np.float64).sum(-2).astype(np.float32))
    without = interpreted(lambda: cast(column_sums=False))
    assert_same_bits((copies, largest), (without[0], without[1][0]))


@needs_mosaic
def test_what_is_no_number_stays_in_its_column():
    x = integers(RAGGED, jnp.float32).at[1, 3, 5].set(jnp.nan).at[0, 159, 223].set(jnp.inf)
    _, (_, sums) = interpreted(lambda: quantized(x, (ROWS, COLUMNS), column_sums=True))
    np.testing.assert_array_equal(sums.sum(-2), np.asarray(x).sum(-2))


@needs_mosaic
def test_under_vmap():
    x = integers((3, *WHOLE), jnp.bfloat16)
    run = jax.vmap(lambda x: quantized(x, (ROWS, COLUMNS), column_sums=True)[1][1])
    assert_same_bits(interpreted(run, x).sum(-2), np.asarray(x, np.float32).sum(-2))


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_xla_is_left_to_reduce(backend):
    cast = cast_in(fp8.E4M3, MX_ROWS, column_sums=True, backends=(backend,))
    _, extras = cast_copies(jnp.ones((64, 64)), cast)
    assert extras.column_sums is None
