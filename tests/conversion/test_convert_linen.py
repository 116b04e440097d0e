"""Converted linen models: the parameters of the model, and the matmuls of our layers."""

import functools
import pickle
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from same_bits import assert_same_bits
from zoo import (
    KEY,
    KINDS,
    LM,
    RECIPES,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Block,
    converted,
    loss_of,
    small,
)

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense, FP8DotGeneral

# State is what transformations must carry, so every kind runs with it. The default rows have a
# state in its own collection ("jit") and beside the parameters: stacked, and shared.
FEW = ("jit", "scan of remat", "shared scan")
SLOW = pytest.mark.slow
CASES = [
    *(pytest.param(kind, "delayed", marks=() if kind in FEW else SLOW) for kind in KINDS),
    pytest.param("jit", "current", marks=SLOW),
    pytest.param("scan", "blockwise", marks=SLOW),
]


STATELESS = ("current", "blockwise")


class Trained(NamedTuple):
    """A model, its variables, and a compiled step: what several tests look at."""

    model: LM
    variables: dict
    step: jax.stages.Wrapped  # of parameters, states and tokens


def drawn(params):
    """Parameters of these types, about as large as those of flax. Its `init` is a long program."""
    draw = np.random.default_rng(0)

    def one(path, x):
        if path[-1].key in ("bias", "scale"):
            return np.full(x.shape, path[-1].key == "scale", x.dtype)
        return (0.5 * draw.normal(size=x.shape) / np.sqrt(WIDTH)).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(one, params)


@functools.cache
def without_fp8(kind) -> Trained:
    model = small(kind)
    step = jax.value_and_grad(loss_of(model))
    types = jax.eval_shape(model.init, KEY, TOKENS)
    return Trained(model, {"params": drawn(types["params"])}, jax.jit(step))


@functools.cache
def in_fp8(kind, recipe) -> Trained:
    """Its own states, and the parameters of the model without FP8."""
    model = converted(small(kind), RECIPES[recipe])
    step = fp8.value_and_grad(loss_of(model))
    state = lambda: {k: v for k, v in model.init(KEY, TOKENS).items() if k != "params"}
    return Trained(model, without_fp8(kind).variables | jax.jit(state)(), jax.jit(step))


@pytest.mark.parametrize(("kind", "recipe"), CASES)
def test_parameters_and_their_paths_do_not_change(kind, recipe):
    mine = jax.eval_shape(in_fp8(kind, recipe).model.init, KEY, TOKENS)
    want = jax.eval_shape(without_fp8(kind).model.init, KEY, TOKENS)
    assert mine["params"] == want["params"]
    assert (COLLECTION in mine) == (recipe == "delayed")


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        pytest.param(*row.values, marks=() if row.values[0] == "scan of remat" else SLOW)
        for row in CASES
    ],
)
def test_values_of_new_parameters_do_not_change(kind, recipe):
    models = in_fp8(kind, recipe).model, without_fp8(kind).model
    mine, want = jax.jit(lambda: [model.init(KEY, TOKENS)["params"] for model in models])()
    assert_same_bits(mine, want)


@pytest.mark.parametrize(("kind", "recipe"), CASES)
def test_each_way_to_repeat_blocks_trains(kind, recipe):
    """Every projection is in FP8, in each transformation, and every state sees its amax."""
    mine = in_fp8(kind, recipe)
    params, state = mine.variables["params"], mine.variables.get(COLLECTION, {})
    loss, grads, new = mine.step(params, state, TOKENS)
    want, exact = without_fp8(kind).step(params, {}, TOKENS)
    assert loss != want
    np.testing.assert_allclose(loss, want, rtol=0.03)
    for ours, theirs in zip(*map(jax.tree.leaves, jax.device_get((grads, exact))), strict=True):
        if np.abs(theirs).max() > 1e-5:  # keys of attention have gradients of nearly 0
            cosine = np.sum(ours * theirs) / np.linalg.norm(ours) / np.linalg.norm(theirs)
            assert cosine > 0.9
    for leaf in jax.tree.leaves(new, is_leaf=lambda n: hasattr(n, "rows")):
        # x, w and g, of each layer of a stack
        assert (np.asarray(leaf.amax_history)[..., -1] > 0).all()


class Handmade(nn.Module):
    """`LM` with our layers."""

    recipe: fp8.Recipe

    def setup(self):
        self.embedding = nn.Embed(VOCABULARY, WIDTH)
        fields = {
            "dense": lambda *a, **k: FP8Dense(*a, recipe=self.recipe, **k),
            "plug": FP8DotGeneral.using(self.recipe),
        }
        self.blocks = [Block(**fields)]
        self.mix = fp8.linen.FP8Einsum((WIDTH, 4, 8), "btd,dhk->bthk", recipe=self.recipe)
        self.head = nn.Dense(VOCABULARY)

    encode = LM.encode
    kind = "loop"

    @nn.compact
    def __call__(self, tokens):
        return self.head(self.encode(tokens))


@pytest.mark.parametrize("recipe", ["delayed", *(pytest.param(n, marks=SLOW) for n in STATELESS)])
def test_program_state_and_results_are_those_of_layers_by_hand(recipe):
    by_hand, by_rules = Handmade(RECIPES[recipe]), converted(LM(depth=1), RECIPES[recipe])

    def programs(model):
        def init(key, tokens):
            return model.init(key, tokens)

        variables = jax.eval_shape(init, KEY, TOKENS)
        step = jax.jit(fp8.value_and_grad(loss_of(model)))
        given = variables["params"], variables.get(COLLECTION, {}), TOKENS
        texts = jax.jit(init).lower(KEY, TOKENS).as_text(), step.lower(*given).as_text()
        return variables, texts

    variables, texts = programs(by_rules)
    assert (COLLECTION in variables) == (recipe == "delayed")
    assert texts[1].count("f8E4M3") > 20  # six layers of a block are in FP8
    assert (variables, texts) == programs(by_hand)  # so the results are equal, too


