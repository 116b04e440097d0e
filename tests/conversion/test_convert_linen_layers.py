"""Kinds of layers in converted linen models."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from same_bits import assert_same_bits
from zoo import KEY, RECIPES, TOKENS, VOCABULARY, WIDTH, loss_of

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION


def init(x, *models):
    """The variables of models, by one program."""
    return jax.jit(lambda: [model.init(KEY, x) for model in models])()


def test_subclasses_of_flax_s_layers():
    class Scaled(nn.Dense):
        """A subclass with a parameter of its own."""

        @nn.compact
        def __call__(self, inputs):
            return super().__call__(inputs) * self.param("gain", nn.initializers.ones, ())

    x = jax.random.normal(KEY, (4, 16))
    mine, coverage = fp8.convert(Scaled(8), RECIPES["current"], inputs=(x,))
    variables, plain = init(x, mine, Scaled(8))
    assert_same_bits(variables, plain)
    assert coverage[""].recipe == "current"
    want = fp8.dot(x, variables["params"]["kernel"], recipe=RECIPES["current"])
    assert_same_bits(mine.apply(variables, x), want)


def test_stochastic_rounding_takes_keys_from_its_stream():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(64, use_bias=False)(x)
            x = nn.DenseGeneral((4, 8), use_bias=False)(nn.gelu(x))
            return nn.Einsum((4, 8, 16), "bhk,hkd->bd", use_bias=False)(nn.gelu(x))

    recipe = fp8.recipes.current(gradient_rounding="stochastic")
    x, c = (np.random.default_rng(i).normal(size=(8, 16)).astype(np.float32) for i in (0, 1))
    mine, _ = fp8.convert(Net(), recipe, inputs=(x,))

    @jax.jit
    def grads(key):
        params = mine.init({"params": KEY, "fp8": KEY}, x)["params"]
        loss = lambda p: jnp.sum(mine.apply({"params": p}, x, rngs={"fp8": key}) * c)
        return jax.grad(loss)(params)

    first, again, other = (grads(jax.random.key(k)) for k in (1, 1, 2))
    assert_same_bits(first, again)
    kernels = zip(*map(jax.tree.leaves, jax.device_get((first, other))), strict=True)
    assert [(a != b).any() for a, b in kernels] == [True] * 3


class Own(nn.Module):
    """A layer of somebody else, which calls `jnp.einsum`."""

    features: int

    def setup(self):
        self.w = self.param("w", nn.initializers.lecun_normal(), (WIDTH, self.features))

    def __call__(self, x):
        return jnp.einsum("...d,df->...f", x, self.w)


class WithOwn(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Own(WIDTH, name="two")(nn.relu(Own(WIDTH, name="one")(x)))


def compute_own(layer, einsum, x):
    return einsum("...d,df->...f", x, layer.w)


def test_layers_of_others():
    x = jax.random.normal(KEY, (4, WIDTH))
    mine, coverage = fp8.convert(
        WithOwn(), RECIPES["delayed"], inputs=(x,), layers={Own: compute_own}
    )
    assert [row.recipe for row in coverage] == ["delayed"] * 2
    assert coverage.share == 1
    variables, plain = init(x, mine, WithOwn())
    assert set(variables[COLLECTION]) == {"one", "two"}
    assert_same_bits(variables["params"], plain["params"])
    y = x
    for name in ("one", "two"):
        y = fp8.dot(
            nn.relu(y) if name == "two" else y, variables["params"][name]["w"],
            recipe=RECIPES["delayed"], state=variables[COLLECTION][name]["fp8"],
        )  # fmt: skip
    assert_same_bits(mine.apply(variables, x), y)


def test_a_model_of_layers_that_cannot_be_read_says_how_to_convert_them():
    @jax.custom_vjp
    def multiply(x, w):
        return x @ w

    multiply.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))

    class Own(nn.Module):
        @nn.compact
        def __call__(self, x):
            return multiply(x, self.param("w", nn.initializers.normal(), (WIDTH, WIDTH)))

    with pytest.raises(ValueError, match=r"(?s)multiplies the parameters of Own\..* layers={Own: "):
        fp8.convert(Own(), RECIPES["current"], inputs=(jnp.ones((4, WIDTH)),))


def test_a_layer_of_others_has_one_matmul():
    def twice(layer, einsum, x):
        return einsum("...d,df->...f", einsum("...d,df->...f", x, layer.w), layer.w)

    with pytest.raises(ValueError, match="calls einsum twice") as error:
        fp8.convert(
            WithOwn(), RECIPES["current"], inputs=(jnp.ones((4, WIDTH)),), layers={Own: twice}
        )
    assert "in layer 'one'" in error.value.__notes__[0]


def test_a_tied_head_is_converted_if_asked():
    class Tied(nn.Module):
        def setup(self):
            self.embedding = nn.Embed(VOCABULARY, WIDTH)
            self.mlp = nn.Dense(WIDTH)

        def __call__(self, tokens):
            return self.embedding.attend(self.mlp(self.embedding(tokens)))

    plain, coverage = fp8.convert(Tied(), RECIPES["delayed"], inputs=(TOKENS,))
    assert coverage["embedding"].reason == "kept: lm_head"
    assert set(jax.eval_shape(plain.init, KEY, TOKENS)[COLLECTION]) == {"mlp"}
    mine, coverage = fp8.convert(Tied(), RECIPES["delayed"], inputs=(TOKENS,), keep=())
    assert coverage.share == 1
    (variables,) = init(TOKENS, mine)
    assert set(variables[COLLECTION]) == {"mlp", "embedding"}
    loss, _, new = jax.jit(fp8.value_and_grad(loss_of(mine)))(
        variables["params"], variables[COLLECTION], TOKENS
    )
    assert np.isfinite(loss)
    amax = np.abs(variables["params"]["embedding"]["embedding"]).max()
    assert new["embedding"]["fp8"].amax_history[1, -1] == amax


def test_a_model_that_is_one_layer_counts():
    _, coverage = fp8.convert(nn.Dense(4), RECIPES["current"], inputs=(jnp.ones((2, 8)),))
    assert coverage.share == 1
    assert coverage[""].flops == 2 * 2 * 8 * 4


class Matmul(nn.Module):
    """A layer that is not flax's, and whose kernel has any name."""

    features: int
    name_of_kernel: str

    @nn.compact
    def __call__(self, x):
        shape = (x.shape[-1], self.features)
        return x @ self.param(self.name_of_kernel, nn.initializers.lecun_normal(), shape)


