"""`jaxfp8.plugs.maxtext`, called as MaxText calls it.

MaxText is not on a package index. The classes here repeat how its dense layer and its train step
call a quantization (`layers/linears.py`, `trainers/pre_train/train.py`).
"""

import types

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from messages import Message, check
from same_bits import assert_same_bits

import jaxfp8 as fp8
from jaxfp8.plugs import maxtext
from jaxfp8.plugs.maxtext import FP8Quantization, configure, gathered

RECIPES = ("delayed", "current", "rowwise", "blockwise", "mxfp8")
# A plug hands its recipe on: one with state, and one whose tiles span tokens, show that it does.
FEW = [
    pytest.param(name, marks=() if name in ("delayed", "blockwise") else pytest.mark.slow)
    for name in RECIPES
]
OWG = nnx.variablelib.variable_type_from_name("_overwrite_with_gradient", allow_register=True)
RULES = [
    ["activation_batch", ["data", "fsdp"]],
    ["activation_length", []],
    ["mlp", ["fsdp_transpose", "tensor"]],
    ["heads", "tensor"],
    ["embed", ["fsdp", "fsdp_transpose"]],
    ["embed", ["fsdp"]],
]
GATHERED = (("activation_batch", ("fsdp",)), ("embed", ("fsdp",)))


class Dense(nnx.Module):
    """The dense layer of MaxText, as far as it concerns the quantization."""

    def __init__(self, k, n, quant, axes=("embed", "mlp")):
        self.kernel = nnx.Param(jax.random.normal(jax.random.key(0), (k, n)) * k**-0.5)
        self.inner = nnx.bridge.ToNNX(quant.dot_general_cls(mesh_axes=axes)(), rngs=nnx.Rngs(0))
        self.inner.lazy_init(jnp.zeros((1, k)), self.kernel[...], (((1,), (0,)), ((), ())))
        self(jnp.zeros((1, k)))  # MaxText makes its layers outside of its mesh, and calls each once

    def __call__(self, x):
        dims = (((x.ndim - 1,), (0,)), ((), ()))
        return self.inner(x, self.kernel[...], dims, precision=None, mutable=["aqt"])


def train_step(model, x, lr=0.5):
    """One gradient for the parameters and for the collection, which it then overwrites."""
    graphdef, params, state, rest = nnx.split(model, nnx.Param, OWG, ...)

    def loss(params, state, rest):
        y = nnx.merge(graphdef, params, state, rest, copy=True)(x)
        return jnp.mean(y**2)

    value, (grads, new) = jax.value_and_grad(loss, argnums=(0, 1))(params, state, rest)
    params = jax.tree.map(lambda p, g: p - lr * g, params, grads)
    return nnx.merge(graphdef, params, new, rest), value


@pytest.mark.parametrize("name", FEW)
def test_trains_as_the_op_does(name):
    recipe = fp8.recipes.get(name)
    x = jax.random.normal(jax.random.key(1), (2, 32, 128))
    model = Dense(128, 64, FP8Quantization(recipe=recipe, gather_rules=GATHERED))
    w, state = model.kernel[...], fp8.init_state(recipe)

    def loss_fn(w, state):
        return jnp.mean(fp8.dot(x, w, recipe=recipe, state=state) ** 2)

    step = nnx.jit(train_step)
    reference = jax.jit(fp8.value_and_grad(loss_fn))
    losses = []
    for _ in range(3):
        model, value = step(model, x)
        expected, grad, state = reference(w, state)
        w = w - 0.5 * grad
        assert_same_bits((value, model.kernel[...]), (expected, w))
        losses.append(float(value))
    assert losses[2] < losses[0]
    found = jax.tree.leaves(nnx.state(model, OWG))
    assert len(found) == len(jax.tree.leaves(state))
    if recipe.rows:
        history = model.inner.fp8.get_value().amax_history
        assert_same_bits(history, state.amax_history)


