"""Adapters of low rank beside weights in FP8: those of flax, and those that qwix adds.

qwix is not installed here. `adapted` does to a model what it does: it notes a path in each module,
adds parameters, and computes more while the model runs.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from same_bits import assert_same_bits
from zoo import RECIPES

import jaxfp8 as fp8

X = jax.random.normal(jax.random.key(0), (16, 64))


class Einsum(nnx.Module):
    """A layer with code of its own."""

    def __init__(self, rngs):
        self.w = nnx.Param(0.1 * jax.random.normal(rngs.params(), (64, 4, 16)))

    def __call__(self, x):
        return jnp.einsum("bd,dnh->bnh", x, self.w[...])


class Model(nnx.Module):
    def __init__(self, *, own=True):
        rngs = nnx.Rngs(0)
        self.own = Einsum(rngs) if own else None
        self.up = nnx.Linear(64, 128, rngs=rngs)

    def __call__(self, x):
        y = self.up(x)
        return y if self.own is None else y + jnp.tile(self.own(x).reshape(len(x), -1), 2)


@contextlib.contextmanager
def watching():
    """Linear layers add their adapter while a model runs."""
    usual = nnx.Linear.__call__

    def call(layer, x):
        return usual(layer, x) + x @ layer.kernel_lora_a[...] @ layer.kernel_lora_b[...]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nnx.Linear, "__call__", call)
        yield


def adapted(model, *inputs):
    model = nnx.clone(model)
    kind = type(model)

    def call(model, *args):
        with watching():
            return kind.__call__(model, *args)

    model.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    for path, module in nnx.iter_modules(model):
        module.qwix_path = path
        if isinstance(module, nnx.Linear):
            k, n = module.kernel.shape
            module.kernel_lora_a = nnx.LoRAParam(jax.random.normal(jax.random.key(1), (k, 2)))
            module.kernel_lora_b = nnx.LoRAParam(jax.random.normal(jax.random.key(2), (2, n)))
    model(*inputs)
    return model


def test_a_model_with_adapters_of_qwix_is_converted():
    model = adapted(Model(), X)
    mine, coverage = fp8.convert(model, RECIPES["current"], inputs=(X,))
    assert {row.path: row.reason or row.recipe for row in coverage} == {
        "own/w": "current",
        "up/kernel": "current",
        "up/kernel_lora_a": "kept: adapter",
        "up/kernel_lora_b": "kept: adapter",
    }
    recipe, up, own = RECIPES["current"], model.up, model.own.w[...]
    want = fp8.dot(X, up.kernel[...], recipe=recipe)
    want += X @ up.kernel_lora_a[...] @ up.kernel_lora_b[...]
    want += jnp.tile(fp8.einsum("bd,dnh->bnh", X, own, recipe=recipe).reshape(16, -1), 2)
    np.testing.assert_allclose(mine(X), want, rtol=1e-5)
    of_adapters = nnx.DiffState(0, nnx.LoRAParam)
    grads = nnx.jit(nnx.grad(lambda m: jnp.sum(jnp.square(m(X))), argnums=of_adapters))(mine)
    assert sorted(nnx.to_pure_dict(grads)["up"]) == ["kernel_lora_a", "kernel_lora_b"]


@pytest.mark.parametrize(
    "made", [lambda: Einsum(nnx.Rngs(0)), lambda: Model(own=False)], ids=["own", "flax"]
)
def test_adapters_after_conversion_are_refused(made):
    """Without the check such layers would get no adapter, and all weights would train."""
    mine, _ = fp8.convert(made(), RECIPES["current"], inputs=(X,))
    with pytest.raises(TypeError, match=r"qwix was applied to a .*Apply qwix to the model without"):
        adapted(mine, X)


def test_layers_of_qwix_take_no_code_of_the_user():
    model = adapted(Model(), X)
    compute = {Einsum: lambda layer, einsum, x: einsum("bd,dnh->bnh", x, layer.w[...])}
    with pytest.raises(ValueError, match=r"layers= has Einsum, but qwix computes more"):
        fp8.convert(model, RECIPES["current"], inputs=(X,), layers=compute)


def test_adapters_stay_in_high_precision():
    layer = nnx.LoRALinear(64, 64, lora_rank=2, rngs=nnx.Rngs(0))
    _, coverage = fp8.convert(nnx.Sequential(layer), RECIPES["current"], inputs=(X,))
    reasons = {row.path: row.reason for row in coverage}
    kept = "kept: adapter"
    assert reasons == {
        "layers/0": "", "layers/0/lora/lora_a": kept, "layers/0/lora/lora_b": kept
    }  # fmt: skip
    _, all_of_it = fp8.convert(nnx.Sequential(layer), RECIPES["current"], inputs=(X,), keep=())
    assert all_of_it.share == 1

    def merged(params, x):  # a sum with a frozen weight is no adapter
        return x @ (params["w"] + params["lora_a"] @ params["lora_b"])

    shapes = {"w": (64, 64), "lora_a": (64, 2), "lora_b": (2, 64), "lora_dense": (64, 64)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    _, coverage = fp8.convert(merged, RECIPES["current"], inputs=(params, X))
    assert [row.reason for row in coverage] == [""]
    named = lambda params, x: x @ params["lora_dense"]
    _, coverage = fp8.convert(named, RECIPES["current"], inputs=(params, X))
    assert coverage["lora_dense"].recipe == "current"


# The frozen weights in FP8.

AXES = fp8.weights.WeightAxes()
RULES = [("own/w", AXES), ("up/kernel", AXES)]


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
@pytest.mark.parametrize("qwix", [True, False])
def test_the_frozen_weights_take_fp8(recipe, qwix):
    recipe = getattr(fp8.recipes, recipe)()
    given = adapted(Model(), X) if qwix else Model()
    model, _ = fp8.convert(given, recipe, inputs=(X,))
    wrt = nnx.LoRAParam if qwix else nnx.Param
    run = nnx.jit(fp8.nnx.value_and_grad(lambda m: jnp.sum(jnp.square(m(X))), wrt=wrt))
    in_fp8 = []
    for primary in (True, False):
        in_fp8.append(fp8.quantize_params(model, recipe, rules=RULES, state=model, primary=primary))
    want = run(model)
    for other in in_fp8:
        assert_same_bits(run(other), want)
        states = (nnx.state(each, fp8.nnx.FP8State) for each in (other, model))
        assert_same_bits(*states)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(in_fp8[0], nnx.Param)))
    copies = 2 if recipe.name == "rowwise" else 1
    adapters = 4 * 2 * (64 + 128) if qwix else 0
    bias = 4 * 128
    scales = 4 * (64 + 128 + 64 + 64) if copies == 2 else 16  # with the amaxes of the weights
    assert held == copies * (64 * 64 + 64 * 128) + adapters + bias + scales


def test_other_uses_of_a_weight_in_fp8_are_refused():
    class Tied(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((64, 64)))

        def __call__(self, x):
            return self.use(x, self.w[...])

    def converted(use, **options):
        Tied.use = staticmethod(use)
        recipe = RECIPES["current"]
        model, _ = fp8.convert(Tied(), recipe, inputs=(X,), keep=())
        return fp8.quantize_params(model, recipe, rules=[("w", AXES)], primary=True, **options)

    uses = {
        "transpose": lambda x, w: x @ w.T,
        "mul": lambda x, w: x @ (2 * w),
        "gather": lambda x, w: x @ w + w[x[:, 0].astype(jnp.int32) % 64],
    }
    for name, use in uses.items():
        with pytest.raises(TypeError, match=rf"QuantizedWeight.* into '{name}'.*\(path, None\)"):
            converted(use)(X)
    with pytest.raises(TypeError, match=r"into its result\..*\(path, None\)"):
        converted(lambda x, w: (x @ w, w))(X)
    cast = lambda x, w: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
    with pytest.raises(TypeError, match=r"dtype=jnp\.bfloat16"):
        converted(cast)(X)
    assert converted(cast, dtype=jnp.bfloat16)(X).dtype == jnp.bfloat16
    other_axis = lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))
    with pytest.raises(ValueError, match=r"contracts axes \(1,\) of rhs"):
        converted(other_axis)(X)
