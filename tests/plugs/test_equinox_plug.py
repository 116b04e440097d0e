"""`jaxfp8.plugs.equinox` in equinox's own layers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from messages import Message, check
from same_bits import assert_same_bits

import jaxfp8 as fp8

eqx = pytest.importorskip("equinox")
plug = pytest.importorskip("jaxfp8.plugs.equinox")

RECIPES = ("delayed", "current", "blockwise", "mxfp8")
# A plug hands its recipe on: one with state, and one whose tiles span tokens, show that it does.
FEW = [
    pytest.param(name, marks=() if name in ("delayed", "blockwise") else pytest.mark.slow)
    for name in RECIPES
]
pytestmark = pytest.mark.usefixtures("standard_promotion")


def mlp():
    return eqx.nn.MLP(128, 128, 256, depth=1, key=jax.random.key(0))


def batch(*shape):
    return jax.device_put(np.random.default_rng(1).standard_normal(shape, np.float32))


def loss_fn(model, x):
    return jnp.mean((jax.vmap(model)(x) - jnp.tanh(x)) ** 2)


@pytest.mark.parametrize("name", FEW)
def test_trains_as_the_op_does(name):
    recipe, tx, x = fp8.recipes.get(name), optax.adam(1e-3), batch(64, 128)
    weights = [(layer.weight, layer.bias) for layer in mlp().layers]
    model = plug.convert(mlp(), recipe)

    def reference(weights, states, x):
        (w0, b0), (w1, b1) = weights
        h = jax.nn.relu(fp8.dot(x, w0.T, recipe=recipe, state=states[0]) + b0)
        y = fp8.dot(h, w1.T, recipe=recipe, state=states[1]) + b1
        return jnp.mean((y - jnp.tanh(x)) ** 2)

    @eqx.filter_jit
    def step(model, opt):
        loss, grads, model = plug.value_and_grad(loss_fn)(model, x)
        updates, opt = tx.update(grads, opt, plug.params(model))
        return eqx.apply_updates(model, updates), opt, loss

    @jax.jit
    def expected(weights, states, opt):
        loss, grads, states = fp8.value_and_grad(reference)(weights, states, x)
        updates, opt = tx.update(grads, opt, weights)
        return optax.apply_updates(weights, updates), states, opt, loss

    states = [fp8.init_state(recipe) for _ in weights]
    mine, theirs = tx.init(plug.params(model)), tx.init(weights)
    for _ in range(3):
        model, mine, loss = step(model, mine)
        weights, states, theirs, same = expected(weights, states, theirs)
        got = [(layer.weight, layer.bias) for layer in model.layers]
        assert_same_bits((loss, got), (same, weights))
        assert_same_bits([layer.state for layer in model.layers], states)


def test_vmap_gives_all_examples_to_one_matmul():
    model = plug.convert(mlp(), fp8.recipes.current())
    arrays, fixed = eqx.partition(model, eqx.is_array)

    def grads(arrays, x):
        return plug.value_and_grad(loss_fn)(eqx.combine(arrays, fixed), x)[1].layers

    shapes = jax.tree.leaves(jax.eval_shape(grads, arrays, batch(64, 128)))
    assert max(leaf.size for leaf in shapes) == 128 * 256
    text = jax.jit(grads).lower(arrays, batch(64, 128)).as_text()
    assert "64x256x128x" not in text  # no outer product for each example
    assert "64x128x256x" not in text


@pytest.mark.parametrize("channel", [None, "gradient"])
def test_amax_is_of_all_examples(channel):
    layer = eqx.nn.Linear(128, 64, key=jax.random.key(0))
    model = plug.convert(layer, fp8.recipes.delayed(), state_channel=channel)
    x = batch(4, 16, 128)

    def loss(model, x):
        return jnp.mean(jax.vmap(jax.vmap(model))(x) ** 2)

    if channel:
        states = eqx.filter_jit(eqx.filter_grad(loss))(model, x).state
    else:
        states = eqx.filter_jit(plug.value_and_grad(loss))(model, x)[2].state
    history = np.asarray(states.amax_history)
    assert history[0, -1] == np.max(np.abs(x))
    assert history[1, -1] == np.max(np.abs(np.asarray(model.weight)))


def test_layers_of_an_ensemble_have_matmuls_of_their_own():
    recipe, x = fp8.recipes.current(), batch(16, 128)
    keys = jax.random.split(jax.random.key(0), 3)
    make = eqx.filter_vmap(lambda key: eqx.nn.Linear(128, 64, key=key))
    models = plug.convert(eqx.filter_jit(make)(keys), recipe)
    run = eqx.filter_vmap(lambda m, x: jax.vmap(m)(x), in_axes=(eqx.if_array(0), None))
    y = eqx.filter_jit(run)(models, x)
    expected = jax.jit(lambda w, b: fp8.dot(x, w.T, recipe=recipe) + b)
    for i, (w, b) in enumerate(zip(*map(np.asarray, (models.weight, models.bias)), strict=True)):
        assert_same_bits(y[i], expected(w, b))


def test_attention():
    attention = eqx.nn.MultiheadAttention(4, 128, key=jax.random.key(0))
    model = plug.convert(attention, fp8.recipes.delayed(), paths=".*_proj")
    x = batch(2, 16, 128)
    loss = lambda m, x: jnp.mean(jax.vmap(lambda q: m(q, q, q))(x) ** 2)
    _, _, model = eqx.filter_jit(plug.value_and_grad(loss))(model, x)
    assert np.asarray(model.query_proj.state.amax_history)[0, -1] == np.max(np.abs(x))


def test_a_lost_state_is_an_error():
    model = plug.convert(mlp(), fp8.recipes.delayed())
    call = lambda: eqx.filter_eval_shape(eqx.filter_grad(loss_fn), model, batch(4, 128))
    check(
        Message(
            fp8.FP8StateError, call, "layer [256, 128]", "not collected",
            "jaxfp8.plugs.equinox.value_and_grad(loss)(model, ...)",
        )
    )  # fmt: skip


MESSAGES = {
    "no layer": Message(
        ValueError, lambda: plug.convert(mlp(), fp8.recipes.current(), paths="head"),
        "paths='head'", "no eqx.nn.Linear", "layers.0",
    ),
    "an option": Message(
        TypeError, lambda: plug.convert(mlp(), fp8.recipes.current(), kernel=1),
        "kernel=1", "no option", "kernels",
    ),
    "a recipe": Message(
        TypeError, lambda: plug.convert(mlp(), "current"), "'current'", "Recipe",
        "fp8.recipes.current()",
    ),
    "keys": Message(
        ValueError,
        lambda: plug.convert(mlp(), fp8.recipes.current(gradient_rounding="stochastic")),
        "'current'", "needs a key", "nearest",
    ),
    "a batch": Message(
        ValueError, lambda: plug.convert(mlp(), fp8.recipes.current()).layers[0](batch(4, 128)),
        "[4, 128]", "one example", "jax.vmap",
    ),
    "commit": Message(
        TypeError, lambda: plug.value_and_grad(loss_fn, commit=False), "commit=", "amaxes",
        "microbatches",
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_messages(message):
    check(message)
