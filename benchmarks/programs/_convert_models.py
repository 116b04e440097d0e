"""The models that `convert_time.py` converts, and the measurement of one of them.

A process measures one model, under one recipe. Each model has blocks of attention and an MLP. Those
of "flax" are made of flax's layers. Those of "own" hold parameters, and multiply by them.

Letters in shapes: B sequences, T tokens, D features, H heads, K features of a head, F hidden
features.
"""

import hashlib
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # no effect after jax is imported

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import jaxfp8 as fp8

BATCH, TOKENS, FEATURES, HEADS = 2, 16, 32, 2
HIDDEN = 4 * FEATURES
RECIPES = {"delayed": fp8.recipes.delayed, "current": fp8.recipes.current}
SHAPES = {
    **dict.fromkeys("qkv", (FEATURES, HEADS, FEATURES // HEADS)),
    "o": (HEADS, FEATURES // HEADS, FEATURES),
    "up": (FEATURES, HIDDEN),
    "down": (HIDDEN, FEATURES),
}
"""The weights of a block that multiplies by parameters of its own."""


def own_block(w: dict[str, jax.Array], x: jax.Array, norm: Callable[..., Any]) -> jax.Array:
    """A block of weights `w`. `norm(0)` is the first norm, `norm(1)` the second."""
    z = norm(0)(x)
    q, k, v = (jnp.einsum("btd,dhk->bthk", z, w[name]) for name in "qkv")
    x = x + jnp.einsum("bthk,hkd->btd", nn.dot_product_attention(q, k, v), w["o"])
    hidden = nn.gelu(jnp.einsum("btd,df->btf", norm(1)(x), w["up"]))
    return x + jnp.einsum("btf,fd->btd", hidden, w["down"])


# Models of linen.


class FlaxBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x))
        return x + nn.Dense(FEATURES)(nn.gelu(nn.Dense(HIDDEN)(nn.LayerNorm()(x))))


class OwnBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.normal(0.1)
        w = {name: self.param(name, init, shape) for name, shape in SHAPES.items()}
        norms = [nn.LayerNorm(), nn.LayerNorm()]
        return own_block(w, x, norms.__getitem__)


class Stack(nn.Module):
    block: type[nn.Module]
    blocks: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.blocks):
            x = self.block()(x)
        return x


# The same models of nnx.


class FlaxBlockNNX(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(FEATURES, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, rngs=rngs)
        self.up = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, FEATURES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class OwnBlockNNX(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(FEATURES, rngs=rngs) for _ in range(2)])
        for name, shape in SHAPES.items():
            setattr(self, name, nnx.Param(0.1 * jax.random.normal(rngs.params(), shape)))

    def __call__(self, x: jax.Array) -> jax.Array:
        w = {name: getattr(self, name)[...] for name in SHAPES}
        return own_block(w, x, self.norms.__getitem__)


class StackNNX(nnx.Module):
    def __init__(self, block: Callable[..., Any], blocks: int, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([block(rngs) for _ in range(blocks)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


BLOCKS: dict[str, tuple[Any, Any]] = {
    "flax": (FlaxBlock, FlaxBlockNNX), "own": (OwnBlock, OwnBlockNNX)
}  # fmt: skip


def model_of(library: str, code: str, blocks: int) -> Any:
    of_linen, of_nnx = BLOCKS[code]
    if library == "linen":
        return Stack(of_linen, blocks)
    return nnx.eval_shape(lambda: StackNNX(of_nnx, blocks, nnx.Rngs(0)))


# A train step of SGD, which adds little to the program.


def loss_of(y: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.mean((y - target) ** 2)


def learn(p: jax.Array, g: jax.Array) -> jax.Array:
    return p - 1e-3 * g


def linen_step(model: Any, converted: bool, x: Any) -> Callable[[], Any]:
    """A call that traces the step of a linen model. Its states are settled."""
    state = dict(jax.eval_shape(model.init, jax.random.key(0), x))
    params = state.pop("params")
    state = {name: fp8.settle(of) for name, of in state.items()}

    def loss_fn(params: Any, state: Any, x: jax.Array, target: jax.Array) -> jax.Array:
        return loss_of(model.apply({"params": params, **state}, x), target)

    def step(params: Any, state: Any, x: jax.Array, target: jax.Array) -> Any:
        if converted:
            loss, grads, state = fp8.value_and_grad(loss_fn)(params, state, x, target)
        else:
            loss, grads = jax.value_and_grad(loss_fn)(params, state, x, target)
        return jax.tree.map(learn, params, grads), state, loss

    return lambda: jax.jit(step).trace(params, state, x, x)


def nnx_step(model: Any, converted: bool, x: Any) -> Callable[[], Any]:
    """The same for an nnx model, whose Variables are types."""
    fp8.nnx.settle(model)
    grads_of: Any = fp8.nnx.value_and_grad if converted else nnx.value_and_grad
    graphdef, state = nnx.split(model)

    def step(state: Any, x: jax.Array, target: jax.Array) -> Any:
        model = nnx.merge(graphdef, state)
        loss, grads = grads_of(lambda model, x, target: loss_of(model(x), target))(model, x, target)
        nnx.update(model, jax.tree.map(learn, nnx.state(model, nnx.Param), grads))
        return nnx.state(model), loss

    return lambda: jax.jit(step).trace(state, x, x)


# The measurement.


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def measure(library: str, code: str, blocks: int, recipe: str, compiles: bool) -> dict[str, Any]:
    """Pairs of seconds (by the clock, of the CPU) of each part, and the lowered program.

    The recipe "none" leaves the model as it is. The program is given by its length and its hash.
    """
    jax.jit(lambda x: jnp.tanh(x @ x)).lower(jnp.ones((8, 8))).compile()  # what jax does once
    x = jax.ShapeDtypeStruct((BATCH, TOKENS, FEATURES), jnp.float32)
    model, converted, share = model_of(library, code, blocks), recipe in RECIPES, 0.0
    times = [now()]
    if converted:
        model, coverage = fp8.convert(model, RECIPES[recipe](), inputs=(x,))
    times.append(now())
    if converted:
        share = coverage.share
    step = (linen_step if library == "linen" else nnx_step)(model, converted, x)
    start = now()
    traced = step()
    after_trace = now()
    lowered = traced.lower()
    after_lower = now()
    if compiles:
        lowered.compile()
    after_compile = now()
    text = lowered.as_text()
    pairs = {"convert": (times[0], times[1])}
    names = ("trace", "lower", *(["compile"] if compiles else []))
    ends = (start, after_trace, after_lower, after_compile)
    pairs |= dict(zip(names, itertools.pairwise(ends), strict=False))
    return {
        "seconds": {
            name: [end - begin for begin, end in zip(*pair, strict=True)]
            for name, pair in pairs.items()
        },
        "share": share,
        "program": [len(text.splitlines()), hashlib.sha256(text.encode()).hexdigest()[:12]],
        "file": fp8.__file__,
    }
