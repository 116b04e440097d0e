"""`jaxfp8.plugs.gemma` in modules as gemma's, and in gemma's own if it is installed.

The class `Einsum` repeats what gemma's `_layers.Einsum` does.
"""

import contextlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import Message, check
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense
from jaxfp8.plugs.gemma import interceptor, replace_module_fn

RECIPES = ("delayed", "current", "blockwise", "mxfp8")
# The plug hands its recipe on. One matmul shows it for each recipe, and a net for one with state.
FEW = [pytest.param(name, marks=() if name == "delayed" else pytest.mark.slow) for name in RECIPES]


class Einsum(nn.Module):
    shape: tuple[int, ...]
    weight_name: str = "w"
    initializer: Any = nn.initializers.normal()
    dtype: Any = None
    w_scale: float | None = None  # newer families have it

    @nn.compact
    def __call__(self, eqn, x):
        w = self.param(self.weight_name, self.initializer, self.shape)
        return jnp.einsum(eqn, x, w * self.w_scale if self.w_scale else w)


Einsum.__module__ = "gemma.gm.nn._layers"


class Mlp(nn.Module):
    """Two einsums that share the scope of their parent, as in gemma's FeedForward."""

    @nn.compact
    def __call__(self, x):
        gate = Einsum((2, 128, 64), weight_name="gating_einsum")
        down = Einsum((64, 128), weight_name="linear")
        nn.share_scope(self, gate)
        nn.share_scope(self, down)
        left, right = jnp.moveaxis(gate("...F,NFH->...NH", x), -2, 0)
        return down("...H,HF->...F", nn.gelu(left) * right)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + Mlp(name="mlp")(x)
        x = nn.DenseGeneral((2, 32), name="heads")(x)
        x = nn.Einsum((2, 32, 64), "...hd,hdk->...k", name="out")(x)
        return nn.Dense(32, name="head")(x)


class Small(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="head")(nn.Dense(32, name="mlp")(x))


class Jitted(Small):
    """Whole models of gemma are so."""

    __call__ = nn.jit(Small.__call__)


@pytest.mark.parametrize("name", FEW)
def test_trains(name):
    recipe = fp8.recipes.get(name)
    x = jax.random.normal(jax.random.key(1), (2, 16, 128))

    @jax.jit
    def init(key, x):
        with interceptor(recipe):
            replaced = Net().init(key, x)
        return replaced, Net().init(key, x)

    variables, plain = init(jax.random.key(0), x)
    assert_same_bits(variables["params"], plain["params"])
    params, state = variables["params"], variables.get(COLLECTION, {})

    def loss_fn(params, state):
        with interceptor(recipe):
            return jnp.mean(Net().apply({"params": params, COLLECTION: state}, x) ** 2)

    @jax.jit
    def step(params, state):
        loss, grads, state = fp8.value_and_grad(loss_fn)(params, state)
        return loss, jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), state

    losses = []
    for _ in range(3):
        loss, params, state = step(params, state)
        losses.append(float(loss))
    assert losses[2] < losses[0]
    # The head stays in high precision.
    assert len(jax.tree.leaves(state)) == (4 * 4 if name == "delayed" else 0)


@pytest.mark.parametrize("name", RECIPES)
def test_has_the_bits_of_the_op(name):
    recipe = fp8.recipes.get(name)
    x = jax.random.normal(jax.random.key(1), (16, 128))
    scale = 0.3 if name == "current" else None
    layer = Einsum((128, 64), w_scale=scale)
    with interceptor(recipe):
        y, variables = layer.init_with_output(jax.random.key(0), "bf,fh->bh", x)
    w, state = variables["params"]["w"], fp8.init_state(recipe)
    w = w * scale if scale else w
    assert_same_bits(y, fp8.dot(x, w, recipe=recipe, state=state))


@pytest.mark.parametrize(
    ("paths", "found"), [("head", {"head"}), (None, {"mlp"}), (".*", {"head", "mlp"})]
)
def test_paths(paths, found):
    with interceptor(fp8.recipes.delayed(), paths=paths):
        variables = jax.eval_shape(Small().init, jax.random.key(0), jnp.ones((4, 128)))
    assert set(variables[COLLECTION]) == found


class Parts(nn.Module):
    def setup(self):
        self.up, self.down = nn.Dense(64), nn.Dense(32)

    def __call__(self, x):
        return self.down(nn.relu(self.up(x)))


def test_a_function_as_the_method_of_a_model_with_setup():
    model, x = Parts(), jax.random.normal(jax.random.key(1), (8, 32))
    variables = model.init(jax.random.key(0), x)
    with interceptor(fp8.recipes.current()):
        got = model.apply(variables, x, method=lambda model, x: model.up(x))
    kernel = variables["params"]["up"]["kernel"]  # its bias is 0
    assert_same_bits(got, fp8.dot(x, kernel, recipe=fp8.recipes.current()))


def test_paths_that_match_nothing():
    for model in (Small(), Jitted()):
        with (
            pytest.raises(
                ValueError, match=r"paths='layer' matches no param.*\['head/kernel', 'mlp/kernel'\]"
            ),
            interceptor(fp8.recipes.delayed(), paths="layer"),
        ):
            model.init(jax.random.key(0), jnp.ones((4, 64)))
    with interceptor(fp8.recipes.delayed(), paths="layer"):
        pass  # nothing ran


