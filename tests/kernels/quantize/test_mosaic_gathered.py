"""The quantizer in Pallas reads rows of groups where they are, and drops those of other groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import interpreted, needs_mosaic

import jaxfp8 as fp8
from jaxfp8._quantized_tensor import Cast, Direction
from jaxfp8.kernels.cast._api import cast_by_xla
from jaxfp8.kernels.grouped_matmul._groups import Groups
from jaxfp8.prologues._prologue import Gathered

pytestmark = needs_mosaic
CASTS = {
    "blockwise": Cast(
        format=fp8.E4M3,
        directions=(Direction(fp8.PerBlock((1, 128))), Direction(fp8.PerBlock((128, 1)), True)),
        rule=fp8.ScaleRule(power_of_two=True),
    ),
    "mxfp8": Cast(
        format=fp8.E4M3,
        directions=(Direction(fp8.PerBlock((1, 32))), Direction(fp8.PerBlock((32, 1)), True)),
        rule=fp8.ScaleRule(power_of_two=True, scale_format=fp8.E8M0),
    ),
    "one direction": Cast(format=fp8.E5M2, directions=(Direction(fp8.PerBlock((1, 128))),)),
}


def gathered(sizes, tokens, k, dtype=jnp.bfloat16, tile=128):
    x = jax.random.normal(jax.random.key(0), (tokens, k), jnp.float32) * 3
    x = x.at[sum(sizes) :].set(jnp.nan).astype(dtype)
    groups = Groups.of(jnp.array(sizes), tokens=tokens, tile=tile)
    return Gathered(groups.tiled(x), x, groups.first_row, groups.live_rows)


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize(
    ("sizes", "tokens", "tile"),
    [([5, 0, 131, 1], 150, 128), ([128, 128], 256, 128), ([0, 0], 7, 128), ([300, 9], 310, 256)],
)
def test_has_the_bits_of_xla(name, sizes, tokens, tile):
    from jaxfp8.kernels.quantize import _mosaic

    x, cast = gathered(sizes, tokens, 192, tile=tile), CASTS[name]
    got, _ = interpreted(lambda x: _mosaic.cast_copies(x, cast, None, key=None), x)
    want, _ = cast_by_xla(x, cast, None, key=None, barriers=False)
    for mine, other in zip(got, want, strict=True):
        for a, b in ((mine.values, other.values), (mine.scale, other.scale)):
            assert a.shape == b.shape
            np.testing.assert_array_equal(
                np.asarray(a.astype(jnp.float32)), np.asarray(b.astype(jnp.float32))
            )


def test_what_the_kernel_cannot_read_is_said():
    from jaxfp8.kernels.quantize import _mosaic

    with pytest.raises(NotImplementedError, match="multiples of 128 rows"):
        _mosaic.cast_copies(gathered([5], 8, 64, tile=32), CASTS["mxfp8"], None, key=None)


@pytest.mark.parametrize(
    ("dtype", "k", "able"),
    [
        ("bfloat16", 448, True),
        ("bfloat16", 416, False),
        ("bfloat16", 96, False),
        ("bfloat16", 32, False),
        ("float32", 96, True),
        ("float32", 40, False),
    ],
)
def test_rows_must_have_whole_boxes(dtype, k, able):
    """Pallas raises ValueError for others, but only when it compiles for a GPU."""
    from jaxfp8.kernels.quantize._mosaic_tiling import _check_gathered

    x = gathered([5], 8, k, jnp.dtype(dtype))
    if able:
        _check_gathered(x)
    else:
        with pytest.raises(NotImplementedError, match=f"{k}.*multiples of 128 bytes.*Pad the rows"):
            _check_gathered(x)
