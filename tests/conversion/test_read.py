"""Matmuls that code of a model computes with parameters of its own: their numbers and states.

A model takes its matmul. The converted one has `jnp.matmul`. The same model with our matmul has the
same numbers.
"""

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION

CURRENT, DELAYED = fp8.recipes.current(), fp8.recipes.delayed()
KEYS = jax.random.split(jax.random.key(0), 3)
X = jax.random.normal(KEYS[0], (2, 8))
PARAMS = {
    "layers": jax.random.normal(KEYS[1], (3, 8, 8)) / 2,
    "out": {"w": jax.random.normal(KEYS[2], (8, 4))},
}
BY_HAND = functools.partial(fp8.dot, recipe=CURRENT)


def equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert_same_bits(one, other)


# Functions.


def forward(params, x, kind="scan", multiply=jnp.matmul, probes=None):
    """The result, and what each layer multiplies."""
    probes = jnp.zeros((3, *x.shape)) if probes is None else probes

    def layer(x, each):
        w, probe = each
        return jnp.tanh(multiply(x, w) + probe), x

    each = params["layers"], probes
    if kind == "scan":
        x, xs = lax.scan(layer, x, each)
    else:
        xs = []
        for i in range(3):
            x, given = layer(x, (each[0][i], probes[i]))
            xs.append(given)
        xs = jnp.stack(xs)
    return multiply(x, params["out"]["w"]), (xs, x)


def convert(kind="scan", recipe=DELAYED, **options):
    function = functools.partial(forward, kind=kind)
    return fp8.convert(function, recipe, inputs=(PARAMS, X), **options)


PATHS = {"scan": ["layers"], "loop": ["layers", "layers#2", "layers#3"]}


@pytest.mark.parametrize("kind", PATHS)
def test_amaxes_are_those_of_numpy(kind):
    """Of x, w and g of each layer. A probe is added to each result, so its gradient is g."""
    function, _ = convert(kind, keep=())

    def loss(trained, state):
        params, probes = trained
        y, aux = function(params, X, probes=probes, fp8_state=state)
        return jnp.sum(y * jnp.arange(4.0)[None]), aux

    trained = PARAMS, jnp.zeros((3, 2, 8))
    (_, (xs, last)), (_, g), new = fp8.value_and_grad(loss, has_aux=True)(
        trained, function.init_state()
    )
    assert sorted(new) == [*PATHS[kind], "out/w"]
    seen = [new[path].amax_history[..., -1] for path in PATHS[kind]]
    for row, arrays in enumerate((xs, PARAMS["layers"], g)):
        want = np.abs(arrays).max((1, 2))
        np.testing.assert_array_equal(np.stack(seen).reshape(3, 3)[:, row], want)
    want = [np.abs(last).max(), np.abs(PARAMS["out"]["w"]).max(), 3]
    np.testing.assert_array_equal(new["out/w"].amax_history[:, -1], np.float32(want))


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize("recipe", [CURRENT, fp8.recipes.identity()], ids=lambda r: r.name)
def test_results_and_gradients_are_those_by_hand(kind, recipe):
    function, _ = convert(kind, recipe, keep=())
    multiply = functools.partial(fp8.dot, recipe=recipe) if recipe is CURRENT else jnp.matmul

    def of(call):
        loss = lambda params, x: jnp.sum(jnp.sin(call(params, x)[0]))
        both = jax.value_and_grad(loss, (0, 1))
        # Eager code has other kernels for a matmul alone than for one in jnp.matmul.
        return (jax.jit(both) if recipe.is_identity else both)(PARAMS, X)

    equal(of(function), of(functools.partial(forward, kind=kind, multiply=multiply)))


