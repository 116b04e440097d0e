"""States of several layers are exact along their first axis. Any other axis raises an error.

Ledgers once had the shape [..., R, BINS]. Then 3 layers that were stacked along axis 1 committed
layers as rows, without an error. Scales were up to 128 times too large or too small.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts.stacks import RECIPE, STEPS, WAYS, by_vmap, data, train, unrolled
from jax import lax

import jaxfp8 as fp8

# Default: as many layers as rows. `-m "slow or not slow"` runs 1 to 5.
LAYERS = [3, *(pytest.param(layers, marks=pytest.mark.slow) for layers in (1, 2, 4, 5))]


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("way", WAYS)
def test_along_the_first_axis(way, layers):
    scales, histories, losses = unrolled(layers, WAYS[way][1])
    state, got = train(way, layers, 0)
    np.testing.assert_array_equal(state.scale, scales)
    np.testing.assert_array_equal(state.amax_history, histories)
    np.testing.assert_array_equal(got, np.float32(losses))


# Each way with one of the axes.
REFUSED = [
    pytest.param(
        way, layers, axis, marks=() if (layers, axis) == (3, default) else pytest.mark.slow
    )
    for way, default in zip(WAYS, (1, -1, -2) * 2, strict=True)
    for layers in range(1, 6)
    for axis in (1, -1, -2)
]


# The matmul says what is wrong. If a mapped axis has two sizes, JAX says so first.
MISTAKES = r"stacked along leading axes|1024|state\.probe\.known|different leading axis sizes"


@pytest.mark.parametrize(("way", "layers", "axis"), REFUSED)
def test_along_another_axis(way, layers, axis):
    """No shape of a state tells three layers from three rows, and it is refused all the same."""
    with pytest.raises(ValueError, match=MISTAKES):
        train(way, layers, axis)


def test_the_matmul_names_the_axis_that_was_mapped():
    with pytest.raises(
        fp8.FP8StateError, match=r"ledger has shape \[3, 3\] in this call, not \[1024, 3\]"
    ):
        train("nn.scan", 3, 1)


@pytest.mark.parametrize("axis", [2, -3])
@pytest.mark.parametrize("way", WAYS)
def test_along_an_axis_that_a_scale_has_not(way, axis):
    """JAX and flax say so, each in its own way, when the states are made."""
    with pytest.raises((ValueError, TypeError, IndexError, AssertionError)):
        train(way, 3, axis)


@pytest.mark.parametrize(
    "axis", [0, *(pytest.param(axis, marks=pytest.mark.slow) for axis in (1, -2)), -1]
)
def test_a_value_and_grad_for_each_layer(axis):
    """Inside of vmap a state is one layer's again: whatever its axis was, it is right."""
    dot = lambda w, state, x, c: jnp.sum(fp8.dot(x, w, recipe=RECIPE, state=state) * c)
    step = jax.jit(
        jax.vmap(fp8.value_and_grad(dot), in_axes=(0, axis, 0, 0), out_axes=(0, 0, axis))
    )
    states, _ = by_vmap(3, axis)
    for i in range(STEPS):
        ws, x, c = data(3, False, i)
        _, _, states = step(ws, states, x, c)
    scales, histories, _ = unrolled(3, False)
    np.testing.assert_array_equal(np.moveaxis(states.scale, axis, 0), scales)
    np.testing.assert_array_equal(np.moveaxis(states.amax_history, axis, 0), histories)


@pytest.mark.parametrize("outer", [0, 1])
def test_two_leading_axes_in_either_order(outer):
    """Three layers in a scan, each of three experts.

    [layer, expert, row] and [expert, layer, row] are both right.
    """
    ws, x, c = data(3, False, 0)
    ws = np.stack([ws, 2 * ws, 4 * ws], axis=outer)  # the experts along `outer`
    one = fp8.init_state(RECIPE)
    states = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (3, 3, *leaf.shape)), one)

    def expert(ws, states, x):
        return lax.scan(
            lambda x, each: (fp8.dot(x, each[0], recipe=RECIPE, state=each[1]), None),
            x,
            (ws, states),
        )[0]

    loss = lambda ws, states, x, c: jnp.sum(
        jax.vmap(expert, in_axes=(outer, outer, 0))(ws, states, x) * c
    )
    state = jax.jit(fp8.value_and_grad(loss))(ws, states, x, c)[2]
    per_expert = [chain(np.take(ws, e, axis=outer), x[e], c[e]) for e in range(3)]
    np.testing.assert_array_equal(state.amax_history, np.stack(per_expert, axis=outer))


@jax.jit
def chain(ws, x, c):
    """The histories of three layers, one after the other."""
    states = [fp8.init_state(RECIPE) for _ in ws]

    def loss(ws, states, x, c):
        for w, state in zip(ws, states, strict=True):
            x = fp8.dot(x, w, recipe=RECIPE, state=state)
        return jnp.sum(x * c)

    states = fp8.value_and_grad(loss)(list(ws), states, x, c)[2]
    return jnp.stack([state.amax_history for state in states])
