"""No edit of a saved state is trained on: it raises, or a warning lists the rows that were unset.

Before there was a check, one inf in a restored history set the scale to 1 for H steps. Every
gradient below 2^-17 became 0 (`jnp.abs(grads).max()` 3.8e-6, 0, 0, 0). A scale of 1e30 and a
negative history raised no error either.
"""

import itertools

import chex
import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from state.saved_states import EDITS, FILES, Flax, fresh, recipe, step, trained

import jaxfp8 as fp8
from jaxfp8.state._state import LEAVES

RECIPE = recipe()
STEPS = 6  # the histories of 4 are full


def arrays(states):
    return {
        name: {leaf: np.asarray(getattr(s, leaf)) for leaf in LEAVES} for name, s in states.items()
    }


@pytest.mark.parametrize("steps", [0, 1, 2, 3, STEPS])
@pytest.mark.parametrize("file", FILES)
def test_what_steps_left_is_taken_as_it_is(file, steps, tmp_path):
    saved = trained(RECIPE, steps)
    restored = FILES[file](saved, tmp_path).restore(fresh(RECIPE))
    jax.tree.map(np.testing.assert_array_equal, arrays(restored), saved)


def edits_of_files():
    """Each edit of one kind of file. Of the others, each kind of damage: values, types, shapes."""
    few = {"one, x: scale nan", "stack 1, g: staged", "cast to float64", "history of 2", "no scale"}
    for file, edit in itertools.product(FILES, EDITS):
        marks = () if file == "npz" or edit in few else pytest.mark.slow
        yield pytest.param(file, edit, marks=marks)


@pytest.mark.parametrize(("file", "edit"), [*edits_of_files()])
def test_an_edit_is_refused_or_repaired(file, edit, tmp_path):
    saved = trained(RECIPE, STEPS)
    edited = FILES[file](EDITS[edit](saved), tmp_path)
    like = fresh(RECIPE)
    if file == "orbax" and "float64" in edit:  # it casts to its target's dtype, and nothing is lost
        edited.restore(like)
    else:
        with pytest.raises(fp8.FP8StateError):
            edited.restore(like)

    with pytest.warns(
        UserWarning, match=r"(?s)fault.* in the quantizer state.*unset \(repair=True\)"
    ):
        repaired = fp8.check_state(edited.read(), like, repair=True)
    jax.tree.map(
        np.testing.assert_array_equal, arrays(fp8.check_state(repaired, like)), arrays(repaired)
    )
    was, now = saved, arrays(repaired)
    for name in was:
        kept = np.ones(was[name]["scale"].shape, bool)
        for leaf in LEAVES:
            same = was[name][leaf] == now[name][leaf]
            kept &= same.all(-1) if leaf == "amax_history" else same
        for leaf in ("scale", "amax_history", "nonfinite_steps"):  # other rows are unset
            np.testing.assert_array_equal(now[name][leaf][~kept], 0)
        if not edit.startswith((f"{name}, ", f"{name} 1, ")):
            continue
        assert (~kept).sum() == 1, "one bad row, one reset"


def test_a_repaired_state_trains():
    """Its unset rows take the amaxes of their tensors; after the step all are set."""
    saved, like = trained(RECIPE, STEPS), fresh(RECIPE)
    bad = EDITS["stack 1, g: scale nan"](EDITS["one, x: slot 3 inf"](saved))
    with pytest.warns(UserWarning, match="2 faults"):
        repaired = fp8.check_state(bad, like, repair=True)
    value, grads, after = step(RECIPE)(repaired)
    chex.assert_tree_all_finite((value, grads))
    assert all(s.scale.all() for s in after.values())
    fp8.check_state(after, like)


OTHERS = {
    "gradients in E4M3": recipe(gradient=fp8.E4M3),
    "margin": recipe(margin=1),
    "algorithm": recipe(algorithm="most_recent"),
    "power_of_two": recipe(power_of_two=True),
    "history_length": recipe(history_length=16),
}


@pytest.mark.parametrize("swap", [False, True], ids=["saved", "of the model"])
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize(
    "file", [pytest.param(f, marks=() if f == "npz" else pytest.mark.slow) for f in FILES]
)
def test_a_state_of_another_recipe(file, other, swap, tmp_path):
    saved, model = (RECIPE, OTHERS[other]) if swap else (OTHERS[other], RECIPE)
    with pytest.raises(fp8.FP8StateError):
        FILES[file](trained(saved, STEPS), tmp_path).restore(fresh(model))
    with pytest.warns(UserWarning, match="another tensor or quantizer|history_length"):
        repaired = fp8.check_state(trained(saved, STEPS), fresh(model), repair=True)
    # Of gradients in another format only their row is another.
    same = [0, 1] if other == "gradients in E4M3" else []
    np.testing.assert_array_equal(np.flatnonzero(np.asarray(repaired["one"].scale)), same)


def committed(state, amaxes):
    seen = jax.tree.map(
        lambda leaf: jnp.broadcast_to(jnp.asarray(amaxes, jnp.float32), leaf.shape),
        fp8.nothing_seen(state),
    )
    return COMMIT(state, seen)


