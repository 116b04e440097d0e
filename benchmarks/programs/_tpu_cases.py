"""What `benchmarks/tpu.py` compiles: contenders, and the steps in which they multiply.

A step is a forward and a backward pass on one device, with all casts and without an optimizer. All
tensors are bfloat16.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# These variables have no effect after jax is imported.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "tpu"))

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from tpu_targets import topology

import jaxfp8 as fp8

RECIPES = ("delayed", "current", "rowwise", "blockwise", "mxfp8")
QWIX = importlib.util.find_spec("qwix") is not None
CONTENDERS = ("bfloat16", *(["qwix"] if QWIX else []), "flax", *RECIPES)
LAYER = (8192, 5120, 13824)  # tokens, features in, features out
ATTENTION = "attention"  # the scope of its operations, and so a part of their op_name


class Experts(NamedTuple):
    """Experts of one matrix [features_in, features_out] each."""

    tokens: int  # of each
    count: int = 16
    features_in: int = 4096
    features_out: int = 2048


EXPERTS = {"experts-4096": Experts(4096), "experts-512": Experts(512)}
CASES = ("layer", "block", "block-inputs", *EXPERTS)


def fits(case: str, chip: str, contender: str) -> bool:
    """Whether the contender has the case. XLA's kernel for experts takes FP8 on TPU 7x only.

    Experts have no tiles there, and those of flax and qwix are not asked for FP8. Tiles are
    compiled for a layer only.
    """
    if case in EXPERTS:
        return chip == "tpu7x" and contender in ("bfloat16", "delayed", "current", "rowwise")
    return case == "layer" or contender not in ("blockwise", "mxfp8")


# Dense layers of a contender.

Dense = Callable[..., nn.Module]


def dense_of(contender: str) -> Dense:
    plain = functools.partial(
        nn.Dense, use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16
    )
    if contender == "flax":
        return functools.partial(plain, dot_general_cls=nn.fp8_ops.Fp8DirectDotGeneralOp)
    if contender in RECIPES:
        recipe = getattr(fp8.recipes, contender)()
        return functools.partial(
            fp8.linen.FP8Dense, use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16,
            recipe=recipe,
        )  # fmt: skip
    return plain


def quantized_by_qwix(model: nn.Module) -> nn.Module:
    """Its dense layers in FP8, gradients too. Attention stays, as with the other contenders."""
    import qwix

    e4m3, e5m2 = fp8.E4M3.dtype, fp8.E5M2.dtype
    rule = qwix.QtRule(module_path=".*dense.*", weight_qtype=e4m3, act_qtype=e4m3, bwd_qtype=e5m2)
    return qwix.quantize_model(model, qwix.QtProvider([rule]))


class Layer(nn.Module):
    """One matmul."""

    dense: Dense
    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(self.features, name="dense")(x)


class Block(nn.Module):
    """A block of Llama 3 8B: attention with 32 heads and 8 of keys and values, and SwiGLU."""

    dense: Dense
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    attend: Callable[..., jax.Array] = functools.partial(
        jax.nn.dot_product_attention, is_causal=True
    )

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        features, size = x.shape[-1], x.shape[-1] // self.heads
        norm = functools.partial(nn.RMSNorm, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)

        def dense(features: int, name: str) -> Any:
            return self.dense(features, name=f"dense_{name}")

        def split(y: jax.Array, heads: int) -> jax.Array:
            return y.reshape(*y.shape[:-1], heads, size)

        h = checkpoint_name(norm(name="norm_attention")(x), "input")
        q = split(dense(features, "q")(h), self.heads)
        k = split(dense(self.kv_heads * size, "k")(h), self.kv_heads)
        v = split(dense(self.kv_heads * size, "v")(h), self.kv_heads)
        with jax.named_scope(ATTENTION):
            y = self.attend(rotated(q), rotated(k), v)
        y = checkpoint_name(y.reshape(x.shape), "input")
        x = x + dense(features, "o")(y)
        h = checkpoint_name(norm(name="norm_mlp")(x), "input")
        h = jax.nn.silu(dense(self.hidden, "gate")(h)) * dense(self.hidden, "up")(h)
        return x + dense(features, "down")(checkpoint_name(h, "input"))


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions of x [batch, tokens, heads, features]."""
    half = x.shape[-1] // 2
    angles = jnp.outer(jnp.arange(x.shape[1]), 500_000.0 ** -(jnp.arange(half) / half))
    sin, cos = (f(angles)[:, None].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    one, other = x[..., :half], x[..., half:]
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], -1)


