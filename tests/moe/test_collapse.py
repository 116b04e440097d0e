"""Routers that collapse, and tokens that are NaN: nobody but the experts concerned sees them."""

import functools
import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

sys.path.insert(0, str(Path(__file__).parent.parent / "ops"))
import moe_cases as cases
from moe_cases import RECIPES

import jaxfp8 as fp8

EXPERTS = cases.E
TAKEN = [2, 3]  # the experts that get every token; with 4 devices, one has both
LOST = 21  # the token that is NaN
# Of recipes, meshes and where gradients are cast: with scales in a state, and with tiles.
QUICK = {("delayed", "expert=4, data=2", False), ("blockwise", "expert=8", True)}
MESHES = {"one device": (1, 1), "expert=8": (8, 1), "expert=4, data=2": (4, 2)}
KINDS = {"delayed": AxisType.Explicit}  # else Auto


def logits_of_router():
    """Logits [T, E] that choose each expert equally often."""
    return np.random.default_rng(0).standard_normal((cases.T, EXPERTS)).astype(np.float32)


top_k = jax.jit(fp8.moe.top_k, static_argnums=1)


@functools.cache
def program(mesh, recipe, gradient_sent_in_fp8):
    """Of params, choices, cotangent and states: one program for all numbers.

    It gives result, dropped choices, gradients of x, gates and both matrices, and states.
    """
    if mesh == "one device":
        run = cases.program(recipe)
    else:
        experts, data = MESHES[mesh]
        run = cases.program_of_global_arrays(
            recipe, KINDS.get(recipe, AxisType.Auto), data=data, experts=experts,
            backward=gradient_sent_in_fp8,
        )  # fmt: skip

    def step(params, chosen, g, states):
        x, gates, *matrices = params
        y, grads, states, dropped = jax.device_get(run((x, gates, chosen, *matrices, g), states))
        named = dict(zip(("dx", "dgates", "dw_in", "dw_out"), grads, strict=True))
        return {"y": y, "dropped": dropped} | named, states

    return step


@functools.cache
def collapsed(recipe, mesh, gradient_sent_in_fp8=False):
    """All tokens choose two experts, because their biases are huge. Two steps."""
    x, _, _, w_in, w_out, g = cases.arrays()
    logits = logits_of_router()
    logits[:, TAKEN] += 1e4
    gates, chosen = map(np.asarray, top_k(logits, 2))
    assert (np.sort(chosen) == TAKEN).all()
    run, states = program(mesh, recipe, gradient_sent_in_fp8), cases.states(RECIPES[recipe], True)
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
def test_two_experts_with_all_tokens(recipe, mesh, gradient_sent_in_fp8):
    found, states = collapsed(recipe, mesh, gradient_sent_in_fp8)
    alone, states_alone = collapsed(recipe, "one device", gradient_sent_in_fp8)
    assert found["dropped"] == 0
    others = ~np.isin(np.arange(EXPERTS), TAKEN)
    for name in ("dw_in", "dw_out"):
        assert not np.any(found[name][others])
        assert np.any(found[name][TAKEN], axis=(1, 2)).all()
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
    x, _, _, w_in, w_out, g = cases.arrays()
    one, logits = np.arange(cases.T)[:, None] == LOST, logits_of_router()
    logits[LOST] = np.nan
    gates, chosen = map(np.asarray, top_k(logits, 2))
    assert np.isnan(gates[LOST]).all()
    run = program(mesh, recipe, gradient_sent_in_fp8)
    clean = x, np.where(one, np.float32(0.5), gates), w_in, w_out
    # Delayed scaling has scales from here on.
    _, states = run(clean, chosen, g, cases.states(RECIPES[recipe], True))
    expected, expected_states = run(clean, chosen, g, states)
    lost = np.where(one, jnp.bfloat16(np.nan), x), gates, w_in, w_out
    found, found_states = run(lost, chosen, g, states)

    rest = np.arange(cases.T) != LOST
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
