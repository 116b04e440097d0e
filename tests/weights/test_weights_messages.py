"""Weights in FP8 where they do not fit: each error says what was given, and what to write."""

import copy
import pickle
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import messages
import numpy as np
import optax
import pytest
from messages import Message
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.weights import WeightAxes

CURRENT, DELAYED, TILES = fp8.recipes.current(), fp8.recipes.delayed(), fp8.recipes.blockwise()
STOCHASTIC = fp8.recipes.Operands(
    lhs=fp8.quantizers.Current(format=fp8.E4M3),
    rhs=fp8.quantizers.Current(format=fp8.E4M3, rounding="stochastic"),
)
X, W = jnp.ones((2, 8)), jnp.linspace(-1, 1, 32).reshape(8, 4)
STATE = fp8.init_state(DELAYED)
PAIR = 'rules=[("blocks/.*kernel", fp8.weights.WeightAxes())]'
NO_ARRAY = ("QuantizedWeight(current, [8, 4] of float32)", "is no array", "in high precision")


RULES = [("w", WeightAxes())]


def quantize(params=W, recipe=CURRENT, rules=RULES, **options):
    return fp8.quantize_params({"w": params}, recipe, rules=rules, **options)["w"]


def primary():
    return quantize(primary=True)


def dot(weight, recipe=CURRENT, x=X, **options):
    return fp8.dot(x, weight, recipe=recipe, **options)


def grad(function: Callable, argument):
    return jax.grad(lambda argument: jnp.sum(function(argument)))(argument)


def stacked(recipe):
    rules = [("w", WeightAxes(stacked=1))]
    return quantize(jnp.ones((2, 8, 4)), recipe, rules)