COMMIT = jax.jit(fp8.commit)
POLICIES = [{}, {"algorithm": "most_recent"}, {"margin": 3}, {"power_of_two": True}]


@pytest.mark.parametrize(
    ("policy", "length"),
    [
        pytest.param(policy, length, marks=() if i == 0 or i == j else pytest.mark.slow)
        for i, policy in enumerate(POLICIES)
        for j, length in enumerate([1, 2, 3, 5])
    ],
    ids=str,
)
def test_every_row_that_steps_leave_passes(policy, length):
    """Steps of any amax, zero or not finite; at most 2^19 lies between those of one history."""
    random = np.random.default_rng(length)
    like = state = fp8.init_state(recipe(history_length=length, **policy))
    for _ in range(25):
        odd = random.choice([0.0, np.inf, np.nan, 1e-40], 3)
        state = committed(
            state, np.where(random.random(3) < 0.2, odd, random.uniform(1, 2.0**19, 3))
        )
        fp8.check_state(state, like)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("amax", [1e-30, 1e15, 3e38, 2.0**-126, 1e-40, np.inf])
def test_extreme_amaxes_pass(amax, policy):
    like = state = fp8.init_state(recipe(history_length=3, **policy))
    for each in (amax, 1.0, amax):
        state = committed(state, each)
        fp8.check_state(state, like)


@pytest.mark.parametrize(("factor", "passes"), [(2.0**19, True), (2.0**21, False)])
def test_how_far_a_full_history_may_lie_below_what_left_it(factor, passes):
    """The limit that the docstring names: a fall of 2^20 within one history reads as damage."""
    state = fp8.init_state(recipe(history_length=3))
    for each in (factor, 1.0, 1.0):
        state = committed(state, each)
    if passes:
        fp8.check_state(state, state)
    else:
        with pytest.raises(
            fp8.FP8StateError, match="not the scale that the amaxes of its history ask for"
        ):
            fp8.check_state(state, state)


def test_the_message_names_leaf_value_and_cure():
    saved = EDITS["stack 1, g: scale nan"](trained(RECIPE, STEPS))
    match = (
        r"(?s)1 fault .*\['stack'\]\.scale\[1, 2\] = nan: it must be 0 "
        r".* g by Delayed\(format=E5M2.*repair=True"
    )
    with pytest.raises(fp8.FP8StateError, match=match):
        fp8.check_state(saved, fresh(RECIPE))
    with pytest.raises(fp8.FP8StateError, match=r"(?s)stack.*the state\.scale.*msgpack_restore"):
        Flax(saved, None).restore(fresh(RECIPE))


def test_many_faults_are_counted_and_the_first_are_listed():
    like = {f"layer{i}": fp8.init_state(RECIPE) for i in range(20)}
    saved = jax.tree.map(lambda leaf: leaf * jnp.nan, like)
    with pytest.raises(fp8.FP8StateError, match=r"20 faults .*") as caught:
        fp8.check_state(saved, like)
    assert str(caught.value).count("layer") == 10


def test_only_the_types_of_a_fresh_state_are_needed():
    like = jax.eval_shape(lambda: fresh(RECIPE))
    saved = trained(RECIPE, STEPS)
    jax.tree.map(np.testing.assert_array_equal, arrays(fp8.check_state(saved, like)), saved)
    with pytest.warns(UserWarning, match=r"\['stack'\]\.scale has shape \[3, 3\]"):
        repaired = fp8.check_state(EDITS["3 layers"](saved), like, repair=True)
    np.testing.assert_array_equal(repaired["stack"].scale, np.zeros((2, 3)))


def test_layers_of_several_recipes():
    current = fp8.init_state(fp8.recipes.current())
    like = {"a": fp8.init_state(RECIPE), "b": fp8.init_state(OTHERS["margin"]), "c": current}
    assert fp8.check_state(like, like)["c"] == ()
    with pytest.raises(fp8.FP8StateError, match=r"(?s)6 faults|2 faults"):
        fp8.check_state({"a": like["b"], "b": like["a"], "c": ()}, like)


@pytest.mark.parametrize(("given", "match"), [
    (lambda s: {"one": s["one"]}, "another tree than like"),
    (lambda s: {**s, "more": s["one"]}, "another tree than like"),
    (lambda s: {**s, "one": 3.0}, "float at .*'one'.*where a quantizer state is needed"),
    (lambda s: {**s, "one": {**trained(RECIPE, 1)["one"], "kernel": 0}},
     r"\['kernel'\] at .*'one'"),
], ids=["a state less", "a state more", "a number", "an array more"])  # fmt: skip
@pytest.mark.parametrize("repair", [False, True])
def test_another_tree(given, match, repair):
    with pytest.raises(fp8.FP8StateError, match=match):
        fp8.check_state(given(fresh(RECIPE)), fresh(RECIPE), repair=repair)


