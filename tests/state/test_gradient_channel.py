"""`state_channel="gradient"` takes the same steps as `fp8.value_and_grad`, bit for bit."""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.state import _gradient_channel, in_gradient_channel
from jaxfp8.state._gradient_channel import _broken
from jaxfp8.state._identity import _UNIT

RECIPE = fp8.recipes.delayed(history_length=4)
K, B, L, STEPS = 8, 4, 3, 5
dot = functools.partial(fp8.dot, recipe=RECIPE)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def dense(dot, w, s, x):
    return dot(x, w, state=s)


def inner_jit(dot, w, s, x):
    return jax.jit(functools.partial(dense, dot))(w, s, x)


def remat(policy):
    def forward(dot, w, s, x):
        return jax.checkpoint(functools.partial(dense, dot), policy=policy)(w, s, x)

    return forward


def scan(dot, w, s, x):
    return lax.scan(lambda h, each: (jnp.tanh(dot(h, each[0], state=each[1])), None), x, (w, s))[0]


def scan_remat(dot, w, s, x):
    body = jax.checkpoint(lambda h, each: (jnp.tanh(dot(h, each[0], state=each[1])), None))
    return lax.scan(body, x, (w, s))[0]


def experts(dot, w, s, x):
    return jax.vmap(lambda w, s: dot(x, w, state=s))(w, s)


def experts_of_own_tokens(dot, w, s, x):
    xs = x[None] * jnp.float32([1, 2, 4])[:, None, None]
    return jax.vmap(lambda w, s, x: dot(x, w, state=s))(w, s, xs)


def examples(dot, w, s, x):
    """One state for all examples: it gets the maximum."""
    return jax.vmap(lambda x: dot(x, w, state=s))(x)


def examples_of_experts(dot, w, s, x):
    return jax.vmap(lambda x: experts(dot, w, s, x[None]))(x)


def cond(dot, w, s, x):
    """A state that each branch uses once."""
    return lax.cond(x[0, 0] > 0, lambda: dot(x, w, state=s), lambda: dot(2 * x, w, state=s))


ONE = {
    "dense": dense,
    "inner jit": inner_jit,
    "remat": remat(None),
    "remat, nothing": remat(jax.checkpoint_policies.nothing_saveable),
    "remat, everything": remat(jax.checkpoint_policies.everything_saveable),
    "remat, dots": remat(jax.checkpoint_policies.dots_saveable),
    "remat, residuals": remat(fp8.save_fp8_residuals()),
    "examples": examples,
    "cond": cond,
}
STACKED = {
    "scan": scan,
    "scan, remat": scan_remat,
    "experts": experts,
    "experts, own tokens": experts_of_own_tokens,
    "examples of experts": examples_of_experts,
}


def fresh(stacked):
    w, state = normal(0, L, K, K), fp8.init_state(RECIPE)
    if stacked:
        return w, jax.tree.map(lambda x: np.stack([x] * L), state)
    return w[0], state


def loss_of(forward, channel):
    of_channel = functools.partial(dot, state_channel=channel)
    return lambda w, s, x: jnp.sum(jnp.square(forward(of_channel, w, s, x)))


def by_gradient(forward, gradient=None):
    """A step with the signature of `fp8.value_and_grad`."""
    loss = loss_of(forward, "gradient")

    def step(w, s, x):
        value, (grads, state) = jax.value_and_grad(loss, argnums=(0, 1))(w, s, x)
        return value, grads, state

    return step


def run(step, w, state, steps=STEPS):
    taken = []
    for i in range(steps):
        loss, grads, state = step(w, state, normal(i, B, K) * np.float32(2.0**i))
        w = w - np.float32(2.0**-10) * np.clip(np.asarray(grads), -1, 1)
        taken.append((loss, grads, arrays(state)))
    return taken, state


def arrays(state):
    return state.scale, state.amax_history, state.nonfinite_steps


# The default rows have each way to hold and to use a state. A settled state changes the cast.
FEW = {"dense", "remat, residuals", "cond", "scan, remat", "examples of experts"}
SETTLED = {"dense"}