def test_states_and_rules_by_paths_of_parameters():
    function, coverage = convert(rules=[("out/w", CURRENT)])
    state = function.init_state()
    assert {path: each.scale.shape for path, each in state.items()} == {"layers": (3, 3)}
    assert {row.path: row.recipe for row in coverage} == {"layers": "delayed", "out/w": "current"}
    assert coverage["layers"].parameters == ("layers",)
    assert coverage["layers"].equation == "ab,bc->ac"
    with pytest.raises(fp8.FP8StateError, match="fp8_state has no state for 'layers'"):
        function(PARAMS, X)
    unrolled = convert("loop")[0].init_state()["layers"]
    with pytest.raises(fp8.FP8StateError, match=r"in loops of \[3\], but the state has \[\]"):
        function(PARAMS, X, fp8_state={"layers": unrolled})
    with pytest.raises(ValueError, match="rule 'nowhere' matches no layer"):
        convert(rules=[("nowhere", CURRENT)])


def test_kinds_that_are_kept():
    """The router, the head and what is looked up, by the names of parameters."""
    shapes = {"table": (16, 8), "router": (8, 4), "lm_head": (8, 16), "w": (8, 8)}
    params, ids = {name: jnp.ones(shape) for name, shape in shapes.items()}, jnp.arange(2)

    def function(params, ids):
        x = jax.nn.one_hot(ids, 16) @ params["table"] @ params["w"]
        return x @ params["router"], x @ params["lm_head"], x @ params["table"].T

    of = lambda **options: fp8.convert(function, CURRENT, inputs=(params, ids), **options)[1]
    assert {row.path: row.reason for row in of()} == {
        "table": "kept: lookup", "w": "", "router": "kept: router", "lm_head": "kept: lm_head",
        "table#2": "kept: lm_head",
    }  # fmt: skip
    assert all(row.recipe for row in of(keep=()))
    assert of(rules=[("table", CURRENT)])["table"].recipe == "current"


def test_stochastic_rounding_has_another_key_in_each_iteration():
    """The gradient of the same layer three times: each one is rounded by itself."""
    recipe = fp8.recipes.current(gradient_rounding="stochastic")

    def function(params, x, probes):
        layer = lambda x, p: (x + 0 * (y := x @ params["w"] + p), y)
        return lax.scan(layer, x, probes)[1]

    params, probes = {"w": PARAMS["layers"][0]}, jnp.zeros((3, 2, 8))
    converted, _ = fp8.convert(function, recipe, inputs=(params, X, probes))
    scales = jnp.linspace(0.3, 1, 16).reshape(2, 8)

    @jax.jit
    def grads(key):
        loss = lambda x: jnp.sum(converted(params, x, probes, fp8_key=key) * scales[None], (1, 2))
        return jax.jacrev(loss)(X)

    one, again, other = grads(KEYS[0]), grads(KEYS[0]), grads(KEYS[1])
    equal(one, again)
    assert not np.array_equal(one, other)
    assert not np.array_equal(one[0], one[1])


jitted = jax.jit(jnp.matmul)


def test_recipes_one_after_another_have_their_own_numbers():
    """Also in functions that are jitted inside, whose programs JAX keeps."""
    function = lambda params, x: jitted(x, params["out"]["w"])
    coarse = fp8.recipes.static(x_scale=0.5, w_scale=0.5, g_scale=1.0)
    want = [fp8.dot(X, PARAMS["out"]["w"], recipe=recipe) for recipe in (CURRENT, coarse)]
    models = [fp8.convert(function, r, inputs=(PARAMS, X))[0] for r in (CURRENT, coarse)]
    for _ in range(2):
        equal([model(PARAMS, X) for model in models], want)
    equal(function(PARAMS, X), X @ PARAMS["out"]["w"])


# linen.


class Own(nn.Module):
    """A layer that no class of flax is."""

    multiply: Callable = jnp.matmul

    @nn.compact
    def __call__(self, x, _=None):
        w = self.param("w", nn.initializers.normal(0.5), (8, 8))
        return jnp.tanh(self.multiply(x, w)), None


class Trained(nn.Module):
    """All that a call may change."""

    multiply: Callable = jnp.matmul

    @nn.compact
    def __call__(self, x, _=None, train=True):
        x, _ = Own(self.multiply, name="own")(x)
        self.sow("intermediates", "h", x)
        cache = self.variable("cache", "last", jnp.zeros_like, x)
        x, cache.value = x + cache.value, x
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dropout(0.5, deterministic=not train)(x), None


