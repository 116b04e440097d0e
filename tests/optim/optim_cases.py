"""Parameters, gradients and a stand-in for quantized weights, for all tests of this folder."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxfp8.optim import BFloat16Plus, Float16, Float32, _weights

KINDS = {
    "float32": Float32(),
    "bfloat16 + 16": BFloat16Plus(bits=16),
    "bfloat16 + 8": BFloat16Plus(bits=8),
    "float16": Float16(),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FakeWeight:
    """A float8 array and its scale, in the place of a quantized weight."""

    values: jax.Array  # float8_e4m3fn [...]
    scale: jax.Array  # float32 []

    @property
    def shape(self):
        return self.values.shape

    def dequantize(self):
        return self.values.astype(jnp.float32) * self.scale


def quantized(w, scale=None):
    """A FakeWeight of a bfloat16 array [...]. Without a scale it gets that of its amax."""
    w = w.astype(jnp.float32)
    scale = jnp.max(jnp.abs(w)) / 448 if scale is None else scale
    return FakeWeight((w / scale).astype(jnp.float8_e4m3fn), scale)


@pytest.fixture
def fake_weights(monkeypatch):
    """Makes FakeWeight a quantized weight."""
    monkeypatch.setattr(_weights, "is_weight", lambda node: isinstance(node, FakeWeight))
    monkeypatch.setattr(_weights, "value_of", lambda node: node.dequantize())
    monkeypatch.setattr(_weights, "rebuilt", lambda node, w, state: quantized(w, state))


def params32(seed=0):
    """Float32 parameters of three leaves, of which "scale" may stay in float32."""
    draw = np.random.default_rng(seed)
    return {
        "dense": {
            "kernel": jnp.asarray(draw.normal(size=(16, 8)) * 0.1, jnp.float32),
            "bias": jnp.asarray(draw.normal(size=(8,)) * 0.01, jnp.float32),
        },
        "scale": jnp.ones(8, jnp.float32),
    }


def gradient(params, seed, dtype=jnp.bfloat16):
    """Gradients like params, whose size varies from step to step."""
    draw = np.random.default_rng(seed)
    return jax.tree.map(
        lambda p: jnp.asarray(draw.normal(size=p.shape) * 10.0 ** draw.integers(-4, 1), dtype),
        params,
    )


@functools.cache
def jitted(tx):
    return jax.jit(functools.partial(step, tx), donate_argnums=(1, 2))


def step(tx, grads, opt_state, params):
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def train(tx, params, opt_state, steps, *, first=0, jit=True):
    """Steps with the gradients of seeds first, first + 1, ...

    Args:
      jit: whether a step is one program. In a program XLA may contract a product and a sum, which
        changes the last bit, and not always in the same places.
    """
    run = jitted(tx) if jit else functools.partial(step, tx)
    shapes = jax.tree.map(lambda x: np.empty(x.shape), params)
    for i in range(first, first + steps):
        params, opt_state = run(gradient(shapes, i), opt_state, params)
    return params, opt_state
