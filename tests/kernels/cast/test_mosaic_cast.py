"""The Mosaic cast, interpreted: the bits of the reference, for all copies at once, and the amax."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casts import cast_in, cast_one
from hard_tiles import uneven
from interpreter import interpreted, needs_mosaic
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.numerics._amax import amax

WHOLE, RAGGED = (2, 128, 256), (2, 160, 224)
# Shapes of multipliers of an array [2, M, K], and what the copies lie as.
KINDS = {
    "tensor": ("",),
    "tensor, both ways": ("", "T"),
    "transposed": ("T",),
    "rows and columns": ("BM", "K T"),
    "columns of each expert": ("BK T",),
    "experts": ("B", "B T"),
}


def multipliers_of(kinds, shape):
    rng = np.random.default_rng(0)
    sizes = dict(zip("BMK", shape, strict=True))
    for kind in kinds:
        letters = kind.removesuffix("T").strip()
        of = [sizes[letter] if letter in letters else 1 for letter in "BMK"] if letters else ()
        yield jnp.asarray(np.exp2(rng.uniform(-9, 9, of)), jnp.float32)


@needs_mosaic
@pytest.mark.parametrize(
    ("name", "shape", "dtype", "format"),
    [
        ("tensor", RAGGED, jnp.bfloat16, fp8.E4M3),
        ("tensor, both ways", WHOLE, jnp.bfloat16, fp8.E5M2),
        ("tensor, both ways", RAGGED, jnp.float32, fp8.E4M3),
        ("transposed", WHOLE, jnp.float16, fp8.E4M3),
        ("rows and columns", WHOLE, jnp.bfloat16, fp8.E4M3),
        ("rows and columns", RAGGED, jnp.float32, fp8.E5M2),
        ("columns of each expert", WHOLE, jnp.bfloat16, fp8.E4M3),
        ("experts", WHOLE, jnp.float32, fp8.E4M3),
    ],
)
def test_has_the_bits_of_the_reference(name, shape, dtype, format):
    from jaxfp8.kernels.cast._mosaic import copies

    kinds = KINDS[name]
    for raw in (uneven(shape), np.nan_to_num(uneven(shape), nan=0, neginf=0)):
        x = jnp.asarray(raw, dtype)
        multipliers = tuple(multipliers_of(kinds, shape))
        granularities = []
        for multiplier in multipliers:
            kept = [axis for axis, size in enumerate(multiplier.shape) if size > 1]
            granularities.append(fp8.PerAxis(*kept) if kept else fp8.PerTensor())
        cast = cast_in(format, *granularities, transposed=tuple("T" in kind for kind in kinds))
        values, (largest, _) = interpreted(lambda x=x, m=multipliers, cast=cast: copies(x, cast, m))
        wanted = tuple(
            cast_one(x, multiplier, format, granularity, backends=("reference",)).values
            for multiplier, granularity in zip(multipliers, granularities, strict=True)
        )
        assert_same_bits(values, wanted)
        np.testing.assert_array_equal(jnp.max(largest), amax(x, fp8.PerTensor()))


@needs_mosaic
@pytest.mark.parametrize("granularity", [fp8.PerTensor(), fp8.PerAxis(0), fp8.PerAxis(1)], ids=repr)
def test_by_its_name(granularity):
    x = jnp.asarray(uneven((256, 256)), jnp.bfloat16)
    scale = jnp.full(granularity.scale_shape(x.shape), 0.3)
    run = lambda how: fp8.quantize(
        x, fp8.E4M3, granularity, scale=scale, kernels=fp8.Kernels(casts=how)
    )
    assert_same_bits(interpreted(lambda: run("mosaic")), run("reference"))


@needs_mosaic
def test_under_vmap():
    x, m = jnp.asarray(uneven((3, 128, 256)), jnp.bfloat16), jnp.array([0.5, 3.0, 100.0])
    run = lambda x, m, how: cast_one(x, m, fp8.E4M3, fp8.PerTensor(), backends=(how,))
    for axes in ((0, 0), (0, None), (None, 0)):
        arguments = [
            each if axis == 0 else each[0] for each, axis in zip((x, m), axes, strict=True)
        ]
        mapped = jax.vmap(functools.partial(run, how="mosaic"), in_axes=axes)
        wanted = jax.vmap(functools.partial(run, how="xla"), in_axes=axes)(*arguments)
        assert_same_bits(interpreted(mapped, *arguments), wanted)


CANNOT = {
    "ragged": (jnp.ones((128, 200)), fp8.PerTensor(), {}, "[128, 200]"),
    "per value": (jnp.ones((128, 128)), fp8.PerAxis(0, 1), {}, "[128, 128]"),
    "tiles": (jnp.ones((128, 128)), fp8.PerBlock((1, 128)), {}, "(1, 128)"),
    "stochastic": (
        jnp.ones((128, 128)),
        fp8.PerTensor(),
        {"rounding": "stochastic", "key": jax.random.key(0)},
        "'stochastic'",
    ),
    "one axis": (jnp.ones(128), fp8.PerTensor(), {}, "[128]"),
}


@needs_mosaic
@pytest.mark.parametrize("case", CANNOT)
def test_what_it_cannot_do_fails_loudly(case):
    x, granularity, how, mentions = CANNOT[case]
    multiplier = jnp.ones(granularity.scale_shape(x.shape))
    with pytest.raises(NotImplementedError, match=re.escape(mentions)):
        cast_one(x, multiplier, fp8.E4M3, granularity, backends=("mosaic",), **how)
