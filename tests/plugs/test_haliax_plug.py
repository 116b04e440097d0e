"""`jaxfp8.plugs.haliax` in haliax's own layers."""

import warnings

import jax
import numpy as np
import optax
import pytest
from messages import Message, check
from same_bits import assert_same_bits

import jaxfp8 as fp8

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import haliax.nn as hnn
        from haliax.quantization import apply_updates, partition_for_grad_overwrite
    except ImportError:
        pytest.skip("haliax is not installed, or not for this jax", allow_module_level=True)
    import equinox as eqx
    import haliax as hax

    if not hasattr(jax.core, "is_constant_dim"):
        pytest.skip("haliax 1.4.dev453 calls what this jax does not have", allow_module_level=True)

from jaxfp8.plugs import haliax as plug

RECIPES = ("delayed", "current", "blockwise", "mxfp8")
IN, OUT = hax.Axis("in", 128), hax.Axis("out", 128)
pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore"),
]


class Block(eqx.Module):
    up: hnn.Linear
    down: hnn.Linear

    @staticmethod
    def init(*, key):
        first, second = jax.random.split(key)
        return Block(hnn.Linear.init(IN, OUT, key=first), hnn.Linear.init(OUT, IN, key=second))

    def __call__(self, x):
        return x + self.down(hax.nn.gelu(self.up(x)))


def stack():
    keys = jax.random.split(jax.random.key(0), 2)
    return hnn.Stacked.init(hax.Axis("layers", 2), Block)(key=keys)


def batch():
    return hax.random.normal(jax.random.key(1), (hax.Axis("tokens", 64), IN))


def loss_fn(model, x):
    return hax.mean(model.fold(x) ** 2).array


@pytest.mark.parametrize("name", RECIPES)
def test_a_stack_trains(name):
    model = plug.quantize_linear_layers(stack(), fp8.recipes.get(name))
    tx, x = optax.sgd(0.1), batch()
    opt = tx.init(eqx.filter(partition_for_grad_overwrite(model)[1], eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, opt):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x)
        overwrites, grads = partition_for_grad_overwrite(grads)
        updates, opt = tx.update(grads, opt)
        return apply_updates(model, updates, overwrites), opt, loss

    losses = []
    for _ in range(3):
        model, opt, loss = step(model, opt)
        losses.append(float(loss))
    assert losses[2] < losses[0]
    if name == "delayed":
        history = model.stacked.up.dot_general.state.amax_history
        assert history.shape == (2, 3, 16)
        assert (history[..., -3:] > 0).all()  # each block has its own
        assert history[0, 0, -3] != history[1, 0, -3]


@pytest.mark.parametrize("name", RECIPES)
def test_has_the_bits_of_the_op(name):
    recipe, x = fp8.recipes.get(name), batch()
    layer = hnn.Linear.init(IN, OUT, key=jax.random.key(0), use_bias=False, out_first=False)
    model = plug.quantize_linear_layers(layer, recipe)
    run = eqx.filter_jit(eqx.filter_value_and_grad(lambda m, x: (m(x).array ** 2).sum()))
    expected = jax.jit(
        fp8.value_and_grad(lambda w, s, x: (fp8.dot(x, w, recipe=recipe, state=s) ** 2).sum())
    )
    state = fp8.init_state(recipe)
    for _ in range(2):
        loss, grads = run(model, x)
        same, grad, state = expected(layer.weight.array, state, x.array)
        assert_same_bits((loss, grads.weight.array), (same, grad))
        overwrites, _ = partition_for_grad_overwrite(grads)
        model = eqx.tree_at(lambda m: m.dot_general, model, overwrites.dot_general)
        if recipe.rows:
            assert_same_bits(overwrites.dot_general.state.scale, state.scale)


@pytest.mark.parametrize("groups", [None, 3])
@pytest.mark.parametrize("name", RECIPES)
def test_experts_have_the_bits_of_ragged_dot(name, groups):
    recipe, sizes = fp8.recipes.get(name), jax.numpy.array([5, 0, 9])
    x = jax.random.normal(jax.random.key(0), (16, 32))
    w = jax.random.normal(jax.random.key(1), (3, 32, 24))
    op = plug.ragged_dot_op(recipe, groups=groups)
    run = eqx.filter_jit(eqx.filter_value_and_grad(lambda p, x: (p[1](x, p[0], sizes) ** 2).sum()))

    def loss_fn(w, state, x):
        return (fp8.ragged_dot(x, w, sizes, recipe=recipe, state=state) ** 2).sum()

    expected, state = jax.jit(fp8.value_and_grad(loss_fn)), op.state
    for _ in range(2):
        loss, (dw, new) = run((w, op), x)
        same, grad, state = expected(w, state, x)
        assert_same_bits((loss, dw), (same, grad))
        op = new
        if recipe.rows:
            assert_same_bits(new.state.scale, state.scale)


EXPERTS, TOKENS = hax.Axis("experts", 3), hax.Axis("tokens", 14)


