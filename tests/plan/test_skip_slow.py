"""The rule: its choice follows from its arguments alone, is printed, and a layer that is skipped is
flax's own.
"""

import concurrent.futures
import dataclasses
import os
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hard_inputs import mentions
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense
from jaxfp8.nnx import FP8Linear

FAST, SLOW = (8192, 4096, 14336), (64, 32, 48)
RULE = fp8.plan.skip_slow(kernels=fp8.Kernels("h200"))
RECIPE = fp8.recipes.delayed()


def test_keeps_what_pays_and_skips_what_does_not(capsys):
    assert RULE("up", FAST, RECIPE) is RECIPE
    skipped = RULE("down", SLOW, RECIPE)
    assert skipped.is_identity
    # The reason is stored, and printed, one line a layer.
    slowdown = fp8.plan.roofline(SLOW, recipe=RECIPE, kernels=fp8.Kernels("h200")).speedup
    found = f"{slowdown:.3f}x on h200"
    assert skipped.name == f"identity (skip_slow: delayed {found})"
    kept, left = capsys.readouterr().out.splitlines()
    assert all(
        part in kept for part in ("up", "[8192, 4096] @ [4096, 14336]", "delayed", "h200", "kept")
    )
    assert all(
        part in left
        for part in ("down", "[64, 32] @ [32, 48]", "delayed", found, "below 1", "identity")
    )


def test_a_skipped_recipe_is_a_value():
    one, two = (RULE("down", SLOW, RECIPE) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert dataclasses.replace(one, name="identity") == fp8.recipes.identity()
    assert fp8.init_state(one) == ()


def test_the_rule_is_a_value():
    assert fp8.plan.skip_slow(kernels=fp8.Kernels("h200")) == RULE
    assert hash(fp8.plan.skip_slow(kernels=fp8.Kernels("h200"))) == hash(RULE)
    others = [
        fp8.plan.skip_slow(kernels=fp8.Kernels("h100")),
        fp8.plan.skip_slow(kernels=fp8.Kernels("h200"), at_least=1.1),
        fp8.plan.skip_slow(kernels=fp8.Kernels("h200"), tokens=8192),
    ]
    assert len({RULE, *others}) == 4
    with pytest.raises(dataclasses.FrozenInstanceError):
        RULE.kernels = fp8.Kernels("h100")


@given(
    shape=st.tuples(*[st.integers(1, 2**14)] * 3),
    name=st.sampled_from(["delayed", "current", "rowwise", "blockwise", "mxfp8"]),
    at_least=st.floats(0.1, 2),
)
def test_the_choice_is_the_threshold(shape, name, at_least):
    recipe, rule = (
        fp8.recipes.get(name),
        fp8.plan.skip_slow(kernels=fp8.Kernels("h200"), at_least=at_least),
    )
    chosen = rule("layer", shape, recipe)
    slow = fp8.plan.roofline(shape, recipe=recipe, kernels=fp8.Kernels("h200")).speedup < at_least
    assert chosen.is_identity == slow
    assert slow or chosen is recipe
    assert chosen == rule("layer", shape, recipe)
    # Of weights, by a rule that knows the tokens.
    weights = fp8.plan.skip_slow(kernels=fp8.Kernels("h200"), at_least=at_least, tokens=shape[0])
    assert weights("layer", shape[1:], recipe) == chosen


def test_identity_stays_as_it_is(capsys):
    strict = fp8.plan.skip_slow(kernels=fp8.Kernels("h200"), at_least=1.5)
    assert strict("head", FAST, fp8.recipes.identity()) == fp8.recipes.identity()
    assert "kept" in capsys.readouterr().out


def test_the_same_in_every_process_and_thread():
    # Another process with another hash seed, and threads: nothing but the arguments decides.
    program = (
        f"import jaxfp8 as fp8\nkernels = fp8.Kernels('h200')\n"
        f"print(fp8.plan.skip_slow(kernels=kernels)('down', {SLOW}, fp8.recipes.delayed()).name)"
    )
    here = RULE("down", SLOW, RECIPE)
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "1", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert finished.stdout.splitlines()[-1] == here.name
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: RULE("down", SLOW, RECIPE), range(8))) == {here}


def arrays():
    random, shapes = np.random.default_rng(0), (SLOW[:2], (SLOW[0], SLOW[2]))
    return jax.device_put(tuple(random.standard_normal(shape, np.float32) for shape in shapes))


def gradients(layer, variables, x, g):
    def loss(params, x):
        return jnp.sum(layer.apply({**variables, "params": params}, x) * g)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(variables["params"], x)


