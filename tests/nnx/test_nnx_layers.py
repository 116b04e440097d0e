"""nnx layers: flax's own parameters and values, with a recipe.

And state through flax's own transformations.
"""

import functools

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxfp8 as fp8
from jaxfp8.nnx import FP8DotGeneral, FP8Einsum, FP8Linear, FP8LinearGeneral, FP8State

DELAYED = fp8.recipes.delayed(history_length=4)
IDENTITY = fp8.recipes.identity()
X = np.random.default_rng(0).normal(size=(3, 5, 8)).astype(np.float32)


def plug(recipe):
    return lambda: FP8DotGeneral(recipe)


def attention(**plugs):
    return nnx.MultiHeadAttention(
        num_heads=2, in_features=8, decode=False, rngs=nnx.Rngs(0), **plugs
    )


# name -> (flax's layer, ours with a recipe, how many states)
LAYERS = {
    "Linear": (
        lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)),
        lambda r: FP8Linear(8, 4, recipe=r, rngs=nnx.Rngs(0)),
        1,
    ),
    "Linear_bf16": (
        lambda: nnx.Linear(8, 4, dtype=jnp.bfloat16, use_bias=False, rngs=nnx.Rngs(0)),
        lambda r: FP8Linear(8, 4, dtype=jnp.bfloat16, use_bias=False, recipe=r, rngs=nnx.Rngs(0)),
        1,
    ),
    "LinearGeneral": (
        lambda: nnx.LinearGeneral((5, 8), (2, 3), axis=(-2, -1), rngs=nnx.Rngs(0)),
        lambda r: FP8LinearGeneral((5, 8), (2, 3), axis=(-2, -1), recipe=r, rngs=nnx.Rngs(0)),
        1,
    ),
    "Einsum": (
        lambda: nnx.Einsum("bsd,dhk->bshk", (8, 2, 4), (2, 4), rngs=nnx.Rngs(0)),
        lambda r: FP8Einsum("bsd,dhk->bshk", (8, 2, 4), (2, 4), recipe=r, rngs=nnx.Rngs(0)),
        1,
    ),
    "Linear_plugged": (
        lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0)),
        lambda r: nnx.Linear(8, 4, dot_general=FP8DotGeneral(r), rngs=nnx.Rngs(0)),
        1,
    ),
}


QUICK = ("Linear_bf16", "LinearGeneral", "Einsum")


def square(model, x):
    return jnp.sum(jnp.square(model(x).astype(jnp.float32)))


step, plain_step = nnx.jit(fp8.nnx.value_and_grad(square)), nnx.jit(nnx.value_and_grad(square))


def states_of(model):
    return jax.tree.leaves(
        nnx.state(model, FP8State), is_leaf=lambda n: isinstance(n, fp8.state.MatmulState)
    )


def assert_same(a, b):
    chex.assert_trees_all_equal(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)


def params(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


@pytest.mark.parametrize("layer", LAYERS)
def test_parameters_and_initial_values_are_flax_s(layer):
    theirs, ours, states = LAYERS[layer]
    want, model = params(theirs()), ours(DELAYED)
    assert jax.tree.structure(params(model)) == jax.tree.structure(want)
    assert_same(params(model), want)
    assert len(states_of(model)) == states
    assert not any(s.scale.any() or s.amax_history.any() for s in states_of(model))
    assert not states_of(ours(IDENTITY))


@pytest.mark.parametrize("layer", LAYERS)
def test_identity_is_bit_equal(layer):
    theirs, ours, _ = LAYERS[layer]
    want = plain_step(theirs(), X)
    assert_same(plain_step(ours(IDENTITY), X), want)
    assert_same(step(ours(IDENTITY), X), want)


@pytest.mark.parametrize(
    "layer",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYERS],
)
def test_a_bf16_checkpoint_loads_unchanged_and_trains(layer):
    theirs, ours, _ = LAYERS[layer]
    blob = flax.serialization.to_bytes(
        jax.tree.map(lambda p: np.asarray(p).astype(jnp.bfloat16), params(theirs()))
    )
    model, plain = ours(DELAYED), theirs()
    loaded = jax.tree.map(
        lambda p: jnp.asarray(np.asarray(p, np.float32)),
        flax.serialization.from_bytes(params(model), blob),
    )
    for each in (model, plain):
        state = nnx.state(each, nnx.Param)
        nnx.replace_by_pure_dict(state, loaded)
        nnx.update(each, state)
    loss, grads = step(model, X)
    want_loss, want = plain_step(plain, X)
    np.testing.assert_allclose(loss, want_loss, rtol=0.1)
    for got_leaf, want_leaf in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        error = np.linalg.norm(np.float32(got_leaf) - np.float32(want_leaf))
        assert error / np.linalg.norm(np.float32(want_leaf)) < 0.15
    assert all(s.scale.all() for s in states_of(model))