@pytest.mark.parametrize(
    ("form", "settled"),
    [
        pytest.param(
            form,
            settled,
            marks=() if form in (SETTLED if settled else FEW) else pytest.mark.slow,
            id=f"{form}-settled" if settled else form,
        )
        for form in (*ONE, *STACKED)
        for settled in (False, True)
    ],
)
def test_five_steps_are_those_of_value_and_grad(form, settled):
    forward, stacked = (ONE | STACKED)[form], form in STACKED
    theirs = jax.jit(fp8.value_and_grad(loss_of(forward, None)))
    mine = jax.jit(by_gradient(forward))
    start = fresh(stacked)
    if settled:
        start = start[0], fp8.settle(theirs(*start, normal(9, B, K))[2])
        assert start[1].settled
    expected, _ = run(theirs, *start)
    taken, state = run(mine, *start)
    assert_same_bits(taken, expected)
    assert jax.tree.structure(state) == jax.tree.structure(start[1])
    fp8.check_state(state, like=fresh(stacked)[1])
    # The tag is the only difference, and the other channel removes it.
    tag = (state.fingerprint - start[1].fingerprint) / _UNIT
    assert np.all((np.asarray(tag) >= 8) & (np.asarray(tag) <= 57))
    x = normal(7, B, K)
    back, there = theirs(start[0], state, x)[2], mine(start[0], state, x)[2]
    assert_same_bits(arrays(back), arrays(there))
    np.testing.assert_array_equal(back.fingerprint, start[1].fingerprint)


def test_without_jit_and_inside_a_compiled_loss():
    w, state = fresh(stacked=False)
    x = normal(1, B, K)
    loss = loss_of(dense, "gradient")
    eager = jax.grad(loss, argnums=(0, 1))(w, state, x)
    outer = jax.jit(jax.grad(loss, argnums=(0, 1)))(w, state, x)
    inner = jax.grad(jax.jit(loss), argnums=(0, 1))(w, state, x)
    assert_same_bits(eager, outer)
    assert_same_bits(inner, outer)


def test_uses_are_forgotten():
    """Ids of dead tracers are used again. A new state must not be taken for an old one."""
    w, state = fresh(stacked=False)
    x = normal(1, B, K)

    def run():
        gradient = jax.grad(loss_of(dense, "gradient"), argnums=(0, 1))
        jax.jit(gradient)(w, state, x)
        gradient(w, state, x)

    def remembered():
        gc.collect()
        return len(_gradient_channel._traced)

    gc.freeze()  # a look through all objects of the tests before takes seconds
    try:
        run()
        before = remembered()  # JAX keeps some traces of the first run
        for _ in range(3):
            run()
        assert remembered() <= before
    finally:
        gc.unfreeze()


def shared(fork):
    def forward(dot, w, s, x):
        first, second = fork(s)
        h = jnp.tanh(dot(x, w, state=first))
        return lax.cond(x[0, 0] > 0, lambda: dot(h, w, state=second), lambda: 2 * h)

    return forward


def test_a_state_that_is_forked_after_it_is_in_the_channel():
    mine = by_gradient(shared(lambda s: fp8.fork(in_gradient_channel(s))))
    theirs = fp8.value_and_grad(loss_of(shared(fp8.fork), None))
    assert_same_bits(
        run(jax.jit(mine), *fresh(stacked=False))[0],
        run(jax.jit(theirs), *fresh(stacked=False))[0],
    )


def test_several_uses_after_the_state_is_in_the_channel():
    """JAX adds their ledgers, as it does under `fp8.value_and_grad`."""

    def forward(prepare, dot, w, s, x):
        s = prepare(s)
        return lax.scan(lambda h, _: (jnp.tanh(dot(h, w, state=s)), None), x, None, length=3)[0]

    mine = by_gradient(functools.partial(forward, in_gradient_channel))
    theirs = fp8.value_and_grad(loss_of(functools.partial(forward, lambda s: s), None))
    assert_same_bits(
        run(jax.jit(mine), *fresh(stacked=False))[0],
        run(jax.jit(theirs), *fresh(stacked=False))[0],
    )


def test_examples_that_take_a_branch_share_the_maximum():
    """Under vmap each example brings a ledger of its own. The state is still one state."""

    def forward(prepare, dot, w, s, x):
        s = prepare(s)
        layer = lambda x: lax.cond(x[0] < 1, lambda: dot(x[None], w, state=s), lambda: x[None] @ w)
        return jax.vmap(layer)(x)

    mine = by_gradient(functools.partial(forward, in_gradient_channel))
    theirs = fp8.value_and_grad(loss_of(functools.partial(forward, lambda s: s), None))
    assert_same_bits(
        run(jax.jit(mine), *fresh(stacked=False))[0],
        run(jax.jit(theirs), *fresh(stacked=False))[0],
    )


def test_gradients_of_each_example_bring_the_state_of_all():
    w, state = fresh(stacked=False)
    x = normal(1, L, B, K) * jnp.float32([1, 2, 4])[:, None, None]
    _, grads, new = jax.jit(jax.vmap(by_gradient(dense), (None, None, 0)))(w, state, x)
    of_all = jax.vmap(fp8.value_and_grad(loss_of(dense, None)), (None, None, 0))
    _, expected, theirs = jax.jit(of_all)(w, state, x)
    assert_same_bits((grads, arrays(new)), (expected, arrays(theirs)))
    np.testing.assert_array_equal(new.amax_history, new.amax_history[:1].repeat(L, axis=0))