def test_like_is_state_alone():
    with pytest.raises(fp8.FP8StateError, match="without parameters"):
        fp8.check_state({"params": jnp.ones(3)}, {"params": jnp.ones(3)})


def test_values_have_to_be_at_hand():
    with pytest.raises(fp8.FP8StateError, match="outside of jit"):
        jax.jit(lambda s: fp8.check_state(s, s))(fresh(RECIPE))
    with pytest.raises(fp8.FP8StateError, match="outside of jit"):
        fp8.check_state(jax.eval_shape(lambda: fresh(RECIPE)), fresh(RECIPE))


def test_frozen_states_stay_frozen():
    frozen = fp8.freeze(fresh(RECIPE))
    assert fp8.check_state(frozen, fresh(RECIPE))["one"].frozen


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_repaired_states_lie_where_they_lay(explicit):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2,), ("pipe",), axis_types=(kind,))
    like = {"stack": fresh(RECIPE)["stack"]}
    specs = fp8.state_specs(like, {"stack": jax.P("pipe")})
    shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs)
    bad = EDITS["stack 1, g: scale nan"](trained(RECIPE, STEPS))["stack"]
    placed = {
        "stack": {
            leaf: jax.device_put(bad[leaf], getattr(shardings["stack"], leaf)) for leaf in LEAVES
        }
    }
    with pytest.warns(UserWarning, match=r"scale\[1, 2\] = nan"):
        repaired = fp8.check_state(placed, like, repair=True)
    assert jax.tree.map(lambda leaf: leaf.sharding, repaired) == shardings


def test_collections_and_variables():
    """The trees of flax's models: a collection of linen, a State of nnx."""
    x = jnp.ones((2, 8))
    init = jax.jit(fp8.linen.FP8Dense(4, recipe=RECIPE).init)
    collection = init(jax.random.key(0), x)[fp8.linen.COLLECTION]
    model = fp8.nnx.FP8Linear(8, 4, recipe=RECIPE, rngs=nnx.Rngs(0))
    nnx.jit(fp8.nnx.value_and_grad(lambda model, x: model(x).sum()))(model, x)
    states = nnx.state(model, fp8.nnx.FP8State)
    for like in (collection, states, nnx.to_pure_dict(states)):
        checked = fp8.check_state(like, like)
        assert jax.tree.structure(checked) == jax.tree.structure(like)
        jax.tree.map(np.testing.assert_array_equal, checked, like)
        bad = jax.tree.map(lambda leaf: -np.asarray(leaf), like)
        match = r"(?s)1 fault.*(DotGeneral_0|dot_general).*fingerprint\[0\] = -1.*2 more rows"
        with pytest.raises(fp8.FP8StateError, match=match):
            fp8.check_state(bad, like)
        with pytest.warns(UserWarning, match="These rows were unset"):
            nnx.update(model, fp8.check_state(bad, like, repair=True)) if like is states else (
                fp8.check_state(bad, like, repair=True)
            )
    assert not states["dot_general"]["state"].get_value().scale.any()


def raw(tree):
    """As a file gives it back that is read without a target."""
    return flax.serialization.msgpack_restore(flax.serialization.to_bytes(tree))


def test_containers_of_another_kind():
    """FrozenDict for dict, dicts with the keys "0" and "1" for lists and tuples, and Orbax's of
    Variables.
    """
    one, two = (fp8.init_state(RECIPE) for _ in range(2))
    model = fp8.nnx.FP8Linear(8, 4, recipe=RECIPE, rngs=nnx.Rngs(0))
    states = nnx.state(model, fp8.nnx.FP8State)
    of_orbax = {
        "dot_general": {
            "state": {"value": {leaf: getattr(one, leaf) for leaf in LEAVES} | {"probe": None}}
        }
    }
    for given, like in [
        (flax.core.freeze({"a": one}), {"a": two}),
        ({"a": one}, flax.core.freeze({"a": two})),
        (raw([one, two]), [one, two]),
        (raw({"a": (one, [two])}), {"a": (one, [two])}),
        (of_orbax, states),
        (of_orbax, nnx.to_pure_dict(states)),
        (nnx.to_pure_dict(states), states),
        ({"query": one, "value": two}, {"query": one, "value": two}),  # a name as any other
        (raw({"attention": {"value": one}}), {"attention": {"value": one}}),
    ]:
        checked = fp8.check_state(given, like)
        assert jax.tree.structure(checked) == jax.tree.structure(like)
        assert all(
            s.fingerprint.all()
            for s in jax.tree.leaves(
                checked, is_leaf=lambda n: isinstance(n, fp8.state.MatmulState)
            )
        )


def test_the_message_about_another_tree_names_places():
    like = [fp8.init_state(RECIPE)] * 2
    with pytest.raises(
        fp8.FP8StateError, match=r"It lacks \['\[1\]'\] and holds \[\"\['a'\]\"\] besides"
    ) as caught:
        fp8.check_state({"0": like[0], "a": like[1]}, like)
    assert len(str(caught.value)) < 300  # and no values
