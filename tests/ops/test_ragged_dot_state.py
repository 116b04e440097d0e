"""The state of `fp8.ragged_dot`: of each group, and of all groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged_cases import RECIPES, SIZES, E, arrays, clear, close, loop, stacked

import jaxfp8 as fp8


def test_a_state_of_each_group_is_that_of_a_loop():
    recipe, sizes = RECIPES["delayed"], SIZES["some_empty"]
    x, w, g = arrays(2)
    state, states = stacked(fp8.init_state(recipe)), [fp8.init_state(recipe)] * E

    @jax.jit
    @fp8.value_and_grad
    def ragged(w, state, x, g):
        y = fp8.ragged_dot(x, w, jnp.array(sizes), recipe=recipe, state=state)
        return jnp.sum(y.astype(jnp.float32) * g.astype(jnp.float32))

    @jax.jit
    @fp8.value_and_grad
    def looped(w, states, x, g):
        y = loop(x, w, sizes, recipe, states)
        return jnp.sum(y.astype(jnp.float32) * g.astype(jnp.float32))

    for step in range(3):
        x, g = x * x.dtype.type(1.5 + step), g * g.dtype.type(0.5)
        _, dw, state = ragged(w, state, clear(x, sizes, np.inf), g)
        _, dw_loop, states = looped(w, states, x, g)
        close(dw, dw_loop)
        for e in range(E):
            for mine, other in zip(jax.tree.leaves(state), jax.tree.leaves(states[e]), strict=True):
                np.testing.assert_array_equal(np.asarray(mine[e]), np.asarray(other))


def test_one_state_for_all_groups_gets_the_largest_amax():
    recipe, sizes = RECIPES["delayed"], SIZES["some_empty"]
    x, w, g = arrays(3)
    state = fp8.init_state(recipe)

    def loss(w, state, x):
        y = fp8.ragged_dot(x, w, jnp.array(sizes), recipe=recipe, state=state)
        return jnp.sum(y.astype(jnp.float32) * g.astype(jnp.float32))

    _, _, new = jax.jit(fp8.value_and_grad(loss))(w, state, clear(x, sizes, np.inf))
    filled, used = sum(sizes), np.array(sizes) > 0
    want = [
        np.abs(np.asarray(each, np.float32)).max() for each in (x[:filled], w[used], g[:filled])
    ]
    np.testing.assert_array_equal(new.amax_history[:, -1], np.float32(want))


@pytest.mark.parametrize("of_each", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_rows_keep_the_state_in_the_gradient_channel(of_each):
    x, w, _ = arrays(10, jnp.float32)
    recipe, sizes = RECIPES["delayed"], np.int32(SIZES["full"])
    state = stacked(fp8.init_state(recipe)) if of_each else fp8.init_state(recipe)

    @jax.jit
    @jax.grad
    def step(state, x, sizes):
        y = fp8.ragged_dot(x, w, sizes, recipe=recipe, state=state, state_channel="gradient")
        return jnp.sum(y)

    state = step(state, x, sizes)
    kept = step(state, x[:0], 0 * sizes)
    np.testing.assert_array_equal(kept.scale, state.scale)
    fp8.check_state(kept, state)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("of_each", "mapped"),
    [
        (True, "x"),
        (False, "w"),
        pytest.param(False, "x", marks=SLOW),
        pytest.param(True, "w", marks=SLOW),
    ],
)
def test_a_state_that_a_mapped_axis_shares_sees_the_largest_amax(of_each, mapped):
    """All amaxes are in one bin of the ledger, so a sum of them would be rounded up."""
    recipe, sizes = RECIPES["delayed"], np.int32([3, 0, 5])
    grow = np.float32([1.0, 1.01, 1.02])[:, None, None]
    x, w = np.full((8, 16), 1.9, np.float32), np.full((3, 16, 8), 1.1, np.float32)
    x, w = (x * grow, w) if mapped == "x" else (x, w * grow[..., None])
    state = stacked(fp8.init_state(recipe), 3) if of_each else fp8.init_state(recipe)

    def loss(arrays, state):
        axes = (0, None) if mapped == "x" else (None, 0)
        dot = lambda x, w: fp8.ragged_dot(x, w, sizes, recipe=recipe, state=state)
        return jnp.sum(jax.vmap(dot, axes)(*arrays))

    _, _, new = jax.jit(fp8.value_and_grad(loss))((x, w), state)
    seen = np.reshape(new.amax_history, (-1, *new.amax_history.shape[-2:]))[:, :2, -1]
    want = np.array([x.max(), w.max()])
    np.testing.assert_array_equal(seen[0], want)
    if of_each:
        np.testing.assert_array_equal(seen, [want, [0, 0], want])


def test_an_unset_scale_that_a_mapped_axis_shares_is_of_the_largest_amax():
    recipe, state = RECIPES["delayed"], fp8.init_state(RECIPES["delayed"])
    x = np.stack([np.full((4, 16), 0.3), np.linspace(-5.0, 5.0, 64).reshape(4, 16)])
    x, w = np.float32(x), np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)
    ragged = jax.vmap(lambda x: fp8.ragged_dot(x, w[None], [4], recipe=recipe, state=state))
    dense = jax.vmap(lambda x: fp8.dot(x, w, recipe=recipe, state=state))
    np.testing.assert_array_equal(*jax.jit(lambda x: (ragged(x), dense(x)))(x))
