"""Recipes, weights in FP8 and states, for all tests of this folder."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8 as fp8
from jaxfp8.weights import WeightAxes

RECIPES = {
    "delayed": fp8.recipes.delayed(history_length=4),
    "rowwise": fp8.recipes.rowwise(),
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
    "current": fp8.recipes.current(),
    "rowwise_hp_wgrad": fp8.recipes.rowwise(high_precision_wgrad=True),
    # Powers of two, because XLA for CPUs folds two constants: (y * 0.1) * 0.1 is y * 0.01.
    "static": fp8.recipes.static(x_scale=0.125, w_scale=0.125, g_scale=0.125),
    "mxfp8_2d": fp8.recipes.mxfp8(w_tile_dim=2),
}
# FP8 copies of a weight: one if the matmuls of both directions can read it.
COPIES = dict.fromkeys(RECIPES, 1) | {"rowwise": 2, "rowwise_hp_wgrad": 2, "mxfp8": 2}
FEW = ("delayed", "rowwise", "blockwise", "mxfp8")
WAYS = ("cached", "primary")
RULES = [("w", WeightAxes())]
M, K, N = 24, 160, 48  # ragged in tiles of 32 and of 128


def rows(few=FEW):
    return [pytest.param(n, marks=() if n in few else pytest.mark.slow) for n in RECIPES]


def normal(i, *shape, dtype="float32"):
    return np.random.default_rng(i).standard_normal(shape).astype(jnp.dtype(dtype))


def held(way, params, recipe, state=(), rules=RULES, **options):
    """The parameters themselves, or with weights in FP8."""
    if way == "plain":
        return params
    return fp8.quantize_params(
        params, recipe, rules=rules, state=state, primary=way == "primary", **options
    )


def init(recipe, stacked=()):
    """The state of the matmul that reads "w"; () for a recipe without state."""
    if not recipe.rows:
        return ()
    state = fp8.init_state(recipe)
    if stacked:  # also inside a program
        state = jax.tree.map(lambda a: jnp.broadcast_to(a, (*stacked, *a.shape)), state)
    return {"w": state}


def dot(x, w, recipe, state, **options):
    return fp8.dot(x, w, recipe=recipe, state=state["w"] if recipe.rows else None, **options)
