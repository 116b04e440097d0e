"""What the tests of `prologue=` share: arrays, recipes, and a look at what a cast reads."""

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from messages import Message

import jaxfp8 as fp8
from jaxfp8.matmul import _three_matmuls
from jaxfp8.prologues._prologue import prologue_of

SWIGLU, RMS_NORM = fp8.prologues.SwiGLU(), fp8.prologues.RMSNorm()
RECIPES = {
    "delayed": fp8.recipes.delayed(history_length=4),
    "current": fp8.recipes.current(),
    "blockwise": fp8.recipes.blockwise(),
    "identity": fp8.recipes.identity(),
}
B, S, D, F = 8, 16, 40, 24


def normal(seed, shape, dtype):
    """From NumPy, so that nothing is compiled for it."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def arrays_of(prologue, dtype=jnp.bfloat16):
    """The arrays of a prologue: [B, S, D], and a gain [D] that bfloat16 would round."""
    x = normal(7, (B, S, D), dtype)
    if prologue == SWIGLU:
        return x, normal(6, (B, S, D), dtype)
    return x, jnp.asarray(np.random.default_rng(6).uniform(0.2, 2, D).astype(np.float32))


def cotangent(shape, dtype=jnp.bfloat16):
    return normal(8, shape, dtype)


def random_like(tree):
    """Random biases. They are initialized to zeros, which would hide mistakes."""
    leaves, structure = jax.tree.flatten(tree)
    new = [normal(9 + i, leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)]
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
        for traced in (_three_matmuls._fprop, _three_matmuls._gradients):
            traced.clear_cache()  # a pass that was traced before would not call the spy
        yield seen


def mistakes(layer):
    """Calls that must fail. `layer(prologue)` is a function of the inputs of a new layer."""

    def call(inputs, prologue=SWIGLU):
        return lambda: layer(prologue)(inputs)

    pair, tuple_ = arrays_of(SWIGLU), "Pass the tuple (gate, up)"
    x, numpy = pair[0], tuple(map(np.asarray, pair))
    return {
        "an array": Message(
            TypeError, call(x), "inputs is an array bfloat16[8, 16, 40]", "takes 2 arrays", tuple_
        ),
        "too many": Message(
            TypeError, call((*pair, x)), "inputs is a tuple of 3", "takes 2 arrays", tuple_
        ),
        "a tuple without": Message(
            TypeError, call(pair, None), "inputs is a tuple of 2", "one array", "prologue="
        ),
        "a tuple of numpy arrays without": Message(
            TypeError, call(numpy, None), "inputs is a tuple of 2", "one array", "prologue="
        ),
        "a class": Message(
            TypeError, lambda: layer(fp8.prologues.SwiGLU), "prologue=<class", "is no prologue",
            "fp8.prologues.SwiGLU()",
        ),
        "a function": Message(
            TypeError, lambda: layer(jax.nn.silu), "prologue=<", "is no prologue",
            "apply your function to inputs",
        ),
        "a name": Message(
            TypeError, lambda: layer("swiglu"), "prologue='swiglu'", "is no prologue",
            "fp8.prologues.SwiGLU()",
        ),
        "None among them": Message(
            TypeError, call((x, None)), "inputs, up is None", "one array is needed",
            "pass an array",
        ),
        "a gain of integers": Message(
            TypeError, call((x, jnp.ones(D, int)), RMS_NORM), "inputs, gain has dtype int32",
            "Cast it to one of", "bfloat16",
        ),
        "two shapes": Message(
            ValueError, call((x, x[:, :1])), "gate", "[8, 16, 40]", "give both one shape"
        ),
        "a long gain": Message(
            ValueError, call((x, jnp.ones(F)), RMS_NORM), "gain has shape [24]", "x [8, 16, 40]",
            "the last axis of x",
        ),
    }  # fmt: skip
