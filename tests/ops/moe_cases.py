"""Tokens, experts and recipes of the tests of `fp8.moe`."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxfp8 as fp8

T, K, F, E, CHOICES = 256, 160, 96, 8, 2
RECIPES = {
    "delayed": fp8.recipes.delayed(history_length=3),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
    "identity": fp8.recipes.identity(),
}
EXACT = {"delayed", "current", "identity"}  # wgrad reads the copy that was sent


def arrays(seed=0, dtype=jnp.bfloat16, tokens=T, spread=0.5):
    """x [T, K], gates [T, k], chosen [T, k], w_in [E, K, 2 F], w_out [E, F, K], g [T, K].

    The sizes of tokens, and of their gradients, differ, so that casts along rows and along columns
    have different scales. `spread` is the standard deviation of the logarithm of a size.
    """
    keys = jax.random.split(jax.random.key(seed), 7)
    size = lambda key: jnp.exp(spread * jax.random.normal(key, (tokens, 1)))
    x = jax.random.normal(keys[0], (tokens, K)) * size(keys[1])
    w_in = jax.random.normal(keys[2], (E, K, 2 * F)) * 0.05
    w_out = jax.random.normal(keys[3], (E, F, K)) * 0.1
    g = jax.random.normal(keys[4], (tokens, K)) * size(keys[5]) * 1e-4
    # Expert 5 gets nothing, expert 0 a lot.
    lean = jnp.array([2.0, 0, 0, 0, 0, -50.0, 0, 1.0])
    logits = jax.random.normal(keys[6], (tokens, E)) + lean[None]
    gates, chosen = fp8.moe.top_k(logits, CHOICES)
    return x.astype(dtype), gates, chosen, w_in.astype(dtype), w_out.astype(dtype), g.astype(dtype)


def states(recipe, stacked):
    """The states of two matmuls: of each expert, or of all."""
    if not recipe.rows:
        return (), ()
    one = fp8.init_state(recipe)
    if stacked:
        one = jax.tree.map(lambda leaf: jnp.stack([leaf] * E), one)
    return one, one


def step(recipe, parallel, given, state, **options):
    """y, the gradients of x, gates, w_in and w_out, and the next states."""
    x, gates, chosen, w_in, w_out, g = given

    def loss(params, state):
        x, gates, w_in, w_out = params
        y = fp8.moe.swiglu_experts(
            x, gates, chosen, w_in, w_out, recipe=recipe, states=state, parallel=parallel,
            **options,
        ).y  # fmt: skip
        return jnp.sum(y.astype(jnp.float32) * g.astype(jnp.float32)), y

    run = fp8.value_and_grad(loss, has_aux=True)
    (_, y), grads, state = run((x, gates, w_in, w_out), state)
    return y, grads, state


def distance(got, want):
    """The Frobenius norm of the difference, over that of `want`."""
    got, want = (np.asarray(each, np.float64) for each in (got, want))
    return float(np.linalg.norm(got - want) / (np.linalg.norm(want) + 1e-30))


def assert_same(got, want):
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(other))
