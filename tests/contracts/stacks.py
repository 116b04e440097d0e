"""Six ways to stack layers along an axis, and the states that NumPy expects of them.

`unrolled` computes delayed scaling in NumPy, layer by layer. `scan` chains the layers, `vmap` runs
them beside each other. Data are small integers and scales are powers of two. So no sum rounds, and
every state is exact.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from flax import nnx
from jax import lax

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense
from jaxfp8.nnx import FP8Linear, FP8State

N, K, STEPS = 2, 4, 3
RECIPE = fp8.recipes.delayed(history_length=3, power_of_two=True)
FORMATS = {"x": "E4M3", "w": "E4M3", "g": "E5M2"}


def data(layers, chained, step):
    """Weights [L, K, K], x and c: [N, K] of a chain, [L, N, K] of layers beside each other.

    Larger in each step.
    """
    random = np.random.default_rng(layers)
    ws = random.integers(-3, 4, (layers, K, K)).astype(np.float32)
    shape = (N, K) if chained else (layers, N, K)
    x, c = (random.integers(1, 4, shape).astype(np.float32) * 2.0**step for _ in range(2))
    if not chained:  # every layer has amaxes of its own
        x = x * 8.0 ** np.arange(layers)[:, None, None]
    return ws, x.astype(np.float32), c.astype(np.float32)


# --------------------------------------------------------------------------------------- the oracle
class Layer:
    """One layer: its three rows, and the copies that a step makes."""

    def __init__(self):
        self.rows = {
            name: oracle.DelayedRow(fmt, 3, "max", 0, True) for name, fmt in FORMATS.items()
        }

    def quantize(self, name, value):
        """What a matmul reads of a tensor, in float64; its amax goes to `seen`."""
        fmt, scale = FORMATS[name], self.rows[name].scale
        self.seen[name] = float(np.max(np.abs(value)))
        if scale == 0:  # unset: the current amax
            scale = 1 / oracle.exact_multiplier(self.seen[name], fmt, power_of_two=True)
        codes = oracle.cast(np.float32(value), np.float32(1 / scale), fmt)
        return codes.view(oracle.DTYPE[fmt]).astype(np.float64) * scale

    def forward(self, x, w):
        self.seen = {}
        self.w = self.quantize("w", w)
        return self.quantize("x", x) @ self.w

    def backward(self, g):
        return self.quantize("g", g) @ self.w.T

    def commit(self):
        for name, row in self.rows.items():
            row.step(self.seen[name])


def unrolled(layers, chained):
    """Scales [L, R] and histories [L, R, H] after STEPS steps, and the losses."""
    stack, losses = [Layer() for _ in range(layers)], []
    for step in range(STEPS):
        ws, x, c = data(layers, chained, step)
        if chained:
            h, g = x, c
            for layer, w in zip(stack, ws, strict=True):
                h = layer.forward(h, w)
            for layer in reversed(stack):
                g = layer.backward(g)
            losses.append(np.sum(h * c))
        else:
            losses.append(
                sum(
                    np.sum(layer.forward(*each) * gradient)
                    for layer, gradient, *each in zip(stack, c, x, ws, strict=True)
                )
            )
            for layer, gradient in zip(stack, c, strict=True):
                layer.backward(gradient)
        for layer in stack:
            layer.commit()
    rows = [list(layer.rows.values()) for layer in stack]
    scales, histories = (
        [[getattr(r, name) for r in each] for each in rows] for name in ("scale", "history")
    )
    return np.float32(scales), np.float32(histories), losses


# ------------------------------------------------------------------------------------- the six ways
# Each takes the number of layers and the axis of their states; gives the states of before the first
# step, and forward(ws, states, x) -> [N, K] or [L, N, K].
def stacked_by_hand(layers, axis):
    states = [fp8.init_state(RECIPE) for _ in range(layers)]
    return jax.tree.map(lambda *leaves: jax.device_put(np.stack(leaves, axis)), *states)


def by_scan(layers, axis):
    def forward(ws, states, x):
        states = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, axis, 0), states)
        body = lambda x, each: (fp8.dot(x, each[0], recipe=RECIPE, state=each[1]), None)
        return lax.scan(body, x, (ws, states))[0]

    return stacked_by_hand(layers, axis), forward


def by_vmap(layers, axis):
    def forward(ws, states, x):
        dot = lambda w, state, x: fp8.dot(x, w, recipe=RECIPE, state=state)
        return jax.vmap(dot, in_axes=(0, axis, 0))(ws, states, x)

    return stacked_by_hand(layers, axis), forward


def by_linen(lifted, layers, axis, chained):
    model, x = lifted(), jnp.ones((N, K) if chained else (layers, N, K))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    structure = jax.tree.structure(variables["params"])
    apply = lambda ws, states, x: model.apply(
        {"params": structure.unflatten([ws]), COLLECTION: states}, x
    )
    return variables[COLLECTION], apply


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return FP8Dense(K, use_bias=False, recipe=RECIPE)(x), None


def by_linen_scan(layers, axis):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes = {"params": 0, COLLECTION: axis}
            return nn.scan(Dense, variable_axes=axes, length=layers, split_rngs={"params": True})()(
                x, None
            )[0]

    return by_linen(Model, layers, axis, True)


def by_linen_vmap(layers, axis):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes = {"params": 0, COLLECTION: axis}
            return nn.vmap(
                Dense, variable_axes=axes, split_rngs={"params": True}, in_axes=(0, None)
            )()(x, None)[0]

    return by_linen(Model, layers, axis, False)


def by_nnx(run, layers, axis):
    axes = nnx.StateAxes({FP8State: axis, ...: 0})

    @nnx.split_rngs(splits=layers)
    @functools.partial(nnx.vmap, in_axes=(0,), out_axes=axes)
    def make(rngs):
        return FP8Linear(K, K, use_bias=False, recipe=RECIPE, rngs=rngs)

    graph, params, states = nnx.split(make(nnx.Rngs(0)), nnx.Param, FP8State)
    structure = jax.tree.structure(params)

    def forward(ws, states, x):
        return run(axes, nnx.merge(graph, structure.unflatten([ws]), states), x)

    return states, forward


def by_nnx_scan(layers, axis):
    def run(axes, stack, x):
        call = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, axes), out_axes=nnx.Carry)
        return call(x, stack)

    return by_nnx(run, layers, axis)


def by_nnx_vmap(layers, axis):
    def run(axes, stack, x):
        return nnx.vmap(lambda layer, x: layer(x), in_axes=(axes, 0), out_axes=0)(stack, x)

    return by_nnx(run, layers, axis)


WAYS = {  # and whether its layers are chained
    "scan": (by_scan, True),
    "vmap": (by_vmap, False),
    "nn.scan": (by_linen_scan, True),
    "nn.vmap": (by_linen_vmap, False),
    "nnx.scan": (by_nnx_scan, True),
    "nnx.vmap": (by_nnx_vmap, False),
}


def train(way, layers, axis):
    """The one state, scales [L, R] and all, after STEPS steps, and the losses."""
    make, chained = WAYS[way]
    states, forward = make(layers, axis)

    @jax.jit
    def step(ws, states, x, c):
        return fp8.value_and_grad(lambda ws, states, x, c: jnp.sum(forward(ws, states, x) * c))(
            ws, states, x, c
        )

    losses = []
    for i in range(STEPS):
        loss, _, states = step(*data(layers, chained, i)[:1], states, *data(layers, chained, i)[1:])
        losses.append(float(loss))
    (state,) = jax.tree.leaves(states, is_leaf=lambda node: isinstance(node, fp8.state.MatmulState))
    return state, losses
