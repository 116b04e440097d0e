"""linen models with weights in FP8: the bits of the same model without."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linen_made import made
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense, FP8DenseGeneral, FP8Einsum
from jaxfp8.weights import WeightAxes

RECIPES = {
    "delayed": fp8.recipes.delayed(history_length=4),
    "blockwise": fp8.recipes.blockwise(),
    "rowwise": fp8.recipes.rowwise(),
    "current": fp8.recipes.current(),
    "mxfp8": fp8.recipes.mxfp8(),
}
X = np.random.default_rng(1).standard_normal((6, 32)).astype(np.float32)
HEADS = WeightAxes(contracted=(0, 1))


class Layers(nn.Module):
    recipe: fp8.Recipe
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x):
        how = {"recipe": self.recipe, "dtype": self.dtype}
        x = FP8Dense(48, name="up", **how)(x)
        x = FP8DenseGeneral((2, 64), name="heads", **how)(jnp.tanh(x))
        return FP8Einsum((2, 64, 24), "bhd,hdk->bk", use_bias=False, name="out", **how)(x)


class Block(nn.Module):
    recipe: fp8.Recipe

    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(FP8Dense(32, recipe=self.recipe)(x)), None


class Stack(nn.Module):
    recipe: fp8.Recipe
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block, policy=fp8.save_fp8_residuals()) if self.remat else Block
        return nn.scan(
            block, variable_axes={"params": 0, COLLECTION: 0}, split_rngs={"params": True}, length=3
        )(self.recipe, name="blocks")(x, None)[0]


class Plain(nn.Module):
    """flax's own layers."""

    attention: bool = True

    @nn.compact
    def __call__(self, x):
        x = nn.DenseGeneral((2, 16), name="general")(nn.Dense(32, name="dense")(x))
        if self.attention:
            x = nn.MultiHeadDotProductAttention(2, name="attention")(x, x)
        return nn.Einsum((2, 16, 8), "bhd,hdk->bk", name="einsum")(x)


def converted(recipe, attention=True):
    return fp8.convert(Plain(attention), recipe, inputs=(X,))[0]


KERNELS = (".*kernel", WeightAxes())
# The model, its rules, and the dtype of its layers.
MODELS = {
    "layers": (Layers, [("out/kernel", HEADS), KERNELS], None),
    "bfloat16": (
        lambda recipe: Layers(recipe, jnp.bfloat16), [("out/kernel", HEADS), KERNELS], jnp.bfloat16,
    ),
    "scan": (Stack, [(".*kernel", WeightAxes(stacked=1))], None),
    "scan, remat": (
        lambda recipe: Stack(recipe, True), [(".*kernel", WeightAxes(stacked=1))], None,
    ),
    "converted": (
        converted, [("attention/out/kernel|einsum/kernel", HEADS), KERNELS], None,
    ),
    "converted, no attention": (
        lambda recipe: converted(recipe, False), [("einsum/kernel", HEADS), KERNELS], None,
    ),
}  # fmt: skip
FEW = [
    ("layers", "delayed"), ("bfloat16", "blockwise"),
    ("converted, no attention", "delayed"),
]  # fmt: skip


def init(model, recipe):
    variables = made(model, X, recipe=recipe)
    return variables["params"], variables.get(COLLECTION, {})


def train_steps(model):
    """A step from each of several parameters: one program, whose parts share much."""

    def loss(params, state, x):
        y = model.apply({"params": params, COLLECTION: state}, x)
        return jnp.sum(jnp.abs(y.astype(jnp.float32))), y

    def step(params, state, x):
        (_, y), *rest = fp8.value_and_grad(loss, has_aux=True)(params, state, x)
        return y, *rest

    return jax.jit(lambda many, state, x: [step(params, state, x) for params in many])


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        pytest.param(name, recipe, marks=() if (name, recipe) in FEW else pytest.mark.slow)
        for name in MODELS
        for recipe in RECIPES
    ],
)
def test_same_bits(name, recipe):
    make, rules, dtype = MODELS[name]
    recipe = RECIPES[recipe]
    model = make(recipe)
    (params, state), steps = init(model, recipe), train_steps(model)
    quantize = jax.jit(
        lambda params, state: fp8.quantize_params(
            params, recipe, rules=rules, state=state, primary=True, dtype=dtype
        )
    )
    for _ in range(2 if recipe.rows else 1):
        want, got = steps([params, quantize(params, state)], state, X)
        if dtype is not None:  # a gradient has the dtype of its weight, and flax's that of params
            like = lambda a, b: a.astype(b.dtype)
            got = got[0], jax.tree.map(like, got[1], want[1]), got[2]
        assert_same_bits(got, want)
        state = want[2]
    in_fp8 = jax.tree.leaves(quantize(params, state))
    assert all(leaf.ndim < 2 or leaf.dtype.itemsize == 1 or leaf.size < 400 for leaf in in_fp8)


DENSE = FP8Dense(8, recipe=RECIPES["blockwise"])
KERNEL = np.random.default_rng(2).standard_normal((32, 8)).astype(np.float32)
PARAMS = {"kernel": KERNEL, "bias": np.zeros(8, np.float32)}


def quantized(name="blockwise", params=PARAMS, **options):
    return fp8.quantize_params(params, RECIPES[name], **{"primary": True} | options)


def test_another_dtype():
    layer = FP8Dense(8, recipe=RECIPES["blockwise"], dtype=jnp.bfloat16)
    with pytest.raises(TypeError, match=r"computes in bfloat16.*dtype=jnp\.bfloat16"):
        layer.apply({"params": quantized()}, X)


def test_flax_s_layer():
    with pytest.raises(TypeError, match="is no array, and only matmuls and layers of jaxfp8"):
        nn.Dense(8).apply({"params": quantized()}, X)
