"""nnx layers with `state_channel="gradient"`, and MaxText's way to call a linen plug."""

import jax
import jax.numpy as jnp
import messages
import numpy as np
import pytest
from flax import nnx
from messages import Message
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION
from jaxfp8.nnx import FP8DotGeneral, FP8Einsum, FP8EinsumOp, FP8Linear, FP8LinearGeneral, FP8State

RECIPE = fp8.recipes.delayed(history_length=4)
K, B, STEPS, RATE = 8, 4, 5, 0.0625
X = jnp.asarray(np.random.default_rng(0).normal(size=(STEPS, B, K)), jnp.float32)
AXES = (((1,), (0,)), ((), ()))

LAYERS = {
    "linear": lambda c, r: FP8Linear(K, K, recipe=RECIPE, state_channel=c, rngs=r),
    "general": lambda c, r: FP8LinearGeneral(K, (2, 4), recipe=RECIPE, state_channel=c, rngs=r),
    "einsum": lambda c, r: FP8Einsum("bk,kn->bn", (K, K), recipe=RECIPE, state_channel=c, rngs=r),
    "plug": lambda c, r: nnx.Linear(
        K, K, dot_general=FP8DotGeneral(RECIPE, state_channel=c), rngs=r
    ),
    "op": lambda c, r: nnx.Einsum(
        "bk,kn->bn", (K, K), einsum_op=FP8EinsumOp(RECIPE, state_channel=c), rngs=r
    ),
}


def square(model, x):
    return jnp.mean(jnp.square(model(x) - 1))


def arrays(tree):
    nodes = jax.tree.leaves(tree, is_leaf=lambda n: isinstance(n, fp8.state.MatmulState))
    states = [n for n in nodes if isinstance(n, fp8.state.MatmulState)]
    assert states
    return [(n.scale, n.amax_history, n.nonfinite_steps) for n in states]


descend = jax.jit(lambda params, grads: jax.tree.map(lambda p, g: p - RATE * g, params, grads))


def run(model, step):
    seen = []
    for x in X:
        loss, grads = step(model, x)
        params = nnx.state(model, nnx.Param)
        nnx.update(model, descend(params, grads))
        seen.append((loss, nnx.to_pure_dict(nnx.state(model, nnx.Param)), arrays(nnx.state(model))))
    return seen


# The linear layer and the einsum hold the plug and the op.
@pytest.mark.parametrize(
    "case",
    [pytest.param(n, marks=pytest.mark.slow if n in ("plug", "op") else ()) for n in LAYERS],
)
def test_nnx_grad_returns_the_next_states(case):
    mine, theirs = (LAYERS[case](channel, nnx.Rngs(0)) for channel in ("gradient", None))
    both = nnx.DiffState(0, nnx.Any(nnx.Param, FP8State))

    @nnx.jit
    def step(model, x):
        loss, grads = nnx.value_and_grad(square, argnums=both)(model, x)
        params, states = nnx.split_state(grads, nnx.Param, FP8State)
        nnx.update(model, states)
        return loss, params

    their_step = nnx.jit(fp8.nnx.value_and_grad(square))
    assert_same_bits(run(mine, step), run(theirs, their_step))


class Dense(nnx.Module):
    """A dense layer as MaxText writes it: its matmul is a linen module."""

    def __init__(self, channel, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (K, K)))
        plug = fp8.linen.FP8DotGeneral.using(RECIPE, state_channel=channel)()
        self.quant = nnx.bridge.ToNNX(plug, rngs=rngs)
        self.quant.lazy_init(jnp.ones((1, K)), self.kernel[...], AXES, mutable=True)

    def __call__(self, x):
        return self.quant(x, self.kernel[...], AXES)


OVERWRITTEN = nnx.variable_type_from_name(COLLECTION, allow_register=True)


def test_a_linen_plug_in_an_nnx_layer_whose_loop_overwrites_the_state():
    graphdef, variables, rest = nnx.split(
        Dense("gradient", nnx.Rngs(0)), nnx.Any(nnx.Param, OVERWRITTEN), ...
    )

    @jax.jit
    def step(variables, x):
        loss = lambda variables: square(nnx.merge(graphdef, variables, rest, copy=True), x)
        value, grads = jax.value_and_grad(loss)(variables)
        params, _ = nnx.split_state(variables, nnx.Param, OVERWRITTEN)
        grads, states = nnx.split_state(grads, nnx.Param, OVERWRITTEN)
        return value, nnx.merge_state(descend(params, grads), states)

    their_step = nnx.jit(fp8.nnx.value_and_grad(square))
    expected = run(Dense(None, nnx.Rngs(0)), their_step)
    for x, (loss, _, states) in zip(X, expected, strict=True):
        value, variables = step(variables, x)
        assert_same_bits((value, arrays(variables)), (loss, states))
    params = nnx.filter_state(variables, nnx.Param)
    assert_same_bits(jax.tree.leaves(params), jax.tree.leaves(expected[-1][1]))


MESSAGES = {
    "both channels": Message(
        fp8.FP8StateError,
        lambda: fp8.nnx.value_and_grad(square)(LAYERS["linear"]("gradient", nnx.Rngs(0)), X[0]),
        "fp8.value_and_grad collects its state",
        "by one channel",
        "Drop state_channel",
    ),
    "parameters only": Message(
        fp8.FP8StateError,
        lambda: nnx.grad(square)(LAYERS["linear"]("gradient", nnx.Rngs(0)), X[0]),
        "not with respect to its state",
        "would be lost",
        "jax.value_and_grad(loss)(variables)",
    ),
    "value": Message(
        ValueError,
        lambda: LAYERS["linear"]("grad", nnx.Rngs(0)),
        "state_channel='grad'",
        "must be None",
        '"gradient"',
    ),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_message(case):
    messages.check(MESSAGES[case])
