"""Parameters, gradients and weights in FP8, for all tests of this folder."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxfp8 as fp8
from jaxfp8.ops._quantize_params import _quantize_weight
from jaxfp8.optim import BFloat16Plus, Float16, Float32
from jaxfp8.weights import WeightAxes

KINDS = {
    "float32": Float32(),
    "bfloat16 + 16": BFloat16Plus(bits=16),
    "bfloat16 + 8": BFloat16Plus(bits=8),
    "float16": Float16(),
}


ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, weight_decay=0.1))
BLOCKWISE = fp8.recipes.blockwise()


def bytes_of(tree):
    """Of arrays or of their types."""
    return sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def quantized(w, recipe=BLOCKWISE, state=None, *, primary=True):
    """A weight [K, N], in bfloat16, as a `QuantizedWeight`."""
    return _quantize_weight(
        w.astype(jnp.bfloat16), recipe, WeightAxes(), state=state, primary=primary
    )


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
