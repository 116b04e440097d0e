"""A scanned model, and its step with and without released layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from jaxfp8.optim import (
    FP8,
    BFloat16,
    BFloat16Plus,
    ExpandedFP8,
    Float16,
    Int8,
    adamw,
    with_master_weights,
    with_moment_formats,
)

L, D, F = 3, 8, 16


def _short(first, second):
    return adamw(2.0**-7, mu=first, nu=second)


TXS = {
    "adamw": optax.adamw(2.0**-7),
    "int8": _short(Int8(min_size=0), Int8(min_size=0)),
    "coat": _short(ExpandedFP8(min_size=0), ExpandedFP8(min_size=0)),
    "fp8-lm": _short(FP8(min_size=0), Float16()),
    "bfloat16": _short(BFloat16("stochastic"), BFloat16("stochastic")),
    "lion": with_moment_formats(optax.lion(2.0**-7), {"mu": Int8(min_size=0)}),
    "masters of 8 bits": with_master_weights(
        _short(Int8(8, min_size=0), Int8(8, min_size=0)), master=BFloat16Plus(bits=8)
    ),
    "masters of 16 bits": with_master_weights(optax.adamw(2.0**-7), master=BFloat16Plus()),
    "masters in float16": with_master_weights(optax.adamw(2.0**-7), master=Float16()),
}
# Each update is 2^-7 or -2^-7. It is a shorter program than that of Adam.
SIGNS = with_master_weights(
    with_moment_formats(optax.lion(2.0**-7), {"mu": Int8(8, min_size=0)}),
    master=BFloat16Plus(bits=8),
)


def stacked(seed=0):
    """bfloat16 matrices and a float32 bias of L layers."""
    draw = np.random.default_rng(seed)
    matrix = lambda *shape: jnp.asarray(draw.normal(size=(L, *shape)) * 0.2, jnp.bfloat16)
    return {
        "up": matrix(D, F),
        "b": jnp.asarray(np.zeros((L, F), np.float32)),
        "down": matrix(F, D),
    }


def inputs(seed):
    return jnp.asarray(np.random.default_rng(100 + seed).normal(size=(4, D)), jnp.float32)


def body(x, p):
    h = jnp.tanh(x @ p["up"].astype(jnp.float32) + p["b"])
    return x + h @ p["down"].astype(jnp.float32), None


def loss_of(scan, f, layers, x):
    return jnp.mean(scan(f, x, layers)[0] ** 2)


def released_step(stack, f, layers, x):
    run = _released(stack, f)
    loss, (layers, dx) = run(layers, x)
    return layers, dx, loss


def plain_step(tx, f, state, x):
    params, opt_state = state
    loss, (grads, dx) = _plain(f)(params, x)
    return updates_of(tx)(grads, opt_state, params), dx, loss


@functools.cache
def _released(stack, f):
    loss_fn = functools.partial(loss_of, stack.scan, f)
    return jax.jit(jax.value_and_grad(loss_fn, argnums=(0, 1)))


@functools.cache
def _plain(f):
    loss_fn = functools.partial(loss_of, jax.lax.scan, f)
    return jax.jit(jax.value_and_grad(loss_fn, argnums=(0, 1)))


@functools.cache
def updates_of(tx):
    def one(grads, opt_state, params):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(jax.vmap(one))