class Decoder(nn.Module):
    """As flax's example lm1b: with `decode` it takes one token a call, and has a cache."""

    decode: bool

    @nn.compact
    def __call__(self, tokens):
        mask = None if self.decode else nn.make_causal_mask(tokens)
        x = nn.Embed(128, 128, name="embed")(tokens)
        for i in range(2):
            x = x + nn.MultiHeadAttention(4, decode=self.decode, name=f"block_{i}")(x, mask=mask)
        return nn.Dense(128, name="head")(x)


@pytest.mark.parametrize("name", ["delayed", "rowwise"])
def test_decodes_with_a_cache_as_without(name):
    """With scales that do not depend on the number of tokens, a token has the same FP8 values."""
    tokens = jax.random.randint(jax.random.key(0), (2, 8), 0, 128)
    with interceptor(getattr(fp8.recipes, name)()):
        variables = Decoder(decode=False).init(jax.random.key(1), tokens)
        cache = Decoder(decode=True).init(jax.random.key(1), tokens)["cache"]
        assert cache["block_0"]["cache_index"] == 0
        if name == "delayed":  # scales of these tokens, which a step of training leaves
            loss = lambda params, state: (
                Decoder(decode=False).apply({"params": params, COLLECTION: state}, tokens).sum()
            )
            grad = fp8.value_and_grad(loss)
            _, _, variables[COLLECTION] = grad(variables["params"], variables[COLLECTION])
        whole = Decoder(decode=False).apply(variables, tokens)
        for i in range(8):
            y, changed = Decoder(decode=True).apply(
                {**variables, "cache": cache}, tokens[:, i : i + 1], mutable="cache"
            )
            cache = changed["cache"]
            np.testing.assert_allclose(y[:, 0], whole[:, i], atol=1e-4)
    plain = Decoder(decode=False).apply({"params": variables["params"]}, tokens)
    assert jnp.abs(plain - whole).max() > 1e-2


def test_a_layer_of_a_block_is_no_head():
    """The sizes of attention are that of the vocabulary, and "out" may be the name of a head."""
    tokens = jnp.ones((2, 8), jnp.int32)
    with interceptor(fp8.recipes.delayed()):
        variables = jax.eval_shape(Decoder(decode=False).init, jax.random.key(1), tokens)
    assert sorted(variables[COLLECTION]) == ["block_0", "block_1"]
    assert len(variables[COLLECTION]["block_0"]) == 4


def test_a_cached_layer_counts_as_matched():
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, name="last")(Jitted(name="inner")(x))

    x = jnp.ones((4, 64))
    params = Outer().init(jax.random.key(0), x)
    for _ in range(2):  # the second run calls "inner" from the cache of nn.jit
        with interceptor(fp8.recipes.current(), paths="inner/.*"):
            Outer().apply(params, x)


def test_fp8_layers_stay():
    with interceptor(fp8.recipes.delayed()):  # no state: the layer keeps its recipe
        variables = jax.eval_shape(
            FP8Dense(4, recipe=fp8.recipes.current()).init, jax.random.key(0), jnp.ones((4, 8))
        )
    assert COLLECTION not in variables


def test_the_cache_of_nn_jit_knows_what_is_exchanged():
    x = jax.random.normal(jax.random.key(1), (16, 64))
    params = jax.jit(Small().init)(jax.random.key(0), x)
    mlp, every = (fp8.recipes.current(), "mlp"), (fp8.recipes.mxfp8(), "mlp|head")

    def run(model, *entered):
        with contextlib.ExitStack() as stack:
            for recipe, paths in entered:
                stack.enter_context(interceptor(recipe, paths))
            return jax.jit(lambda params, x: model.apply(params, x))(params, x)

    runs = [(), (mlp,), (every,), (mlp, every), ()]
    found = [run(Jitted(), *entered) for entered in runs]
    assert_same_bits(found, [run(Small(), *entered) for entered in runs])
    assert len({each.tobytes() for each in jax.device_get(found)}) == 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("standard_promotion")
def test_in_gemma_itself():
    modules = pytest.importorskip("gemma.gm.nn._modules")
    layer = modules.FeedForward(features=128, hidden_dim=64, transpose_gating_einsum=False)
    x = jax.random.normal(jax.random.key(1), (2, 16, 128))
    with interceptor(fp8.recipes.delayed()):
        variables = layer.init(jax.random.key(0), x)
    assert sorted(variables[COLLECTION]) == ["gating_einsum", "linear"]
    assert_same_bits(variables["params"], layer.init(jax.random.key(0), x)["params"])


def enter(recipe, **options):
    with interceptor(recipe, **options):
        pass


def inside_of_another():
    with nn.intercept_methods(lambda run, args, kwargs, context: run(*args, **kwargs)):
        enter(fp8.recipes.current())


MESSAGES = {
    "another interceptor": Message(
        ValueError, inside_of_another, "inside_of_another", "twice",
        "Enter interceptor(recipe) first",
    ),
    "a recipe": Message(
        TypeError, lambda: enter("current"), "'current'", "Recipe",
        "fp8.recipes.current()",
    ),
    "an option": Message(
        TypeError, lambda: enter(fp8.recipes.current(), kernel=1), "kernel=1",
        "no option", "kernels",
    ),
    "gemma's interceptor": Message(
        NotImplementedError, lambda: replace_module_fn(fp8.recipes.current(), paths="layer_.*"),
        "replace_module_fn", "nn.jit", "jaxfp8.plugs.gemma.interceptor",
    ),
    "paths": Message(
        TypeError, lambda: enter(fp8.recipes.current(), paths=["a"]),
        "paths=['a']", "regular expression", "'layer_.*'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_messages(message):
    check(message)
