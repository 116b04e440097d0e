"""`nnx.MultiHeadAttention`.

A class with state raises an error, and the advice of its message works.

flax makes a new object of `dot_general_cls` at each call. Before, the error of a training step
advised the call that had raised it: "Use ... fp8.nnx.value_and_grad".
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from same_bits import assert_same_bits

import jaxfp8 as fp8

RECIPE = fp8.recipes.delayed(history_length=4)
PROJECTIONS = ("query", "key", "value", "out")
X = np.random.default_rng(0).normal(size=(3, 5, 8)).astype(np.float32)


def attention(**plugs):
    return nnx.MultiHeadAttention(
        num_heads=2, in_features=8, decode=False, rngs=nnx.Rngs(0), **plugs
    )


def square(model, x):
    return jnp.mean(jnp.square(model(x)))


step = nnx.jit(fp8.nnx.value_and_grad(square))

CLASSES = {
    "class": fp8.nnx.FP8DotGeneral,
    "partial": functools.partial(fp8.nnx.FP8DotGeneral, RECIPE),
    "function": lambda: fp8.nnx.FP8DotGeneral(RECIPE),
}


@pytest.mark.parametrize("where", ["qkv_dot_general_cls", "out_dot_general_cls"])
@pytest.mark.parametrize("given", CLASSES)
def test_a_class_with_state_is_refused(given, where):
    model = attention(**{where: CLASSES[given]})
    assert not nnx.state(model, fp8.nnx.FP8State)
    with pytest.raises(
        fp8.FP8StateError, match=r"out_dot_general_cls=\).*layer\.dot_general = nnx\.data\(fp8"
    ) as error:
        step(model, X)
    assert "Use fp8.value_and_grad" not in str(error.value)
    assert all(name in str(error.value) for name in PROJECTIONS)


def test_linen_s_plug_is_refused_by_flax():
    model = attention(qkv_dot_general_cls=fp8.linen.FP8DotGeneral.using(RECIPE))
    with pytest.raises(Exception, match="unbound module"):
        model(X)


def plugged():
    model = attention()
    for name in PROJECTIONS:
        getattr(model, name).dot_general = nnx.data(fp8.nnx.FP8DotGeneral(RECIPE))
    return model


def test_the_cure_gives_each_projection_its_state():
    model, replaced = plugged(), attention()
    for name in PROJECTIONS:
        theirs = getattr(replaced, name)
        layer = fp8.nnx.FP8LinearGeneral(
            theirs.in_features,
            theirs.out_features,
            axis=theirs.axis,
            recipe=RECIPE,
            rngs=nnx.Rngs(0),
        )
        nnx.update(layer, nnx.state(theirs, nnx.Param))
        setattr(replaced, name, layer)
    for factor in (1, 2):
        assert_same_bits(*(step(each, np.float32(factor) * X) for each in (model, replaced)))
    for name in PROJECTIONS:
        (state,) = jax.tree.leaves(
            nnx.state(getattr(model, name), fp8.nnx.FP8State),
            is_leaf=lambda n: isinstance(n, fp8.state.MatmulState),
        )
        assert_same_bits(state, getattr(replaced, name).dot_general.state.get_value())
        kernel = getattr(model, name).kernel.get_value()
        np.testing.assert_array_equal(state.amax_history[1, -1], np.abs(kernel).max())


def test_a_new_layer_inside_a_loss_is_refused_and_one_outside_is_not():
    def loss(model, x):
        return jnp.mean(model(x) * fp8.nnx.FP8Linear(8, 8, recipe=RECIPE, rngs=nnx.Rngs(0))(x))

    with pytest.raises(fp8.FP8StateError, match="made while a loss was running"):
        nnx.jit(fp8.nnx.value_and_grad(loss))(attention(), X)
    # The error does not outlive its loss, and a layer without state keeps nothing that could be
    # lost.
    assert step(plugged(), X)[0] > 0
    stateless = attention(qkv_dot_general_cls=lambda: fp8.nnx.FP8DotGeneral(fp8.recipes.current()))
    assert step(stateless, X)[0] > 0


def test_layers_that_share_an_object_are_tied():
    """One state: found once, and bounded by the largest of its matmuls."""
    shared = fp8.nnx.FP8DotGeneral(RECIPE)

    class Two(nnx.Module):
        def __init__(self):
            self.first = nnx.Linear(8, 8, dot_general=shared, rngs=nnx.Rngs(0))
            self.second = nnx.Linear(8, 8, dot_general=shared, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.second(self.first(x))

    model = Two()
    step(model, X)
    states = jax.tree.leaves(
        nnx.state(model, fp8.nnx.FP8State), is_leaf=lambda n: isinstance(n, fp8.state.MatmulState)
    )
    assert len(states) == 1
    assert model.first.dot_general is model.second.dot_general
    largest = max(np.abs(layer.kernel.get_value()).max() for layer in (model.first, model.second))
    assert largest <= states[0].amax_history[1, -1] <= 1.125 * largest
