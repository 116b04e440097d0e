"""State over many steps: what changes it, what does not, and what a checkpoint has to hold."""

import functools

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax import lax

import jaxfp8 as fp8
from jaxfp8.state._state import SeenAmax

RECIPE = fp8.recipes.delayed(history_length=4)
K, B = 4, 8


def integers(seed, *shape, largest=9):
    return np.float32(np.random.default_rng(seed).integers(-largest, largest + 1, shape))


def two_layers(params, states, x, c):
    h = jnp.maximum(fp8.dot(x, params["up"], recipe=RECIPE, state=states["up"]), 0)
    return jnp.sum(fp8.dot(h, params["down"], recipe=RECIPE, state=states["down"]) * c)


def batch(seed):
    """Each step has another magnitude, so that the window matters."""
    x, c = integers(seed, B, K), integers(seed + 100, B, K)
    return x * np.float32(2.0 ** (seed % 5)), c * np.float32(1e-3)


STEP = jax.jit(fp8.value_and_grad(two_layers))
DESCEND = jax.jit(lambda params, grads: jax.tree.map(lambda p, g: p - 2**-7 * g, params, grads))


def fresh():
    params = {"up": integers(1, K, K), "down": integers(2, K, K)}
    return params, {"up": fp8.init_state(RECIPE), "down": fp8.init_state(RECIPE)}


def train(params, states, steps):
    for i in steps:
        _, grads, states = STEP(params, states, *batch(i))
        params = DESCEND(params, grads)
    return params, states


def assert_same(a, b):
    chex.assert_trees_all_equal(a, b, strict=True)


@functools.partial(jax.jit, static_argnames="amax")
def warm(states, amax=(3, 5, 7)):
    return jax.tree.map(
        lambda s: fp8.commit(s, SeenAmax(jnp.float32(amax), s.rows)),
        states,
        is_leaf=lambda n: isinstance(n, fp8.state.MatmulState),
    )


@pytest.mark.parametrize(
    "prepare",
    [lambda s: s, warm, fp8.freeze, lambda s: fp8.freeze(warm(s))],
    ids=["unset", "warm", "frozen unset", "frozen"],
)
def test_evaluation_changes_nothing_and_equals_the_loss_of_training(prepare):
    params, states = fresh()
    states = prepare(states)
    before = jax.tree.map(np.asarray, states)
    loss = jax.jit(two_layers)(params, states, *batch(0))
    assert_same(jax.tree.map(np.asarray, states), before)
    np.testing.assert_array_equal(loss, STEP(params, states, *batch(0))[0])


def test_frozen_state_keeps_its_scale_and_gives_gradients():
    params, states = fresh()
    states = warm(states)
    frozen = fp8.freeze(states)
    _, grads, new = STEP(params, frozen, *batch(3))
    assert_same(new, frozen)
    _, want, _ = STEP(params, states, *batch(3))
    assert_same(grads, want)
    # Frozen states need no collection: jax's own transformations serve.
    assert_same(jax.jit(jax.grad(two_layers))(params, frozen, *batch(3)), want)


def test_a_commit_leaves_frozen_states():
    frozen = fp8.freeze(warm(fresh()[1]))
    assert_same(warm(frozen, (1e6, 1e6, 1e6)), frozen)


def test_treedef_shapes_and_dtypes_never_change():
    params, states = fresh()
    signature = lambda tree: jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), tree
    )
    for i in range(3):
        new = STEP(params, states, *batch(i))[2]
        assert signature(new) == signature(states)
        states = new
    chex.assert_type(jax.tree.leaves(states), jnp.float32)


def test_one_trace_serves_every_step_and_buffers_can_be_donated():
    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(fp8.value_and_grad(two_layers), n=1), donate_argnums=1)
    params, states = fresh()
    for i in range(4):
        _, grads, states = step(params, states, *batch(i))
        params = DESCEND(params, grads)
    assert_same((params, states), train(*fresh(), range(4)))


def test_stacked_initial_states_can_be_donated():
    states = jax.vmap(lambda _: fp8.init_state(RECIPE))(jnp.zeros(3))
    jax.jit(lambda s: jax.tree.map(lambda leaf: leaf + 1, s), donate_argnums=0)(states)


