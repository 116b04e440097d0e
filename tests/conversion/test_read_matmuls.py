"""Matmuls of a model's own code: each kind in FP8 numbers, uses of one weight, and paths."""

import functools
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from same_bits import assert_same_bits as equal

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION

CURRENT, DELAYED = fp8.recipes.current(), fp8.recipes.delayed()
KEYS = jax.random.split(jax.random.key(0), 3)

# Each kind of matmul in FP8, beside the same by hand.

OF = functools.partial(jax.random.normal, jax.random.key(7))
SIZES = jnp.array([2, 0, 3])
OVER_E = (((1,), (2,)), ((0,), (0,)))


def three(x):
    return jnp.stack([x, 2 * x, x + 1])


KINDS = {
    "weight on the left": (
        lambda w, x: w @ x.T, OF((4, 8)),
        lambda w, x, **how: fp8.dot_general(x, w, (((1,), (1,)), ((), ())), **how).T,
    ),
    "weight on the left, with a batch": (
        lambda w, x: lax.dot_general(w, three(x), OVER_E), OF((3, 8, 4)),
        lambda w, x, **how: jnp.swapaxes(fp8.einsum("emk,ekn->emn", three(x), w, **how), 1, 2),
    ),
    "groups": (
        lambda w, x: lax.ragged_dot(x, w, SIZES), OF((3, 8, 4)),
        lambda w, x, **how: fp8.ragged_dot(x, w, SIZES, **how),
    ),
    "three operands": (
        lambda w, x: jnp.einsum("mk,kn,n->mn", x, w, jnp.arange(4.0)), OF((8, 4)),
        lambda w, x, **how: fp8.dot(x, w, **how) * jnp.arange(4.0)[None],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_matmuls(kind):
    plain, w, by_hand = KINDS[kind]
    x = jax.random.normal(jax.random.key(8), (5, 8))
    params = {"w": w}
    for recipe in (CURRENT, DELAYED):
        converted, coverage = fp8.convert(
            lambda params, x: plain(params["w"], x), recipe, inputs=(params, x)
        )
        assert [row.recipe for row in coverage] == [recipe.name]
        state = converted.init_state()
        how = {"recipe": recipe, "state": state.get("w", ())}
        y = converted(params, x, fp8_state=state)
        equal(y, by_hand(w, x, **how))
        assert (y != plain(w, x)).any()


# Uses of one weight, paths, and what a module keeps.


class Two(nn.Module):
    """Two methods use one weight, with inputs of other sizes."""

    def setup(self):
        self.w = self.param("w", nn.initializers.normal(0.2), (16, 16))

    def large(self, x):
        return (1e9 * x) @ self.w

    def small(self, x):
        return x @ self.w

    def twice(self, x):
        return self.small(self.small(x))

    def __call__(self, x):
        return 1e-9 * self.large(x) + self.small(x)


def test_a_call_that_uses_a_weight_less_often_has_the_states_of_its_lines():
    x = jax.random.normal(jax.random.key(0), (8, 16))
    model, _ = fp8.convert(Two(), DELAYED, inputs=(x,))
    variables = model.init(jax.random.key(1), x)
    params, state = variables["params"], variables[COLLECTION]
    loss = lambda params, state: model.apply({"params": params, COLLECTION: state}, x).sum()
    for _ in range(2):
        _, _, state = fp8.value_and_grad(loss)(params, state)
    variables = {"params": params, COLLECTION: state}
    want = fp8.dot(x, params["w"], recipe=DELAYED, state=state["fp8_of_w#2"])
    equal(model.apply(variables, x, method="small"), want)
    with pytest.raises(fp8.FP8StateError, match=r"w: the call with inputs= .* 2 times"):
        model.apply(variables, x, method=lambda m, x: m.twice(m.small(x)))


def test_rules_of_uses_hold_in_a_call_with_fewer():
    def function(w, x, aux):
        y = jnp.sum(x @ w["w"]) if aux else 0.0
        return jnp.tanh(x) @ w["w"] + y

    x, w = jax.random.normal(jax.random.key(0), (8, 16)), {"w": jnp.eye(16) / 3}
    converted, _ = fp8.convert(function, CURRENT, inputs=(w, x, True), rules=[("w#2", None)])
    equal(converted(w, x, False), function(w, x, False))


class Pair(nn.Module):
    """A parameter that is a tuple of two arrays."""

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.normal()
        a, b = self.param("w", lambda key: (init(key, (16, 16)), init(key, (16, 16))))
        return jnp.tanh(x @ a) @ b


class NNXPair(nnx.Module, pytree=False):
    """Also one that is no pytree, counts its calls, and returns a string."""

    def __init__(self):
        self.w = nnx.Param({"a": jnp.eye(16), "b": jnp.eye(16)})
        self.calls, self.shape = 0, None

    def __call__(self, x):
        self.calls, self.shape = self.calls + 1, x.shape
        return jnp.tanh(x @ self.w["a"]) @ self.w["b"], "a string"


def test_parts_of_a_parameter_and_attributes():
    x = jnp.ones((8, 16))
    _, coverage = fp8.convert(Pair(), DELAYED, inputs=(x,))
    assert [row.path for row in coverage] == ["w/0", "w/1"]
    model, coverage = fp8.convert(NNXPair(), DELAYED, inputs=(x,))
    assert [row.path for row in coverage] == list(model.fp8_matmuls) == ["w/a", "w/b"]
    nnx.jit(lambda model: model(x)[0])(model)
    y, text = model(x)
    assert (text, model.calls, model.shape) == ("a string", 2, (8, 16))
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model)
    equal(again(x)[0], y)
    with pytest.raises(ValueError, match="two parameters have the path 'a/b'"):
        fp8.convert(
            lambda w, x: x @ w["a/b"] @ w["a"]["b"], CURRENT,
            inputs=({"a/b": jnp.eye(16), "a": {"b": jnp.eye(16)}}, x),
        )  # fmt: skip


def test_a_bound_model_draws_other_masks_at_each_call_and_serves_nnx():
    class Dropped(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.normal(), (16, 16))
            return nn.Dropout(0.5, deterministic=False)(x @ w)

    x = jnp.ones((8, 16))
    model, _ = fp8.convert(Dropped(), fp8.recipes.identity(), inputs=(x,))
    params = {"params": {"w": jnp.eye(16)}}
    bound, plain = (m.bind(params, rngs={"dropout": KEYS[0]}) for m in (model, Dropped()))
    first = bound(x)
    equal(first, plain(x))
    assert (first != bound(x)).any()
    model, _ = fp8.convert(Dropped(), DELAYED, inputs=(x,))
    wrapped = nnx.bridge.lazy_init(nnx.bridge.ToNNX(model, rngs=nnx.Rngs(0)), x)
    assert wrapped(x).shape == x.shape