def kernel_and_einsum(layer, einsum, x):
    shape = (x.shape[-1], layer.features)
    w = layer.param(layer.name_of_kernel, nn.initializers.lecun_normal(), shape)
    return einsum("...d,df->...f", x, w)


class SharedScope(nn.Module):
    """As in google-deepmind/gemma: two layers keep their kernels in the scope of their parent."""

    @nn.compact
    def __call__(self, x):
        up, down = Matmul(64, "up"), Matmul(WIDTH, "down")
        nn.share_scope(self, up)
        nn.share_scope(self, down)
        return down(100 * nn.relu(up(x)))


def test_layers_of_one_scope_have_states_of_their_own():
    x = jax.random.normal(KEY, (4, WIDTH))
    mine, coverage = fp8.convert(
        SharedScope(), RECIPES["delayed"], inputs=(x,), layers={Matmul: kernel_and_einsum}
    )
    assert [(row.path, row.shape) for row in coverage] == [
        ("Matmul_0", (4, WIDTH, 64)), ("Matmul_1", (4, 64, WIDTH))
    ]  # fmt: skip
    assert coverage.share == 1
    variables, plain = init(x, mine, SharedScope())
    assert_same_bits(variables["params"], plain["params"])

    def loss(params, state):
        return jnp.mean(mine.apply({"params": params, COLLECTION: state}, x) ** 2)

    _, _, new = jax.jit(fp8.value_and_grad(loss))(variables["params"], variables[COLLECTION])
    amaxes = [new[f"fp8_Matmul_{i}"].amax_history[0, -1] for i in (0, 1)]
    assert amaxes[0] == jnp.abs(x).max()
    assert amaxes[1] > 10 * amaxes[0]


def test_stochastic_rounding_does_not_change_initial_values():
    recipe = fp8.recipes.current(gradient_rounding="stochastic")
    x = jnp.ones((4, WIDTH))
    for layer in (nn.Einsum((WIDTH, 16), "bd,dk->bk"), nn.Dense(16)):
        mine, _ = fp8.convert(layer, recipe, inputs=(x,))
        assert_same_bits(*init(x, mine, layer))
    by_hand = fp8.linen.FP8Einsum((WIDTH, 16), "bd,dk->bk", recipe=recipe)
    assert_same_bits(*init(x, by_hand, nn.Einsum((WIDTH, 16), "bd,dk->bk")))