def test_scan_over_steps_from_an_unset_state():
    params, states = fresh()
    batches = jax.tree.map(lambda *leaves: np.stack(leaves), *map(batch, range(6)))

    @jax.jit
    def run(params, states):
        def body(carry, batch):
            params, states = carry
            _, grads, states = fp8.value_and_grad(two_layers)(params, states, *batch)
            return (jax.tree.map(lambda p, g: p - 2**-7 * g, params, grads), states), None

        return lax.scan(body, (params, states), batches)[0]

    got, want = run(params, states), train(*fresh(), range(6))
    assert_same(got[1], want[1])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got[0], want[0])


def test_eager_steps_equal_jitted_ones():
    params, states = fresh()
    for i in range(2):
        eager = fp8.value_and_grad(two_layers)(params, states, *batch(i))
        jitted = STEP(params, states, *batch(i))
        assert_same(eager[2], jitted[2])
        states = eager[2]


def by_bytes(tree, like, path):
    return flax.serialization.from_bytes(like, flax.serialization.to_bytes(tree))


def by_state_dict(tree, like, path):
    return flax.serialization.from_state_dict(like, flax.serialization.to_state_dict(tree))


def by_orbax(tree, like, path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "checkpoint", tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / "checkpoint", like)


@pytest.mark.parametrize(
    ("through", "jit"),
    [
        pytest.param(by_bytes, True, id="bytes"),
        pytest.param(by_bytes, False, id="bytes-eager"),
        pytest.param(by_state_dict, True, id="state_dict", marks=pytest.mark.slow),
        pytest.param(by_state_dict, False, id="state_dict-eager", marks=pytest.mark.slow),
        pytest.param(by_orbax, True, id="orbax"),
        pytest.param(by_orbax, False, id="orbax-eager", marks=pytest.mark.slow),
    ],
)
def test_save_and_restore_in_mid_window(through, jit, tmp_path):
    saved = train(*fresh(), range(2))
    restored = through(saved, fresh(), tmp_path)
    assert_same(restored, saved)
    if not jit:  # the leaves may be NumPy arrays
        assert_same(
            fp8.value_and_grad(two_layers)(*restored, *batch(2))[2], STEP(*saved, *batch(2))[2]
        )
        return
    assert_same(train(*restored, range(2, 12)), train(*fresh(), range(12)))


def test_layers_below_a_zero_projection_get_a_right_first_step():
    """Their gradient is zero until the projection moves.

    The first one that is not is cast by its own amax.
    """
    params, states = fresh()
    params = {**params, "down": np.zeros((K, K), np.float32)}
    for _ in range(2):
        _, grads, states = STEP(params, states, *batch(0))
        assert states["up"].scale[2] == 0
        assert not grads["up"].any()
    params = {**params, "down": np.float32(1e-7) * integers(2, K, K)}
    _, grads, new = STEP(params, states, *batch(0))
    x, c = batch(0)
    exact = x.T @ (c @ params["down"].T * (x @ params["up"] > 0))
    # One eighth is E5M2's half step; a gradient flushed to zero would be off by 1.
    error = np.linalg.norm(grads["up"] - exact) / np.linalg.norm(exact)
    assert error < 0.125, error
    assert new["up"].scale[2] > 0


def test_expert_that_sees_its_first_token_at_step_50():
    states = jax.vmap(lambda _: fp8.init_state(RECIPE))(jnp.zeros(2))
    w, c = integers(1, 2, K, K), np.float32(1e-6) * integers(2, 2, B, K)
    x = integers(3, 2, B, K)
    loss = lambda w, s, x, c: jnp.sum(
        jax.vmap(lambda w, s, x: fp8.dot(x, w, recipe=RECIPE, state=s))(w, s, x) * c
    )
    step = jax.jit(fp8.value_and_grad(loss))
    routed = np.float32([1, 0])[:, None, None]
    for _ in range(50):
        states = step(w, states, x * routed, c * routed)[2]
    x_scale, w_scale, g_scale = np.asarray(states.scale)[1]
    assert (x_scale, g_scale) == (0, 0)  # no token
    assert w_scale > 0
    _, grads, new = step(w, states, x, c)
    first = jax.tree.map(lambda leaf: np.asarray(leaf)[1], states)
    loss = lambda w, s: jnp.sum(fp8.dot(x[1], w, recipe=RECIPE, state=s) * c[1])
    alone = jax.jit(fp8.value_and_grad(loss))(w[1], first)
    np.testing.assert_allclose(grads[1], alone[1], rtol=1e-6)
    exact = x[1].T @ c[1]
    assert np.linalg.norm(grads[1] - exact) / np.linalg.norm(exact) < 0.125
    np.testing.assert_array_equal(new.amax_history[1, 0, -1], np.max(np.abs(x[1])))


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
@pytest.mark.parametrize("start", [lambda s: s, warm], ids=["unset", "warm"])
def test_steps_that_are_not_finite_are_counted_and_dropped(bad, start):
    params, states = fresh()
    states = start(states)
    x, c = batch(0)
    broken = x.copy()
    broken[0, 0] = bad
    value, _, new = STEP(params, states, broken, c)
    assert not jnp.isfinite(value)
    up, was = new["up"], states["up"]
    assert up.nonfinite_steps[0] == 1
    np.testing.assert_array_equal(up.scale[0], was.scale[0])
    np.testing.assert_array_equal(up.amax_history[0], was.amax_history[0])
    assert up.scale[1] != was.scale[1]  # w was finite
    chex.assert_tree_all_finite(new)
    # The next step goes on as if it had not happened.
    after = STEP(params, new, x, c)[2]["up"]
    want = STEP(params, states, x, c)[2]["up"]
    np.testing.assert_array_equal(after.amax_history[0], want.amax_history[0])
    np.testing.assert_array_equal(after.scale[0], want.scale[0])