def test_layer_equals_the_function():
    model = FP8Linear(8, 4, use_bias=False, recipe=DELAYED, rngs=nnx.Rngs(0))
    w = model.kernel.get_value()
    loss, grads = step(model, X)
    function = lambda w, s, x: jnp.sum(jnp.square(fp8.dot(x, w, recipe=DELAYED, state=s)))
    want = jax.jit(fp8.value_and_grad(function))(w, fp8.init_state(DELAYED), X)
    assert_same((loss, grads, states_of(model)), want)


def attend(model, x):
    return jnp.sum(jnp.square(model(x, x, x)))


plain_attend = nnx.jit(attend)


@pytest.mark.slow  # one step of test_the_cure_gives_each_projection_its_state
def test_attention_with_layers_of_its_own():
    plain, model = attention(), attention()
    for name in ("query", "key", "value", "out"):
        theirs = getattr(model, name)
        ours = FP8LinearGeneral(
            theirs.in_features,
            theirs.out_features,
            axis=theirs.axis,
            recipe=DELAYED,
            rngs=nnx.Rngs(0),
        )
        nnx.update(ours, nnx.state(theirs, nnx.Param))
        setattr(model, name, ours)
    assert_same(params(model), params(plain))
    value, _ = nnx.jit(fp8.nnx.value_and_grad(attend))(model, X)
    np.testing.assert_allclose(value, plain_attend(plain, X), rtol=0.1)
    assert len(states_of(model)) == 4
    assert all(s.scale.all() for s in states_of(model))


@pytest.mark.slow  # test_layers_that_share_an_object_are_tied has it without attention
def test_attention_whose_projections_share_a_plug():
    """One object for q, k and v is one state.

    Bounded by the largest of the three, and never lost.
    """
    model = attention(
        qkv_dot_general=FP8DotGeneral(DELAYED), out_dot_general=FP8DotGeneral(DELAYED)
    )
    nnx.jit(fp8.nnx.value_and_grad(attend))(model, X)
    assert len(states_of(model)) == 2
    largest = max(
        np.abs(getattr(model, name).kernel.get_value()).max() for name in ("query", "key", "value")
    )
    assert largest <= states_of(model.query)[0].amax_history[1, -1] <= 1.125 * largest


def test_attention_with_a_class_plug():
    """nnx makes a new object at each call.

    Fine without state, and an error with it, since it would be lost.
    """
    stateless = attention(
        qkv_dot_general_cls=plug(fp8.recipes.current()),
        out_dot_general_cls=plug(fp8.recipes.current()),
    )
    value, _ = nnx.jit(fp8.nnx.value_and_grad(attend))(stateless, X)
    np.testing.assert_allclose(value, plain_attend(attention(), X), rtol=0.1)
    with pytest.raises(fp8.FP8StateError, match="made while a loss was running"):
        fp8.nnx.value_and_grad(attend)(attention(qkv_dot_general_cls=plug(DELAYED)), X)


def test_nnx_grad_is_refused():
    model = FP8Linear(8, 4, recipe=DELAYED, rngs=nnx.Rngs(0))
    for differentiate in (nnx.grad, nnx.value_and_grad):
        with pytest.raises(fp8.FP8StateError, match=r"fp8\.nnx\.value_and_grad"):
            differentiate(square)(model, X)


def test_evaluation_changes_nothing():
    model = FP8Linear(8, 4, recipe=DELAYED, rngs=nnx.Rngs(0))
    for _ in range(2):
        before = jax.tree.map(np.asarray, states_of(model))
        nnx.jit(lambda m, x: m(x))(model, X)
        assert_same(states_of(model), before)
        step(model, X)


@pytest.mark.parametrize(("layer", "given"), [
    (lambda **k: FP8Linear(8, 4, rngs=nnx.Rngs(0), **k), {"dot_general": jax.lax.dot_general}),
    (lambda **k: FP8LinearGeneral(8, 4, rngs=nnx.Rngs(0), **k), {"dot_general_cls": plug(DELAYED)}),
    (lambda **k: FP8Einsum("ab,bc->ac", (8, 4), rngs=nnx.Rngs(0), **k), {"einsum_op": jnp.einsum}),
])  # fmt: skip
def test_another_matmul_is_refused(layer, given):
    with pytest.raises(ValueError, match=f"Drop {next(iter(given))}="):
        layer(**given)


