"""States that are computed on together: same bits as one by one, and few slices to compile."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.sharding._amax import vary_as, varying_axes
from jaxfp8.state._commit import commit_one
from jaxfp8.state._identity import known_scales
from jaxfp8.state._together import _MOST_STACKED, by_groups, groups_of, known_scales_of

COMMIT = jax.jit(fp8.commit)
RECIPES = fp8.recipes.delayed(), fp8.recipes.delayed(history_length=4)


def states(count, recipes=RECIPES[:1]):
    """States after a step that saw other amaxes in each of them, and what the next step saw."""
    old = [fp8.init_state(recipes[i % len(recipes)]) for i in range(count)]

    def seen(i, of):
        nothing = fp8.nothing_seen(of)
        amaxes = np.random.default_rng(i).lognormal(size=3).astype(np.float32)
        return jax.tree.map(lambda _: jnp.asarray(amaxes), nothing)

    old = [COMMIT(state, seen(i, state)) for i, state in enumerate(old)]
    return old, [seen(count + i, state) for i, state in enumerate(old)]


def together(old, seen):
    return by_groups(groups_of(old), commit_one, old, seen)


def jitted():
    """`together`, traced again: JAX would keep the trace of another platform."""
    return jax.jit(lambda *given: together(*given))


@pytest.fixture(params=["cpu", "cuda"])
def platform(request, monkeypatch):
    """What that platform would compute."""

    def chosen(*arguments, default, **functions):
        return functions.get(request.param, default)(*arguments)

    monkeypatch.setattr(jax.lax, "platform_dependent", chosen)


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize("count", [1, _MOST_STACKED + 1, 3 * _MOST_STACKED + 2])
def test_same_bits_as_one_by_one(count):
    old, seen = states(count, RECIPES)
    got = jitted()(old, seen)
    wanted = [jax.jit(commit_one)(*each) for each in zip(old, seen, strict=True)]
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    assert_same_bits(got, wanted)


@pytest.mark.usefixtures("platform")
def test_any_number_that_a_quantizer_remembers():
    """Users' quantizers may write numbers that ours never write."""
    history = np.float32([-np.inf, -3.5, -0.0, 0.0, 2.0**-140, 3.0, np.inf, np.nan])
    old, seen = states(3, [fp8.recipes.delayed(history_length=8)])
    old = [dataclasses.replace(s, amax_history=jnp.stack([history] * 3)) for s in old]
    seen = [dataclasses.replace(s, amax=s.amax * 0) for s in seen]  # nothing changes
    for state in jitted()(old, seen):
        assert_same_bits(state.amax_history, old[0].amax_history)


@pytest.mark.usefixtures("platform")
@pytest.mark.parametrize("settled", [False, True])
def test_same_scales_as_one_by_one(settled):
    """Unset ones too, and those of a foreign row."""
    old, _ = states(5)
    old[1] = fp8.init_state(RECIPES[0])
    old[2] = dataclasses.replace(old[2], fingerprint=old[2].fingerprint * 2)
    old[3] = dataclasses.replace(old[3], scale=old[3].scale.at[1].set(jnp.nan))
    old = [dataclasses.replace(state, settled=settled) for state in old]
    got = jax.jit(lambda tree: known_scales_of(groups_of(tree), tree))(old)
    assert_same_bits(got, [jax.jit(known_scales)(state) for state in old])


@pytest.mark.parametrize("count", [1, _MOST_STACKED, 3 * _MOST_STACKED + 2])
def test_stacks_hold_every_state_once_and_few_states_each(count):
    old, _ = states(count, RECIPES)
    found = []
    jax.jit(lambda tree: found.append(groups_of(tree)))(old)
    groups = found[0]
    assert sorted(place for group in groups for place in group) == list(range(count))
    assert max(map(len, groups)) <= _MOST_STACKED
    assert all(len({old[place].rows for place in group}) == 1 for group in groups)


def test_deep_models_compile_no_more_slices():
    def slices(count):
        text = jax.jit(together).lower(*states(count)).compile().as_text()
        return set(re.findall(r"\[\S* slice\(.*?slice=(\{.*?\})", text))

    few, many = slices(24), slices(48)  # multiples of most sizes that a stack may get
    assert len(few) >= 3  # each place of a stack, and rows of a quantizer
    assert many == few


@pytest.mark.parametrize("count", [1, 2])
def test_a_quantizer_that_changed_is_traced_again(count, monkeypatch):
    """A notebook may define a method of a quantizer again, or a test may replace it."""
    quantizer = type(RECIPES[0].rows[0].quantizer)
    old, seen = states(count)
    assert all(leaf.scale[0] != 7 for leaf in jax.jit(together)(old, seen))

    def update(self, row, amax):
        return row._replace(scale=jnp.full_like(row.scale, 7))

    monkeypatch.setattr(quantizer, "update", update)
    again = jitted()(old, seen)
    assert all(leaf.scale[0] == 7 for leaf in again)


def test_states_that_are_not_alike_are_apart():
    old, _ = states(4)
    assert groups_of(old) == [[0], [1], [2], [3]]  # eager: messages name single states
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), old[0])
    frozen = fp8.freeze(old[3])
    found = []
    jax.jit(lambda *tree: found.append(groups_of(tree)))(*old[:2], stacked, stacked, frozen)
    assert found == [[[0, 1], [2], [3], [4]]]


def test_states_on_a_mesh_that_splits_them():
    """An Explicit mesh may split a history, and a state may vary over other axes in shard_map."""
    old, seen = states(5)
    wanted = [jax.jit(commit_one)(*each) for each in zip(old, seen, strict=True)]
    axes = (jax.sharding.AxisType.Explicit,)
    mesh = jax.make_mesh((1,), ("a",), axis_types=axes)
    with jax.set_mesh(mesh):
        old = jax.device_put(old, jax.NamedSharding(mesh, jax.P()))
        split = jax.NamedSharding(mesh, jax.P(None, "a"))
        frozen = [
            dataclasses.replace(s, amax_history=jax.device_put(s.amax_history, split), frozen=True)
            for s in old
        ]
        for state in jax.jit(together)(frozen, seen):
            assert jax.typeof(state.amax_history).sharding.spec == jax.P(None, "a")

    @jax.shard_map(mesh=jax.make_mesh((1,), ("a",)), in_specs=jax.P(), out_specs=jax.P("a"))
    def vary(old, seen):
        some = [dataclasses.replace(s, scale=lax.pcast(s.scale, "a", to="varying")) for s in old]
        given, found = [*some[:3], *old[3:]], []
        for i, one in enumerate(together(given, seen)):
            leaves, alone = jax.tree.leaves(one), jax.tree.leaves(commit_one(given[i], seen[i]))
            assert [*map(varying_axes, leaves)] == [*map(varying_axes, alone)]
            found.append([vary_as(leaf, some[0].scale) for leaf in leaves])
        return found

    got = vary(*states(5))
    assert_same_bits(got, [jax.tree.leaves(state) for state in wanted])
