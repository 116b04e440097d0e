"""What a matmul saves for its backward pass: one byte a value, and no copy in high precision."""

import math

import jax
import jax.numpy as jnp
import pytest

import jaxfp8 as fp8
from jaxfp8.ops._state import with_probes, zero_ledgers

M, K, N = 64, 32, 16
F8, BF16 = "float8_e4m3fn", "bfloat16"

# Of each recipe: the arrays as large as x, and those as large as w.
SAVED = {
    "delayed": ([F8], [F8]),
    "current": ([F8], [F8]),
    "static": ([F8], [F8]),
    "rowwise": ([F8], [F8]),
    "rowwise, wgrad in high precision": ([BF16], [F8]),
}
RECIPES = {
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
    "static": fp8.recipes.static(x_scale=1.0, w_scale=1.0, g_scale=1.0),
    "rowwise": fp8.recipes.rowwise(),
    "rowwise, wgrad in high precision": fp8.recipes.rowwise(high_precision_wgrad=True),
}


@pytest.mark.parametrize("name", RECIPES)
def test_residuals(name):
    recipe = RECIPES[name]

    def saved(x, w):
        state = fp8.init_state(recipe)
        ledgers = zero_ledgers(state)

        def forward(x, w, ledgers):
            probed = with_probes(state, ledgers, all_set=True, reduce_axes=None)
            return fp8.dot(x, w, recipe=recipe, state=probed)

        return jax.vjp(forward, x, w, ledgers)[1]

    residuals = jax.tree.leaves(jax.eval_shape(saved, jnp.zeros((M, K), jnp.bfloat16), jnp.zeros((K, N), jnp.bfloat16)))
    of_x, of_w = ([leaf.dtype.name for leaf in residuals if leaf.size == size] for size in (M * K, K * N))
    assert (of_x, of_w) == SAVED[name]
    # All else is scales and amaxes (and, of delayed scaling, the ledger of zeros that tells where amaxes go).
    rest = [leaf for leaf in residuals if leaf.size not in (M * K, K * N)]
    assert sum(math.prod(leaf.shape) for leaf in rest) <= max(M, K, N) + len(recipe.rows) * 1024 + 16
