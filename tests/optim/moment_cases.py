"""Pairs of formats, parameters and gradients, for the tests of stored moments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from jaxfp8.optim import (
    FP8,
    BFloat16,
    ExpandedFP8,
    Float16,
    Int8,
)

PAIRS = {
    "fp8-lm": (FP8(), Float16()),
    "coat": (ExpandedFP8(), ExpandedFP8()),
    "int8": (Int8(), Int8()),
    "bfloat16": (BFloat16(), BFloat16()),
    "stochastic": (FP8(rounding="stochastic"), BFloat16("stochastic")),
}
# Every format, in three optimizers instead of five.
MIXED = {
    "fp8, int8": (FP8(), Int8()),
    "int8, expanded": (Int8(), ExpandedFP8()),
    "expanded, float16": (ExpandedFP8(), Float16()),
    "stochastic": PAIRS["stochastic"],
}
SHAPE = (32, 256)


def params():
    draw = np.random.default_rng(0)
    return {
        "w": jnp.asarray(draw.normal(size=SHAPE), jnp.float32),
        "b": jnp.asarray(draw.normal(size=(16,)), jnp.float32),
    }


def gradients(step, scale=1.0):
    draw = np.random.default_rng(step)
    return jax.tree.map(
        lambda x: jnp.asarray(scale * draw.normal(size=x.shape), jnp.float32), params()
    )


def train(tx, start, steps=3, state=None, first=0, update=None):
    """Steps op by op, or with a compiled `tx.update`."""
    update = update or tx.update
    state = tx.init(start) if state is None else state
    for i in range(first, first + steps):
        grads = {name: g for name, g in gradients(i).items() if name in start}
        updates, state = update(grads, state, start)
        start = optax.apply_updates(start, updates)
    return start, state
