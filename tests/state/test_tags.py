"""Tags of fingerprints: a mean of states is found, the rounding of a mean over devices passes."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxfp8 as fp8
from jaxfp8.recipes._recipe import Row
from jaxfp8.state._commit import commit_one
from jaxfp8.state._identity import (
    _ROUNDING,
    _TAGS,
    _UNIT,
    is_known,
    tag_fits,
    tag_state,
)
from jaxfp8.state._init import fingerprints, unset_state
from jaxfp8.state._state import SeenAmax

N = 4_000
RECIPES = {
    "float32 scales": fp8.recipes.delayed(history_length=16),
    "powers of two": fp8.recipes.delayed(history_length=16, power_of_two=True),
    "long": fp8.recipes.delayed(history_length=64),
    "no history": fp8.recipes.delayed(history_length=1),
}
AMAXES = {  # of the second microbatch, given that of the first
    "float32": lambda random, first: first * np.exp(random.normal(size=first.shape) * 0.2),
    "near": lambda random, first: first * (1 + random.normal(size=first.shape) * 0.01),
    "bfloat16": lambda random, first: first * (1 + random.integers(1, 40, first.shape) / 128),
    "next bfloat16": lambda random, first: first * (1 + 1 / 128),
    "twice": lambda random, first: 2 * first,
}


@jax.jit
def commit(state, amax):
    return tag_state(commit_one(state, SeenAmax(amax, state.rows)))


def after(recipe, *amaxes):
    """N states of one step, f32[N, R], after commits of these amaxes."""
    state = unset_state(recipe.rows, (N,))
    for amax in amaxes:
        state = commit(state, jnp.asarray(amax, jnp.float32))
    return state


@jax.jit
def fitting(state):
    return is_known(state) & tag_fits(state)


def passes(state):
    return np.asarray(fitting(state))


def on_host(state):
    return jax.tree.map(np.asarray, state)


def amaxes_of(random, kind):
    first = np.exp(random.normal(size=(N, 3)) * 2).astype(np.float32)
    if "bfloat16" in kind:
        first = first.astype(ml_dtypes.bfloat16).astype(np.float32)
        first = np.float32(2) ** np.floor(np.log2(first))  # so that both are bfloat16
    return first


def few(recipe, kind, microbatches):
    """Each recipe, each kind of amaxes, and more than two microbatches once."""
    if microbatches == 8:
        return (recipe, kind) == ("long", "float32")
    return recipe == "float32 scales" or kind == "float32"


@pytest.mark.parametrize(
    ("recipe", "kind", "microbatches"),
    [
        pytest.param(*case, marks=() if few(*case) else pytest.mark.slow)
        for case in itertools.product(RECIPES, AMAXES, (2, 8))
    ],
)
def test_a_mean_passes_in_few_rows(recipe, kind, microbatches):
    random = np.random.default_rng(0)
    past = np.exp(random.normal(size=(N, 3)) * 2)
    first = amaxes_of(random, kind)
    all_of_them = [first]
    while len(all_of_them) < microbatches:
        all_of_them.append(np.float32(AMAXES[kind](random, all_of_them[-1])))
    states = [after(RECIPES[recipe], past, amax) for amax in all_of_them]
    mean = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *map(on_host, states))
    assert all(passes(state).all() for state in states)
    rows = passes(mean)
    assert 0.02 < rows.mean() < 0.35
    assert rows.all(axis=-1).mean() < 0.05  # three rows with different amaxes


def test_the_mean_of_equal_states_passes():
    random = np.random.default_rng(1)
    for recipe in RECIPES.values():
        state = on_host(after(recipe, *np.exp(random.normal(size=(2, N, 3)) * 9)))
        for devices in (2, 3, 4, 5, 7, 8):
            mean = jax.tree.map(lambda leaf, n=devices: sum([leaf] * n) / n, state)
            assert passes(mean).all()


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_last_bit_of_an_amax_and_a_scale_does_not_matter(sign):
    state = after(RECIPES["float32 scales"], np.exp(np.random.default_rng(2).normal(size=(N, 3))))
    ulp = lambda leaf: np.nextafter(np.asarray(leaf), np.float32(sign * np.inf))
    rounded = dataclasses.replace(
        state,
        fingerprint=np.asarray(state.fingerprint) + np.float32(sign * _UNIT),
        scale=ulp(state.scale),
        amax_history=ulp(state.amax_history),
    )
    assert tag_fits(rounded).all()


@pytest.mark.parametrize("factor", [0.5, 2.0, 3.0, 1 / 1024, 0.999, 1 - 1e-6, 1 + 1e-6])
def test_a_multiple_does_not_pass(factor):
    state = after(RECIPES["float32 scales"], np.exp(np.random.default_rng(3).normal(size=(N, 3))))
    scaled = passes(jax.tree.map(lambda leaf: leaf * np.float32(factor), on_host(state)))
    assert scaled.mean() < 0.25
    assert scaled.all(axis=-1).mean() < 0.05


def test_tags_are_equal_in_numpy_and_jax():
    """Files and eager code are checked in NumPy, steps in XLA."""
    state = after(RECIPES["long"], np.exp(np.random.default_rng(4).normal(size=(N, 3)) * 20))
    host = on_host(state)
    assert tag_fits(host).all()
    other = dataclasses.replace(host, scale=host.scale * np.float32(1.7))
    np.testing.assert_array_equal(tag_fits(other), jax.jit(tag_fits)(other))


def test_tags_are_between_the_bounds_and_far_from_other_rows():
    state = after(RECIPES["long"], np.exp(np.random.default_rng(5).normal(size=(N, 3)) * 20))
    tag = np.asarray(state.fingerprint - fingerprints(state.rows, state.fingerprint.shape)) / _UNIT
    assert set(np.unique(tag)) == {8 + 7 * level for level in range(8)}
    assert 2 * _ROUNDING <= 7 * _UNIT
    assert 57 * _UNIT + _ROUNDING <= _TAGS
    # Checksums are multiples of 2^-16.
    row = Row("x", fp8.quantizers.Delayed(format=fp8.E4M3))
    assert (row.fingerprint * 2**16).is_integer()
    assert 2 * _TAGS == 2.0**-16
