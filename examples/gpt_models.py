"""The GPT of train_gpt.py in flax.linen and in flax.nnx, in FP8 and in bf16.

The bf16 twin of a model is the same model with the layers of flax.

Letters in shapes: B windows of a batch, T tokens of a window, D width.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8Dense
from jaxfp8.nnx import FP8Linear, FP8State

VOCABULARY, HEAD_WIDTH = 256, 32
BF16 = jnp.bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes and the dtype of a model."""

    layers: int = 2
    width: int = 192  # D, a multiple of HEAD_WIDTH
    context: int = 64  # T, the longest window
    dtype: Any = BF16  # of activations; parameters are in float32

    @property
    def heads(self) -> int:
        return self.width // HEAD_WIDTH


class Model(NamedTuple):
    """A model of either framework, in the form that the training loop needs."""

    params: Any
    state: Any  # of the quantizers; empty for bf16 and for recipes without state
    # params, state, tokens [B, T] -> logits f32[B, T, 256]
    apply: Callable[[Any, Any, jax.Array], jax.Array]
    fp8_layers: int


def attention(qkv: jax.Array, heads: int) -> jax.Array:
    """Causal self-attention: [B, T, 3 D] -> [B, T, D]."""
    q, k, v = (part.reshape(*part.shape[:2], heads, -1) for part in jnp.split(qkv, 3, axis=-1))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(*qkv.shape[:2], -1)


# --------------------------------------------------------------------------------------- flax.linen
class Block(nn.Module):
    """One block in flax.linen. `recipe=None` makes the bf16 twin."""

    recipe: fp8.Recipe | None
    size: Size
    kernels: fp8.Kernels | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width, dtype = self.size.width, self.size.dtype
        # The next two lines are the only difference between FP8 and bf16.
        fp8_dense = functools.partial(FP8Dense, recipe=self.recipe, kernels=self.kernels)
        dense = fp8_dense if self.recipe else nn.Dense
        dense = functools.partial(dense, use_bias=False, dtype=dtype)
        norm = functools.partial(nn.LayerNorm, use_bias=False, dtype=dtype)
        qkv = dense(3 * width, name="qkv")(norm(name="norm1")(x))
        x = x + dense(width, name="out")(attention(qkv, self.size.heads))
        return x + dense(width, name="fc2")(
            nn.gelu(dense(4 * width, name="fc1")(norm(name="norm2")(x)))
        )


class GPT(nn.Module):
    """The model in flax.linen."""

    recipe: fp8.Recipe | None
    size: Size
    kernels: fp8.Kernels | None = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        size = self.size
        embed = functools.partial(nn.Embed, features=size.width, dtype=size.dtype)
        positions = jnp.arange(tokens.shape[1])[None]
        x = embed(VOCABULARY, name="token")(tokens) + embed(size.context, name="position")(
            positions
        )
        for i in range(size.layers):
            x = Block(self.recipe, size, self.kernels, name=f"block{i}")(x)
        x = nn.LayerNorm(use_bias=False, dtype=size.dtype, name="norm")(x)
        return nn.Dense(VOCABULARY, use_bias=False, dtype=size.dtype, name="head")(x).astype(
            jnp.float32
        )


def linen_gpt(
    recipe: fp8.Recipe | None,
    seed: int,
    size: Size = Size(),
    kernels: fp8.Kernels | None = None,
) -> Model:
    """Make the linen model. Parameters and quantizer state are two collections of variables."""
    model, key, tokens = (
        GPT(recipe, size, kernels),
        jax.random.key(seed),
        jnp.zeros((1, size.context), jnp.int32),
    )
    variables = jax.jit(model.init)(key, tokens)

    def apply(params: Any, state: Any, tokens: jax.Array) -> jax.Array:
        return model.apply({"params": params, COLLECTION: state}, tokens)

    fp8_layers = sum(
        isinstance(module, FP8Dense) for module in model.module_paths(key, tokens).values()
    )
    return Model(variables["params"], variables.get(COLLECTION, {}), apply, fp8_layers)


# ----------------------------------------------------------------------------------------- flax.nnx
class NnxBlock(nnx.Module):
    """One block in flax.nnx."""

    def __init__(
        self,
        recipe: fp8.Recipe | None,
        size: Size,
        rngs: nnx.Rngs,
        kernels: fp8.Kernels | None = None,
    ) -> None:
        width, self.heads = size.width, size.heads
        # The next two lines are the only difference between FP8 and bf16.
        fp8_linear = functools.partial(FP8Linear, recipe=recipe, kernels=kernels)
        linear = fp8_linear if recipe else nnx.Linear
        linear = functools.partial(linear, use_bias=False, dtype=size.dtype, rngs=rngs)
        norm = functools.partial(nnx.LayerNorm, width, use_bias=False, dtype=size.dtype, rngs=rngs)
        self.norm1, self.qkv, self.out = norm(), linear(width, 3 * width), linear(width, width)
        self.norm2, self.fc1, self.fc2 = norm(), linear(width, 4 * width), linear(4 * width, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.out(attention(self.qkv(self.norm1(x)), self.heads))
        return x + self.fc2(nnx.gelu(self.fc1(self.norm2(x))))


class NnxGPT(nnx.Module):
    """The model in flax.nnx."""

    def __init__(
        self,
        recipe: fp8.Recipe | None,
        size: Size,
        rngs: nnx.Rngs,
        kernels: fp8.Kernels | None = None,
    ) -> None:
        width, dtype = size.width, size.dtype
        embed = functools.partial(nnx.Embed, features=width, dtype=dtype, rngs=rngs)
        self.token, self.position = embed(VOCABULARY), embed(size.context)
        self.blocks = nnx.List(NnxBlock(recipe, size, rngs, kernels) for _ in range(size.layers))
        self.norm = nnx.LayerNorm(width, use_bias=False, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(width, VOCABULARY, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.token(tokens) + self.position(jnp.arange(tokens.shape[1])[None])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(jnp.float32)


def nnx_gpt(
    recipe: fp8.Recipe | None,
    seed: int,
    size: Size = Size(),
    kernels: fp8.Kernels | None = None,
) -> Model:
    """Make the nnx model. Parameters and quantizer state are Variables of two types.

    The example splits them for a training loop that both frameworks share. Without that loop,
    `fp8.nnx.value_and_grad` takes the model itself.
    """
    model = NnxGPT(recipe, size, nnx.Rngs(seed), kernels)
    graph, params, state = nnx.split(model, nnx.Param, FP8State)

    def apply(params: Any, state: Any, tokens: jax.Array) -> jax.Array:
        return nnx.merge(graph, params, state)(tokens)

    return Model(
        params,
        state,
        apply,
        sum(isinstance(module, FP8Linear) for _, module in nnx.iter_modules(model)),
    )


FRAMEWORKS = {"linen": linen_gpt, "nnx": nnx_gpt}