class Block(nnx.Module):
    def __init__(self, rngs, recipe=DELAYED):
        self.layer = FP8Linear(8, 8, use_bias=False, recipe=recipe, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.layer(x))


def blocks(length=2):
    @nnx.split_rngs(splits=length)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs):
        return Block(rngs)

    return make(nnx.Rngs(0))


def index(model, i):
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[i]), state))


class Loop(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([index(blocks(), i) for i in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


FACTORS = np.float32([1, 2])


@functools.cache
def looped():
    """Losses, gradients of kernels and states of a step at each factor, stacked as in a scan."""
    loop, steps = Loop(), []
    for factor in FACTORS:
        loss, grads = step(loop, X * factor)
        states = jax.tree.map(lambda *leaves: np.stack(leaves), *states_of(loop))
        steps.append((loss, np.stack(jax.tree.leaves(grads)), states))
    return steps


@pytest.mark.parametrize(
    "remat", [pytest.param(False, marks=pytest.mark.slow), True], ids=["scan", "remat in scan"]
)
def test_scan_over_layers(remat):
    class Model(nnx.Module):
        def __init__(self):
            self.blocks = blocks()

        def __call__(self, x):
            call = lambda x, block: block(x)
            if remat:
                call = nnx.remat(call, policy=fp8.save_fp8_residuals())
            return nnx.scan(call, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)

    model = Model()
    for factor, (loss, kernels, states) in zip(FACTORS, looped(), strict=True):
        got = step(model, X * factor)
        np.testing.assert_allclose(got[0], loss, rtol=1e-5)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), states_of(model)[0], states
        )
        np.testing.assert_allclose(jax.tree.leaves(got[1])[0], kernels, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shared", [False, True], ids=["experts", "examples"])
def test_vmap(shared):
    model = FP8Linear(8, 4, recipe=DELAYED, rngs=nnx.Rngs(0)) if shared else None

    class Experts(nnx.Module):
        def __init__(self):
            self.inner = model if shared else blocks(3)

        def __call__(self, x):
            return nnx.vmap(
                lambda block, x: block(x), in_axes=(None if shared else 0, 0), out_axes=0
            )(self.inner, x)

    experts = Experts()
    step(experts, X)
    (state,) = states_of(experts)
    np.testing.assert_array_equal(
        np.asarray(state.amax_history)[..., 0, -1],
        np.abs(X).max(axis=None if shared else (1, 2)),
    )


def test_tied_layer():
    class Model(nnx.Module):
        def __init__(self):
            self.layer = Block(nnx.Rngs(0), fp8.recipes.delayed(power_of_two=True))

        def __call__(self, x):
            return self.layer(self.layer(x))

    model = Model()
    step(model, X)
    (state,) = states_of(model)
    true = np.abs(X).max()
    assert true <= state.amax_history[0, -1] <= 1.125 * true


def test_other_state_is_updated_too():
    class Model(nnx.Module):
        def __init__(self):
            self.layer, self.norm = Block(nnx.Rngs(0)), nnx.BatchNorm(8, rngs=nnx.Rngs(0))
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.dropout(self.norm(self.layer(x)))

    model = Model()
    (_, aux), grads = nnx.jit(
        fp8.nnx.value_and_grad(lambda m, x: (square(m, x), m(x).shape[0]), has_aux=True)
    )(model, X)
    assert model.norm.mean.get_value().any()
    assert aux == 3
    assert model.dropout.rngs.count.get_value() == 2
    assert states_of(model)[0].scale.all()
    assert set(grads) == {"layer", "norm"}


def test_microbatches_are_committed_once():
    model, whole = (FP8Linear(8, 4, recipe=DELAYED, rngs=nnx.Rngs(0)) for _ in range(2))
    run = nnx.jit(fp8.nnx.value_and_grad(square, commit=False))
    seen = fp8.merge_seen(*(run(model, X[i])[2] for i in range(3)))
    assert not states_of(model)[0].scale.any()
    nnx.jit(fp8.nnx.commit)(model, seen)
    step(whole, X)
    np.testing.assert_array_equal(
        states_of(model)[0].amax_history[:2], states_of(whole)[0].amax_history[:2]
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda **how: FP8Linear(8, 4, use_bias=False, **how),
        lambda **how: FP8LinearGeneral(8, 4, use_bias=False, **how),
        lambda **how: FP8Einsum("bsd,dh->bsh", (8, 4), **how),
    ],
    ids=["Linear", "LinearGeneral", "Einsum"],
)
def test_the_dtype_of_the_result(make):
    layer = make(recipe=DELAYED, preferred_element_type=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert nnx.eval_shape(layer, X).dtype == jnp.bfloat16
