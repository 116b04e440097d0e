"""Calls of functions that used to fail obscurely: the three parts of their messages."""

import dataclasses

import flax.core
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import messages
import numpy as np
import pytest
from casts import quantized
from messages import Message

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense

CURRENT, DELAYED, IDENTITY = fp8.recipes.current(), fp8.recipes.delayed(), fp8.recipes.identity()
X, W = jnp.ones((2, 8)), jnp.ones((8, 4))
STATE = fp8.init_state(DELAYED)
DENSE = FP8Dense(4, recipe=DELAYED)
RESTORED = "fp8.check_state(restored, like=fresh_state)"
DTYPES = "['bfloat16', 'float16', 'float32', 'float64']"


def dot(lhs=X, rhs=W, recipe=CURRENT, **options):
    return fp8.dot(lhs, rhs, recipe=recipe, **options)


def scaled_loss(params, state):
    return jnp.sum(fp8.dot(X, params, recipe=DELAYED, state=state))


def with_state(**leaves):
    return dataclasses.replace(STATE, **leaves)


def restored():
    """A state from msgpack bytes, without a target."""
    variables = DENSE.init(jax.random.key(0), X)
    return flax.serialization.msgpack_restore(flax.serialization.to_bytes(variables))[COLLECTION]


def quantized_sum(x, **options):
    return jnp.sum(fp8.quantize(x, fp8.E4M3, **options).dequantize())


NO_GRADIENT = (
    "fp8.quantize of x [2, 8] is being differentiated",
    "no gradient",
    "fp8.fake_quantize",
)
NO_STATE = ("found an object of type ndarray of shape", "expected quantizer state", RESTORED)