class Twice(nn.Module):
    multiply: Callable = jnp.matmul

    @nn.compact
    def __call__(self, x, _=None):
        own = Own(self.multiply, name="own")
        return own(own(x)[0])


CHANGES = ["cache", "batch_stats"]
STACKED = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
LINEN = {
    "plain": (Own, {"w": ()}),
    "called twice": (Twice, {"own/w": (), "own/w#2": ()}),
    "scan": (nn.scan(Own, length=3, **STACKED), {"w": (3,)}),
    "remat": (nn.remat(Own), {"w": ()}),
    "scan of remat": (nn.scan(nn.remat(Own), length=3, **STACKED), {"w": (3,)}),
    "jit": (nn.jit(Own), {"w": ()}),
    "vmap": (nn.vmap(Own, in_axes=None, axis_size=3, **STACKED), {"w": ()}),
    "all that changes": (Trained, {"own/w": ()}),
}


@pytest.mark.parametrize("name", LINEN)
def test_linen_models(name):
    kind, states = LINEN[name]
    rngs = {"params": KEYS[0], "dropout": KEYS[1]}
    variables = kind().init(rngs, X, None)
    converted, _ = fp8.convert(kind(), CURRENT, inputs=(X, None))
    equal(converted.init(rngs, X, None)["params"], variables["params"])
    args = variables, X, None
    have = converted.apply(*args, rngs=rngs, mutable=True)
    if name != "vmap":  # ours has one amax for each, that of a batch is one
        equal(have, kind(BY_HAND).apply(*args, rngs=rngs, mutable=True))
    if name == "all that changes":
        options = {"train": False, "mutable": ["cache"]}
        equal(converted.apply(*args, **options), kind(BY_HAND).apply(*args, **options))
    delayed, _ = fp8.convert(kind(), DELAYED, inputs=(X, None))
    flat = delayed.init(rngs, X, None)[COLLECTION]
    found = {
        "/".join(key.key.removeprefix("fp8_of_") for key in path): state.scale.shape[:-1]
        for path, state in jax.tree_util.tree_leaves_with_path(
            flat, is_leaf=lambda node: hasattr(node, "amax_history")
        )
    }
    assert found == states
    if name == "plain":
        with pytest.raises(fp8.FP8StateError, match="w: the state of recipe 'delayed' is missing"):
            delayed.apply(*args)


def test_a_converted_linen_model_as_a_part_of_another_and_bound():
    part, _ = fp8.convert(Trained(), CURRENT, inputs=(X,))

    class Outer(nn.Module):
        part: nn.Module

        @nn.compact
        def __call__(self, x):
            return self.part(nn.Dense(8)(x))[0]

    rngs = {"params": KEYS[0], "dropout": KEYS[1]}
    variables = Outer(part).init(rngs, X)
    have, changed = Outer(part).apply(variables, X, rngs=rngs, mutable=CHANGES)
    inner = {name: each["part"] for name, each in variables.items() if "part" in each}
    dense = nn.Dense(8).apply({"params": variables["params"]["Dense_0"]}, X)
    want = Trained(BY_HAND).apply(inner, dense, rngs=rngs, mutable=CHANGES)[1]
    equal({name: each["part"] for name, each in changed.items()}, want)
    assert have.shape == (2, 8)
    bound = part.bind(inner, mutable=CHANGES)
    want, changed = Trained(BY_HAND).apply(inner, dense, train=False, mutable=CHANGES)
    equal(bound(dense, train=False), want)
    equal({name: bound.variables[name] for name in CHANGES}, changed)


# nnx.


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(rngs.params.normal((8, 8)) / 2)

    def __call__(self, x, multiply=jnp.matmul):
        return jnp.tanh(multiply(x, self.w[...]))


