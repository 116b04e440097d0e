"""`nnx.bridge` does not change results: linen layers in nnx models, and nnx layers in linen models.

Before, `fp8.nnx.value_and_grad` found no state in `nnx.bridge.ToNNX` and raised "Use ...
fp8.nnx.value_and_grad". flax makes a Variable type for these states from the name of their
collection.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION

RECIPE = fp8.recipes.delayed(history_length=4)
X = np.random.default_rng(0).normal(size=(6, 4, 8)).astype(np.float32)
RATE = 0.125


@functools.partial(nnx.jit, static_argnums=0)  # flax initializes with a forward pass
def bridged(features=4):
    return nnx.bridge.ToNNX(
        fp8.linen.FP8Dense(features, recipe=RECIPE), rngs=nnx.Rngs(0)
    ).lazy_init(X[0])


def square(model, x):
    return jnp.mean(jnp.square(model(x)))


def states_in(tree):
    nodes = jax.tree.leaves(tree, is_leaf=lambda n: isinstance(n, fp8.state.MatmulState))
    return [node for node in nodes if isinstance(node, fp8.state.MatmulState)]


@functools.cache
def compiled(graph=True):
    """One program for each kind of model, whichever test it is of."""
    return nnx.jit(fp8.nnx.value_and_grad(square), graph=graph)


descend = jax.jit(lambda params, grads: jax.tree.map(lambda p, g: p - RATE * g, params, grads))


def run_nnx(model, step):
    seen = []
    for x in X[:5]:
        loss, grads = step(model, x)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, descend(params, grads))
        seen.append((loss, nnx.to_pure_dict(grads), states_in(nnx.state(model))))
    return seen


def step_of(module):
    loss_fn = lambda p, s, x: jnp.mean(jnp.square(module.apply({"params": p, **s}, x)))
    return jax.jit(fp8.value_and_grad(loss_fn))


def run_linen(step, variables):
    params, state = variables["params"], {k: v for k, v in variables.items() if k != "params"}
    seen = []
    for x in X[:5]:
        loss, grads, state = step(params, state, x)
        params = descend(params, grads)
        seen.append((loss, grads, states_in(state)))
    return seen


PURE = fp8.linen.FP8Dense(4, recipe=RECIPE)
PURE_STEP = step_of(PURE)


def pure_linen(kernel, bias):
    variables = jax.jit(PURE.init)(jax.random.key(1), X[0])
    return run_linen(PURE_STEP, {**variables, "params": {"kernel": kernel, "bias": bias}})


def weights(model):
    return model.kernel.get_value(), model.bias.get_value()


@pytest.mark.parametrize("mode", ["graph", "tree"])
def test_a_linen_layer_in_nnx(mode):
    """Losses, gradients and states of five steps, bit for bit."""
    model, layer = bridged(), fp8.nnx.FP8Linear(8, 4, recipe=RECIPE, rngs=nnx.Rngs(0))
    kernel, bias = weights(model)
    layer.kernel.set_value(kernel)
    want = pure_linen(kernel, bias)
    got = run_nnx(model, compiled(graph=mode == "graph"))
    assert len(got[-1][2]) == 1
    assert got[-1][2][0].scale.all()
    assert_same_bits(got, want)
    assert_same_bits(run_nnx(layer, compiled()), want)


def test_an_nnx_layer_in_linen():
    module = nnx.bridge.ToLinen(fp8.nnx.FP8Linear, args=(8, 4), kwargs={"recipe": RECIPE})
    variables = jax.jit(module.init)(jax.random.key(0), X[0])
    assert set(variables) == {"params", "FP8State"}
    want = pure_linen(variables["params"]["kernel"], variables["params"]["bias"])
    assert_same_bits(run_linen(step_of(module), variables), want)


def test_microbatches():
    model, whole = bridged(), bridged()
    see = nnx.jit(fp8.nnx.value_and_grad(square, commit=False))
    seen = fp8.merge_seen(*(see(model, x)[2] for x in X[:2]))
    assert not states_in(nnx.state(model))[0].scale.any()
    nnx.jit(fp8.nnx.commit)(model, seen)
    compiled()(whole, X[:2].reshape(8, 8))
    got, want = states_in(nnx.state(model))[0], states_in(nnx.state(whole))[0]
    np.testing.assert_array_equal(got.amax_history[:2], want.amax_history[:2])


class Net(nnx.Module):
    """A linen layer, an nnx layer, batch statistics and dropout."""

    def __init__(self):
        self.first = bridged(8)
        self.norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
        self.second = fp8.nnx.FP8Linear(8, 4, recipe=RECIPE, rngs=nnx.Rngs(1))
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(2))

    def __call__(self, x):
        return self.drop(self.second(self.norm(self.first(x))))


@pytest.mark.usefixtures("standard_promotion")  # optax
def test_inside_a_bigger_model_with_flax_s_optimizer():
    model = nnx.jit(Net)()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, x):
        loss, grads = fp8.nnx.value_and_grad(square)(model, x)
        optimizer.update(model, grads)
        return loss, grads

    before = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
    for i in range(3):
        _, grads = train_step(model, optimizer, X[i])
    assert set(grads) == {"first", "norm", "second"}
    assert not states_in(grads)
    assert not states_in(nnx.state(optimizer))
    states = states_in(nnx.state(model))
    assert len(states) == 2
    amaxes = np.array([0, *(np.abs(x).max() for x in X[:3])])
    np.testing.assert_allclose(
        model.first.FP8DotGeneral_0["fp8"].get_value().amax_history[0], amaxes
    )
    assert all(state.amax_history[:, 1:].all() for state in states)
    assert model.norm.mean.get_value().any()
    assert model.drop.rngs.count.get_value() == 3
    for a, b in zip(
        jax.tree.leaves(before), jax.tree.leaves(nnx.state(model, nnx.Param)), strict=True
    ):
        assert (a != b).any()
    # Evaluation collects nothing.
    model.eval()
    frozen = jax.tree.map(np.asarray, states_in(nnx.state(model)))
    assert jnp.isfinite(nnx.jit(square)(model, 100 * X[0]))
    assert_same_bits(states_in(nnx.state(model)), frozen)


def test_states_are_found_by_what_they_hold():
    """The type of their Variables is flax's, and another library may use it for its own arrays."""
    flax_s_type = nnx.variable_type_from_name(COLLECTION, allow_register=True)

    class Model(nnx.Module):
        def __init__(self):
            self.layer, self.other = bridged(), flax_s_type(jnp.ones(3))

        def __call__(self, x):
            return self.layer(x)

    model = Model()
    assert len(jax.tree.leaves(nnx.state(model, flax_s_type))) > len(
        jax.tree.leaves(nnx.state(model.layer, flax_s_type))
    )
    compiled()(model, X[0])
    assert states_in(nnx.state(model, flax_s_type))[0].scale.all()
    np.testing.assert_array_equal(model.other.get_value(), 1)


def test_states_have_no_gradient():
    """Nor have the states of linen layers, which are no `FP8State`."""
    model = bridged()
    model.to_nnx__rngs = None
    with pytest.raises(
        ValueError, match=r"wrt=.*Variable.* matches 1 quantizer states, .* write wrt=nnx\.Param"
    ):
        fp8.nnx.value_and_grad(square, wrt=nnx.Variable)(model, X[0])
    assert not states_in(nnx.state(model))[0].scale.any()


class Plugged(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, dot_general_cls=fp8.linen.FP8DotGeneral.using(RECIPE))(x)
        return nn.Dense(4)(nn.Dropout(0.5, deterministic=True)(nn.relu(x)))


def test_a_linen_model_with_a_plug():
    model = nnx.jit(lambda: nnx.bridge.ToNNX(Plugged(), rngs=nnx.Rngs(0)).lazy_init(X[0]))()
    variables = {
        "params": nnx.to_pure_dict(nnx.state(model, nnx.Param)),
        COLLECTION: nnx.to_pure_dict(
            nnx.state(model, nnx.variable_type_from_name(COLLECTION, allow_register=True))
        ),
    }
    assert_same_bits(run_nnx(model, compiled()), run_linen(step_of(Plugged()), variables))
