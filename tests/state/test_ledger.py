"""Ledgers survive addition.

Exact for one use, bounded for several, the same power-of-two scale always.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8 as fp8
from jaxfp8.numerics._scale import encoding_multiplier
from jaxfp8.state._ledger import _UPPER_EDGES, decode, encode, observe

EDGES = _UPPER_EDGES[:-1]
HARD = np.float32([0, 2.0**-126, 2.0**-64, 1e-30, 1, 3, 448, 57344, 2.0**64, 3e38, *EDGES[::37]])
NEIGHBOURS = np.concatenate(
    [HARD, np.nextafter(HARD, np.float32(np.inf)), np.nextafter(HARD, np.float32(0))]
)
TINY = np.float32(2.0**-126)
NORMAL = NEIGHBOURS[(NEIGHBOURS == 0) | (NEIGHBOURS >= TINY)]

sum_of = jax.jit(lambda amaxes: decode(jnp.sum(encode(amaxes), axis=0)))


@jax.jit
def powers_of_two(amaxes):
    formats = fp8.E4M3, fp8.E5M2
    return [encoding_multiplier(amaxes, format, power_of_two=True) for format in formats]


@jax.jit
def many(key, uses):
    """16 sets of `uses` amaxes of 2^-70 to 2^70, close together within a set."""
    middle, spread = jax.random.split(key)
    exponents = jax.random.uniform(middle, (1, 16), minval=-60, maxval=60)
    return (
        jnp.exp2(exponents + jax.random.normal(spread, (64, 16)) * 0.2)
        * (jnp.arange(64) < uses).astype(jnp.float32)[:, None]
    )


def test_one_use_is_exact():
    np.testing.assert_array_equal(decode(encode(jnp.asarray(NORMAL))), NORMAL)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_not_finite_stays_whatever_is_added(bad):
    seen = [observe(jnp.float32([value, 0.5]), jnp.float32(0)) for value in (1.0, bad, 3e38)]
    amaxes = jnp.stack(seen)[:, None]
    np.testing.assert_array_equal(sum_of(amaxes), np.inf)


def test_a_bin_cannot_overflow_to_infinity():
    assert jnp.isfinite(sum_of(jnp.full((2, 1), 2.0**63, jnp.float32))).all()


@pytest.mark.parametrize("uses", [1, 2, 3, 17, 64])
def test_several_uses_are_bounded(uses):
    for seed in range(20):
        amaxes = many(jax.random.key(seed), uses)
        true, got = np.max(amaxes, 0), np.asarray(sum_of(amaxes))
        assert (got >= true).all()
        assert (got <= true * np.float32(1.125)).all()
        np.testing.assert_array_equal(powers_of_two(got), powers_of_two(true))


def test_edges_ask_for_the_power_of_two_of_their_bin():
    """Bins are (lo, hi]: an edge, the largest of its bin, and what is just above the edge before
    it.
    """
    above = np.nextafter(EDGES[:-1], np.float32(np.inf))
    np.testing.assert_array_equal(powers_of_two(above), powers_of_two(EDGES[1:]))


def test_several_uses_at_an_edge_stay_in_its_bin():
    inside = EDGES[:-1]  # the last bin is open
    np.testing.assert_array_equal(sum_of(jnp.stack([inside, inside, 0.95 * inside])), inside)


def test_uses_in_different_bins_are_exact():
    amaxes = jnp.float32([[3.0], [1.0], [0.25], [1e-20]])
    np.testing.assert_array_equal(sum_of(amaxes), [3.0])


@pytest.mark.parametrize(("x_axes", "like_axes", "reduced"), [
    ((0, 0), (0, 0), (2,)),  # both stacked twice
    ((0, 0), (None, 0), (0, 2)),  # examples outside, experts inside
    ((0, 0), (0, None), (1, 2)),  # experts outside, examples inside
    ((0, 0), (None, None), (0, 1, 2)),
])  # fmt: skip
def test_observe_under_nested_vmap(x_axes, like_axes, reduced):
    """Axes of examples are reduced over, axes of stacked states are kept, in any order."""
    x = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
    like = jnp.zeros(
        [size for size, axis in zip((3, 4), like_axes, strict=True) if axis is not None]
    )
    inner = jax.vmap(observe, in_axes=(x_axes[1], like_axes[1]))
    got = jax.vmap(inner, in_axes=(x_axes[0], like_axes[0]))(jnp.asarray(x), like)
    want = np.broadcast_to(np.max(np.abs(x), axis=reduced, keepdims=True)[..., 0], (3, 4))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("outer", [0, None])
def test_observe_of_one_value_for_stacked_states(outer):
    x = jnp.float32([[1.0, -5.0], [2.0, 3.0]])
    inner = jax.vmap(observe, in_axes=(0, 0))
    got = jax.vmap(inner, in_axes=(outer, 0))(
        x if outer is None else jnp.stack([x, x, x]), jnp.zeros((3, 2))
    )
    np.testing.assert_array_equal(got, [[5.0, 3.0]] * 3)
