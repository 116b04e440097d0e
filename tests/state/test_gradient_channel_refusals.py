"""What `state_channel="gradient"` refuses: with an error while tracing, or with NaN one step later.

JAX adds cotangents. A sum, a mean or a multiple of states must never be taken for a state.
"""

import functools

import jax
import jax.numpy as jnp
import messages
import numpy as np
import pytest
from jax import lax
from messages import Message

import jaxfp8 as fp8
from jaxfp8.state import in_gradient_channel

RECIPE = fp8.recipes.delayed(history_length=4)
K, B, L = 8, 4, 3
dot = functools.partial(fp8.dot, recipe=RECIPE, state_channel="gradient")
W = jnp.asarray(np.random.default_rng(0).normal(size=(K, K)), jnp.float32)
X = jnp.asarray(np.random.default_rng(1).normal(size=(B, K)), jnp.float32)
STATE = fp8.init_state(RECIPE)


def once(w, s, x):
    return dot(x, w, state=s)


def twice(w, s, x):
    return dot(dot(x, w, state=s), w, state=s)


def loss_of(forward):
    return lambda w, s, x: jnp.sum(jnp.square(forward(w, s, x)))


def grad(forward, argnums=(0, 1)):
    return jax.grad(loss_of(forward), argnums=argnums)


STEP = jax.jit(jax.value_and_grad(loss_of(once), argnums=(0, 1)))
WARM = STEP(W, STATE, X)[1][1]


def both_channels():
    return fp8.value_and_grad(loss_of(once))(W, STATE, X)


def second_derivative():
    inner = lambda w, s: jnp.sum(jnp.square(grad(once)(w, s, X)[0]))
    return jax.grad(inner, argnums=(0, 1))(W, STATE)


USED_TWICE = ('state_channel="gradient" is used twice', "JAX would add", "fp8.value_and_grad")
LOST = ("not with respect to its state", "would be lost", "jax.value_and_grad(loss)(variables)")
MESSAGES = {
    "value": Message(
        ValueError,
        lambda: fp8.dot(X, W, recipe=RECIPE, state=STATE, state_channel="grad"),
        "state_channel='grad'",
        "must be None",
        '"gradient"',
    ),
    "value, recipe without state": Message(
        ValueError,
        lambda: fp8.dot(X, W, recipe=fp8.recipes.current(), state_channel=True),
        "state_channel=True",
        "must be None",
        '"gradient"',
    ),
    "both channels": Message(
        fp8.FP8StateError,
        both_channels,
        "fp8.value_and_grad collects its state",
        "leaves the backward pass by one channel",
        "Drop state_channel, or use jax.value_and_grad",
    ),
    "both channels, frozen": Message(
        fp8.FP8StateError,
        lambda: fp8.value_and_grad(loss_of(once))(W, fp8.freeze(STATE), X),
        'state_channel="gradient"',
        "leaves the backward pass by one channel",
        "Drop state_channel, or use jax.value_and_grad",
    ),
    "parameters only": Message(
        fp8.FP8StateError, lambda: jax.jit(grad(once, argnums=0))(W, STATE, X), *LOST
    ),
    "parameters only, eager": Message(
        fp8.FP8StateError, lambda: grad(once, argnums=0)(W, STATE, X), *LOST
    ),
    "stop_gradient": Message(
        fp8.FP8StateError,
        lambda: grad(lambda w, s, x: once(w, lax.stop_gradient(s), x))(W, STATE, X),
        *LOST,
    ),
    "twice, jit": Message(
        fp8.FP8StateError, lambda: jax.jit(grad(twice))(W, STATE, X), *USED_TWICE
    ),
    "twice, eager": Message(fp8.FP8StateError, lambda: grad(twice)(W, STATE, X), *USED_TWICE),
    "twice, inside jit": Message(
        fp8.FP8StateError, lambda: grad(jax.jit(twice))(W, STATE, X), *USED_TWICE
    ),
    "twice, remat": Message(
        fp8.FP8StateError, lambda: grad(jax.checkpoint(twice))(W, STATE, X), *USED_TWICE
    ),
    "twice, in the channel": Message(
        fp8.FP8StateError,
        lambda: grad(lambda w, s, x: once(w, in_gradient_channel(s), x) + once(w, s, x))(
            W, STATE, X
        ),
        *USED_TWICE,
    ),
    "twice, once frozen": Message(
        fp8.FP8StateError,
        lambda: grad(lambda w, s, x: once(w, s, x) + once(w, fp8.freeze(s), x))(W, STATE, X),
        "is used twice",
        "JAX would add",
        "jax.lax.stop_gradient(fp8.freeze(state))",
    ),
    "reduce_axes, one name": Message(
        TypeError,
        lambda: in_gradient_channel(STATE, reduce_axes="data"),
        "reduce_axes='data'",
        "must be a sequence",
        "('data',)",
    ),
    "second derivative": Message(
        fp8.FP8StateError,
        second_derivative,
        "FP8 matmuls",
        "no second derivative",
        "fp8.recipes.identity()",
    ),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_message(case):
    messages.check(MESSAGES[case])


def shared_by_a_scan(w, s, x):
    return lax.scan(lambda h, _: (jnp.tanh(dot(h, w, state=s)), None), x, None, length=L)[0]


def two_remats(w, s, x):
    return jax.checkpoint(once)(w, s, x) + jax.checkpoint(once)(w, s, 3 * x)


def one_compiled_function(w, s, x):
    layer = jax.jit(once)
    return layer(w, s, layer(w, s, x))


def examples_in_branches(w, s, x):
    """JAX gives each example a copy of the state if it maps the condition."""
    branch = lambda x: lax.cond(x[0] < 9, lambda: once(w, s, x[None]), lambda: x[None] @ w)
    return jax.vmap(branch)(x)


def step_of(forward):
    return jax.jit(jax.grad(loss_of(forward), argnums=1))


def of_microbatches(combine):
    def step(w, s, x):
        return jax.tree.map(combine, *(STEP(w, s, x * k)[1][1] for k in (1.0, 1.37)))

    return step


SUMS = {
    "scan": step_of(shared_by_a_scan),
    "two remats": step_of(two_remats),
    "one compiled function": jax.grad(loss_of(one_compiled_function), argnums=1),
    "examples in branches": step_of(examples_in_branches),
    "microbatches, summed": of_microbatches(jnp.add),
    "microbatches, averaged": of_microbatches(lambda a, b: (a + b) / 2),
}
OTHERS = {
    "moving average": lambda w, s, x: jax.tree.map(
        lambda old, new: 0.9 * old + 0.1 * new, s, STEP(w, s, 1.37 * x)[1][1]
    ),
    "loss scale": lambda w, s, x: jax.tree.map(lambda leaf: leaf / 1024, STEP(w, s, x)[1][1]),
    "clip": lambda w, s, x: jax.tree.map(lambda leaf: leaf * 0.999, STEP(w, s, x)[1][1]),
    "weight decay": lambda w, s, x: jax.tree.map(lambda leaf: leaf * (1 - 1e-6), s),
    "bfloat16": lambda w, s, x: jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), STEP(w, s, x)[1][1]
    ),
}


