"""A whole nnx training step.

Flax's optimizer, which leaves quantizer state alone, and state that is saved and restored.
"""

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.nnx import FP8Linear, FP8State

DELAYED = fp8.recipes.delayed(history_length=4)
X = jax.random.normal(jax.random.key(0), (3, 5, 8))


def square(model, x):
    return jnp.sum(jnp.square(model(x).astype(jnp.float32)))


def state_of(layer):
    (state,) = jax.tree.leaves(
        nnx.state(layer, FP8State), is_leaf=lambda n: isinstance(n, fp8.state.MatmulState)
    )
    return state


class MLP(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.up, self.down = (
            FP8Linear(8, 8, recipe=DELAYED, rngs=rngs),
            FP8Linear(8, 2, recipe=DELAYED, rngs=rngs),
        )

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


# One, or each trainer would compile a step of its own.
CHAIN = optax.chain(optax.clip_by_global_norm(1e-2), optax.adamw(1e-2, weight_decay=0.3))


def trainer():
    model = MLP()
    return model, nnx.Optimizer(model, CHAIN, wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, x):
    _, grads = fp8.nnx.value_and_grad(square)(model, x)
    optimizer.update(model, grads)


def run(model, optimizer, steps):
    for i in steps:
        train_step(model, optimizer, X * 2.0 ** (i % 4))


def test_stock_optimizer_does_not_touch_state(standard_promotion):
    model, optimizer = trainer()
    run(model, optimizer, range(3))
    np.testing.assert_allclose(
        state_of(model.up).amax_history[0], [0, *(jnp.max(jnp.abs(X)) * 2.0 ** np.arange(3))]
    )


@pytest.mark.parametrize("through", ["bytes", "orbax"])
def test_saved_and_restored_in_mid_window(through, tmp_path, standard_promotion):
    model, optimizer = trainer()
    run(model, optimizer, range(2))
    saved = nnx.to_pure_dict(nnx.state((model, optimizer)))
    fresh = trainer()
    like = nnx.state(fresh)
    if through == "bytes":
        loaded = flax.serialization.from_bytes(
            nnx.to_pure_dict(like), flax.serialization.to_bytes(saved)
        )
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "model", saved)
            checkpointer.wait_until_finished()
            loaded = checkpointer.restore(tmp_path / "model", nnx.to_pure_dict(like))
    nnx.replace_by_pure_dict(like, loaded)
    nnx.update(fresh, like)
    assert_same_bits(nnx.state(fresh), nnx.state((model, optimizer)))
    run(*fresh, range(2, 12))
    run(model, optimizer, range(2, 12))
    assert_same_bits(nnx.state(fresh), nnx.state((model, optimizer)))