class Mixture(eqx.Module):
    gate: hnn.Linear
    up: hnn.MoELinear

    @staticmethod
    def init(*, key, **options):
        up = hnn.MoELinear.init(EXPERTS, IN, OUT, key=key, use_bias=False, **options)
        return Mixture(hnn.Linear.init(IN, EXPERTS, key=key), up)


def test_tokens_of_a_wider_dtype_are_not_rounded():
    """haliax' layers promote both operands: the weights to float32 here."""
    layer = Mixture.init(key=jax.random.key(0))
    layer = jax.tree.map(lambda leaf: leaf.astype(jax.numpy.bfloat16), layer)
    x = hax.random.normal(jax.random.key(1), (TOKENS, IN))
    sizes = hax.named(jax.numpy.array([5, 0, 9]), EXPERTS)
    model = plug.quantize_linear_layers(layer, fp8.recipes.identity(), targets=".*")
    for got, want in ((model.gate(x), layer.gate(x)), (model.up(x, sizes), layer.up(x, sizes))):
        assert got.dtype == want.dtype == jax.numpy.float32
        np.testing.assert_allclose(got.array, want.array, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("out_first", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_experts_of_a_model_have_the_bits_of_ragged_dot(name, out_first):
    recipe, sizes = fp8.recipes.get(name), jax.numpy.array([5, 0, 9])
    x = hax.random.normal(jax.random.key(1), (TOKENS, IN))
    plain = Mixture.init(key=jax.random.key(0), out_first=out_first)
    layer = plug.quantize_linear_layers(plain, recipe).up
    assert layer.weight.axes == plain.up.weight.axes
    grouped = hax.named(sizes, EXPERTS)
    run = eqx.filter_jit(eqx.filter_value_and_grad(lambda m: (m(x, grouped).array ** 2).sum()))

    def loss_fn(w, state):
        return (fp8.ragged_dot(x.array, w, sizes, recipe=recipe, state=state) ** 2).sum()

    expected, state = jax.jit(fp8.value_and_grad(loss_fn)), layer.op.state
    w = layer.weight.rearrange((EXPERTS, IN, OUT)).array
    for _ in range(2):
        loss, grads = run(layer)
        same, dw, state = expected(w, state)
        assert_same_bits((loss, grads.weight.rearrange((EXPERTS, IN, OUT)).array), (same, dw))
        layer = eqx.tree_at(lambda m: m.op, layer, grads.op)
        if recipe.rows:
            assert layer.op.state.scale.shape[0] == EXPERTS.size
            assert_same_bits(layer.op.state.scale, state.scale)


def test_a_stack_of_experts_has_a_state_for_each():
    key = jax.random.split(jax.random.key(0), 2)
    model = hnn.Stacked.init(hax.Axis("layers", 2), Mixture)(key=key)
    model = plug.quantize_linear_layers(model, fp8.recipes.delayed())
    assert model.stacked.up.op.state.amax_history.shape[:2] == (2, EXPERTS.size)


def test_routers_stay_unless_they_are_named():
    model, recipe = Mixture.init(key=jax.random.key(0)), fp8.recipes.current()
    assert not hasattr(plug.quantize_linear_layers(model, recipe).gate.dot_general, "policy")
    named = plug.quantize_linear_layers(model, recipe, targets="gate")
    assert hasattr(named.gate.dot_general, "policy")
    assert not hasattr(named.up, "op")


def test_targets():
    model = plug.quantize_linear_layers(stack(), fp8.recipes.current(), targets=["up"])
    assert hasattr(model.stacked.up.dot_general, "policy")
    assert not hasattr(model.stacked.down.dot_general, "policy")


MESSAGES = {
    "no layer": Message(
        ValueError,
        lambda: plug.quantize_linear_layers(stack(), fp8.recipes.current(), targets="head"),
        "targets='head'", "no Linear or MoELinear", "stacked.up",
    ),
    "gmm": Message(
        ValueError,
        lambda: plug.quantize_linear_layers(
            Mixture.init(key=jax.random.key(0), use_gmm=True), fp8.recipes.current()
        ),
        "up is a MoELinear", "use_gmm=True", "use_gmm=False",
    ),
    "a recipe": Message(
        TypeError, lambda: plug.dot_general_op("current"), "'current'", "Recipe",
        "fp8.recipes.current()",
    ),
    "an option": Message(
        TypeError, lambda: plug.dot_general_op(fp8.recipes.current(), kernel=1), "kernel=1",
        "no option", "kernels",
    ),
    "a shard of experts": Message(
        TypeError, lambda: plug.ragged_dot_op(fp8.recipes.current(), x_shard=1), "x_shard=1",
        "no option", "its options are kernels, reduce_axes, save_original, state_channel.",
    ),
    "no experts": Message(
        ValueError, lambda: plug.ragged_dot_op(fp8.recipes.delayed(), groups=0), "groups=0",
        "positive integer", "the number of experts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_messages(message):
    check(message)
