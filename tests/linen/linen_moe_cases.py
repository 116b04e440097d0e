"""Layers of experts of linen, and what they compute, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION

E, F, K = 8, 24, 32
IDENTITY = fp8.recipes.identity()
RECIPES = [
    fp8.recipes.delayed(), fp8.recipes.current(), fp8.recipes.rowwise(), fp8.recipes.blockwise(),
    fp8.recipes.mxfp8(), IDENTITY,
]  # fmt: skip


def tokens(*shape, seed=1):
    draw = np.random.default_rng(seed).standard_normal((*(shape or (8, 3)), K))
    return draw.astype(np.float32)


def mesh_of_four(kind=AxisType.Auto):
    return jax.make_mesh((4,), ("expert",), devices=jax.devices()[:4], axis_types=(kind,))


def wide(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float64), tree)


def swiglu(x, w_in, w_out, clamp):
    gate, linear = np.split(x @ w_in, 2, axis=-1)
    if clamp is not None:
        gate, linear = np.minimum(gate, clamp[0]), np.clip(linear, -clamp[1], clamp[1])
    return (gate / (1 + np.exp(-gate)) * linear) @ w_out


def reference(params, x, k, scores="softmax", normalized=True, clamp=None):
    """A loop over tokens and experts, in float64."""
    params, x = wide(params), wide(x)
    rows = []
    for token in x.reshape(-1, x.shape[-1]):
        logits = token @ params["router"]
        score = 1 / (1 + np.exp(-logits))
        if scores == "softmax":
            score = np.exp(logits - logits.max())
            score /= score.sum()
        chosen = np.argsort(-score)[:k]
        gates = score[chosen] / (score[chosen].sum() if normalized else 1)
        y = sum(
            gate * swiglu(token, *(params[w]["kernel"][e] for w in ("w_in", "w_out")), clamp)
            for gate, e in zip(gates, chosen, strict=True)
        )
        if "shared_in" in params:
            shared = (params[w]["kernel"] for w in ("shared_in", "shared_out"))
            y = y + swiglu(token, *shared, clamp)
        rows.append(y)
    return np.stack(rows).reshape(x.shape)


def loss_of(layer):
    def loss(params, state, x):
        y, stats = layer.apply({"params": params, COLLECTION: state}, x)
        weight = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        value = jnp.sum(y.astype(jnp.float32) * weight)
        return value + 0.1 * stats.load_balancing_loss + 0.01 * stats.z_loss, (y, stats)

    return loss


@functools.cache
def step_of(layer):
    """One program for all tests of an equal layer."""
    return jax.jit(fp8.value_and_grad(loss_of(layer), has_aux=True))


def run(layer, variables, x):
    step = step_of(layer)
    (_, (y, stats)), grads, state = step(variables["params"], variables.get(COLLECTION, {}), x)
    return y, stats, grads, state
