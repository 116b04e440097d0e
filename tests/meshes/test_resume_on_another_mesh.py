"""A checkpoint that is restored on a mesh of another shape.

The same bits, and the step that would have come next.

Small integers, scales that are powers of two, and an optimizer that keeps integers, so that no sum
rounds on any mesh.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from meshes.layouts import LAYOUTS, N, make_mesh, on_mesh, specs_of, stack, unstack

import jaxfp8 as fp8

RECIPE = fp8.recipes.delayed(history_length=4, power_of_two=True)
STEPS = 2  # in mid-window


@functools.cache
def batch(step):
    """x and c, [N, N], twice as large in each step.

    The scales of earlier steps then saturate, so a lost state is noticed.
    """
    random = np.random.default_rng(step)
    return [(random.integers(-5, 6, (N, N)) * 2**step).astype(np.float32) for _ in range(2)]


def fresh():
    random = np.random.default_rng(99)
    ws = tuple(random.integers(-3, 4, (N, N)).astype(np.float32) for _ in range(2))
    return ws, [fp8.init_state(RECIPE) for _ in ws]


def train(step, ws, states, steps):
    """Descent by the sign of the gradient. The losses, the weights, the states."""
    losses = []
    for i in steps:
        x, c = batch(i)
        loss, (_, *grads), states = step((x, *ws), states, c)
        losses.append(float(loss))
        ws = tuple(w - np.sign(g) for w, g in zip(ws, grads, strict=True))
    return losses, ws, states


def placed(layout, mode, ws, states):
    """As a run on that mesh holds them."""
    (_, w_specs), state_spec, _ = specs_of(layout)
    if layout.stages:
        ws, states = stack(ws), stack(states)
    mesh = make_mesh(layout, mode)
    return jax.device_put(
        (ws, states), jax.tree.map(functools.partial(NamedSharding, mesh), (w_specs, state_spec))
    )


def save_and_restore(path, tree, like):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()
        types = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like
        )
        return checkpointer.restore(path, types)


# From where to where, each with its mode.
MOVES = {
    "tensor and sequence to fsdp": (("tensor and sequence", "auto"), ("fsdp", "types")),
    "fsdp to three axes": (("fsdp", "auto, shards"), ("data, fsdp and tensor", "explicit")),
    "three axes to data": (("data, fsdp and tensor", "no types"), ("data", "auto")),
    "a pipeline to fewer devices": (("data and pipeline", "types"), ("pipeline", "no types")),
}
QUICK = ("tensor and sequence to fsdp",)
MARKED = [pytest.param(move, marks=() if move in QUICK else (pytest.mark.slow,)) for move in MOVES]


@pytest.mark.parametrize("move", MARKED)
def test_resume(move, tmp_path):
    (there, here) = [(LAYOUTS[layout], mode) for layout, mode in MOVES[move]]
    step = on_mesh(*there, RECIPE)
    _, ws, states = train(step, *fresh(), range(STEPS))
    like = placed(*here, *jax.tree.map(jnp.zeros_like, (ws, states)))
    restored = save_and_restore(tmp_path / "checkpoint", placed(*there, ws, states), like)

    assert jax.tree.structure(restored) == jax.tree.structure(like)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, restored, like))
    got = (
        [unstack(part) for part in jax.device_get(restored)]
        if here[0].stages
        else jax.device_get(restored)
    )
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(got), jax.tree.leaves((ws, states)))

    # The steps that the first run would have taken; with a cold state they are other ones.
    want = train(step, ws, states, range(STEPS, 2 * STEPS))
    resumed = train(on_mesh(*here, RECIPE), *got, range(STEPS, 2 * STEPS))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(resumed), jax.tree.leaves(want))
    cold = train(step, ws, fresh()[1], range(STEPS, STEPS + 1))
    assert cold[0][0] != want[0][0]
