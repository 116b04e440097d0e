"""linen layers with `state_channel="gradient"`, in loops that know `jax.value_and_grad` only."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import messages
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from linen_made import made
from messages import Message
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.linen import (
    COLLECTION,
    FP8Dense,
    FP8DenseGeneral,
    FP8DotGeneral,
    FP8Einsum,
    FP8EinsumOp,
)

RECIPE = fp8.recipes.delayed(history_length=4)
K, B, L, STEPS = 8, 4, 3, 5
X = np.random.default_rng(0).normal(size=(STEPS, B, K)).astype(np.float32)
KEY = jax.random.key(0)


def dense(channel, **fields):
    return FP8Dense(K, recipe=RECIPE, state_channel=channel, **fields)


class Op(nn.Module):
    channel: str | None

    @nn.compact
    def __call__(self, x):
        w = self.param("w", nn.initializers.lecun_normal(), (K, K))
        return FP8EinsumOp(RECIPE, state_channel=self.channel)("bk,kn->bn", x, w)


class Block(nn.Module):
    channel: str | None

    @nn.compact
    def __call__(self, x, _=None):
        return jnp.tanh(dense(self.channel, name="up")(x)), None


class Scanned(nn.Module):
    channel: str | None
    remat: bool = False
    lifted: tuple = (("variable_axes", {"params": 0, COLLECTION: 0}),)

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block) if self.remat else Block
        scan = nn.scan(block, split_rngs={"params": True}, length=L, **dict(self.lifted))
        return scan(self.channel)(x, None)[0]


def sequential(channel):
    return nn.Sequential([dense(channel), nn.relu, nn.remat(FP8Dense)(
        1, recipe=RECIPE, state_channel=channel)])  # fmt: skip


class EachLayer(nn.Module):
    """One of each class, in one program."""

    channel: str | None

    @nn.compact
    def __call__(self, x):
        how = {"recipe": RECIPE, "state_channel": self.channel}
        x = FP8DenseGeneral((2, 4), **how)(Op(self.channel)(jnp.tanh(dense(self.channel)(x))))
        x = nn.Dense(K, dot_general_cls=FP8DotGeneral.using(RECIPE, state_channel=self.channel))(
            jnp.tanh(x.reshape(-1, K))
        )
        return FP8Einsum((K, 4), "bk,kn->bn", **how)(x)


MODELS = {
    "each layer": EachLayer,
    "dense, remat": sequential,
    "general": lambda c: FP8DenseGeneral((2, 4), recipe=RECIPE, state_channel=c),
    "einsum": lambda c: FP8Einsum((K, 4), "bk,kn->bn", recipe=RECIPE, state_channel=c),
    "plug": lambda c: nn.Dense(
        4, dot_general_cls=FP8DotGeneral.using(RECIPE, state_channel=c)
    ),
    "op": Op,
    "scan": Scanned,
    "scan, remat": lambda c: Scanned(c, remat=True),
    "vmap": lambda c: nn.vmap(
        FP8Dense, variable_axes={"params": 0, COLLECTION: 0}, split_rngs={"params": True},
        in_axes=None, axis_size=L,
    )(4, recipe=RECIPE, state_channel=c),
}  # fmt: skip


def states_in(tree):
    """All arrays of states but their fingerprints, which have a tag in one of the channels."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda n: isinstance(n, fp8.state.MatmulState))
    return [(n.scale, n.amax_history, n.nonfinite_steps) for n in nodes]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in ("each layer", "scan, remat") else pytest.mark.slow)
        for case in MODELS
    ],
)
def test_flax_s_train_state_trains_and_takes_the_steps_of_value_and_grad(case, standard_promotion):
    mine, theirs = (MODELS[case](channel) for channel in ("gradient", None))
    variables = made(theirs, X[0], recipe=RECIPE)
    assert jax.eval_shape(mine.init, KEY, X[0]) == jax.eval_shape(theirs.init, KEY, X[0])
    loss = lambda model: lambda tree, x: jnp.mean(jnp.square(model.apply(tree, x) - 1))
    of_params = lambda p, s, x: loss(theirs)({"params": p, COLLECTION: s}, x)

    def step(ts, x):  # knows nothing of FP8
        value, grads = jax.value_and_grad(loss(mine))(ts.params, x)
        return value, ts.apply_gradients(grads=grads)

    def their_step(ts, x):
        value, grads, state = fp8.value_and_grad(of_params)(
            ts.params["params"], ts.params[COLLECTION], x
        )
        return value, ts.apply_gradients(grads={"params": grads, COLLECTION: state})

    @jax.jit  # eagerly the moments of each leaf are programs
    def create(variables):
        how = {"params": variables, "tx": optax.adam(1e-2)}
        return [TrainState.create(apply_fn=model.apply, **how) for model in (mine, theirs)]

    @jax.jit  # one program, whose two parts share much
    def both(mine_ts, their_ts, x):
        return step(mine_ts, x), their_step(their_ts, x)

    mine_ts, their_ts = create(variables)
    for x in X:
        (value, mine_ts), (their_value, their_ts) = both(mine_ts, their_ts, x)
        assert_same_bits(value, their_value)
    assert_same_bits(mine_ts.params["params"], their_ts.params["params"])
    mine_states = mine_ts.params[COLLECTION]
    assert_same_bits(states_in(mine_states), states_in(their_ts.params[COLLECTION]))
    fp8.check_state(mine_states, like=variables[COLLECTION])
    assert all(np.all(np.asarray(scale) > 0) for scale, *_ in states_in(mine_states))


def grads_of(model):
    variables = jax.eval_shape(model.init, KEY, X[0])
    loss = lambda tree: jnp.sum(jnp.square(model.apply(tree, X[0])))
    return jax.eval_shape(jax.grad(loss), variables)


BROADCAST = (("variable_axes", {"params": 0}), ("variable_broadcast", COLLECTION))


class Tied(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = dense("gradient")
        return layer(layer(x))


MESSAGES = {
    "scan that shares the state": Message(
        fp8.FP8StateError,
        lambda: grads_of(Scanned("gradient", lifted=BROADCAST)),
        f"nn.scan(variable_broadcast={COLLECTION!r})",
        "JAX would add their states",
        f"variable_axes={{{COLLECTION!r}: 0}}",
    ),
    "a layer that is called twice": Message(
        fp8.FP8StateError,
        lambda: grads_of(Tied()),
        "is used twice in one loss",
        "JAX would add",
        "fp8.value_and_grad",
    ),
    "field of a layer": Message(
        ValueError, lambda: dense("grad"), "state_channel='grad'", "must be None", '"gradient"'
    ),
    "field of an op": Message(
        ValueError,
        lambda: FP8EinsumOp(RECIPE, state_channel="grad"),
        "state_channel='grad'",
        "must be None",
        '"gradient"',
    ),
    "option of a plug": Message(
        ValueError,
        lambda: FP8DotGeneral.using(RECIPE, state_channel="grad"),
        "state_channel='grad'",
        "must be None",
        '"gradient"',
    ),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_message(case):
    messages.check(MESSAGES[case])


def test_a_scan_that_shares_the_state_is_fine_in_the_other_channel():
    assert jax.eval_shape(Scanned(None, lifted=BROADCAST).init, KEY, X[0])