MESSAGES = {
    "grad of quantize": Message(TypeError, lambda: jax.grad(quantized_sum)(X), *NO_GRADIENT),
    "jvp of quantize": Message(TypeError, lambda: jax.jvp(quantized_sum, (X,), (X,)), *NO_GRADIENT),
    "grad of quantize, scale": Message(
        TypeError, lambda: jax.grad(lambda x: quantized_sum(x, scale=1.0))(X), *NO_GRADIENT
    ),
    "grad of quantize under jit": Message(
        TypeError, lambda: jax.jit(jax.grad(quantized_sum))(X), *NO_GRADIENT
    ),
    "recipe by name": Message(
        TypeError,
        lambda: dot(recipe="mxfp8"),
        "recipe='mxfp8'",
        "a Recipe is needed",
        "fp8.recipes.mxfp8()",
    ),
    "recipe not called": Message(
        TypeError,
        lambda: dot(recipe=fp8.recipes.rowwise),
        "of type function",
        "a Recipe is needed",
        "fp8.recipes.rowwise()",
    ),
    "class of recipes": Message(
        TypeError,
        lambda: fp8.init_state(fp8.Recipe),
        "of type type",
        "a Recipe is needed",
        "fp8.recipes.delayed()",
    ),
    "compiler options": Message(
        TypeError,
        lambda: fp8.Kernels("h200").compiler_options("delayed"),
        "recipe='delayed'",
        "a Recipe",
        "fp8.recipes.delayed()",
    ),
    "class of granularities": Message(
        TypeError,
        lambda: fp8.quantize(X, fp8.E4M3, fp8.PerTensor),
        "granularity=<class",
        "not an instance",
        "fp8.PerTensor()",
    ),
    "class of shards": Message(
        TypeError,
        lambda: dot(w_shard=fp8.sharding.Shard),
        "w_shard=<class",
        "must be a Shard",
        'Shard(0, "fsdp")',
    ),
    "class of kernels": Message(
        TypeError,
        lambda: dot(kernels=fp8.Kernels),
        "kernels=<class",
        "of type type",
        "fp8.Kernels('h200')",
    ),
    "chip in place of kernels": Message(
        TypeError,
        lambda: dot(kernels="b200"),
        "kernels='b200'",
        "of type str",
        "kernels=fp8.Kernels('b200')",
    ),
    "timings in place of kernels": Message(
        TypeError,
        lambda: dot(kernels=fp8.plan.Timings(chip="h200", device="", versions=(), times=())),
        "kernels=Timings(",
        "of type Timings",
        "fp8.Kernels('h200')",
    ),
    "class of prologues": Message(
        TypeError,
        lambda: dot((X, X), prologue=fp8.prologues.SwiGLU),
        "prologue=<class",
        "is no prologue",
        "fp8.prologues.SwiGLU()",
    ),
    "class of quantizers": Message(
        TypeError,
        lambda: fp8.recipes.Operands(lhs=fp8.quantizers.Current, rhs=fp8.quantizers.Identity()),
        "lhs=<class",
        "must be a quantizer",
        "fp8.quantizers",
    ),
    "restored without a target: value_and_grad": Message(
        fp8.FP8StateError, lambda: fp8.value_and_grad(lambda p, s: 0.0)(1.0, restored()), *NO_STATE
    ),
    "restored without a target: commit": Message(
        fp8.FP8StateError, lambda: fp8.commit(restored(), fp8.nothing_seen(STATE)), *NO_STATE
    ),
    "restored without a target: freeze": Message(
        fp8.FP8StateError, lambda: fp8.freeze(restored()), *NO_STATE
    ),
    "restored without a target: dot": Message(
        fp8.FP8StateError,
        lambda: dot(recipe=DELAYED, state=restored()["FP8DotGeneral_0"]["fp8"]),
        "state=a dict with the keys ['",
        "needs the state of this matmul",
        RESTORED,
    ),
    "restored without a target: layer": Message(
        fp8.FP8StateError,
        lambda: DENSE.apply({**DENSE.init(jax.random.key(0), X), COLLECTION: restored()}, X),
        "state=a dict with the keys ['",
        "needs the state of this matmul",
        RESTORED,
    ),
    "parameters as state": Message(
        fp8.FP8StateError,
        lambda: fp8.value_and_grad(lambda p, s: 0.0)(1.0, {"up": {"kernel": W}}),
        "of shape [8, 4] at ['up']['kernel']",
        "expected quantizer state",
        "fp8.init_state",
    ),
    "history of rank 1": Message(
        fp8.FP8StateError,
        lambda: dot(recipe=DELAYED, state=with_state(amax_history=jnp.zeros(16))),
        "amax_history has shape [16]",
        "must have [3, 16]",
        "fp8.init_state(recipe)",
    ),
    "history of rank 1, value_and_grad": Message(
        fp8.FP8StateError,
        lambda: fp8.value_and_grad(scaled_loss)(W, with_state(amax_history=jnp.zeros(16))),
        "amax_history has shape [16]",
        "must have [3, 16]",
        "fp8.init_state(recipe)",
    ),
    "what a step saw as state": Message(
        fp8.FP8StateError,
        lambda: fp8.freeze({"up": fp8.nothing_seen(STATE)}),
        "found SeenAmax (the amaxes that a step saw) at ['up']",
        "expected quantizer state",
        "fp8.commit(state, seen)",
    ),
    "scale of rank 0": Message(
        fp8.FP8StateError,
        lambda: dot(recipe=DELAYED, state=with_state(scale=jnp.zeros(()))),
        "scale has shape []",
        "must hold the 3 rows",
        "leading axes",
    ),
    "list leaves": Message(
        fp8.FP8StateError,
        lambda: dot(recipe=DELAYED, state=with_state(scale=[0.0, 0.0, 0.0])),
        "scale is an object of type list",
        "must be an array of float32",
        "fp8.check_state(state, like=fresh_state)",
    ),
    "list leaves, value_and_grad": Message(
        fp8.FP8StateError,
        lambda: fp8.value_and_grad(scaled_loss)(
            W, with_state(amax_history=np.zeros((3, 16)).tolist())
        ),
        "amax_history is an object of type list",
        "must be an array of float32",
        "fp8.check_state(state, like=fresh_state)",
    ),
    "list leaves, nothing seen": Message(
        fp8.FP8StateError,
        lambda: fp8.nothing_seen(with_state(scale=[0.0, 0.0, 0.0])),
        "scale is an object of type list",
        "must be an array of float32",
        "fp8.check_state(state, like=fresh_state)",
    ),
    "no leaf": Message(
        fp8.FP8StateError,
        lambda: dot(recipe=DELAYED, state=with_state(fingerprint=None)),
        "fingerprint is None",
        "must be an array of float32",
        "fp8.check_state(state, like=fresh_state)",
    ),
    "preferred_element_type": Message(
        TypeError,
        lambda: dot(preferred_element_type="foo"),
        "preferred_element_type='foo'",
        "dtype that a matmul can return",
        DTYPES,
    ),
    "preferred_element_type, object": Message(
        TypeError,
        lambda: dot(preferred_element_type=dict),
        "preferred_element_type=object",
        "dtype",
        DTYPES,
    ),
    "preferred_element_type of identity": Message(
        TypeError,
        lambda: dot(recipe=IDENTITY, preferred_element_type="foo"),
        "preferred_element_type='foo'",
        "dtype that a matmul can return",
        DTYPES,
    ),
    "preferred_element_type of einsum": Message(
        TypeError,
        lambda: fp8.einsum("bd,dk->bk", X, W, recipe=IDENTITY, preferred_element_type="foo"),
        "preferred_element_type='foo'",
        "dtype that a matmul can return",
        DTYPES,
    ),
    "state_specs of an array": Message(
        fp8.FP8StateError,
        lambda: fp8.state_specs(X, jax.P()),
        "of shape [2, 8] at the top of the tree",
        "expected quantizer state",
        "fp8.init_state",
    ),
    "state_specs of arrays": Message(
        fp8.FP8StateError,
        lambda: fp8.state_specs({"up": {"kernel": W}}, {"up": {"kernel": jax.P()}}),
        "at ['up']['kernel']",
        "expected quantizer state",
        "fp8.init_state",
    ),
    "state_specs of another tree": Message(
        ValueError,
        lambda: fp8.state_specs({"up": STATE}, {"down": jax.P()}),
        "weight_specs has leaves at [\"['down']\"]",
        "states are at [\"['up']\"]",
        "one jax.P for each state",
    ),
}

