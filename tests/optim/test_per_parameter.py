"""`PerParameter`: formats of moments by the names of parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

from jaxfp8.optim import (
    FP8,
    BFloat16,
    ExpandedFP8,
    Float16,
    Float32,
    Int8,
    PerParameter,
    adamw,
    fused_adamw,
    release,
    with_moment_formats,
)

pytestmark = pytest.mark.usefixtures("standard_promotion")
RULES = [(".*embed.*", Float32()), ("blocks/0/.*", ExpandedFP8())]
FORMATS = PerParameter(RULES, Int8())


def params():
    matrix = lambda: jnp.ones((64, 128))
    return {
        "embed": matrix(),
        "blocks": [{"up": matrix(), "bias": jnp.ones(128)}, {"up": matrix()}],
    }


def kinds(tree):
    """The type of what is stored, by path. A small array is itself."""
    is_node = lambda node: hasattr(node, "largest")
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_node)
    return {jax.tree_util.keystr(path): type(x).__name__ for path, x in found}


WANTED = {
    "['embed']": "ShapeDtypeStruct",
    "['blocks'][0]['up']": "ExpandedFP8State",
    "['blocks'][0]['bias']": "ShapeDtypeStruct",
    "['blocks'][1]['up']": "Int8State",
}


def test_each_parameter_has_the_format_of_the_first_rule_that_matches():
    tx = adamw(1e-3, mu=FORMATS, nu=PerParameter(RULES, Float16()))

    def steps(p):
        state = tx.init(p)
        for _ in range(2):
            updates, state = tx.update(p, state, p)
        return updates, state

    updates, state = jax.eval_shape(steps, params())
    assert kinds(state.inner[0].mu) == WANTED
    second = {**WANTED, "['blocks'][1]['up']": "ShapeDtypeStruct"}
    assert {k: v for k, v in kinds(state.inner[0].nu).items() if k in second} == {
        k: v for k, v in second.items() if k != "['blocks'][1]['up']"
    }
    assert state.inner[0].nu["blocks"][1]["up"].values.dtype == jnp.float16
    assert jax.tree.structure(updates) == jax.tree.structure(params())


def test_a_parameter_in_float32_is_updated_as_by_optax():
    grads = jax.tree.map(lambda x: x * 0.1, params())
    update = lambda tx: jax.jit(lambda p: tx.update(grads, tx.init(p), p)[0])(params())
    mine = update(adamw(1e-3, mu=FORMATS, nu=FORMATS))
    np.testing.assert_array_equal(mine["embed"], update(optax.adamw(1e-3))["embed"])


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda tx: optax.chain(optax.clip(1.0), tx),
        lambda tx: optax.partition(
            {"a": tx, "b": optax.sgd(0.1)},
            {"embed": "a", "blocks": [{"up": "a", "bias": "b"}, "a"]},
        ),
        lambda tx: optax.MultiSteps(tx, 2),
    ],
    ids=["chain", "partition", "MultiSteps"],
)
def test_inside_other_transformations(wrapped):
    tx = wrapped(adamw(1e-3, mu=FORMATS, nu=FORMATS))
    start = params()

    def step(p):
        return tx.update(p, tx.init(p), p)

    _, state = jax.eval_shape(step, start)
    adam = optax.tree_utils.tree_get(state, "mu", filtering=lambda path, value: True)
    found = kinds(adam)
    assert found["['blocks'][0]['up']"] == "ExpandedFP8State"
    assert found["['blocks'][1]['up']"] == "Int8State"


def test_names_in_an_nnx_optimizer():
    class Model(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(64, 128, rngs=nnx.Rngs(0))
            self.up = nnx.Linear(64, 128, use_bias=False, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.up(x @ self.embed.embedding[...].T)

    model = Model()
    formats = PerParameter([("embed/.*", Float32())], Int8())
    optimizer = nnx.Optimizer(model, adamw(1e-3, mu=formats, nu=formats), wrt=nnx.Param)
    gradient = nnx.grad(lambda model: jnp.mean(model(jnp.ones((2, 128))) ** 2))
    step = nnx.jit(lambda optimizer, model: optimizer.update(model, gradient(model)))
    for _ in range(2):  # the second one reads what nnx made of the state
        step(optimizer, model)
    mu = nnx.as_pure(optimizer.opt_state.inner[0].mu)
    assert mu["embed"]["embedding"].dtype == jnp.float32
    assert {x.dtype.name for x in jax.tree.leaves(mu["up"])} == {"int8", "float32"}


def test_muon_and_release_and_the_fused_update():
    linear = PerParameter([("v", BFloat16())], Int8(companding=False))
    tx = with_moment_formats(
        optax.contrib.muon(1e-2), {"mu": linear, "nu": PerParameter([("v", BFloat16())], Int8())}
    )
    start = {"w": jnp.ones((64, 128)), "v": jnp.ones((64, 128))}
    state = jax.eval_shape(tx.init, start)
    assert {x.dtype.name for x in jax.tree.leaves(state)} >= {"int8", "bfloat16"}
    formats = PerParameter([("v", Float32())], Int8())
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), start)
    stack = release(adamw(1e-2, mu=formats, nu=formats))
    state = jax.eval_shape(lambda p: stack.init(p).opt_state, stacked)
    assert state.inner[0].mu["v"].dtype == jnp.float32
    assert state.inner[0].mu["w"].roots.shape == (2, 64, 128)
    fused = jax.eval_shape(fused_adamw(1e-2, moments=formats).init, start)
    assert fused.inner[0].nu["v"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PerParameter([("(", Float32())], Int8()), ValueError, "unterminated.*regular"),
        (lambda: PerParameter({"w": Float32()}, Int8()), ValueError, "must be pairs"),
        (
            lambda: adamw(1e-3, mu=PerParameter([(".*", "float32")], Int8())),
            TypeError,
            "must be one of Float32",
        ),
        (lambda: adamw(1e-3, nu=PerParameter([], FP8())), ValueError, "cannot store a second"),
        (
            lambda: adamw(1e-3, mu=PerParameter([("embedding", Float32())], Int8())).init(params()),
            ValueError,
            r"'embedding' matches no parameter.*blocks/0/bias",
        ),
        (
            lambda: fused_adamw(1e-3, moments=PerParameter([(".*embed", Float16())], Int8())),
            ValueError,
            "the kernel takes Int8",
        ),
    ],
    ids=["pattern", "pairs", "format", "second moment", "unused", "fused"],
)
def test_refusals(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_state_of_other_rules_is_refused():
    state = jax.eval_shape(adamw(1e-3, mu=FORMATS, nu=FORMATS).init, params())
    other = adamw(1e-3)
    with pytest.raises(ValueError, match="another format has stored"):
        jax.eval_shape(other.update, params(), state, params())