def test_a_frozen_state_returns_itself():
    w, state = fresh(stacked=False)
    step = jax.jit(by_gradient(dense))
    _, _, state = step(w, state, normal(1, B, K))
    frozen = fp8.freeze(state)
    _, grads, new = step(w, frozen, normal(2, B, K))
    assert_same_bits(new, frozen)
    assert new.frozen
    assert_same_bits(grads, step(w, state, normal(2, B, K))[1])


def test_evaluation_is_a_plain_call_and_may_use_a_state_twice():
    w, state = fresh(stacked=False)
    x = normal(1, B, K)
    mine, theirs = (
        jax.jit(lambda w, s, x, c=c: dot(dot(x, w, state=s, state_channel=c), w, state=s))
        for c in ("gradient", None)
    )
    assert_same_bits(mine(w, state, x), theirs(w, state, x))
    twice = jax.jit(lambda w, s, x: [loss_of(dense, "gradient")(w, s, y) for y in (x, 2 * x)])
    assert np.all(np.isfinite(twice(w, state, x)))


def test_a_part_of_the_loss_that_is_not_trained():
    """The cure of two messages: freeze the state, and stop its gradient."""
    w, state = fresh(stacked=False)
    x = normal(1, B, K)

    def loss(w, s, x):
        fixed = jax.lax.stop_gradient(fp8.freeze(s))
        y = dot(x, w, state=s, state_channel="gradient")
        return jnp.sum(jnp.square(y - dot(2 * x, w, state=fixed, state_channel="gradient")))

    new = jax.jit(jax.grad(loss, argnums=(0, 1)))(w, state, x)[1]
    alone = jax.jit(by_gradient(dense))(w, state, x)[2]
    assert_same_bits(arrays(new)[1][:2], arrays(alone)[1][:2])
    fp8.check_state(new, like=state)


def test_a_non_finite_step_is_counted():
    w, state = fresh(stacked=False)
    step = jax.jit(by_gradient(dense))
    _, _, state = step(w, state, normal(1, B, K))
    bad = normal(1, B, K)
    bad[0, 0] = np.inf
    _, _, new = step(w, state, bad)
    np.testing.assert_array_equal(new.nonfinite_steps, [1, 0, 1])
    assert np.isfinite(step(w, new, normal(2, B, K))[0])


@pytest.mark.parametrize(
    "name", ["current", pytest.param("rowwise", marks=pytest.mark.slow), "identity"]
)
def test_recipes_without_state_take_the_option(name):
    recipe = fp8.recipes.get(name)
    x, w = normal(1, B, K), normal(2, K, K)
    mine, theirs = (
        jax.jit(jax.grad(lambda w, c=c: jnp.sum(fp8.dot(x, w, recipe=recipe, state_channel=c))))(w)
        for c in ("gradient", None)
    )
    assert_same_bits(mine, theirs)
    assert in_gradient_channel(fp8.init_state(recipe)) == ()


def test_einsum_and_dot_general_take_the_option():
    w, state = fresh(stacked=False)
    x = normal(1, B, K)
    axes = (((1,), (0,)), ((), ()))
    for matmul in (
        lambda s: fp8.einsum("bk,kn->bn", x, w, recipe=RECIPE, state=s, state_channel="gradient"),
        lambda s: fp8.dot_general(x, w, axes, recipe=RECIPE, state=s, state_channel="gradient"),
    ):
        new = jax.jit(jax.grad(lambda s, matmul=matmul: jnp.sum(matmul(s))))(state)
        assert np.all(np.asarray(new.scale) > 0)


def test_a_commit_removes_the_tag():
    """A tag belongs to the arrays that the channel returned, not to those of a later commit."""
    w, state = fresh(stacked=False)
    _, _, state = jax.jit(by_gradient(dense))(w, state, normal(1, B, K))
    run = jax.jit(fp8.value_and_grad(loss_of(dense, None), commit=False))
    _, _, seen = run(w, state, normal(2, B, K))
    for commit in (jax.jit(fp8.commit), fp8.commit):  # without jit NumPy looks at the tag
        new = commit(state, seen)
        np.testing.assert_array_equal(new.fingerprint, fp8.init_state(RECIPE).fingerprint)
        fp8.check_state(new, like=state)


def test_a_layer_of_a_stack_is_broken_alone():
    _, stack = fresh(stacked=True)
    stack.fingerprint[1] *= 2  # that of no row
    np.testing.assert_array_equal(_broken(stack), [[n == 1] for n in range(L)])
