"""Routers that collapse, and tokens that are NaN: nobody but the experts concerned sees them."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxfp8 as fp8

TOKENS, EXPERTS, WIDTH, HIDDEN = 64, 8, 64, 48
TAKEN = 3  # the expert that gets every token
LOST = 21  # the token that is NaN
RECIPES = {
    "delayed": fp8.recipes.delayed(history_length=3),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
    "identity": fp8.recipes.identity(),
}
# Of recipes, meshes and where gradients are cast: each at least once.
QUICK = {
    ("delayed", "expert=4, data=2", False),
    ("current", "expert=8", False),
    ("rowwise", "expert=4, data=2", False),
    ("blockwise", "expert=4, data=2", True),
    ("mxfp8", "expert=8", False),
}
MESHES = {"one device": (1, 1), "expert=8": (8, 1), "expert=4, data=2": (4, 2)}


def arrays():
    keys = jax.random.split(jax.random.key(0), 5)
    x, g = (jax.random.normal(key, (TOKENS, WIDTH), jnp.bfloat16) for key in keys[:2])
    router = jax.random.normal(keys[2], (WIDTH, EXPERTS))
    w_in = jax.random.normal(keys[3], (EXPERTS, WIDTH, 2 * HIDDEN), jnp.bfloat16) / 8
    w_out = jax.random.normal(keys[4], (EXPERTS, HIDDEN, WIDTH), jnp.bfloat16) / 7
    return x, g, router, w_in, w_out


def states_of(recipe):
    if not recipe.rows:
        return (), ()
    state = jax.vmap(lambda _: fp8.init_state(recipe))(jnp.arange(EXPERTS))
    return state, state


def step(shape, recipe, x, gates, chosen, g, w_in, w_out, states, gradient_sent_in_fp8=False):
    """Result, dropped choices, gradients of x, gates and both matrices, and states."""
    mesh = jax.make_mesh(
        shape,
        ("expert", "data"),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[: shape[0] * shape[1]],
    )
    parallel = fp8.moe.ExpertParallel(
        axis="expert", tokens=("data", "expert"), gradient_sent_in_fp8=gradient_sent_in_fp8
    )

    def loss(params, states):
        x, gates, w_in, w_out = params
        y, dropped = fp8.moe.swiglu_experts(
            x, gates, chosen, w_in, w_out, recipe=recipe, states=states, parallel=parallel
        )
        return jnp.sum(y.astype(jnp.float32) * g.astype(jnp.float32)), (y, dropped)

    @jax.jit
    def run(params, states):
        (_, (y, dropped)), grads, states = fp8.value_and_grad(loss, has_aux=True)(params, states)
        return {"y": y, "dropped": dropped} | dict(
            zip(("dx", "dgates", "dw_in", "dw_out"), grads, strict=True)
        ), states

    with jax.set_mesh(mesh):
        found, states = run((x, gates, w_in, w_out), states)
    return jax.tree.map(np.asarray, found), jax.device_get(states)


@functools.cache
def collapsed(recipe, mesh, gradient_sent_in_fp8=False):
    """All tokens choose one expert, because its bias is huge. Two steps."""
    x, g, router, w_in, w_out = arrays()
    logits = x.astype(jnp.float32) @ router + 1e4 * jax.nn.one_hot(TAKEN, EXPERTS)[None]
    gates, chosen = fp8.moe.top_k(logits, 1)
    assert bool(jnp.all(chosen == TAKEN))
    states = states_of(RECIPES[recipe])
    for _ in range(2):  # in the second step delayed scaling has scales
        found, states = step(
            MESHES[mesh],
            RECIPES[recipe],
            *(x, gates, chosen, g, w_in, w_out),
            states,
            gradient_sent_in_fp8,
        )
    return found, states


# A mesh with an axis for data adds up parts of weight gradients, each rounded to bfloat16.
IN_PARTS = {"dw_in", "dw_out"}


@pytest.mark.parametrize(
    ("recipe", "mesh", "gradient_sent_in_fp8"),
    [
        pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow)
        for row in itertools.product(RECIPES, list(MESHES)[1:], (False, True))
    ],
)
def test_one_expert_with_all_tokens(recipe, mesh, gradient_sent_in_fp8):
    found, states = collapsed(recipe, mesh, gradient_sent_in_fp8)
    alone, states_alone = collapsed(recipe, "one device", gradient_sent_in_fp8)
    assert found["dropped"] == 0
    others = np.arange(EXPERTS) != TAKEN
    for name in ("dw_in", "dw_out"):
        assert not np.any(found[name][others])
        assert np.any(found[name][TAKEN])
    for name in found:
        ours, theirs = found[name].astype(np.float32), alone[name].astype(np.float32)
        assert np.all(np.isfinite(ours)), name
        if name in IN_PARTS and "data" in mesh:
            difference = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
            assert difference < 2**-8, name
        else:
            np.testing.assert_array_equal(ours, theirs, name)
    jax.tree.map(np.testing.assert_array_equal, states, states_alone)


@pytest.mark.parametrize("mesh", ["expert=8", pytest.param("one device", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "blockwise", "mxfp8"])
def test_a_token_of_nan_spoils_its_own_row_and_its_own_experts(recipe, mesh):
    x, g, router, w_in, w_out = arrays()
    one = jnp.arange(TOKENS)[:, None] == LOST
    gates, chosen = fp8.moe.top_k(jnp.where(one, jnp.nan, x.astype(jnp.float32) @ router), 2)
    assert bool(jnp.all(jnp.isnan(gates[LOST])))
    run = functools.partial(step, MESHES[mesh], RECIPES[recipe])
    clean = x, jnp.where(one, 0.5, gates), chosen, g, w_in, w_out
    _, states = run(*clean, states_of(RECIPES[recipe]))  # delayed scaling has scales from here on
    expected, expected_states = run(*clean, states)
    lost = jnp.where(one, jnp.bfloat16(jnp.nan), x), gates, *clean[2:]
    found, found_states = run(*lost, states)

    rest = np.arange(TOKENS) != LOST
    for name in ("y", "dx", "dgates"):
        assert np.all(np.isnan(found[name][LOST])), name
        np.testing.assert_array_equal(found[name][rest], expected[name][rest], name)
    others = ~np.isin(np.arange(EXPERTS), np.asarray(chosen[LOST]))
    for name in ("dw_in", "dw_out"):
        assert np.any(expected[name][others]), name
        np.testing.assert_array_equal(found[name][others], expected[name][others], name)
        assert np.all(np.any(np.isnan(found[name][~others]), axis=(1, 2))), name  # not hidden

    # States keep what was finite, and count the rest.
    for ours, theirs, before in zip(found_states, expected_states, states, strict=True):
        if not RECIPES[recipe].rows:
            continue
        new = ours.nonfinite_steps - before.nonfinite_steps
        assert np.all(new[others] == 0)
        assert np.all(new[~others].max(axis=1) == 1)
        for field in ("scale", "amax_history"):
            ours_, theirs_ = getattr(ours, field), getattr(theirs, field)
            assert np.all(np.isfinite(ours_)), field
            np.testing.assert_array_equal(ours_[others], theirs_[others], field)