def test_not_finite_in_one_of_several_uses():
    """A sum of ledgers keeps infinity."""
    state = fp8.init_state(RECIPE)
    loss = lambda w, s, x: (
        jnp.sum(fp8.dot(x, w, recipe=RECIPE, state=s))
        + jnp.sum(fp8.dot(2 * x[1:], w, recipe=RECIPE, state=s))
    )
    new = jax.jit(fp8.value_and_grad(loss))(
        jnp.ones((K, K)), state, jnp.ones((B, K)).at[0].set(jnp.nan)
    )[2]
    np.testing.assert_array_equal(new.nonfinite_steps, [1, 0, 0])
    np.testing.assert_array_equal(new.amax_history[:, -1], [0, 1, 1])


@pytest.mark.quick
@pytest.mark.parametrize("make", [
    lambda: optax.chain(optax.clip_by_global_norm(1e-3), optax.adamw(1e-2, weight_decay=0.5)),
    lambda: optax.MultiSteps(optax.sgd(1e-2), every_k_schedule=2),
    lambda: optax.apply_if_finite(optax.sgd(1e-2), max_consecutive_errors=3),
], ids=["clip and decay", "MultiSteps", "apply_if_finite"])  # fmt: skip
def test_optimizers_never_see_state(make, standard_promotion):
    optimizer = make()
    params, states = fresh()
    memory = jax.jit(optimizer.init)(params)

    @jax.jit
    def update(params, grads, memory):
        updates, memory = optimizer.update(grads, memory, params)
        return optax.apply_updates(params, updates), memory

    for i in range(3):
        _, grads, new = STEP(params, states, *batch(i))
        assert jax.tree.structure(grads) == jax.tree.structure(params)
        seen = {name: np.asarray(gemm.amax_history)[:, -1] for name, gemm in new.items()}
        x, c = (np.abs(each).max() for each in batch(i))
        for name in new:
            assert seen[name][1] == np.abs(params[name]).max()
        assert seen["up"][0] == x
        assert seen["down"][2] == c
        (params, memory), states = update(params, grads, memory), new


def test_a_skipped_step_still_commits_what_was_finite():
    params, states = fresh()
    x, c = batch(0)
    c[0, 0] = np.inf
    _, grads, new = STEP(params, states, x, c)
    assert not jnp.isfinite(grads["down"]).all()
    np.testing.assert_array_equal(new["up"].amax_history[:2, -1] > 0, True)
    np.testing.assert_array_equal(new["up"].nonfinite_steps, [0, 0, 1])


def test_margin_and_most_recent_follow_their_definition():
    recipe = fp8.recipes.delayed(
        history_length=3, margin=2, algorithm="most_recent", power_of_two=True
    )
    state = fp8.init_state(recipe)
    step = jax.jit(
        fp8.value_and_grad(lambda w, s, x: jnp.sum(fp8.dot(x, w, recipe=recipe, state=s)))
    )
    for amax in (7.0, 56.0, 14.0):
        state = step(jnp.ones((K, K)), state, jnp.full((B, K), amax))[2]
        np.testing.assert_array_equal(state.scale[0], amax / 448 * 4)
    np.testing.assert_array_equal(state.amax_history[0], [0, 56, 14])
