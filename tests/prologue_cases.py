"""What the tests of `prologue=` share: arrays, recipes, and a look at what a cast reads."""

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp

import jaxfp8 as fp8
from jaxfp8.ops import _three_matmuls
from jaxfp8.prologues._prologue import prologue_of

SWIGLU, RMS_NORM = fp8.prologues.SwiGLU(), fp8.prologues.RMSNorm()
RECIPES = {
    "delayed": fp8.recipes.delayed(history_length=4),
    "current": fp8.recipes.current(),
    "blockwise": fp8.recipes.blockwise(),
    "identity": fp8.recipes.identity(),
}
B, S, D, F = 8, 16, 40, 24


def arrays_of(prologue, dtype=jnp.bfloat16):
    """The arrays of a prologue: [B, S, D], and a gain [D] that bfloat16 would round."""
    keys = jax.random.split(jax.random.key(7), 2)
    x = 3 * jax.random.normal(keys[0], (B, S, D), dtype)
    if prologue == SWIGLU:
        return x, jax.random.normal(keys[1], (B, S, D), dtype)
    return x, 1 + jax.random.normal(keys[1], (D,), jnp.float32)


def cotangent(shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(8), shape, dtype)


def random_like(tree):
    """Random biases. They are initialized to zeros, which would hide mistakes."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(9), len(leaves))
    new = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, new)


@contextlib.contextmanager
def casts_of_x():
    """The prologue of each cast of a left operand; None where an array was cast."""
    seen, quantize = [], _three_matmuls.quantize_operand

    def spy(call, tensor, source, *arguments, **options):
        if tensor == "x":
            seen.append(prologue_of(source))
        return quantize(call, tensor, source, *arguments, **options)

    with mock.patch.object(_three_matmuls, "quantize_operand", spy):
        yield seen