@pytest.mark.parametrize("case", [*SUMS, *OTHERS])
def test_a_state_of_no_run_gives_nan_in_the_next_step(case):
    bad = (SUMS | OTHERS)[case](W, WARM, X)
    loss, (grads, kept) = STEP(W, bad, X)
    assert np.isnan(loss)
    assert np.all(np.isnan(grads))
    # The state stays as it is, so that its values show what happened.
    np.testing.assert_array_equal(kept.fingerprint, bad.fingerprint)
    np.testing.assert_array_equal(kept.amax_history, bad.amax_history)
    assert np.isnan(STEP(W, kept, X)[0])
    says = "takes one backward pass per optimizer step" if case in SUMS else "fp8.check_state"
    for check in (
        lambda: fp8.check_state(kept, like=STATE),
        lambda: fp8.dot(X, W, recipe=RECIPE, state=kept),  # eager
    ):
        with pytest.raises(fp8.FP8StateError, match=says) as raised:
            check()
        if case in SUMS:
            assert "This looks like a" in str(raised.value)
            assert "fp8.value_and_grad(commit=False)" in str(raised.value)
    with pytest.warns(UserWarning, match="were unset"):
        repaired = fp8.check_state(kept, like=STATE, repair=True)
    assert np.isfinite(STEP(W, repaired, X)[0])


def test_a_stacked_layer_that_is_no_state_spoils_its_own_layer_only():
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), WARM)
    y = jax.vmap(lambda s: once(W, s, X))(stack)
    assert np.all(np.isfinite(y[0]))
    assert np.all(np.isnan(y[1]))


def test_one_bad_row_of_the_gradient_is_enough():
    """The row of g does not reach the loss of its step. All rows of the matmul become NaN."""
    bad = jax.tree.map(lambda leaf: leaf.at[2].multiply(2), WARM)
    assert np.isnan(STEP(W, bad, X)[0])


def test_a_layer_that_no_loss_used_starts_anew():
    """JAX gives zeros for it, and the loop overwrites the state with them."""
    unused = jax.grad(lambda s: jnp.sum(X) + 0 * jnp.sum(s.scale))(WARM)
    zeros = jax.tree.map(jnp.zeros_like, unused)
    loss, (_, new) = STEP(W, zeros, X)
    expected, (_, fresh) = STEP(W, STATE, X)
    assert loss == expected
    np.testing.assert_array_equal(new.scale, fresh.scale)
    np.testing.assert_array_equal(new.fingerprint, fresh.fingerprint)


def test_states_of_equal_gradients_may_be_averaged():
    """Data parallel loops average the equal states of all devices. The mean may round."""
    for devices in (2, 3, 7, 8):
        mean = jax.tree.map(lambda leaf, n=devices: sum([leaf] * n) / n, WARM)
        assert np.isfinite(STEP(W, mean, X)[0])
        fp8.check_state(mean, like=STATE)