# Steps.


@jax.custom_vjp
def inject(y: Any, g: Any) -> Any:
    """A loss whose gradient of y is g, without an operation."""
    return jnp.float32(0)


inject.defvjp(lambda y, g: (jnp.float32(0), g), lambda g, _: (g, jnp.zeros_like(g)))


def differentiated(contender: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`step(trained, state, g)`: y and the gradients of `forward(trained, state)` by g."""

    def step(trained: Any, state: Any, g: Any) -> Any:
        def loss(trained: Any, state: Any) -> Any:
            y = forward(trained, state)
            return inject(y, g), y

        transform = fp8.value_and_grad if contender in RECIPES else jax.value_and_grad
        return transform(loss, has_aux=True)(trained, state)

    return step


def lowered(case: str, chip: str, contender: str, shape: tuple[int, ...] = LAYER) -> Any:
    """The step, lowered for one device. `shape` is that of "layer"."""
    there = jax.sharding.SingleDeviceSharding(topology(chip).devices[0])

    def place(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there), tree
        )

    step, arguments = (
        of_experts(case, contender) if case in EXPERTS else of_model(case, contender, shape)
    )
    return jax.jit(step).lower(*place(arguments))


def of_model(case: str, contender: str, shape: tuple[int, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The step of a flax model, and the types of its arguments."""
    if case == "layer":
        m, k, n = shape
        model, x, g = Layer(dense_of(contender), n), _array(m, k), _array(m, n)
    else:
        model, x = Block(dense_of(contender)), _array(4, 2048, 4096)
        g = x
    if contender == "qwix":
        model = quantized_by_qwix(model)
    variables = dict(jax.eval_shape(model.init, jax.random.key(0), x))
    if contender in RECIPES:
        params = {"params": variables.pop("params")}
        state = {name: fp8.settle(of) for name, of in variables.items()}
    else:  # flax's state is replaced by its gradient
        params, state = variables, {}

    def apply(trained: Any, state: Any) -> Any:
        params, x = trained
        return model.apply({**params, **state}, x)

    if case == "block-inputs":
        names = jax.checkpoint_policies.save_only_these_names("input")
        policy = fp8.save_fp8_residuals() if contender in RECIPES else names
        apply = jax.checkpoint(apply, policy=policy)
    return differentiated(contender, apply), ((params, x), state, g)


def of_experts(case: str, contender: str) -> tuple[Any, tuple[Any, ...]]:
    """y, dx and dw of the grouped matmul of all experts."""
    experts = EXPERTS[case]
    x = _array(experts.count * experts.tokens, experts.features_in)
    w = _array(experts.count, experts.features_in, experts.features_out)
    g = _array(x.shape[0], experts.features_out)
    sizes = jax.ShapeDtypeStruct((experts.count,), jnp.int32)
    if contender == "bfloat16":
        multiply, state = jax.lax.ragged_dot, {}
    else:
        recipe = getattr(fp8.recipes, contender)()
        state = fp8.settle(jax.eval_shape(lambda: fp8.init_state(recipe)))
        multiply = functools.partial(fp8.ragged_dot, recipe=recipe, kernels=fp8.Kernels("tpu7x"))

    def step(trained: Any, state: Any, g: Any, sizes: Any) -> Any:
        def forward(trained: Any, state: Any) -> Any:
            extra = {"state": state} if contender in RECIPES else {}
            return multiply(*trained, sizes, **extra)

        return differentiated(contender, forward)(trained, state, g)

    return step, ((x, w), state, g, sizes)


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)
