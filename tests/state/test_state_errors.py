"""Every way to lose an amax is an error while tracing, which names the cure."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8
from jaxfp8.state._state import SeenAmax

RECIPE = fp8.recipes.delayed(history_length=4)
X, W = jnp.ones((4, 2)), jnp.ones((2, 2))


def loss(w, s, x, recipe=RECIPE):
    return jnp.sum(fp8.dot(x, w, recipe=recipe, state=s))


@pytest.fixture
def state():
    return fp8.init_state(RECIPE)


def stacked(state, n=3):
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (n, *leaf.shape)), state)


NOT_COLLECTED = "fp8.value_and_grad"


@pytest.mark.parametrize("argnums", [0, (0, 2)])
def test_grad_over_parameters_only(state, argnums):
    with pytest.raises(fp8.FP8StateError, match=NOT_COLLECTED):
        jax.grad(loss, argnums)(W, state, X)


def test_grad_over_state_too(state):
    with pytest.raises(fp8.FP8StateError, match=NOT_COLLECTED):
        jax.grad(loss, (0, 1))(W, state, X)


def test_vjp_linearize_and_jacrev(state):
    for differentiate in (jax.vjp, jax.linearize):
        with pytest.raises(fp8.FP8StateError, match=NOT_COLLECTED):
            differentiate(lambda w: loss(w, state, X), W)
    with pytest.raises(fp8.FP8StateError, match=NOT_COLLECTED):
        jax.jacrev(loss)(W, state, X)


def test_jvp(state):
    with pytest.raises(fp8.FP8StateError, match=NOT_COLLECTED):
        jax.jvp(lambda w: loss(w, state, X), (W,), (W,))


def test_jvp_without_state():
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda w: loss(w, None, X, fp8.recipes.current()), (W,), (W,))


def test_stop_gradient_on_state(state):
    with pytest.raises(fp8.FP8StateError, match="stop_gradient"):
        fp8.value_and_grad(lambda w, s, x: loss(w, lax.stop_gradient(s), x))(W, state, X)


def test_state_from_outside_the_loss(state):
    with pytest.raises(fp8.FP8StateError, match="Pass the state that it gives to the loss"):
        fp8.value_and_grad(lambda w, s, x: loss(w, state, x))(W, state, X)


def test_inner_grad(state):
    inner = lambda w, s, x: jnp.sum(jax.grad(loss, 2)(w, s, x)) + loss(w, s, x)
    with pytest.raises(fp8.FP8StateError, match=NOT_COLLECTED):
        fp8.value_and_grad(inner)(W, state, X)


@pytest.mark.parametrize(
    "recipe", [RECIPE, fp8.recipes.current(), fp8.recipes.rowwise()], ids=lambda r: r.name
)
def test_grad_of_grad(recipe):
    state = fp8.init_state(recipe)
    penalty = lambda w: jnp.sum(
        fp8.value_and_grad(
            lambda w, s, x: jnp.sum(jnp.square(fp8.dot(x, w, recipe=recipe, state=s)))
        )(w, state, X)[1]
    )
    with pytest.raises(fp8.FP8StateError, match="no second derivative"):
        jax.grad(penalty)(W)


@pytest.mark.parametrize("missing", [None, ()])
def test_missing(missing):
    with pytest.raises(fp8.FP8StateError, match=r"fp8\.init_state\(recipe\)"):
        loss(W, missing, X)


@pytest.mark.parametrize(
    "other",
    [
        fp8.recipes.delayed(history_length=4, margin=1),
        fp8.recipes.delayed(history_length=5),
        fp8.recipes.delayed(history_length=4, power_of_two=True),
        fp8.recipes.delayed(history_length=4, algorithm="most_recent"),
        fp8.recipes.delayed(history_length=4, gradient=fp8.E4M3),
    ],
    ids=["margin", "history_length", "power_of_two", "algorithm", "format"],
)
def test_of_another_recipe(other):
    with pytest.raises(fp8.FP8StateError, match="belongs to another recipe"):
        loss(W, fp8.init_state(other), X)


def test_stacked_not_indexed(state):
    with pytest.raises(fp8.FP8StateError, match=r"\[3, 3\].*index stacked states"):
        loss(W, stacked(state), X)


LAYOUTS = {
    "layers last": (
        lambda s: jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), stacked(s, 5)),
        "last axis must hold",
    ),
    "history of 16": (
        lambda s: dataclasses.replace(s, amax_history=jnp.zeros((3, 16))),
        r"must have \[3, 4\]",
    ),
    "5 rows of history": (
        lambda s: dataclasses.replace(s, amax_history=jnp.zeros((5, 4))),
        r"must have \[3, 4\]",
    ),
    "one count": (
        lambda s: dataclasses.replace(s, nonfinite_steps=jnp.zeros(())),
        "nonfinite_steps has shape",
    ),
    "bfloat16": (
        lambda s: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), s),
        "dtype bfloat16",
    ),
    "float16 history": (
        lambda s: dataclasses.replace(s, amax_history=s.amax_history.astype(jnp.float16)),
        "dtype float16",
    ),
    "types": (lambda s: jax.eval_shape(lambda: s), "has no values"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_that_are_no_state_s(state, layout):
    """A history of 4 under a recipe of 16 was kept, and 5 rows lost 2 of them."""
    change, match = LAYOUTS[layout]
    bad, seen = change(state), fp8.nothing_seen(state)
    seen = dataclasses.replace(seen, amax=jnp.zeros(bad.scale.shape))
    uses = [lambda: fp8.value_and_grad(loss)(W, bad, X), lambda: fp8.commit(bad, seen)]
    for use in (*uses, *([] if layout == "layers last" else [lambda: loss(W, bad, X)])):
        with pytest.raises(fp8.FP8StateError, match=match):
            use()


def test_given_to_a_recipe_without_state(state):
    with pytest.raises(fp8.FP8StateError, match="'current' has no state, got MatmulState"):
        loss(W, state, X, fp8.recipes.current())


@pytest.mark.parametrize("garbage", [jnp.ones(3), 1.0, "state", {"layer": jnp.ones(3)}])
def test_garbage_in_the_tree(state, garbage):
    tree = {"good": state, "bad": garbage}
    for function in (
        fp8.value_and_grad(lambda w, s, x: loss(w, s["good"], x)),
        lambda w, s, x: fp8.freeze(s),
        lambda w, s, x: fp8.fork(s),
    ):
        with pytest.raises(fp8.FP8StateError, match="expected quantizer state, found"):
            function(W, tree, X)


def test_parameters_and_state_exchanged(state):
    with pytest.raises(fp8.FP8StateError, match="expected quantizer state, found"):
        fp8.value_and_grad(lambda s, w, x: loss(w, s, x))(state, W, X)


def test_commit_of_a_committed_state(state):
    with pytest.raises(fp8.FP8StateError, match="commit=False"):
        fp8.commit(state, state)


def test_commit_of_what_another_recipe_saw(state):
    other = fp8.init_state(fp8.recipes.delayed(history_length=4, margin=1))
    with pytest.raises(fp8.FP8StateError, match="does not belong to this state"):
        fp8.commit(state, fp8.nothing_seen(other))


def test_commit_of_another_tree(state):
    with pytest.raises(fp8.FP8StateError, match="different trees"):
        fp8.commit({"a": state}, {"b": fp8.nothing_seen(state)})


@pytest.mark.parametrize("swap", [False, True])
def test_commit_of_another_number_of_layers(state, swap):
    one, many = state, stacked(state)
    with pytest.raises(fp8.FP8StateError, match=r"\[3, 3\]"):
        fp8.commit(one if swap else many, fp8.nothing_seen(many if swap else one))


def test_merge_of_committed_states(state):
    with pytest.raises(fp8.FP8StateError, match="argument 1 of merge_seen holds a MatmulState"):
        fp8.merge_seen(fp8.nothing_seen(state), state)


def test_merge_of_different_trees(state):
    seen = fp8.nothing_seen(state)
    with pytest.raises(fp8.FP8StateError, match="merge_seen"):
        fp8.merge_seen({"a": seen}, {"b": seen})


def test_merge_of_different_numbers_of_layers(state):
    with pytest.raises(fp8.FP8StateError, match="merge_seen"):
        fp8.merge_seen(fp8.nothing_seen(state), fp8.nothing_seen(stacked(state)))


def test_merge_of_nothing():
    with pytest.raises(TypeError, match="merge_seen"):
        fp8.merge_seen()


def test_init_state_of_no_recipe():
    with pytest.raises(TypeError, match=r"fp8\.recipes\.delayed"):
        fp8.init_state("delayed")


def mesh():
    return jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def in_shard_map(function, *, vma):
    return jax.shard_map(
        function, mesh=mesh(), in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=vma
    )


def test_types_do_not_tell_inside(state):
    step = in_shard_map(fp8.value_and_grad(loss), vma=False)
    with pytest.raises(fp8.FP8StateError, match=r"\('data',\).*reduce_axes="):
        jax.eval_shape(step, W, state, X)


def test_types_do_not_tell_outside(state):
    step = fp8.value_and_grad(
        lambda w, s, x: in_shard_map(lambda *a: lax.psum(loss(*a), "data"), vma=False)(w, s, x)
    )
    with pytest.raises(fp8.FP8StateError, match=r"\('data',\).*reduce_axes="):
        jax.eval_shape(step, W, state, X)


def test_types_do_not_tell_current_scaling():
    step = in_shard_map(
        lambda w, s, x: lax.psum(loss(w, s, x, fp8.recipes.current()), "data"), vma=False
    )
    with pytest.raises(fp8.FP8StateError, match=r"\('data',\).*reduce_axes="):
        jax.eval_shape(step, W, (), X)


def test_named_axes_of_a_call_are_checked():
    dot = lambda w, s, x: jnp.sum(fp8.dot(x, w, recipe=fp8.recipes.current(), reduce_axes=("dat",)))
    with pytest.raises(fp8.FP8StateError, match=r"'dat'.*'data'"):
        jax.eval_shape(in_shard_map(lambda *a: lax.psum(dot(*a), "data"), vma=True), W, (), X)


def test_types_tell_inside(state):
    step = in_shard_map(fp8.value_and_grad(loss, reduce_axes=("data",)), vma=True)
    with pytest.raises(ValueError, match="types say"):
        jax.eval_shape(step, W, state, X)


def test_reduce_axes_of_no_mesh_axis(state):
    step = in_shard_map(fp8.value_and_grad(loss, reduce_axes=("dat",)), vma=False)
    with pytest.raises(fp8.FP8StateError, match=r"'dat'.*'data'"):
        jax.eval_shape(step, W, state, X)


def test_reduce_axes_is_a_string():
    with pytest.raises(TypeError, match=r"write \('data',\)"):
        fp8.value_and_grad(loss, reduce_axes="data")


def test_pmap_is_a_shard_map(state):
    step = jax.pmap(fp8.value_and_grad(loss), axis_name="i", in_axes=(None, None, 0))
    with pytest.raises(fp8.FP8StateError, match="reduce_axes="):
        step(W, state, jnp.ones((2, 4, 2)))


def test_seen_is_no_state(state):
    with pytest.raises(fp8.FP8StateError, match="SeenAmax"):
        loss(W, fp8.nothing_seen(state), X)
    with pytest.raises(fp8.FP8StateError, match="SeenAmax"):
        fp8.value_and_grad(loss)(W, SeenAmax(jnp.zeros(3), RECIPE.rows), X)


def test_recipe_changes_between_commits(state):
    rows = fp8.recipes.delayed(history_length=4, margin=2).rows
    with pytest.raises(fp8.FP8StateError, match="does not belong"):
        fp8.commit(dataclasses.replace(state, rows=rows), fp8.nothing_seen(state))