DIFFERENTIATED = ("an FP8 weight is being differentiated", "no gradient", "fp8.value_and_grad")
MESSAGES = {
    "jax.grad": Message(fp8.FP8StateError, lambda: grad(dot, quantize()), *DIFFERENTIATED),
    "jax.grad, primary": Message(fp8.FP8StateError, lambda: grad(dot, primary()), *DIFFERENTIATED),
    "jvp": Message(
        fp8.FP8StateError, lambda: jax.jvp(dot, (quantize(),), (quantize(),)), *DIFFERENTIATED
    ),
    "primary inside a loss": Message(
        TypeError, lambda: grad(lambda w: dot(quantize(w, primary=True)), W),
        "of a weight [8, 4] is being differentiated", "primary=True drops", "outside of the loss",
    ),
    "another recipe": Message(
        ValueError, lambda: dot(quantize(), TILES),
        "'current'", "'blockwise'", "fp8.quantize_params(params, recipe)",
    ),
    "a recipe of the same name": Message(
        ValueError, lambda: dot(quantize(), fp8.recipes.current(power_of_two=True)),
        "power_of_two=False", "power_of_two=True", "fp8.quantize_params(params, recipe)",
    ),
    "other axes": Message(
        ValueError, lambda: fp8.einsum("bn,kn->bk", jnp.ones((2, 4)), quantize(), recipe=CURRENT),
        "contracts axes (1,)", "quantized for WeightAxes(contracted=(0,)",
        "WeightAxes(contracted=(1,), batch=())",
    ),
    "another order of merged axes": Message(
        ValueError,
        lambda: fp8.einsum(
            "bhd,dhk->bk", jnp.ones((2, 4, 64)),
            quantize(jnp.ones((64, 4, 8)), TILES, [("w", WeightAxes(contracted=(0, 1)))]),
            recipe=TILES,
        ),
        "contracted=(0, 1)", "in another order", "order of the axes of lhs",
    ),
    "stacked": Message(
        ValueError,
        lambda: fp8.dot_general(
            jnp.ones((2, 2, 8)), stacked(CURRENT), (((2, 0), (1, 0)), ((), ())), recipe=CURRENT
        ),
        "axes (1, 0)", "WeightAxes(contracted=(0,), batch=(), stacked=1", "WeightAxes(contracted=",
    ),
    "stacked, as one layer": Message(
        ValueError,
        lambda: fp8.einsum("ml,lkn->mkn", jnp.ones((3, 2)), stacked(CURRENT), recipe=CURRENT),
        "scale float32[2]", "stacked=1", "jax.tree.map(lambda leaf: leaf[i], weight)",
    ),
    "identity": Message(
        ValueError, lambda: quantize(recipe=fp8.recipes.identity()),
        "'identity'", "high precision in fprop", "leave these weights out",
    ),
    "identity matmul": Message(
        TypeError, lambda: dot(primary(), fp8.recipes.identity()),
        "rhs is QuantizedWeight", "'identity'", "out of quantize_params",
    ),
    "stochastic weights": Message(
        ValueError,
        lambda: quantize(
            recipe=fp8.Recipe(name="noisy", fprop=STOCHASTIC, dgrad=STOCHASTIC, wgrad=STOCHASTIC)
        ),
        "'noisy'", "rounds weights stochastically", "rounds gradients only",
    ),
    "no state": Message(
        fp8.FP8StateError,
        lambda: quantize(recipe=DELAYED),
        "w has a recipe with state",
        "state= holds no quantizer state",
        "Pass state=",
    ),
    "two states": Message(
        fp8.FP8StateError,
        lambda: fp8.quantize_params(
            {"a": {"kernel": W}}, DELAYED, state={"a": {"up": STATE, "down": STATE}}
        ),
        "a/kernel", "['a/down', 'a/up']", "the only one below 'a'",
    ),
    "matmul without state": Message(
        fp8.FP8StateError, lambda: dot(quantize(recipe=DELAYED, state={"w": STATE}), DELAYED),
        "'delayed'", "state=None", "fp8.init_state(recipe)",
    ),
    "twice": Message(
        ValueError, lambda: quantize(quantize()),
        "w is QuantizedWeight", "already", "('w', None) before the other rules",
    ),
    "integers": Message(
        TypeError, lambda: quantize(jnp.ones((4, 4), jnp.int32)), "w has dtype int32",
        "Cast it to one of", "'bfloat16'",
    ),
    "no axes": Message(
        ValueError, lambda: quantize(rules=[("w", WeightAxes(stacked=2))]),
        "w [8, 4]", "no axes besides", "2 stacked",
    ),
    "axis out of range": Message(
        ValueError, lambda: quantize(rules=[("w", WeightAxes(contracted=(2,)))]),
        "contracted=(2,)", "2 axes", "WeightAxes(contracted=...)",
    ),
    "no rule matches": Message(
        ValueError, lambda: quantize(rules=[("v", WeightAxes())]), "rules ['v']",
        "A rule must match a whole path", "['w']",
    ),
    "a rule after its match": Message(
        ValueError, lambda: quantize(rules=[(".", WeightAxes()), ("w", None)]), "rules ['w']",
        "that earlier rules leave", "the first match decides",
    ),
    "a rule without axes": Message(
        TypeError, lambda: quantize(rules=["w"]), "'w'", "must be a pair", PAIR
    ),
    "a rule with an axis": Message(
        TypeError, lambda: quantize(rules=[("w", 0)]), "('w', 0)", "must be a pair", PAIR
    ),
    "rules of a dict": Message(
        TypeError, lambda: quantize(rules={"w": None}), "{'w': None}", "must be a pair", PAIR
    ),
    "negative axes": Message(
        TypeError, lambda: WeightAxes(contracted=(-1,)), "contracted=(-1,)", "counted from 0",
        "contracted=(0,)",
    ),
    "an axis twice": Message(
        ValueError, lambda: WeightAxes(contracted=(0,), batch=(0,)), "batch=(0,)", "each axis once",
        "at least one contracted axis",
    ),
    "negated": Message(
        ValueError, lambda: dot(jax.tree.map(jnp.negative, primary())),
        "rhs, a QuantizedWeight(current, [8, 4] of float32), has the scale -0.002", "be positive",
        "quantize the result: fp8.quantize_params(params, recipe)",
    ),
    "zeros": Message(
        ValueError, lambda: dot(jax.tree.map(jnp.zeros_like, primary())),
        "has the scale 0.0", "be positive", "quantize the result",
    ),
    "averaged": Message(
        ValueError,
        lambda: dot(jax.tree.map(lambda a: 0.75 * a + 0.125 * a, quantize(recipe=TILES)), TILES),
        "has the scale 0.00", "must be a power of two", "quantize the result",
    ),
    "cast by tree.map": Message(
        ValueError, lambda: dot(jax.tree.map(lambda a: a.astype(jnp.bfloat16), primary())),
        "values of dtype bfloat16", "must be FP8", "quantize the result: fp8.quantize_params(",
    ),
    "updates of arrays": Message(
        TypeError, lambda: jax.tree.map(jnp.add, {"w": W}, {"w": primary()}), *NO_ARRAY
    ),
    "as lhs": Message(
        TypeError, lambda: fp8.dot(primary(), X, recipe=CURRENT), "lhs is of type QuantizedWeight",
        "one array is needed", "a right operand",
    ),
    "index": Message(
        TypeError, lambda: primary()[0], "cannot be indexed by 0", "stacked layers", "leaf[i]"
    ),
    "jnp": Message(TypeError, lambda: jnp.dot(X, primary()), *NO_ARRAY),
    "operator": Message(TypeError, lambda: X @ primary(), *NO_ARRAY),
    "times 2": Message(TypeError, lambda: 2 * primary(), *NO_ARRAY[:2], "with_master_weights(tx"),
    "remainder": Message(TypeError, lambda: primary() % 2, *NO_ARRAY),
    "minus": Message(TypeError, lambda: -primary(), *NO_ARRAY[:2], "optim.master_weights"),
    "jnp.asarray": Message(TypeError, lambda: jnp.asarray(primary()), *NO_ARRAY),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name):
    messages.check(MESSAGES[name])