def test_a_skipped_linen_layer_is_flax():
    x, g = arrays()
    recipe = RULE("down", SLOW, RECIPE)
    ours, theirs = FP8Dense(SLOW[2], recipe=recipe), nn.Dense(SLOW[2])
    mine, their = (jax.jit(layer.init)(jax.random.key(1), x) for layer in (ours, theirs))
    assert COLLECTION not in mine
    jax.tree.map(np.testing.assert_array_equal, mine, their)
    results = gradients(ours, mine, x, g), gradients(theirs, their, x, g)
    jax.tree.map(np.testing.assert_array_equal, *results)
    # And it is told from FP8.
    fp8_result = gradients(FP8Dense(SLOW[2], recipe=fp8.recipes.current()), mine, x, g)
    assert np.any(np.asarray(fp8_result[0]) != np.asarray(results[0][0]))


def test_a_skipped_nnx_layer_is_identity():
    from flax import nnx

    x, _ = arrays()
    layers = [
        FP8Linear(SLOW[1], SLOW[2], recipe=recipe, rngs=nnx.Rngs(0))
        for recipe in (RULE("down", SLOW, RECIPE), fp8.recipes.identity())
    ]
    np.testing.assert_array_equal(*(layer(x) for layer in layers))


def test_a_skipped_matmul_in_an_explicit_mesh():
    x, w = arrays()[0], jax.random.normal(jax.random.key(2), SLOW[1:])
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
        y = jax.jit(lambda x, w: fp8.dot(x, w, recipe=RULE("down", SLOW, RECIPE)))(placed, w)
        np.testing.assert_array_equal(y, jax.jit(jnp.dot)(placed, w))


@pytest.mark.parametrize(
    ("kernels", "fields", "says"),
    [
        (fp8.Kernels("cpu"), {}, ("cpu", "no figures", "h200")),
        (fp8.Kernels(), {}, ("Kernels()", "names no chip", 'fp8.Kernels("h200")')),
        (fp8.Kernels("h200", casts="reference"), {}, ("casts='reference'", "for tests")),
        (fp8.Kernels("h200"), {"at_least": 0}, ("at_least=0", "positive")),
        (fp8.Kernels("h200"), {"at_least": float("nan")}, ("at_least=nan", "positive")),
        (fp8.Kernels("h200"), {"at_least": "1"}, ("at_least='1'", "positive")),
        (fp8.Kernels("h200"), {"tokens": 0}, ("tokens=0", "at least 1")),
        (fp8.Kernels("h200"), {"tokens": 8.0}, ("tokens=8.0", "at least 1")),
    ],
)
def test_rules_that_are_refused(kernels, fields, says):
    with pytest.raises(ValueError, match=mentions(*says)):
        fp8.plan.skip_slow(kernels=kernels, **fields)


def test_kernels_that_are_none():
    with pytest.raises(TypeError, match=mentions("kernels='h200'", "kernels=fp8.Kernels('h200')")):
        fp8.plan.skip_slow(kernels="h200")
    with pytest.raises(TypeError, match="kernels"):
        fp8.plan.skip_slow()


@pytest.mark.parametrize(
    ("tokens", "shape", "says"),
    [
        (None, (8, 8), ("shape=(8, 8)", "'down'", "(M, K, N)", "tokens=")),
        (64, SLOW, ("shape=(64, 32, 48)", "'down'", "(K, N)")),
        (None, (8, 8, 0), ("shape=(8, 8, 0)", "(M, K, N)")),
        (None, 8, ("shape=8", "(M, K, N)")),
    ],
)
def test_shapes_that_do_not_fit(tokens, shape, says):
    rule = fp8.plan.skip_slow(kernels=fp8.Kernels("h200"), tokens=tokens)
    with pytest.raises(ValueError, match=mentions(*says)):
        rule("down", shape, RECIPE)


@pytest.mark.parametrize(("chip", "name"), [("h200", "blockwise"), ("b200", "mxfp8")])
def test_it_estimates_the_kernels_of_the_layers(chip, name):
    """Kernels of the chip, from jax 0.11 on, make tiles worth it that XLA alone makes slow."""
    recipe = fp8.recipes.get(name)
    rules = [
        fp8.plan.skip_slow(kernels=kernels)
        for kernels in (fp8.Kernels(chip, casts="xla", matmuls="xla"), fp8.Kernels(chip))
    ]
    by_xla, by_kernels = (rule("up", FAST, recipe) for rule in rules)
    assert by_xla.is_identity
    assert by_kernels.is_identity == (jax.__version_info__ < (0, 11))
