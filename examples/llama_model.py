"""Llama, Qwen 2 and Qwen 3 in flax.nnx, built from the config.json of a Hugging Face checkpoint.

Modules have the names that transformers gives them, so `rows` needs one word. In float32 the logits
are those of transformers, up to rounding (tests/loaders/test_example_model.py).

Letters in shapes: B windows of a batch, T tokens of a window, D width, H features of a head.
"""

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxfp8 as fp8
from jaxfp8.nnx import FP8Linear

BF16 = jnp.bfloat16
LAYOUTS = {"llama": "llama", "qwen2": "qwen", "qwen3": "qwen"}  # by the model_type of a config
# Small models with random parameters. Tiles of 128x128 fill their matrices.
_TINY = {
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
TINY = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | _TINY,
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]} | _TINY,
}


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a checkpoint.

    Raises:
      ValueError: if there is none, or if the model would compute other numbers than transformers.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder}/config.json cannot be read: {error}.") from None
    kind, rope = config.get("model_type"), _rope(config)
    refused = {
        f"model_type {kind!r}": kind not in LAYOUTS,
        f"rope_type {rope['rope_type']!r}": rope["rope_type"] not in ("default", "llama3"),
        f"hidden_act {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        "mlp_bias": bool(config.get("mlp_bias")),
        "use_sliding_window": bool(config.get("use_sliding_window")),
    }
    if found := [what for what, is_refused in refused.items() if is_refused]:
        raise ValueError(
            f"{folder}/config.json: this example does not compute {', '.join(found)}; give a "
            f"checkpoint of {', '.join(LAYOUTS)} without it."
        )
    return config


def rows(config: Mapping[str, Any]) -> tuple[fp8.checkpoint.Row, ...]:
    """Which tensor of a file is which parameter: "model.layers.0..." is at "layers/0/..."."""
    return fp8.checkpoint.names(LAYOUTS[config["model_type"]], {"model": ""})


# --------------------------------------------------------------------------------------------- RoPE
def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of RoPE. transformers 5 writes them to another place than transformers 4."""
    found = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    found.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    found.setdefault("rope_type", found.get("type", "default"))
    return found


def angles(config: Mapping[str, Any], tokens: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines for each position, f32[T, 1, H]. Both halves of a head have the same."""
    rope, size = _rope(config), head_size(config)
    frequencies = rope["rope_theta"] ** (-jnp.arange(0, size, 2, dtype=jnp.float32) / size)
    if rope["rope_type"] == "llama3":
        # Long waves are stretched, short ones stay, and those between are blended.
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = jnp.clip((turns - low) / (high - low), 0, 1)
        frequencies *= kept + (1 - kept) / rope["factor"]
    found = jnp.outer(jnp.arange(tokens, dtype=jnp.float32), frequencies)
    found = jnp.concatenate([found, found], axis=-1)[:, None]
    return jnp.cos(found), jnp.sin(found)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns pairs of features, [B, T, heads, H]. A pair is a feature of each half of a head."""
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos.astype(x.dtype) + jnp.concatenate([-second, first], -1) * sin.astype(x.dtype)


# -------------------------------------------------------------------------------------------- model
def head_size(config: Mapping[str, Any]) -> int:
    """H. Configs without `head_dim` split the width evenly."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


class Layers:
    """Makes the layers of a model: in FP8 with a recipe, and those of flax without one."""

    def __init__(self, config, recipe, kernels, dtype, rngs):
        self.config, both = config, {"dtype": dtype, "rngs": rngs}
        fp8_linear = functools.partial(FP8Linear, recipe=recipe, kernels=kernels)
        linear = fp8_linear if recipe else nnx.Linear
        self.linear = functools.partial(linear, use_bias=False, **both)
        self.norm = functools.partial(nnx.RMSNorm, epsilon=config["rms_norm_eps"], **both)
        self.embed = functools.partial(nnx.Embed, **both)
        self.head = functools.partial(nnx.Linear, use_bias=False, **both)


class Attention(nnx.Module):
    """Causal attention: [B, T, D] -> [B, T, D]. Several heads of queries share keys and values."""

    def __init__(self, layers: Layers):
        config, kind = layers.config, layers.config["model_type"]
        width, self.size = config["hidden_size"], head_size(config)
        queries = config["num_attention_heads"] * self.size
        keys = (config.get("num_key_value_heads") or config["num_attention_heads"]) * self.size
        # Qwen 2 always has these biases, and never that of o_proj.
        bias = kind == "qwen2" or bool(config.get("attention_bias"))
        self.q_proj = layers.linear(width, queries, use_bias=bias)
        self.k_proj = layers.linear(width, keys, use_bias=bias)
        self.v_proj = layers.linear(width, keys, use_bias=bias)
        self.o_proj = layers.linear(queries, width, use_bias=bias and kind != "qwen2")
        if kind == "qwen3":
            self.q_norm, self.k_norm = layers.norm(self.size), layers.norm(self.size)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        linears = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (linear(x).reshape(*x.shape[:2], -1, self.size) for linear in linears)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.reshape(*x.shape[:2], -1))


class MLP(nnx.Module):
    """SwiGLU: [B, T, D] -> [B, T, D]."""

    def __init__(self, layers: Layers):
        width, hidden = layers.config["hidden_size"], layers.config["intermediate_size"]
        self.gate_proj, self.up_proj = layers.linear(width, hidden), layers.linear(width, hidden)
        self.down_proj = layers.linear(hidden, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    """One layer of the model: [B, T, D] -> [B, T, D]."""

    def __init__(self, layers: Layers):
        width = layers.config["hidden_size"]
        self.input_layernorm, self.self_attn = layers.norm(width), Attention(layers)
        self.post_attention_layernorm, self.mlp = layers.norm(width), MLP(layers)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nnx.Module):
    """Tokens [B, T] -> logits f32[B, T, vocabulary].

    `dtype` is that of activations. Parameters are in float32. Embedding, norms and head are never
    in FP8.
    """

    def __init__(
        self, config, recipe: fp8.Recipe | None, *, kernels=None, dtype: Any = BF16, seed: int = 0
    ):
        layers = Layers(config, recipe, kernels, dtype, nnx.Rngs(seed))
        self.config, vocabulary, width = dict(config), config["vocab_size"], config["hidden_size"]
        self.embed_tokens = layers.embed(vocabulary, width)
        self.layers = nnx.List(Block(layers) for _ in range(config["num_hidden_layers"]))
        self.norm = layers.norm(width)
        if not config.get("tie_word_embeddings"):
            self.lm_head = layers.head(width, vocabulary)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        cos, sin = angles(self.config, tokens.shape[1])
        x = self.embed_tokens(tokens)
        for block in self.layers:
            x = block(x, cos, sin)
        head = self.lm_head if hasattr(self, "lm_head") else self.embed_tokens.attend
        return head(self.norm(x)).astype(jnp.float32)