OPTIMIZERS = {
    "adamw": (fp8.optim.adamw(0.1), "with_master_weights(tx, master=...)"),
    "momentum of optax": (optax.sgd(0.1, momentum=0.5), "with_master_weights(tx, master=...)"),
    "weight decay": (optax.add_decayed_weights(0.1), "with_master_weights(tx, master=...)"),
    "sgd": (optax.sgd(0.1), "QuantizedWeight"),  # JAX says it
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_without_master_weights(name):
    tx, mentioned = OPTIMIZERS[name]
    params, grads = {"w": primary()}, {"w": W}
    with pytest.raises((TypeError, ValueError), match=re.escape(mentioned)):
        optax.apply_updates(params, tx.update(grads, tx.init(params), params)[0])


RIGHT = {"times 2": lambda w: 2 * w, "zeros": jnp.zeros_like, "minus": jnp.negative}


def test_a_weight_is_changed_before_the_cast():
    """The right way to scale, zero and negate: x @ (2 * w) to the precision of FP8."""
    got = jax.jit(lambda w: [dot(quantize(f(w), primary=True)) for f in RIGHT.values()])(W)
    x, w = (np.asarray(each, np.float64) for each in (X, W))
    for y, factor in zip(got, (2, 0, -1), strict=True):
        bound = abs(factor) * np.abs(x) @ np.abs(w) / 16  # E4M3 rounds by up to 1/16
        assert np.all(np.abs(np.asarray(y, np.float64) - factor * x @ w) <= bound)


def test_a_program_does_not_read_scales():
    """A limit that docs/weights.md names: inside jit a negated tree is the weight itself."""
    negated = jax.jit(lambda w: dot(jax.tree.map(jnp.negative, quantize(w, primary=True))))
    assert_same_bits(negated(W), jax.jit(lambda w: dot(quantize(w, primary=True)))(W))


SENTINEL = object()
LEAVES = {
    "types": lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
    "numpy": np.asarray,
    "bool": lambda leaf: True,
    "object": lambda leaf: SENTINEL,
    "zeros": jnp.zeros_like,
    "float32": lambda leaf: np.zeros(leaf.shape, np.float32),
}


@pytest.mark.parametrize("name", LEAVES)
def test_a_tree_of_any_leaves(name):
    """JAX, optax and Orbax put other things in the place of arrays, so only matmuls refuse them."""
    weight = quantize(recipe=TILES)
    leaves = jax.tree.map(LEAVES[name], weight)
    assert jax.tree.structure(leaves) == jax.tree.structure(weight)
    assert "QuantizedWeight(blockwise" in repr(leaves)


def test_a_weight_is_a_plain_tree():
    """It is copied, pickled, moved and passed through programs as a tree of arrays."""
    weight = quantize(recipe=TILES)
    assert repr(weight) == "QuantizedWeight(blockwise, [8, 4] of float32, with its original)"
    shapes = jax.eval_shape(lambda w: quantize(w, TILES), W)
    assert jax.tree.structure(shapes) == jax.tree.structure(weight)
    copies = {
        "copy": copy.deepcopy(weight),
        "pickle": pickle.loads(pickle.dumps(weight)),
        "numpy": jax.device_get(weight),
        "jit": jax.jit(lambda w: w, donate_argnums=0)(jax.tree.map(jnp.copy, weight)),
        "stack": jax.tree.map(lambda leaf: jnp.stack([leaf, leaf])[1], weight),
    }
    for each in copies.values():
        assert_same_bits(each, weight)
        assert jax.tree.structure(each) == jax.tree.structure(weight)
        assert_same_bits(dot(each, TILES), dot(W, TILES))
