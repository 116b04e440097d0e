"""nnx models with weights in FP8: the bits of the same model without."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.nnx import FP8Einsum, FP8Linear, FP8LinearGeneral, FP8State
from jaxfp8.weights import WeightAxes

RECIPES = {
    "delayed": fp8.recipes.delayed(history_length=4),
    "blockwise": fp8.recipes.blockwise(),
    "rowwise": fp8.recipes.rowwise(),
    "current": fp8.recipes.current(),
    "mxfp8": fp8.recipes.mxfp8(),
}
X = np.random.default_rng(1).normal(size=(6, 32)).astype(np.float32)
HEADS = WeightAxes(contracted=(0, 1))
KERNELS = (".*kernel", WeightAxes())


class Layers(nnx.Module):
    def __init__(self, recipe, dtype=None):
        how = {"recipe": recipe, "dtype": dtype, "rngs": nnx.Rngs(0)}
        self.up = FP8Linear(32, 48, **how)
        self.heads = FP8LinearGeneral(48, (2, 64), **how)
        self.out = FP8Einsum("bhd,hdk->bk", (2, 64, 24), **how)

    def __call__(self, x):
        return self.out(self.heads(jnp.tanh(self.up(x))))


class Block(nnx.Module):
    def __init__(self, recipe, rngs):
        self.up = FP8Linear(32, 32, recipe=recipe, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.up(x))


class Stack(nnx.Module):
    def __init__(self, recipe):
        make = nnx.vmap(lambda rngs: Block(recipe, rngs), in_axes=0, out_axes=0)
        self.blocks = make(nnx.Rngs(0).split(3))

    def __call__(self, x):
        return nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(
            self.blocks, x
        )


class Plain(nnx.Module):
    """flax's own layers."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.general = nnx.LinearGeneral(32, (2, 16), rngs=rngs)
        self.out = nnx.LinearGeneral((2, 16), 32, axis=(-2, -1), rngs=rngs)

    def __call__(self, x):
        return self.out(self.general(x))


MODELS = {
    "layers": (Layers, [("out/kernel", HEADS), KERNELS], None),
    "bfloat16": (
        lambda recipe: Layers(recipe, jnp.bfloat16), [("out/kernel", HEADS), KERNELS], jnp.bfloat16,
    ),
    "scan": (Stack, [(".*kernel", WeightAxes(stacked=1))], None),
    "converted": (
        lambda recipe: fp8.convert(Plain(), recipe)[0], [("out/kernel", HEADS), KERNELS], None,
    ),
}  # fmt: skip
FEW = [("bfloat16", "blockwise"), ("scan", "delayed"), ("converted", "delayed")]


def in_fp8(model, recipe, rules=(KERNELS,), dtype=None, **options):
    """A copy of a model whose weights are in FP8."""
    model = nnx.clone(model)
    params, states = nnx.state(model, nnx.Param), nnx.state(model, FP8State)
    quantize = quantizer(recipe, tuple(rules), dtype, **{"primary": True} | options)
    nnx.update(model, quantize(params, states))
    return model


@functools.cache
def quantizer(recipe, rules, dtype, **options):
    """One program for all weights of a model."""

    @jax.jit
    def quantize(params, states):
        return fp8.quantize_params(
            params, recipe, rules=rules, state=states, dtype=dtype, **options
        )

    return quantize


def absolute(model, x):
    y = model(x)
    return jnp.sum(jnp.abs(y.astype(jnp.float32))), y


@nnx.jit
def steps(models, x):
    """A step of each model: one program, whose parts share much."""
    found = [fp8.nnx.value_and_grad(absolute, has_aux=True)(model, x) for model in models]
    return [(y, grads) for (_, y), grads in found]


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
    model = nnx.jit(lambda: make(recipe))()
    for _ in range(2 if recipe.rows else 1):
        other = in_fp8(model, recipe, rules, dtype)
        got, want = steps([other, model], X)
        if dtype is not None:  # a gradient has the dtype of its weight, and flax's that of params
            got = got[0], jax.tree.map(lambda a, b: a.astype(b.dtype), got[1], want[1])
        assert_same_bits(got, want)
        assert_same_bits(nnx.state(other, FP8State), nnx.state(model, FP8State))
    assert np.any(np.asarray(jax.tree.leaves(want[1])[-1]) != 0)


class Adapted(nnx.Module):
    """A frozen layer, and LoRA beside it."""

    def __init__(self, recipe):
        self.base = FP8Linear(32, 16, recipe=recipe, rngs=nnx.Rngs(0))
        self.lora = nnx.LoRA(32, 4, 16, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.base(x) + self.lora(x)


def test_lora():
    """The gradients of an adapter need none of the weight in FP8 below it."""
    recipe = RECIPES["delayed"]
    model = Adapted(recipe)
    other = in_fp8(model, recipe, [("base/kernel", WeightAxes())])
    run = nnx.jit(fp8.nnx.value_and_grad(lambda m: jnp.sum(jnp.abs(m(X))), wrt=nnx.LoRAParam))
    assert_same_bits(run(other)[1], run(model)[1])
    assert_same_bits(nnx.state(other, FP8State), nnx.state(model, FP8State))


def test_refusals():
    layer = FP8Linear(32, 16, recipe=RECIPES["blockwise"], rngs=nnx.Rngs(0))
    other = in_fp8(layer, RECIPES["blockwise"])
    with pytest.raises(fp8.FP8StateError, match=r"fp8\.nnx\.value_and_grad"):
        nnx.grad(lambda m: jnp.sum(m(X)))(other)
    other.dtype = jnp.bfloat16
    with pytest.raises(TypeError, match=r"computes in bfloat16.*dtype=jnp\.bfloat16"):
        other(X)
