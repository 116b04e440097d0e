"""`state_channel="gradient"` on meshes of 8 devices: the bits of one device, or an error."""

import functools

import jax
import jax.numpy as jnp
import messages
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from messages import Message
from same_bits import assert_same_bits

import jaxfp8 as fp8

# Powers of two and integers, so that no sum rounds.
RECIPE = fp8.recipes.delayed(history_length=4, power_of_two=True)
K, B = 8, 16
DATA = P("data")


def integers(seed, *shape):
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(np.float32)


W, X, STATE = integers(0, K, K), integers(1, B, K), jax.device_get(fp8.init_state(RECIPE))


def loss(w, s, x, channel="gradient", **options):
    y = fp8.dot(x, w, recipe=RECIPE, state=s, state_channel=channel, **options)
    return jnp.sum(y * x)


def by_gradient(loss):
    return jax.value_and_grad(loss, argnums=(0, 1))


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((8,), ("data",), axis_types=(kind,))


def whole(kind):
    """Arrays of a global mesh."""
    with jax.set_mesh(mesh(kind)):
        place = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh(kind), spec))
        arguments = place(W, P()), place(STATE, P()), place(X, DATA)
        return jax.jit(by_gradient(loss))(*arguments)


def in_shard_map(function, check_vma, *arguments):
    specs = (P(), P(), DATA)
    mapped = jax.shard_map(
        function, mesh=mesh(), in_specs=specs, out_specs=P(), check_vma=check_vma
    )
    return jax.jit(mapped)(W, STATE, X)


def inside(w, s, x):
    value, grads = by_gradient(loss)(w, s, x)
    return lax.psum(value, "data"), grads


def inside_jit(w, s, x):
    return jax.jit(inside)(w, s, x)


def inside_without_types(w, s, x, reduce_axes=("data",)):
    named = functools.partial(loss, reduce_axes=reduce_axes)
    value, (grads, state) = by_gradient(named)(w, s, x)
    return lax.psum(value, "data"), (lax.psum(grads, "data"), state)


def averaged(w, s, x):
    """A data parallel loop that averages all gradients, the states included."""
    value, (grads, state) = inside_without_types(w, s, x)
    return value, (grads, lax.pmean(state, "data"))


def outside(check_vma, **options):
    """The gradient of a whole shard_map."""
    mapped = jax.shard_map(
        lambda w, s, x: lax.psum(loss(w, s, x, **options), "data"),
        mesh=mesh(), in_specs=(P(), P(), DATA), out_specs=P(), check_vma=check_vma,
    )  # fmt: skip
    return jax.jit(by_gradient(mapped))(W, STATE, X)


FORMS = {
    "auto": lambda: whole(AxisType.Auto),
    "explicit": lambda: whole(AxisType.Explicit),
    "inside, types": lambda: in_shard_map(inside, True),
    "inside, types, jit": lambda: in_shard_map(inside_jit, True),
    "inside, no types": lambda: in_shard_map(inside_without_types, False),
    "inside, averaged": lambda: in_shard_map(averaged, False),
    "outside, types": lambda: outside(check_vma=True),
}


@functools.cache
def on_one_device():
    return jax.jit(fp8.value_and_grad(functools.partial(loss, channel=None)))(W, STATE, X)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(form, marks=pytest.mark.slow if form == "inside, types, jit" else ())
        for form in FORMS
    ],
)
def test_a_step_on_a_mesh_is_that_of_value_and_grad_on_one_device(form):
    value, (grads, state) = FORMS[form]()
    one = on_one_device()
    mine = value, grads, state.scale, state.amax_history, state.nonfinite_steps
    theirs = *one[:2], one[2].scale, one[2].amax_history, one[2].nonfinite_steps
    assert_same_bits(jax.device_get(mine), jax.device_get(theirs))
    fp8.check_state(state, like=STATE)


def test_pipeline_stages_keep_their_own_states():
    stages = jax.make_mesh((2, 4), ("pipe", "data"), axis_types=(AxisType.Auto,) * 2)
    w, state = np.stack([W, 2 * W]), jax.tree.map(lambda leaf: np.stack([leaf] * 2), STATE)
    first = lambda tree: jax.tree.map(lambda leaf: leaf[0], tree)

    def run(differentiate, channel):
        def stage(w, s, x):
            value, *rest = differentiate(
                lambda w, s, x: loss(first(w), first(s), x, channel=channel)
            )(w, s, x)
            return lax.psum(value, ("pipe", "data")), jax.tree.leaves(rest)

        specs = (P("pipe"), P("pipe"), DATA)
        mapped = jax.shard_map(stage, mesh=stages, in_specs=specs, out_specs=(P(), P("pipe")))
        value, (grads, *leaves) = jax.jit(mapped)(w, state, X)
        return value, grads, leaves[:3]

    assert_same_bits(run(by_gradient, "gradient"), run(fp8.value_and_grad, None))


def test_without_types_the_gradient_of_a_shard_map_adds_states_and_the_next_step_shows_it():
    _, (_, state) = outside(check_vma=False, reduce_axes=("data",))
    with pytest.raises(fp8.FP8StateError, match="This looks like a sum of 8 states"):
        fp8.check_state(state, like=STATE)
    assert np.isnan(jax.jit(loss)(W, state, X))


MESSAGES = {
    "inside": Message(
        fp8.FP8StateError,
        lambda: in_shard_map(functools.partial(inside_without_types, reduce_axes=None), False),
        "inside shard_map(check_vma=False) or pmap over ('data',)",
        "types do not say",
        "reduce_axes= of this call or layer",
    ),
    "outside": Message(
        fp8.FP8StateError,
        lambda: outside(check_vma=False),
        "inside shard_map(check_vma=False) or pmap over ('data',)",
        "types do not say",
        "reduce_axes= of this call or layer",
    ),
}


@pytest.mark.parametrize("case", MESSAGES)
def test_message(case):
    messages.check(MESSAGES[case])