@pytest.mark.quick
def test_a_checkpoint_of_the_model_loads_as_it_is():
    model, saved, _ = without_fp8("scan of remat")
    assert set(saved) == {"params"}
    mine = converted(model, RECIPES["current"])
    assert jax.eval_shape(mine.apply, saved, TOKENS).shape == (2, 8, VOCABULARY)
    stateful = in_fp8("scan of remat", "delayed").model
    with pytest.raises(fp8.FP8StateError, match="state of recipe 'delayed' is missing"):
        jax.eval_shape(stateful.apply, saved, TOKENS)


def test_frozen_variables_and_a_boxed_tree():
    from flax.core import freeze

    mine, variables, _ = in_fp8("scan of remat", "delayed")
    programs = [
        jax.jit(mine.apply).lower(each, TOKENS).as_text() for each in (freeze(variables), variables)
    ]
    assert programs[0] == programs[1]


def test_equal_conversions_are_equal_models():
    """jax.jit then does not trace a train step again."""
    one, two = (converted(small(), RECIPES["current"]) for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one != converted(small(), RECIPES["blockwise"])
    assert one != small()
    assert isinstance(one, LM)
    assert type(one).__name__ == "LM"


def test_a_converted_model_can_be_pickled():
    mine = converted(small(), RECIPES["delayed"])
    assert pickle.loads(pickle.dumps(mine)) == mine


def test_mutable_collections_and_random_streams():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.Dense(16)(x)
            x = nn.BatchNorm(use_running_average=not train)(x)
            x = nn.Dropout(0.5, deterministic=not train)(x)
            self.sow("intermediates", "x", x)
            return nn.Dense(4)(x)

    x = jax.random.normal(KEY, (8, 16))
    mine, _ = fp8.convert(Net(), RECIPES["delayed"], inputs=(x,), arguments={"train": False})
    variables, plain = jax.jit(lambda: [m.init(KEY, x, train=True) for m in (mine, Net())])()
    assert_same_bits({k: v for k, v in variables.items() if k != COLLECTION}, plain)
    rngs = {"dropout": jax.random.key(1)}

    @jax.jit
    def run(variables, plain):
        how, few = {"train": True, "rngs": rngs}, ["batch_stats", "intermediates"]
        return (
            mine.apply(variables, x, mutable=few, **how),
            Net().apply(plain, x, mutable=few, **how),
            mine.apply(variables, x, mutable=True, **how)[1],
        )

    (y, changed), (z, want), everything = run(variables, plain)
    assert jax.tree.structure(changed) == jax.tree.structure(want)
    assert (y != z).any()
    assert jax.tree.structure(everything["params"]) == jax.tree.structure(plain["params"])
    assert_same_bits(everything[COLLECTION], variables[COLLECTION])


def test_layers_that_only_a_later_call_makes_are_decided_by_the_same_rules():
    class Lazy(nn.Module):
        @nn.compact
        def __call__(self, x, extra=False):
            x = nn.Dense(16, name="always")(x)
            return nn.Dense(16, name="sometimes")(x) if extra else x

    x = jnp.ones((4, 16))
    mine, coverage = fp8.convert(Lazy(), RECIPES["delayed"], inputs=(x,))
    assert [row.path for row in coverage] == ["always"]
    made = jax.eval_shape(lambda: mine.init(KEY, x, True))
    assert set(made[COLLECTION]) == {"always", "sometimes"}


def test_a_later_call_with_other_shapes_has_the_recipes_of_the_table():
    h200 = fp8.Kernels("h200")
    x = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)
    layer = nn.Dense(4096, param_dtype=jnp.bfloat16)
    mine, coverage = fp8.convert(layer, RECIPES["delayed"], inputs=(x,), kernels=h200)
    assert coverage[""].recipe == "delayed"
    few = jax.eval_shape(lambda: mine.init(KEY, jnp.ones((1, 4096), jnp.bfloat16)))
    assert COLLECTION in few


@pytest.mark.parametrize(
    "kind", ["scan of remat", *(pytest.param(k, marks=SLOW) for k in ("loop", "jit", "scan"))]
)
def test_states_in_the_gradient_channel(kind):
    """A loop that overwrites states with their gradients trains a converted model."""
    model = without_fp8(kind).model
    mine = converted(model, RECIPES["delayed"], state_channel="gradient")
    other = in_fp8(kind, "delayed")
    variables = other.variables
    loss, grads = jax.jit(
        jax.value_and_grad(lambda v: loss_of(mine)(v["params"], v[COLLECTION], TOKENS))
    )(variables)
    want = other.step(variables["params"], variables[COLLECTION], TOKENS)
    assert_same_bits((loss, grads["params"]), want[:2])
    is_state = {"is_leaf": lambda node: hasattr(node, "rows")}
    pairs = zip(
        *(jax.tree.leaves(s, **is_state) for s in (grads[COLLECTION], want[2])), strict=True
    )
    for ours, theirs in pairs:
        assert_same_bits((ours.scale, ours.amax_history), (theirs.scale, theirs.amax_history))


def test_the_gradient_channel_refuses_layers_that_a_scan_shares():
    with pytest.raises(fp8.FP8StateError, match=r"inside nn\.scan\(variable_broadcast='params'\)"):
        converted(small("shared scan"), RECIPES["delayed"], state_channel="gradient")
