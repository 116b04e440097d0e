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
# Of recipes, meshes and where gradients are cast: with scales in a state, and with tiles.
QUICK = {("delayed", "expert=4, data=2", False), ("blockwise", "expert=4, data=2", True)}
MESHES = {"one device": (1, 1), "expert=8": (8, 1), "expert=4, data=2": (4, 2)}


def arrays():
    """x, g [T, K] and w_in, w_out; and logits [T, E] of a random router."""
    normal = np.random.default_rng(0).standard_normal  # NumPy compiles nothing
    x, g, w_in, w_out = (
        normal(shape).astype(jnp.bfloat16)
        for shape in (
            (TOKENS, WIDTH),
            (TOKENS, WIDTH),
            (EXPERTS, WIDTH, 2 * HIDDEN),
            (EXPERTS, HIDDEN, WIDTH),
        )
    )
    logits = x.astype(np.float32) @ normal((WIDTH, EXPERTS)).astype(np.float32)
    return x, g, w_in / jnp.bfloat16(8), w_out / jnp.bfloat16(7), logits


top_k = jax.jit(fp8.moe.top_k, static_argnums=1)


def states_of(recipe):
    if not recipe.rows:
        return (), ()
    state = jax.tree.map(lambda leaf: np.stack([leaf] * EXPERTS), fp8.init_state(recipe))
    return state, state


@functools.cache
def program(mesh, recipe, gradient_sent_in_fp8):
    """Of params, choices, cotangent and states: one program for all numbers.

    It gives result, dropped choices, gradients of x, gates and both matrices, and states.
    """
    shape = MESHES[mesh]
    mesh = jax.make_mesh(
        shape,
        ("expert", "data"),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[: shape[0] * shape[1]],
    )
    parallel = fp8.moe.ExpertParallel(
        axis="expert", tokens=("data", "expert"), gradient_sent_in_fp8=gradient_sent_in_fp8
    )

    @jax.jit
    def run(params, chosen, g, states):
        def loss(params, states):
            x, gates, w_in, w_out = params
            y, dropped = fp8.moe.swiglu_experts(
                x, gates, chosen, w_in, w_out,
                recipe=RECIPES[recipe], states=states, parallel=parallel,
            )  # fmt: skip
            return jnp.sum(y.astype(jnp.float32) * g.astype(jnp.float32)), (y, dropped)

        (_, (y, dropped)), grads, states = fp8.value_and_grad(loss, has_aux=True)(params, states)
        return {"y": y, "dropped": dropped} | dict(
            zip(("dx", "dgates", "dw_in", "dw_out"), grads, strict=True)
        ), states

    def step(params, chosen, g, states):
        with jax.set_mesh(mesh):
            found, states = run(params, chosen, g, states)
        return jax.tree.map(np.asarray, found), jax.device_get(states)

    return step


@functools.cache
def collapsed(recipe, mesh, gradient_sent_in_fp8=False):
    """All tokens choose one expert, because its bias is huge. Two steps."""
    x, g, w_in, w_out, logits = arrays()
    logits[:, TAKEN] += 1e4
    gates, chosen = map(np.asarray, top_k(logits, 1))
    assert (chosen == TAKEN).all()
    run, states = program(mesh, recipe, gradient_sent_in_fp8), states_of(RECIPES[recipe])
    for _ in range(2):  # in the second step delayed scaling has scales
        found, states = run((x, gates, w_in, w_out), chosen, g, states)
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


@pytest.mark.parametrize(
    ("recipe", "mesh", "gradient_sent_in_fp8"),
    [
        pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow)
        for row in (
            *sorted(QUICK),
            *itertools.product(
                ("delayed", "rowwise", "blockwise", "mxfp8"), ("expert=8", "one device"), (False,)
            ),
        )
    ],
)
def test_a_token_of_nan_spoils_its_own_row_and_its_own_experts(recipe, mesh, gradient_sent_in_fp8):
    x, g, w_in, w_out, logits = arrays()
    one = np.arange(TOKENS)[:, None] == LOST
    logits[LOST] = np.nan
    gates, chosen = map(np.asarray, top_k(logits, 2))
    assert np.isnan(gates[LOST]).all()
    run = program(mesh, recipe, gradient_sent_in_fp8)
    clean = x, np.where(one, np.float32(0.5), gates), w_in, w_out
    # Delayed scaling has scales from here on.
    _, states = run(clean, chosen, g, states_of(RECIPES[recipe]))
    expected, expected_states = run(clean, chosen, g, states)
    lost = np.where(one, jnp.bfloat16(np.nan), x), gates, w_in, w_out
    found, found_states = run(lost, chosen, g, states)

    rest = np.arange(TOKENS) != LOST
    for name in ("y", "dx", "dgates"):
        assert np.all(np.isnan(found[name][LOST])), name
        np.testing.assert_array_equal(found[name][rest], expected[name][rest], name)
    others = ~np.isin(np.arange(EXPERTS), chosen[LOST])
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