NO_OPERANDS = {
    "None": (None, "is None", "pass an array"),
    "dict": ({"kernel": W}, "is of type dict", "['kernel']"),
    "ShapeDtypeStruct": (
        jax.ShapeDtypeStruct((8, 4), jnp.float32),
        "is ShapeDtypeStruct(shape=(8, 4)",
        "jax.eval_shape",
    ),
    "Partitioned": (
        nn.Partitioned(W, ("a", "b")),
        "is of type Partitioned",
        "flax.linen.meta.unbox",
    ),
    "string": ("foo", "is 'foo'", "an array of numbers"),
    "ragged list": ([[1.0, 2.0], [3.0]], "is a list of 2", "an array of numbers"),
    "tuple": ((X, X), "is a tuple of 2", "prologue="),
    "function": (jnp.ones, "is of type function", "pass what it returns"),
    "QuantizedTensor": (quantized(W), "is of type QuantizedTensor", ".dequantize()"),
    "state": (STATE, "is of type MatmulState", "an array of numbers"),
}
TAKING = {
    "lhs": ("lhs", lambda given: dot(lhs=given)),
    "rhs": ("rhs", lambda given: dot(rhs=given)),
    "rhs of identity": ("rhs", lambda given: dot(rhs=given, recipe=IDENTITY)),
    "einsum": ("rhs", lambda given: fp8.einsum("bd,dk->bk", X, given, recipe=CURRENT)),
    "bias": ("bias", lambda given: dot(bias=(W,) if given is None else given)),
    "quantize": ("x", lambda given: fp8.quantize(given, fp8.E4M3)),
    "fake_quantize": ("x", lambda given: fp8.fake_quantize(given, fp8.E4M3)),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_has_three_parts(name):
    messages.check(MESSAGES[name])


@pytest.mark.parametrize("taking", TAKING)
@pytest.mark.parametrize("given", NO_OPERANDS)
def test_an_operand_that_is_no_array_is_named(given, taking):
    value, what, cure = NO_OPERANDS[given]
    if taking == "bias" and given == "None":
        pytest.skip("None is no bias")
    name, call = TAKING[taking]
    messages.check(
        Message(TypeError, lambda: call(value), f"{name} {what}", "one array is needed", cure)
    )


def test_state_specs_of_trees_with_gaps():
    """A layer without state may be None, and containers may be of other types."""
    state = {"a": None, "b": STATE}
    for specs in ({"a": None, "b": jax.P()}, {"b": jax.P()}, flax.core.freeze({"b": jax.P()})):
        assert fp8.state_specs(state, specs)["b"].scale == jax.P()
    assert fp8.state_specs(flax.core.freeze(state), {"b": jax.P()})["a"] is None


def test_lists_that_jax_can_read_are_operands():
    assert fp8.dot([[1.0, 2.0]], [[2.0], [4.0]], recipe=CURRENT).item() == 10