class Changing(nnx.Module):
    """All that a call may change."""

    def __init__(self, rngs):
        self.layer = Layer(rngs)
        self.mean = nnx.BatchStat(jnp.zeros(8))
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.last, self.calls = nnx.data(None), 0

    def __call__(self, x, rngs=None, multiply=jnp.matmul):
        x = self.layer(x, multiply)
        self.mean[...] = self.mean[...] / 2 + x.mean(0)
        self.last = nnx.Variable(x)
        self.calls += 1
        return self.drop(x, rngs=rngs) - self.mean[...][None]


class Jitted(nnx.Module):
    def __init__(self, rngs):
        self.layer = Layer(rngs)

    def __call__(self, x, multiply=jnp.matmul):
        return nnx.jit(lambda layer, x: layer(x, multiply))(self.layer, x)


class Stack(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.split_rngs(splits=3)(nnx.vmap(Layer))(rngs)

    def __call__(self, x, multiply=jnp.matmul):
        step = lambda x, layer: layer(x, multiply)
        return nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


NNX = {
    "plain": (Layer, {"w": ()}),
    "all that changes": (Changing, {"layer/w": ()}),
    "jit": (Jitted, {"layer/w": ()}),
    "scan": (Stack, {"layers/w": (3,)}),
}


@pytest.mark.parametrize("name", NNX)
def test_nnx_models(name):
    kind, states = NNX[name]
    mine, other = kind(nnx.Rngs(0)), kind(nnx.Rngs(0))
    converted, _ = fp8.convert(mine, CURRENT, inputs=(X,))
    for _ in range(2):
        equal(converted(X), other(X, multiply=BY_HAND))
    if name == "all that changes":
        equal(converted.last[...], other.last[...])
        assert converted.calls == 2
        rngs, others = nnx.Rngs(7), nnx.Rngs(7)
        for _ in range(2):
            equal(converted(X, rngs), other(X, others, multiply=BY_HAND))
        equal(rngs.default.count[...], others.default.count[...])
    have, want = nnx.to_pure_dict(nnx.state(converted)), nnx.to_pure_dict(nnx.state(other))
    equal(*(jax.tree.map(_data, each) for each in (have, want)))
    delayed, _ = fp8.convert(kind(nnx.Rngs(0)), DELAYED, inputs=(X,))
    found = {path: m.matmul_state.scale.shape[:-1] for path, m in delayed.fp8_matmuls.items()}
    assert found == states


def _data(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def test_a_step_of_an_nnx_model():
    """The amaxes of the first step, and what the call changes."""
    model, _ = fp8.convert(Changing(nnx.Rngs(0)), DELAYED, inputs=(X,))
    model(X)  # makes a Variable, which a gradient cannot
    loss = lambda model, x: jnp.sum(model(x) ** 2)
    _, grads = nnx.jit(fp8.nnx.value_and_grad(loss))(model, X)
    x, w, _ = model.fp8_matmuls["layer/w"].matmul_state.amax_history[:, -1]
    assert (x, w) == (np.abs(X).max(), np.abs(model.layer.w[...]).max())
    assert grads["layer"]["w"][...].shape == (8, 8)
    assert np.abs(model.mean[...]).max() > 0


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_jitted_modules_have_the_recipe_of_their_model(kind):
    coarse = fp8.recipes.static(x_scale=0.5, w_scale=0.5, g_scale=1.0)
    if kind == "linen":
        model = nn.jit(Own)()
        variables = model.init(KEYS[0], X)
        w, call = variables["params"]["w"], lambda model: model.apply(variables, X)[0]
    else:
        model = Jitted(nnx.Rngs(0))
        w, call = model.layer.w[...], lambda model: model(X)
    recipes = CURRENT, coarse
    models = [fp8.convert(model, recipe, inputs=(X,))[0] for recipe in recipes]
    want = [jnp.tanh(fp8.dot(X, w, recipe=recipe)) for recipe in recipes]
    for _ in range(2):
        for each, y in zip(models, want, strict=True):  # the recipes differ by more
            np.testing.assert_allclose(call(each), y, rtol=1e-5)
