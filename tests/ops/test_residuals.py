"""What a matmul saves for its backward pass: one byte a value, and no copy in high precision."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

import jaxfp8 as fp8
from jaxfp8.state._identity import known_scales
from jaxfp8.state._ledger import zero_ledgers
from jaxfp8.state._state import Probe, map_states

M, K, N = 64, 32, 16
F8, BF16 = "float8_e4m3fn", "bfloat16"

# Of each recipe: the arrays as large as x, and those as large as w.
SAVED = {
    "delayed": ([F8], [F8]),
    "current": ([F8], [F8]),
    "static": ([F8], [F8]),
    "rowwise": ([F8], [F8]),
    "rowwise, wgrad in high precision": ([BF16], [F8]),
    "blockwise": ([F8], [F8]),
    "blockwise, float32 scales": ([F8], [F8]),
    "mxfp8": ([F8], [F8]),
    "mxfp8, 2D weights": ([F8], [F8]),
}
RECIPES = {
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
    "static": fp8.recipes.static(x_scale=1.0, w_scale=1.0, g_scale=1.0),
    "rowwise": fp8.recipes.rowwise(),
    "rowwise, wgrad in high precision": fp8.recipes.rowwise(high_precision_wgrad=True),
    "blockwise": fp8.recipes.blockwise(),
    "blockwise, float32 scales": fp8.recipes.blockwise(power_of_two=False),
    "mxfp8": fp8.recipes.mxfp8(),
    "mxfp8, 2D weights": fp8.recipes.mxfp8(w_tile_dim=2),
}
IN_TILES = [name for name in RECIPES if RECIPES[name].tile]


def with_probe(state, ledger, known):
    return dataclasses.replace(state, probe=Probe(ledger, known, reduce_axes=None))


def saved(recipe, x_shape, w_shape):
    """The types of what a layer in bfloat16 saves."""

    def backward(x, w):
        state = map_states(lambda s: dataclasses.replace(s, settled=True), fp8.init_state(recipe))
        ledgers, scales = zero_ledgers(state), map_states(known_scales, state)

        def forward(x, w, ledgers):
            probed = map_states(with_probe, state, ledgers, scales)
            return fp8.dot(x, w, recipe=recipe, state=probed)

        return jax.vjp(forward, x, w, ledgers)[1]

    return jax.tree.leaves(
        jax.eval_shape(
            backward, *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (x_shape, w_shape))
        )
    )


@pytest.mark.quick
@pytest.mark.parametrize("name", RECIPES)
def test_residuals(name):
    recipe = RECIPES[name]
    residuals = saved(recipe, (M, K), (K, N))
    of_x, of_w = (
        [leaf.dtype.name for leaf in residuals if leaf.size == size] for size in (M * K, K * N)
    )
    assert (of_x, of_w) == SAVED[name]
    # All else is scales and amaxes (and, of delayed scaling, the ledger of zeros that tells where
    # amaxes go).
    rest = [leaf for leaf in residuals if leaf.size not in (M * K, K * N)]
    assert sum(math.prod(leaf.shape) for leaf in rest) <= M + K + N + len(recipe.rows) * 1024


@pytest.mark.parametrize("name", IN_TILES)
def test_bytes_of_a_large_layer(name):
    """With their scales, of 4096 tokens and 4096 -> 16384 features."""
    shapes = (4096, 4096), (4096, 16384)
    size = lambda recipe: sum(leaf.size * leaf.dtype.itemsize for leaf in saved(recipe, *shapes))
    assert size(fp8.recipes.identity()) == 2 * sum(map(math.prod, shapes))
    assert size(RECIPES[name]) <= 0.55 * size(fp8.recipes.identity())


# The granularities of the saved copies of x [M, K] and w [K, N]: along M, which wgrad contracts,
# and along N, which dgrad does.
DIRECTIONS = {
    "blockwise": ((128, 1), (128, 128)),
    "blockwise, float32 scales": ((128, 1), (128, 128)),
    "mxfp8": ((32, 1), (1, 32)),
    "mxfp8, 2D weights": ((32, 1), (32, 32)),
}


@pytest.mark.parametrize("name", IN_TILES)
def test_scales_of_the_saved_copies(name):
    """FP8 values with the scales of the direction in which the backward pass reads them, and
    nothing else.
    """
    shapes = (256, 384), (384, 640)
    cells = lambda shape, tile: tuple(
        -(-size // side) for size, side in zip(shape, tile, strict=True)
    )
    scale = "float8_e8m0fnu" if name.startswith("mxfp8") else "float32"
    want = [(F8, shape) for shape in shapes]
    want += [
        (scale, cells(shape, tile)) for shape, tile in zip(shapes, DIRECTIONS[name], strict=True)
    ]
    assert sorted(
        (leaf.dtype.name, leaf.shape) for leaf in saved(RECIPES[name], *shapes)
    ) == sorted(want)
