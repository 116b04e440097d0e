"""Collecting changes no program that runs outside of it, and finds every cast that runs inside."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hard_inputs import mentions
from jax import lax

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense, FP8Einsum

RECIPES = {
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "high precision": fp8.recipes.rowwise(high_precision_wgrad=True),
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
    "static": fp8.recipes.static(x_scale=0.1, w_scale=0.1, g_scale=0.1),
    "stochastic": fp8.recipes.current(gradient_rounding="stochastic"),
    "stochastic tiles": fp8.recipes.blockwise(gradient_rounding="stochastic"),
    "stochastic, high precision": fp8.recipes.rowwise(
        high_precision_wgrad=True, gradient_rounding="stochastic"
    ),
}
X = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
LAYERS = 3


class Block(nn.Module):
    recipe: fp8.Recipe

    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.relu(FP8Dense(32, recipe=self.recipe, name="up")(x)), None


class Model(nn.Module):
    """Three layers in a scan, with or without remat, and a head outside of it."""

    recipe: fp8.Recipe
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        block = Block
        if self.remat:
            policy = fp8.save_fp8_residuals() if self.remat == "policy" else None
            block = nn.remat(Block, prevent_cse=False, policy=policy)
        scanned = nn.scan(
            block,
            variable_axes={"params": 0, COLLECTION: 0},
            split_rngs={"params": True, "fp8": True},
            length=LAYERS,
        )
        x, _ = scanned(self.recipe, name="blocks")(x)
        return FP8Einsum((32, 4), "bk,kn->bn", recipe=self.recipe, name="head")(x)


@functools.cache
def variables():
    """Parameters, which are those of each recipe, and the states of delayed scaling."""
    return jax.jit(Model(RECIPES["delayed"]).init)(jax.random.key(1), X)


def train_step(model):
    """A step, and its arguments."""
    rngs = {"fp8": jax.random.key(7)} if model.recipe.needs_key else None

    def loss(params, state, x):
        y = model.apply({"params": params, COLLECTION: state}, x, rngs=rngs)
        return jnp.mean(y**2)

    def step(params, state, x):
        return fp8.value_and_grad(loss)(params, state, x)

    state = variables()[COLLECTION] if model.recipe.rows else {}
    return step, (variables()["params"], state, X)


def same(a, b):
    return all(map(np.array_equal, *map(jax.tree.leaves, (a, b))))


# With state and with a key, with one copy of a tensor and with more, and each kind of remat.
# Without remat: the scan of `test_nnx`.
FEW = {("delayed", "policy"), ("stochastic tiles", True)}


@pytest.mark.parametrize(
    ("name", "remat"),
    [
        pytest.param(*case, marks=() if case in FEW else pytest.mark.slow)
        for case in (
            *((name, False) for name in RECIPES),
            *((name, remat) for name in ("delayed", "blockwise") for remat in (True, "policy")),
            ("stochastic tiles", True),
        )
    ],
)
def test_a_scanned_model(name, remat):
    model = Model(RECIPES[name], remat)
    function, arguments = train_step(model)
    step = jax.jit(function)
    results, text = step(*arguments), step.lower(*arguments).as_text()
    programs = step._cache_size()

    with fp8.diagnostics.collect() as records:
        watched, inside = step(*arguments), step.lower(*arguments).as_text()
    rows = fp8.diagnostics.summary(records).rows
    # Each cast of a step is recorded once, also if a forward pass runs twice.
    calls = {"blocks/up": LAYERS, "head": 1}
    assert {row.layer: row.calls for row in rows} == calls
    assert {row.tensor for row in rows} == {"x", "w", "g"}
    sizes = {("blocks/up", "x"): X.size, ("blocks/up", "w"): 32 * 32, ("head", "g"): 16 * 4}
    for row in rows:
        assert row.calls == calls[row.layer]
        if size := sizes.get((row.layer, row.tensor)):
            assert row.values == size * row.calls
        assert 0 < row.scale_min <= row.scale_max
    if name == "delayed":
        seen = {(r.layer, r.tensor): r.amax for r in fp8.diagnostics.summary(results[2]).rows}
        for row in rows:
            stacked = [f"{row.layer}[{i}]" for i in range(LAYERS)]
            keys = [key for key in (row.layer, *stacked) if (key, row.tensor) in seen]
            assert row.amax == pytest.approx(max(seen[key, row.tensor] for key in keys), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5), results, watched)

    # Outside, nothing is compiled again. Inside, a second time compiles nothing.
    assert step._cache_size() == programs + 1
    assert same(step(*arguments), results)
    with fp8.diagnostics.collect() as again:
        step(*arguments)
    assert step._cache_size() == programs + 1
    assert fp8.diagnostics.summary(again).rows == rows
    # A fresh function gives the same program as before, outside and inside.
    fresh, _ = train_step(model)
    assert jax.jit(fresh).lower(*arguments).as_text() == text != inside
    assert "callback" in inside
    assert "callback" not in text
    with fp8.diagnostics.collect() as records:
        assert step.lower(*arguments).as_text() == inside
        step(*arguments)


class Net(nnx.Module):
    def __init__(self, recipe, rngs):
        def up(rngs):
            return fp8.nnx.FP8Linear(32, 32, recipe=recipe, rngs=rngs)

        self.layers = nnx.List([up(rngs) for _ in range(2)])
        self.scanned = nnx.vmap(up, in_axes=0, out_axes=0)(rngs.split(LAYERS))
        self.head = fp8.nnx.FP8Einsum("bk,kn->bn", (32, 4), recipe=recipe, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        x = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, self.scanned
        )
        return self.head(x)


@pytest.mark.parametrize("name", ["delayed", pytest.param("blockwise", marks=pytest.mark.slow)])
def test_nnx(name):
    model = nnx.jit(lambda: Net(RECIPES[name], nnx.Rngs(0)))()

    @nnx.jit
    def step(model, x):
        return fp8.nnx.value_and_grad(lambda model, x: model(x).sum())(model, x)[0]

    graph = nnx.graphdef(model)
    with fp8.diagnostics.collect(model) as records:
        step(model, X)
    rows = fp8.diagnostics.summary(records).rows
    calls = {"head": 1, "layers/0": 1, "layers/1": 1, "scanned": LAYERS}
    assert {row.layer: row.calls for row in rows} == calls
    assert nnx.graphdef(model) == graph
    if name == "delayed":
        layers = {row.layer for row in fp8.diagnostics.summary(model).rows}
        assert layers == {"head", "layers/0", "layers/1", *(f"scanned[{i}]" for i in range(3))}
        assert layers == {row.layer for row in fp8.diagnostics.summary(nnx.state(model)).rows}
    with fp8.diagnostics.collect() as records:  # without names, the lines of the calls
        nnx.jit(lambda model, x: model(x))(model, X)
    assert all(
        row.layer.startswith("test_collect.py:") for row in fp8.diagnostics.summary(records).rows
    )


def tensors(records):
    return {(row.layer, row.key, row.calls) for row in fp8.diagnostics.summary(records).rows}


@pytest.mark.parametrize("jit", [jax.jit, lambda function: function], ids=["jit", "eager"])
def test_plain_jax(jit):
    recipe, w = fp8.recipes.blockwise(), jnp.ones((32, 32))

    def forward(w, x):
        return fp8.dot(fp8.dot(x, w, recipe=recipe, name="first"), w, recipe=recipe)

    with fp8.diagnostics.collect() as records:
        jit(forward)(w, X)
    line = f"test_collect.py:{forward.__code__.co_firstlineno + 1}"
    # The copies for a backward pass are not made without one.
    expected = {(layer, key, 1) for layer in ("first", line) for key in ("x/fprop", "w")}
    assert tensors(records) == expected
    with fp8.diagnostics.collect() as records:
        jit(jax.grad(lambda w: forward(w, X).sum()))(w)
    keys = ("x/fprop", "x/wgrad", "w", "g/dgrad", "g/wgrad")
    assert tensors(records) == {(layer, key, 1) for layer in ("first", line) for key in keys}


def test_a_wgrad_in_high_precision():
    recipe, w = RECIPES["stochastic, high precision"], np.ones((32, 32), np.float32)
    loss = lambda w, key: fp8.dot(X, w, recipe=recipe, key=key, name="layer").sum()
    with fp8.diagnostics.collect() as records:
        jax.jit(jax.grad(loss))(w, jax.random.key(0))
    keys = ("x/fprop", "w/fprop", "w/dgrad", "g/dgrad")
    assert tensors(records) == {("layer", key, 1) for key in keys}


def test_a_body_that_was_traced_before():
    """JAX caches the traces of loops. A trace without statistics must not be found, nor kept."""
    recipe = fp8.recipes.current()

    def body(x, w):
        return fp8.dot(x, w, recipe=recipe, name="layer"), None

    ws = jnp.ones((LAYERS, 32, 32))
    loss = lambda ws: lax.scan(jax.checkpoint(body), X, ws)[0].sum()
    before = str(jax.make_jaxpr(jax.grad(loss))(ws))
    for _ in range(2):
        with fp8.diagnostics.collect() as records:
            jax.grad(loss)(ws)
        assert tensors(records) == {("layer", key, LAYERS) for key in "xwg"}
    assert str(jax.make_jaxpr(jax.grad(loss))(ws)) == before
    assert "callback" not in before


def test_vmap():
    recipe, w = fp8.recipes.current(), jnp.ones((5, 32, 8))
    run = jax.grad(lambda w: jax.vmap(lambda w: fp8.dot(X, w, recipe=recipe, name="e"))(w).sum())
    with fp8.diagnostics.collect() as records:
        run(w)
    assert tensors(records) == {("e", key, 5) for key in "xwg"}
    assert {row.values for row in fp8.diagnostics.summary(records).rows if row.tensor == "w"} == {
        w.size
    }


def test_a_prologue():
    recipe, w = fp8.recipes.current(), jnp.ones((32, 8))
    with fp8.diagnostics.collect() as records:
        fp8.dot((X, X), w, recipe=recipe, prologue=fp8.prologues.SwiGLU(), name="down")
    x = np.asarray(fp8.prologues.SwiGLU()(X, X))
    assert fp8.diagnostics.summary(records).rows[0].amax == np.abs(x).max()


def test_steps_add_up():
    recipe, step = fp8.recipes.current(), jax.jit(fp8.dot, static_argnames=("recipe", "name"))
    w = np.ones((32, 8), np.float32)
    w[0] = 0
    with fp8.diagnostics.collect() as records:
        for scale in (1.0, 2.0, 4.0):
            step(X, np.float32(scale) * w, recipe=recipe, name="layer")
        assert len(fp8.diagnostics.summary(records).rows) == 2  # it waits for what still runs
    row = fp8.diagnostics.summary(records).rows[1]
    assert (row.calls, row.values, row.amax) == (3, 3 * w.size, 4.0)
    assert row.scale_max == 4 * row.scale_min


def test_without_records():
    recipe, w = fp8.recipes.current(), jnp.ones((32, 8))
    compiled = jax.jit(lambda x, w: fp8.dot(x, w, recipe=recipe)).lower(X, w).compile()
    for run in (lambda: None, lambda: compiled(X, w)):
        with (
            pytest.raises(RuntimeError, match=mentions("no FP8 cast", "ahead of time", "jax.jit")),
            fp8.diagnostics.collect(),
        ):
            run()
    # A program that was compiled inside may run outside. Nobody receives its statistics.
    with fp8.diagnostics.collect():
        watched = jax.jit(lambda x, w: fp8.dot(x, w, recipe=recipe)).lower(X, w).compile()
        watched(X, w)
    watched(X, w)


def test_misuse():
    with (
        pytest.raises(RuntimeError, match="active already"),
        fp8.diagnostics.collect(),
        fp8.diagnostics.collect(),
    ):
        pass
    with pytest.raises(TypeError, match=mentions("FP8Dense", "collect()")):
        fp8.diagnostics.collect(FP8Dense(4)).__enter__()
    with pytest.raises(TypeError, match="name=3 must be a string"):
        fp8.dot(X, X.T, recipe=fp8.recipes.current(), name=3)
    with pytest.raises(KeyError), fp8.diagnostics.collect():  # the error of the step stays
        raise KeyError("step")
    with fp8.diagnostics.collect():  # and the next context can begin
        fp8.dot(X, jnp.ones((32, 8)), recipe=fp8.recipes.current())
