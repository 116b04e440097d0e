"""Whole train steps of a few blocks of Llama 3 8B: forward, backward, AdamW, and quantizer state.

The baseline is bfloat16. Rivals and recipes multiply in the same model, see `rivals.py`. Weights
and the moments of `optax.adamw` are in float32, and all else is in bfloat16. Attention is that of
cuDNN. Blocks are in a scan without rematerialization. There is no embedding and no head, so the
figures are those of the blocks. A block counts once in the number of FP8 matmuls: 4 layers with 3
matmuls each.

The step donates weights, moments and quantizer state, and each call gets those of the call before,
as in training. A measurement starts from a copy of them. So the memory of weights and moments is
needed twice, however many contenders there are.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import rivals
from case import Case
from jax import lax
from layers import PALLAS_CASTS, RECIPES
from rivals import Library
from target import Target
from timing import copies

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "deviceless"))
from transformer import attention, gated, rms_norm

SECTION = "steps"
BASELINE = "bf16"
STEPS = 5
"""Steps before the timed ones, in which scales become those of the data.

A gradient may be 0 in E5M2 until the scale of its layer is set, and then those before it are too.
A block has two layers one after the other, between the residuals.
"""
SEED = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """Blocks, and the tokens of a step."""

    blocks: int
    sequences: int
    tokens: int
    width: int
    hidden: int
    queries: int
    keys: int

    @property
    def name(self) -> str:
        return f"{self.blocks} blocks of width {self.width}, {self.sequences}x{self.tokens} tokens"

    @property
    def weights(self) -> dict[str, tuple[int, int]]:
        """[K, N] of the layers of a block."""
        heads = self.width // self.queries * (self.queries + 2 * self.keys)
        return {
            "qkv": (self.width, heads),
            "out": (self.width, self.width),
            "gate_up": (self.width, 2 * self.hidden),
            "down": (self.hidden, self.width),
        }


# Llama 3 8B (arXiv:2407.21783, table 3), with its 8192 tokens of a sequence (section 3.4).
STACKS = (Stack(blocks=4, sequences=2, tokens=8192, width=4096, hidden=14336, queries=32, keys=8),)
TINY_STACKS = (Stack(blocks=2, sequences=2, tokens=128, width=128, hidden=256, queries=4, keys=2),)
NORMS = ("attention_norm", "mlp_norm")


def contenders(chip: str) -> dict[str, Library]:
    """The most important ones come first."""
    names = ("delayed", "current", "rowwise", "blockwise", "mxfp8")
    chosen = {name: rivals.ours(RECIPES[name], chip, {}, settled=True) for name in names}
    return {
        BASELINE: rivals.bf16(),
        **chosen,
        rivals.FLAX: rivals.flax(),
        rivals.PLAIN: rivals.plain(),
        "delayed, Pallas casts": rivals.ours(RECIPES["delayed"], chip, PALLAS_CASTS, settled=True),
    }


def optimizer() -> optax.GradientTransformation:
    return optax.adamw(1e-4)


def step(library: Library, stack: Stack, how: str) -> Callable[..., Any]:
    """`step(params, moments, state, x) -> (params, moments, state, loss)`.

    `how` is the `implementation` of `jax.nn.dot_product_attention`.
    """

    def block(h: jax.Array, of: Any) -> tuple[jax.Array, None]:
        params, state = of

        def dot(name: str, x: jax.Array) -> jax.Array:
            return library.dot(x, params[name].astype(x.dtype), state[name])

        first, second = (params[name].astype(h.dtype) for name in NORMS)
        heads = attention(dot("qkv", rms_norm(h, first)), how, stack.queries, stack.keys)
        h = h + dot("out", heads)
        return h + dot("down", gated(dot("gate_up", rms_norm(h, second)))), None

    def loss(params: Any, state: Any, x: jax.Array) -> jax.Array:
        h, _ = lax.scan(block, x, (params, state))
        return jnp.mean(jnp.square(h.astype(jnp.float32)))

    def run(params: Any, moments: Any, state: Any, x: jax.Array) -> Any:
        of_batch = functools.partial(loss, x=x)
        value, gradients, state = library.value_and_grad(of_batch)(params, state)
        updates, moments = optimizer().update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, state, value

    return run


def cases(stacks: tuple[Stack, ...], target: Target) -> Iterator[Case]:
    for stack in stacks:
        yield from one_stack(stack, target)


def one_stack(stack: Stack, target: Target) -> Iterator[Case]:
    how = "cudnn" if target.is_gpu else "xla"
    sizes = sum(k * n for k, n in stack.weights.values())
    for name, library in contenders(target.chip).items():
        yield Case(
            section=SECTION,
            group=stack.name,
            operation="train step",
            contender=name,
            named=library.named,
            function=step(library, stack, how),
            arguments=jax.eval_shape(lambda library=library: start(stack, library)),
            options=library.options(target.chip),
            # Of the dense layers, without attention.
            flops=6 * stack.blocks * stack.sequences * stack.tokens * sizes,
            looped=False,
            carried=3,
            inputs=functools.partial(steady, stack, library),
        )


def start(stack: Stack, library: Library) -> tuple[Any, Any, Any, Any]:
    """Weights, moments, state and x before the first step."""
    *trained, x = trained_and_x(stack)
    return *trained, states(stack, library), x


def trained_and_x(stack: Stack) -> tuple[Any, Any, Any]:
    """Weights, moments and x. Weights have the spread that keeps activations near 1."""
    keys = iter(jax.random.split(jax.random.key(SEED), 1 + len(stack.weights)))
    params = {
        name: jax.random.normal(next(keys), (stack.blocks, k, n)) * k**-0.5
        for name, (k, n) in stack.weights.items()
    }
    params |= {name: jnp.ones((stack.blocks, stack.width)) for name in NORMS}
    shape = (stack.sequences, stack.tokens, stack.width)
    return params, optimizer().init(params), jax.random.normal(next(keys), shape, jnp.bfloat16)


def states(stack: Stack, library: Library) -> Any:
    """The state of each layer, stacked over blocks."""
    stacked = jax.vmap(lambda _: library.state())(jnp.zeros(stack.blocks))
    return {name: copies(stacked) for name in stack.weights}  # a donated array must be there once


def steady(stack: Stack, library: Library, program: Any, known: Any) -> Any:
    """Values of the arguments, with the quantizer state after some steps.

    All contenders share weights, moments and x, which `known` keeps.
    """
    make = jax.jit(functools.partial(trained_and_x, stack))
    *trained, x = known.made(stack, lambda: jax.device_put(make(), known.device))
    state = states(stack, library)
    carried = (*copies(trained), state)
    for _ in range(STEPS):
        *carried, _ = program(*carried, x)
    return *trained, carried[2], x
