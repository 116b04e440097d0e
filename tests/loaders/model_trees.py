"""One model in several trees of parameters: more axes, stacked layers and experts, flax models."""

import jax
import jax.numpy as jnp
from flax import linen, nnx
from loaders.tiny_models import FAMILIES

import jaxfp8 as fp8
from jaxfp8.weights import WeightAxes

LAYER = "model.layers.{layer}"
HEADS, FEATURES, HIDDEN, INNER, VOCAB, LAYERS = 4, 64, 256, 384, 320, 2
AXES = {
    f"{LAYER}.self_attn.{name}_proj": "(heads features) in -> in heads features" for name in "qkv"
} | {f"{LAYER}.self_attn.o_proj": "out (heads features) -> heads features out"}


def stack(parts):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(parts[i] for i in sorted(parts)))


def mapped(tree, path, change):
    """The tree with another value at a path of keys. "*" is every key."""
    if not path:
        return change(tree)
    found = {}
    for key, below in tree.items():
        found[key] = mapped(below, path[1:], change) if path[0] in ("*", key) else below
    return found


def general(params):
    """Attention with an axis for heads, as DenseGeneral has it."""
    block = ("model", "layers", "*", "self_attn")
    for name in ("q_proj", "k_proj", "v_proj"):
        split = lambda kernel: kernel.reshape(kernel.shape[0], -1, FEATURES)
        params = mapped(params, (*block, name, "kernel"), split)
    join = lambda kernel: kernel.reshape(-1, FEATURES, kernel.shape[-1])
    return mapped(params, (*block, "o_proj", "kernel"), join)


def scanned(params):
    """All layers in one, as nn.scan has them."""
    return mapped(params, ("model", "layers"), stack)


def experts(params):
    """Matrices [E, K, N]."""
    return mapped(params, ("model", "layers", "*", "mlp", "experts"), stack)


def both(params):
    """Matrices [L, E, K, N]."""
    return scanned(experts(params))


KERNELS = r".*_proj/kernel"
OF_EXPERTS = r".*/experts/.*kernel"
TREES = {
    "flat": ("llama", lambda params: params, {}, [(KERNELS, WeightAxes())]),
    "general": (
        "llama",
        general,
        {"axes": AXES},
        [(".*/o_proj/kernel", WeightAxes(contracted=(0, 1))), (KERNELS, WeightAxes())],
    ),
    "scanned": (
        "llama",
        scanned,
        {"modules": {LAYER: "model/layers"}},
        [(KERNELS, WeightAxes(stacked=1))],
    ),
    "experts": (
        "qwen3_moe",
        experts,
        {"modules": {f"{LAYER}.mlp.experts.{{expert}}": "model/layers/{layer}/mlp/experts"}},
        [(OF_EXPERTS, WeightAxes(contracted=(1,), batch=(0,))), (KERNELS, WeightAxes())],
    ),
    "both": (
        "qwen3_moe",
        both,
        {
            "modules": {
                LAYER: "model/layers",
                f"{LAYER}.mlp.experts.{{expert}}": "model/layers/mlp/experts",
            }
        },
        [
            (OF_EXPERTS, WeightAxes(contracted=(1,), batch=(0,), stacked=1)),
            (KERNELS, WeightAxes(stacked=1)),
        ],
    ),
}
"""For each tree the family, the tree, the arguments of `names`, and the rules of weights."""


def names_of(tree):
    family, _, options, _ = TREES[tree]
    return fp8.checkpoint.names(FAMILIES[family][0], **options)


# Models of flax with our layers. Their forward pass is no attention: only parameters count here.


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        dense = fp8.linen.FP8DenseGeneral
        general = lambda n, name: dense((n, FEATURES), use_bias=False, name=name)
        y = linen.RMSNorm(name="before_attention")(x)
        heads, key, value = general(HEADS, "q")(y), general(2, "k")(y), general(2, "v")(y)
        heads = heads + jnp.repeat(key + value, 2, axis=-2)
        x = x + dense(HIDDEN, axis=(-2, -1), use_bias=False, name="o")(heads)
        y = linen.RMSNorm(name="before_mlp")(x)
        wide = lambda name: fp8.linen.FP8Dense(INNER, use_bias=False, name=name)
        y = wide("gate")(y) * wide("up")(y)
        return x + fp8.linen.FP8Dense(HIDDEN, use_bias=False, name="down")(y)


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(VOCAB, HIDDEN, name="embed")(tokens)
        for i in range(LAYERS):
            x = LinenBlock(name=f"block_{i}")(x)
        x = linen.RMSNorm(name="last_norm")(x)
        return linen.Dense(VOCAB, use_bias=False, name="head")(x)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        options = {"use_bias": False, "rngs": rngs}
        general = lambda n: fp8.nnx.FP8LinearGeneral(HIDDEN, (n, FEATURES), **options)
        self.q, self.k, self.v = general(HEADS), general(2), general(2)
        self.o = fp8.nnx.FP8LinearGeneral((HEADS, FEATURES), HIDDEN, axis=(-2, -1), **options)
        self.gate, self.up = (fp8.nnx.FP8Linear(HIDDEN, INNER, **options) for _ in range(2))
        self.down = fp8.nnx.FP8Linear(INNER, HIDDEN, **options)
        self.before_attention, self.before_mlp = (nnx.RMSNorm(HIDDEN, rngs=rngs) for _ in range(2))


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, HIDDEN, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])
        self.last_norm = nnx.RMSNorm(HIDDEN, rngs=rngs)
        self.head = nnx.Linear(HIDDEN, VOCAB, use_bias=False, rngs=rngs)


def flax_names(block):
    """The rows of both models. `block` is the path of a layer."""
    modules = {
        "model.embed_tokens": "embed",
        "model.norm": "last_norm",
        "lm_head": "head",
        f"{LAYER}.input_layernorm": f"{block}/before_attention",
        f"{LAYER}.post_attention_layernorm": f"{block}/before_mlp",
    }
    modules |= {f"{LAYER}.self_attn.{name}_proj": f"{block}/{name}" for name in "qkvo"}
    modules |= {f"{LAYER}.mlp.{name}_proj": f"{block}/{name}" for name in ("gate", "up", "down")}
    return fp8.checkpoint.names("llama", modules, axes=AXES)
