"""Mistakes with nnx layers and plugs: the three parts of their messages."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import messages
import optax
import pytest
from flax import nnx
from messages import Message

import jaxfp8 as fp8
from jaxfp8.nnx import FP8DotGeneral, FP8Einsum, FP8EinsumOp, FP8Linear, FP8LinearGeneral, FP8State

DELAYED = fp8.recipes.delayed()
X = jnp.ones((2, 8))
LAYERS = {
    "FP8Linear": lambda: FP8Linear(8, 4, rngs=nnx.Rngs(0)),
    "FP8LinearGeneral": lambda: FP8LinearGeneral(8, 4, rngs=nnx.Rngs(0)),
    "FP8Einsum": lambda: FP8Einsum("bd,dk->bk", (8, 4), rngs=nnx.Rngs(0)),
}
INPUTS = {
    "None": (None, "is None", "pass an array"),
    "dict": ({"x": X}, "is of type dict", "['x']"),
    "ShapeDtypeStruct": (
        jax.ShapeDtypeStruct((2, 8), jnp.float32),
        "is ShapeDtypeStruct",
        "jax.eval_shape",
    ),
    "Partitioned": (
        nn.Partitioned(X, ("a", "b")),
        "is of type Partitioned",
        "flax.linen.meta.unbox",
    ),
}


def linear(**options):
    return FP8Linear(8, 4, rngs=nnx.Rngs(0), **options)


def updated(wrt):
    model = nnx.Sequential(linear())
    return fp8.nnx.value_and_grad(lambda model, x: jnp.sum(model(x)), wrt=wrt)(model, X)


class Generator(nnx.Module):
    def __init__(self, rngs):
        self.up = FP8Linear(8, 8, rngs=rngs)

    def __call__(self, z):
        return self.up(z)


class Critic(Generator):
    pass


def networks():
    return Generator(nnx.Rngs(0)), Critic(nnx.Rngs(1))


def through_an_argument():
    generator, critic = networks()
    return fp8.nnx.value_and_grad(lambda g, z, d: jnp.sum(d(g(z))))(generator, X, critic)


def through_a_keyword():
    generator, critic = networks()
    return fp8.nnx.value_and_grad(lambda g, z, critic: jnp.sum(critic(g(z))))(
        generator, X, critic=critic
    )


def through_a_closure():
    generator, critic = networks()
    return fp8.nnx.value_and_grad(lambda g, z: jnp.sum(critic(g(z))))(generator, X)


def under_jit():
    return nnx.jit(lambda g, d: fp8.nnx.value_and_grad(lambda g, d: jnp.sum(d(g(X))))(g, d))(
        *networks()
    )


NO_GRADIENT = (
    "quantizer states, layers.0.dot_general.state for instance",
    "have no gradient",
    "wrt=nnx.Param",
)
FROZEN = "fp8.nnx.freeze(network)"
MESSAGES = {
    "layer with a name": Message(
        TypeError,
        lambda: linear(recipe="blockwise"),
        "recipe='blockwise'",
        "a Recipe",
        "fp8.recipes.blockwise()",
    ),
    "plug with a function": Message(
        TypeError,
        lambda: FP8DotGeneral(fp8.recipes.current),
        "recipe=<function",
        "a Recipe",
        "fp8.recipes.current()",
    ),
    "dot_general=class": Message(
        TypeError,
        lambda: nnx.Linear(8, 4, dot_general=FP8DotGeneral, rngs=nnx.Rngs(0))(X),
        "given the class FP8DotGeneral",
        "an instance is needed",
        "dot_general=FP8DotGeneral(recipe)",
    ),
    "einsum_op=class": Message(
        TypeError,
        lambda: nnx.Einsum("bd,dk->bk", (8, 4), einsum_op=FP8EinsumOp, rngs=nnx.Rngs(0))(X),
        "given the class FP8EinsumOp",
        "an instance is needed",
        "einsum_op=FP8EinsumOp(recipe)",
    ),
    "dot_general_cls=instance": Message(
        TypeError,
        lambda: nnx.LinearGeneral(8, 4, dot_general_cls=FP8DotGeneral(DELAYED), rngs=nnx.Rngs(0))(
            X
        ),
        "an instance of FP8DotGeneral was called without operands",
        "needs a class",
        "dot_general=FP8DotGeneral(recipe)",
    ),
    "wrt=nnx.Variable": Message(ValueError, lambda: updated(nnx.Variable), *NO_GRADIENT),
    "wrt=FP8State": Message(ValueError, lambda: updated(FP8State), *NO_GRADIENT),
    "wrt=a tuple": Message(ValueError, lambda: updated((nnx.Param, FP8State)), *NO_GRADIENT),
    "wrt=...": Message(ValueError, lambda: updated(...), *NO_GRADIENT),
    "a GAN's critic, argument": Message(
        fp8.FP8StateError,
        through_an_argument,
        "positional argument 3 is a Critic with quantizer states",
        "trains only its first argument",
        FROZEN,
    ),
    "a GAN's critic, keyword": Message(
        fp8.FP8StateError,
        through_a_keyword,
        "critic is a Critic with quantizer states",
        "only its first argument",
        FROZEN,
    ),
    "a GAN's critic, under jit": Message(
        fp8.FP8StateError,
        under_jit,
        "positional argument 2 is a Critic",
        "only its first argument",
        FROZEN,
    ),
    "a GAN's critic, closure": Message(
        fp8.FP8StateError,
        through_a_closure,
        "no other has states",
        "takes from outside",
        FROZEN,
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_has_three_parts(name):
    messages.check(MESSAGES[name])


@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("layer", LAYERS)
def test_an_input_that_is_no_array_is_named(layer, given):
    value, what, cure = INPUTS[given]
    call = lambda: LAYERS[layer]()(value)
    messages.check(Message(TypeError, call, f"inputs {what}", "one array is needed", cure))


def penalized():
    """A gradient penalty, which takes a gradient inside the loss."""
    penalty = lambda critic, x: jnp.sum(jax.grad(lambda x: jnp.sum(critic(x)))(x) ** 2)
    return fp8.nnx.value_and_grad(penalty)(linear(), X)


def test_a_gradient_inside_the_loss():
    messages.check(
        Message(
            fp8.FP8StateError,
            penalized,
            "If the loss takes a gradient inside",
            "no second derivative",
            "recipes.identity()",
        )
    )


def test_plugs_can_be_hashed():
    layers = [linear() for _ in range(2)]
    assert len({layer.dot_general for layer in layers}) == 2
    hash(nn.Dense(4, dot_general=layers[0].dot_general))


OTHER_PLUGS = {
    "dot_general=op": Message(
        TypeError,
        lambda: nnx.Linear(8, 4, dot_general=FP8EinsumOp(DELAYED), rngs=nnx.Rngs(0))(X),
        "the first argument of FP8EinsumOp is an array",
        "an equation is needed",
        "dot_general=FP8DotGeneral(recipe)",
    ),
    "einsum_op=plug": Message(
        TypeError,
        lambda: nnx.Einsum("bd,dk->bk", (8, 4), einsum_op=FP8DotGeneral(DELAYED), rngs=nnx.Rngs(0))(
            X
        ),
        "the first argument of FP8DotGeneral is an equation",
        "an array is needed",
        "einsum_op=FP8EinsumOp(recipe)",
    ),
}


@pytest.mark.parametrize("name", OTHER_PLUGS)
def test_the_other_kind_of_plug(name):
    messages.check(OTHER_PLUGS[name])


def test_a_plug_without_state_goes_into_jnp_einsum():
    plug = FP8DotGeneral(fp8.recipes.current())
    y = jnp.einsum("bd,kd->bk", X, X, _dot_general=plug)
    assert jnp.array_equal(y, fp8.einsum("bd,kd->bk", X, X, recipe=plug.recipe))


def test_a_plug_with_state_does_not():
    """jax compiles `jnp.einsum` once for equal static arguments, and would keep the state of the
    first call.
    """
    messages.check(
        Message(
            fp8.FP8StateError,
            lambda: jnp.einsum("bd,kd->bk", X, X, _dot_general=FP8DotGeneral(DELAYED)),
            "was passed as jnp.einsum(_dot_general=)",
            "would keep the state of the first call",
            "FP8EinsumOp(recipe).dot_general",
        )
    )


def test_a_gan_trains_with_a_frozen_critic(standard_promotion):
    """Both networks learn in their own steps, and each step leaves the other's states alone."""
    generator, critic = networks()
    optimizers = [
        nnx.Optimizer(network, optax.adam(1e-2), wrt=nnx.Param) for network in (generator, critic)
    ]

    @nnx.jit
    def step(generator, critic, generator_optimizer, critic_optimizer, real, z):
        score = lambda g, d: jnp.mean(d(g(z)))
        down, grads = fp8.nnx.value_and_grad(score)(generator, fp8.nnx.freeze(critic))
        generator_optimizer.update(generator, grads)
        margin = lambda d, g: jnp.mean(d(g(z))) - jnp.mean(d(real))
        up, grads = fp8.nnx.value_and_grad(margin)(critic, fp8.nnx.freeze(generator))
        critic_optimizer.update(critic, grads)
        return down, up

    real, z = jax.random.normal(jax.random.key(2), (2, 4, 8))
    for seen in (1, 2, 3):
        down, up = step(generator, critic, *optimizers, real, z)
        assert jnp.isfinite(down)
        assert jnp.isfinite(up)
        for network in (generator, critic):  # one commit in each step, not two
            state = network.up.dot_general.state.get_value()
            assert not state.frozen
            assert jnp.sum(state.amax_history[0] > 0) == seen


def test_freeze_shares_parameters_and_copies_states():
    _, critic = networks()
    frozen = fp8.nnx.freeze(critic)
    assert type(frozen) is Critic
    assert frozen.up.kernel is critic.up.kernel
    assert frozen.up.dot_general.state is not critic.up.dot_general.state
    assert frozen.up.dot_general.state.get_value().frozen
    assert not critic.up.dot_general.state.get_value().frozen
    assert jnp.array_equal(frozen(X), critic(X))
