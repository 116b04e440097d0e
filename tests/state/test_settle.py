"""`fp8.settle`: the same bits, without the reads that unset scales need. NaN if one is unset."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from primitives import count

import jaxfp8 as fp8

RECIPE = fp8.recipes.delayed(history_length=3)
X, W = (
    jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
    for i, shape in enumerate(((16, 32), (32, 8)))
)


def loss(w, state, x):
    return jnp.sum(fp8.dot(x, w, recipe=RECIPE, state=state).astype(jnp.float32) ** 2)


STEP = jax.jit(fp8.value_and_grad(loss))


def warm():
    return STEP(W, fp8.init_state(RECIPE), X)[2]


def assert_same(first, second):
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(first), jax.tree.leaves(second))


def reads_of(state):
    """How many maxima a step takes."""
    return count(jax.make_jaxpr(fp8.value_and_grad(loss))(W, state, X).jaxpr, "reduce_max")


def test_bits_and_reads():
    state = warm()
    settled = fp8.settle(state)
    assert (state.settled, settled.settled) == (False, True)
    assert_same(state, settled)
    for _ in range(3):
        (*plain, state), (*lean, settled) = STEP(W, state, X), STEP(W, settled, X)
        assert_same((plain, state), (lean, settled))
        assert settled.settled
    # Each tensor has one for its scale and one for its amax, which may be the same in the end. Each
    # has three forms, for CPUs, for TPUs and for the rest.
    assert reads_of(state) - reads_of(settled) == 3 * 3


def test_a_state_with_an_unset_row_is_not_marked():
    state = warm()
    for row in range(3):
        unset = dataclasses.replace(state, scale=state.scale.at[row].set(0))
        assert not fp8.settle(unset).settled
    tree = {"a": state, "b": fp8.init_state(RECIPE)}
    assert [s.settled for s in fp8.settle(tree).values()] == [True, False]


def test_stacked_states_are_marked_together():
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), warm())
    assert fp8.settle(stacked).settled
    late = dataclasses.replace(stacked, scale=stacked.scale.at[1, 2].set(0))
    assert not fp8.settle(late).settled


# Eagerly one step is seventy programs.
@pytest.mark.parametrize(
    "jit", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["jit", "eager"]
)
@pytest.mark.parametrize("row", range(3))
def test_an_unset_row_of_a_marked_state_gives_nan(row, jit):
    state = fp8.settle(warm())
    unset = dataclasses.replace(state, scale=state.scale.at[row].set(0))
    step = STEP if jit else fp8.value_and_grad(loss)
    value, grads, _ = step(W, unset, X)
    assert np.isnan(grads.astype(jnp.float32)).any()
    assert np.isnan(value) == (row < 2)  # the loss does not depend on g


def test_a_foreign_row_of_a_marked_state_gives_nan():
    state = fp8.settle(warm())
    foreign = dataclasses.replace(state, fingerprint=state.fingerprint.at[0].set(0))
    value, _, new = STEP(W, foreign, X)
    assert np.isnan(value)
    # Its history starts anew, with the amax of this step. So the next step is right again.
    np.testing.assert_array_equal(new.amax_history[0] > 0, [False, False, True])


def test_evaluation():
    state = warm()
    evaluate = jax.jit(loss)
    assert_same(evaluate(W, state, X), evaluate(W, fp8.settle(state), X))


def test_types_are_marked():
    types = jax.eval_shape(lambda: fp8.init_state(RECIPE))
    assert fp8.settle(types).settled


def test_inside_jit():
    with pytest.raises(fp8.FP8StateError, match=r"inside jax\.jit .* Call it outside"):
        jax.jit(fp8.settle)(warm())


def test_anything_else_is_refused():
    with pytest.raises(fp8.FP8StateError, match="expected quantizer state"):
        fp8.settle({"scale": jnp.ones(3)})


def test_scan_over_steps():
    state = fp8.settle(warm())
    last, _ = jax.lax.scan(lambda s, _: (STEP(W, s, X)[2], None), state, length=4)
    assert last.settled
    for _ in range(4):
        state = STEP(W, state, X)[2]
    assert_same(last, state)


def test_commit_freeze_and_fork_keep_the_mark():
    state = fp8.settle(warm())
    assert jax.jit(fp8.commit)(state, jax.jit(fp8.nothing_seen)(state)).settled
    assert fp8.freeze(state).settled
    assert all(each.settled for each in fp8.fork(state))


def test_check_state_marks_what_is_set():
    state, fresh = warm(), fp8.init_state(RECIPE)
    like = fp8.settle(state)
    assert fp8.check_state(state, like).settled
    assert not fp8.check_state(fresh, like).settled
    assert not fp8.check_state(like, fresh).settled


def test_nnx():
    model = fp8.nnx.FP8Linear(32, 8, recipe=RECIPE, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    run = nnx.jit(fp8.nnx.value_and_grad(lambda model, x: model(x).sum()))
    first = run(model, X)
    fp8.nnx.settle(model)
    assert model.dot_general.state.get_value().settled
    assert_same(first[0], run(model, X)[0])
    assert model.dot_general.state.get_value().settled
    fresh = fp8.nnx.FP8Linear(32, 8, recipe=RECIPE, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    with pytest.raises(fp8.FP8StateError, match=r"inside jax\.jit"):
        nnx.jit(fp8.nnx.settle)(fresh)


def test_linen_collection():
    layer = fp8.linen.FP8Dense(8, recipe=RECIPE, dtype=jnp.bfloat16)
    variables = jax.jit(layer.init)(jax.random.key(0), X)
    params, state = variables["params"], variables[fp8.linen.COLLECTION]

    @jax.jit
    def step(params, state, x):
        def loss(params, state, x):
            return layer.apply({"params": params, fp8.linen.COLLECTION: state}, x).sum()

        return fp8.value_and_grad(loss)(params, state, x)

    _, _, state = step(params, state, X)
    settled = fp8.settle(state)
    assert_same(step(params, state, X), step(params, settled, X))


def test_the_mark_is_shown():
    assert "(settled)" in repr(fp8.settle(warm()))