@pytest.mark.parametrize("name", [pytest.param("current", marks=pytest.mark.slow), "mxfp8"])
def test_einsum_of_experts(name):
    recipe = fp8.recipes.get(name)
    x = jax.random.normal(jax.random.key(0), (2, 32, 64), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (3, 64, 32))
    einsum = FP8Quantization(recipe=recipe).einsum(mesh_axes=("exp", "embed", "mlp"))
    y = einsum("BSM,EMH -> BSEH", x, w)
    assert_same_bits(y, fp8.einsum("BSM,EMH->BSEH", x, w.astype(x.dtype), recipe=recipe))


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (("embed", "mlp"), fp8.Shard(0, ("fsdp",))),  # fsdp_transpose splits "mlp"
        (("mlp", "embed"), fp8.Shard(1, ("fsdp",))),
        (("heads", None, "mlp"), None),
        ((None, "heads"), None),
        ((), None),
    ],
)
def test_which_axis_is_gathered(axes, expected):
    assert gathered(axes, RULES) == expected


def test_kernels_are_gathered_in_fp8():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    quant = FP8Quantization(recipe=fp8.recipes.current(), gather_rules=GATHERED)
    plug = quant.dot_general_cls(mesh_axes=("embed", "mlp"))()
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((64, 128)), jax.P("fsdp"))
        w = jax.device_put(jnp.ones((128, 64)), jax.P("fsdp"))

        def loss(w):
            y = plug.apply({}, x, w, (((1,), (0,)), ((), ())))
            return jnp.mean(y**2)

        compiled = jax.jit(jax.grad(loss)).lower(w).compile()
    lines = [line for line in compiled.as_text().splitlines() if " all-gather(" in line]
    assert lines
    assert all("= u8[" in line or "= f8" in line for line in lines)


def test_remat_policy_of_maxtext_keeps_residuals():
    recipe = fp8.recipes.current()
    policy = jax.checkpoint_policies.save_only_these_names("mlpwi", "quantization")

    def loss(x, w, policy):
        block = jax.checkpoint(lambda x, w: fp8.dot(x, w, recipe=recipe), policy=policy)
        return jnp.sum(block(x, w) ** 2)

    x, w = jnp.ones((8, 16)), jnp.ones((16, 4))
    nothing = jax.checkpoint_policies.nothing_saveable
    trace = jax.make_jaxpr(jax.grad(loss), static_argnums=2)
    saved = [str(trace(x, w, each)) for each in (policy, fp8.save_fp8_residuals(), nothing)]
    casts = [text.count("bitcast_convert_type") for text in saved]
    assert casts[0] == casts[1] < casts[2]  # the backward pass casts no operand again


def config(quantization, steps=1):
    return types.SimpleNamespace(
        quantization=quantization, gradient_accumulation_steps=steps, logical_axis_rules=RULES
    )


@pytest.mark.parametrize("name", RECIPES)
def test_configure(name):
    quant = configure(config(f"jaxfp8_{name}"), kernels=fp8.Kernels("h200"))
    assert quant.recipe == fp8.recipes.get(name)
    made = quant.dot_general_cls(mesh_axes=("embed", "mlp"))()
    assert (made.w_shard, made.kernels) == (fp8.Shard(0, ("fsdp",)), fp8.Kernels("h200"))
    assert configure(config(f"jaxfp8_{name}"), gather=False).gather_rules is None
    assert quant.quant_mode == "train"


MESSAGES = {
    "unknown recipe": Message(
        ValueError, lambda: configure(config("jaxfp8_nvfp4")), "'jaxfp8_nvfp4'", "no recipe",
        "jaxfp8_blockwise",
    ),
    "another library": Message(
        ValueError, lambda: configure(config("int8")), "'int8'", "no recipe", "jaxfp8_blockwise"
    ),
    "accumulation": Message(
        ValueError, lambda: configure(config("jaxfp8_delayed", 4)),
        "gradient_accumulation_steps=4", "no state", "jaxfp8_current",
    ),
    "sparse experts": Message(
        NotImplementedError, lambda: FP8Quantization(recipe=fp8.recipes.current()).quant_dg,
        "sparse_matmul=True", "grouped", "sparse_matmul=False",
    ),
    "keys": Message(
        ValueError,
        lambda: FP8Quantization(recipe=fp8.recipes.current(gradient_rounding="stochastic")),
        "'current'", "needs a key", "gradient_rounding='nearest'",
    ),
    "no recipe": Message(
        TypeError, lambda: FP8Quantization(recipe="current"), "recipe='current'", "Recipe",
        "fp8.recipes.current()",
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_messages(message):
    check(message)


def test_the_plug_has_the_methods_of_the_interface():
    assert {"dot_general_cls", "einsum", "quant_mode"} <= set(dir(maxtext.FP8Quantization))
