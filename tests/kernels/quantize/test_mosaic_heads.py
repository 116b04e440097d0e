"""Arrays of heads in the quantizer in Pallas: tiles along another axis than the last two.

Letters: B batch, S tokens, H heads, D values of a head.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hard_inputs import mentions
from hard_tiles import uneven
from interpreter import interpreted, needs_mosaic
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from same_bits import assert_same_bits

import jaxfp8 as fp8

MOSAIC, REFERENCE = fp8.Kernels(casts="mosaic"), fp8.Kernels(casts="reference")
B, S, H, D = 2, 160, 6, 128
ALONG_D, ALONG_S = fp8.PerBlock((1, 128)), fp8.PerBlock((128, 1, 1))
MX = {"scale_format": fp8.E8M0}


@needs_mosaic
@pytest.mark.parametrize(
    ("granularities", "shape", "rule"),
    [
        ((ALONG_D, ALONG_S), (B, S, H, D), {}),
        ((ALONG_S,), (B, S, H, 160), {}),  # D has no whole tiles, and none along it is asked for
        ((fp8.PerBlock((1, 32)), fp8.PerBlock((32, 1, 1))), (B, S, H, 64), MX),
        ((fp8.PerBlock((128, 1, 128)),), (S, H, D), {"power_of_two": True}),  # weights [K, H, D]
        ((fp8.PerBlock((32, 1, 32)), fp8.PerBlock((1, 32))), (S, H, D), MX),
        ((ALONG_D, fp8.PerBlock((128, 1, 1, 1))), (128, 2, H, D), {}),
    ],
)
def test_has_the_bits_of_the_reference(granularities, shape, rule):
    x = jnp.asarray(uneven(shape), jnp.bfloat16)
    run = functools.partial(fp8.quantize, x, fp8.E4M3, granularities, **rule)
    assert_same_bits(interpreted(lambda: run(kernels=MOSAIC)), run(kernels=REFERENCE))


@needs_mosaic
def test_a_prologue_of_heads():
    gate, up = (jnp.asarray(uneven((B, S, H, D)), jnp.bfloat16) / 2**k for k in (0, 1))
    run = functools.partial(
        fp8.quantize, (gate, up), fp8.E4M3, (ALONG_D, ALONG_S), prologue=fp8.prologues.SwiGLU()
    )
    assert_same_bits(interpreted(lambda: run(kernels=MOSAIC)), run(kernels=REFERENCE))


@needs_mosaic
@pytest.mark.parametrize(
    ("granularities", "shape", "prologue", "words"),
    [
        ((ALONG_D, ALONG_S), (B, S, H, 96), None, "whose last axis has no whole tiles"),
        ((ALONG_D, ALONG_S), (B, S, H, D), fp8.prologues.RMSNorm(), "prologue=RMSNorm("),
        ((ALONG_D, fp8.PerBlock((128, 1, 128, 1))), (128, S, D, D), None, "PerBlock"),
    ],
)
def test_what_it_refuses(granularities, shape, prologue, words):
    x = jnp.ones(shape, jnp.bfloat16)
    x = x if prologue is None else (x, jnp.ones(shape[-1]))
    with pytest.raises(NotImplementedError, match=mentions(words)):
        fp8.quantize(x, fp8.E4M3, granularities, prologue=prologue, kernels=MOSAIC)


def layer(kernels, x, w, c):
    """A projection to heads: the gradient [B, S, H, D] is contracted along S, and along H and D."""

    def loss(x, w):
        y = fp8.einsum("bsk,khd->bshd", x, w, recipe=fp8.recipes.blockwise(), kernels=kernels)
        return jnp.sum((y * c).astype(jnp.float32))

    return jax.grad(loss, (0, 1))(x, w)


def arrays():
    shapes = (B, 256, 128), (128, 4, D), (B, 256, 4, D)
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]


@needs_mosaic
@pytest.mark.slow
def test_a_layer_has_the_bits_of_one_by_xla():
    mine = interpreted(lambda: layer(MOSAIC, *arrays()))
    assert_same_bits(mine, layer(fp8.Kernels(casts="xla"), *arrays()))


@needs_mosaic
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("split", ["heads", "values of heads"])
def test_heads_on_a_mesh(kind, split):
    """Heads split over devices merge with their values; values that are split take XLA's cast."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(kind,) * 2)
    along = ("tensor", None) if split == "heads" else (None, "tensor")
    x, w, c = arrays()
    if split == "values of heads":
        w, c = (jnp.concatenate([a, a], -1) for a in (w, c))  # of whole tiles each
    specs = P("data"), P(None, *along), P("data", None, *along)
    placed = [
        jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip((x, w, c), specs, strict=True)
    ]
    with jax.set_mesh(mesh):
        by_chip = fp8.Kernels("h200")
        assert by_chip.backends(fp8.recipes.blockwise(), (8192, 4096, 4096)).g[0] == "mosaic"
        mine = jax.jit(functools.partial(layer, by_chip))(*placed)
        theirs = jax.jit(functools.partial(layer, None))(*placed)
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
