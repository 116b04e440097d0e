"""Models that others wrote, in tiny sizes. The script public_models.py gets the path of each.

A model is imported from that path. None of its code is here. Language models and the plain ViT
multiply in bfloat16, with parameters in float32. The other models are float32, as written.

Letters in shapes: B windows of a batch, T tokens of a window.
"""

import importlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from _public_tasks import CHARACTERS, Task, one_of_four, sums, text, velocity
from flax import nnx
from gpt_models import BF16, VOCABULARY
from gpt_text import CONTEXT

WIDTH, HIDDEN, HEADS, HEAD_WIDTH, LAYERS = 128, 512, 4, 32, 2
CLASSES = 10


class Public(NamedTuple):
    """A model of others, and how to call it.

    Attributes:
      model: a linen module, or a function that makes an nnx module from a seed.
      arguments: from the inputs of the task, tokens [B, T] for text, to the arguments of a call.
      output: from the result of that call to that of the task, logits [B, T, 256] for text.
      task: makes what the model learns.
      layers: the argument `layers=` of `fp8.convert`.
      dtype: cast the parameters to it before a call, for models that compute in their dtype.
      rules: the argument `rules=` of `fp8.convert`.
      keywords: keyword arguments of a call.
      rngs: streams of random numbers that a call of a linen model draws from.
    """

    model: nn.Module | Callable[[int], nnx.Module]
    arguments: Callable[..., tuple[Any, ...]] = lambda *inputs: inputs
    output: Callable[[Any], jax.Array] = lambda result: result
    task: Callable[[], Task] = text
    layers: Mapping[type, Callable[..., jax.Array]] = types.MappingProxyType({})
    dtype: Any = None
    rules: tuple[tuple[str, None], ...] = ()
    keywords: Mapping[str, Any] = types.MappingProxyType({})
    rngs: tuple[str, ...] = ()


def positions_and_mask(tokens: jax.Array) -> tuple[Any, ...]:
    """Arguments of the models of Gemma and Llama: tokens, positions, no cache, causal mask."""
    batch, context = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(context), tokens.shape)
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((context, context), bool)), (batch, context, context))
    return tokens, positions, None, mask


def gpt_jax() -> Public:
    """github.com/jenkspt/gpt-jax: nanoGPT in linen, with the embedding as head."""
    theirs = importlib.import_module("model")
    config = theirs.GPTConfig(
        block_size=CONTEXT, vocab_size=VOCABULARY, num_layers=LAYERS, num_heads=HEADS,
        num_embeds=WIDTH, dropout_rate=0.0, dtype="bfloat16",
    )  # fmt: skip
    return Public(theirs.GPT(config), lambda tokens: (tokens, True))


def lm1b() -> Public:
    """github.com/google/flax, examples/lm1b, in linen."""
    theirs = importlib.import_module("models")
    config = theirs.TransformerConfig(
        vocab_size=VOCABULARY, output_vocab_size=VOCABULARY, dtype=BF16, emb_dim=WIDTH,
        num_heads=HEADS, num_layers=LAYERS, qkv_dim=WIDTH, mlp_dim=HIDDEN, max_len=CONTEXT + 1,
        deterministic=True,
    )  # fmt: skip

    def one_more(tokens: jax.Array) -> tuple[jax.Array]:
        # The model shifts its input, and takes 0 for padding.
        return (jnp.pad(tokens, ((0, 0), (0, 1)), constant_values=1),)

    return Public(theirs.TransformerLM(config), one_more, lambda logits: logits[:, 1:])


def flax_gemma() -> Public:
    """github.com/google/flax, examples/gemma, in nnx, with the embedding as head."""
    theirs, sizes = map(importlib.import_module, ("transformer", "transformer_cfg"))
    config = sizes.TransformerConfig(
        num_layers=LAYERS, num_embed=VOCABULARY, embed_dim=WIDTH, hidden_dim=HIDDEN,
        num_heads=HEADS, head_dim=HEAD_WIDTH, num_kv_heads=1, final_logit_softcap=None,
        use_post_attn_norm=True, use_post_ffw_norm=True, use_qk_norm=True,
        attention_types=(sizes.AttentionType.GLOBAL,) * LAYERS, dtype=BF16,
    )  # fmt: skip
    return Public(
        lambda seed: theirs.Transformer(config, rngs=nnx.Rngs(seed)),
        positions_and_mask,
        lambda result: result[0],
    )


def tunix_llama() -> Public:
    """github.com/google/tunix, models/llama3, in nnx, with an `Einsum` of its own."""
    theirs = importlib.import_module("tunix.models.llama3.model")
    config = theirs.ModelConfig(
        num_layers=LAYERS, vocab_size=VOCABULARY, embed_dim=WIDTH, hidden_dim=HIDDEN,
        num_heads=HEADS, head_dim=HEAD_WIDTH, num_kv_heads=2, rope_theta=10_000, norm_eps=1e-5,
    )  # fmt: skip
    return Public(
        lambda seed: theirs.Llama3(config, rngs=nnx.Rngs(seed)),
        positions_and_mask,
        lambda result: result[0],
        layers={theirs.Einsum: lambda layer, einsum, x: einsum(layer.einsum_str, x, layer.w[...])},
        dtype=BF16,
    )


def gemma() -> Public:
    """github.com/google-deepmind/gemma in linen, under nn.jit, with an `Einsum` of its own."""
    network, layers, sizes, modules = (
        importlib.import_module(f"gemma.gm.nn._{name}")
        for name in ("transformer", "layers", "config", "modules")
    )
    config = sizes.TransformerConfig(
        num_embed=VOCABULARY, embed_dim=WIDTH, hidden_dim=HIDDEN, num_heads=HEADS,
        head_dim=HEAD_WIDTH, num_kv_heads=1, final_logit_softcap=None, use_post_attn_norm=True,
        use_post_ffw_norm=True, use_qk_norm=True,
        attention_types=(modules.AttentionType.GLOBAL,) * LAYERS,
    )  # fmt: skip

    def compute(layer: Any, einsum: Any, equation: str, x: jax.Array) -> jax.Array:
        w = layer.param(layer.weight_name, layer.initializer, layer.shape, layer.dtype)
        return einsum(equation, x, w)

    return Public(
        network.Transformer(config=config, dtype=jnp.float32),
        lambda tokens: (tokens,),
        lambda result: result.logits,
        layers={layers.Einsum: compute},
        dtype=BF16,
    )


def hybrid_vit() -> Public:
    """github.com/google-research/vision_transformer in linen: a ResNet, then a ViT."""
    theirs = importlib.import_module("vit_jax.models_vit")
    stem = types.SimpleNamespace(width_factor=0.5, num_layers=(1, 1))
    sizes = {"num_layers": LAYERS, "mlp_dim": HIDDEN, "num_heads": HEADS}
    model = theirs.VisionTransformer(
        num_classes=CLASSES, patches=types.SimpleNamespace(size=(1, 1)), hidden_size=WIDTH,
        transformer=sizes | {"dropout_rate": 0.0, "attention_dropout_rate": 0.0}, resnet=stem,
    )  # fmt: skip
    return Public(model, task=one_of_four, keywords={"train": False})


def vit() -> Public:
    """github.com/google-research/big_vision in linen: a ViT."""
    # It imports tensorflow for files, which are not read here, and so does a part of flax.
    importlib.import_module("flax.training.checkpoints")
    names = ("tensorflow", "tensorflow.io", "tensorflow.io.gfile")
    added = {name: types.ModuleType(name) for name in names if name not in sys.modules}
    sys.modules.update(added)
    theirs = importlib.import_module("big_vision.models.vit")
    for name in added:
        del sys.modules[name]
    model = theirs.Model(
        CLASSES, patch_size=(8, 8), width=WIDTH, depth=LAYERS, mlp_dim=HIDDEN, num_heads=HEADS,
        dtype_mm="bfloat16",
    )  # fmt: skip
    return Public(model, output=lambda result: result[0], task=one_of_four)


def dit() -> Public:
    """github.com/kvfrans/jax-diffusion-transformer in linen: a DiT."""
    theirs = importlib.import_module("diffusion_transformer")
    model = theirs.DiT(
        patch_size=2, hidden_size=WIDTH, depth=LAYERS, num_heads=HEADS, mlp_ratio=HIDDEN / WIDTH,
        class_dropout_prob=0.0, num_classes=10,
    )  # fmt: skip
    return Public(model, task=velocity)


def seq2seq() -> Public:
    """github.com/google/flax, examples/seq2seq, in linen: two LSTMs."""
    theirs = importlib.import_module("models")
    vocabulary = len(CHARACTERS) + 2
    model = theirs.Seq2seq(teacher_force=True, hidden_size=2 * WIDTH, vocab_size=vocabulary)
    return Public(model, output=lambda result: result[0], task=sums, rngs=("lstm",))


def seq2seq_with_head() -> Public:
    """The same, with the layer that computes logits in high precision. Its name is no head's."""
    return seq2seq()._replace(rules=(("DecoderLSTMCell_0/Dense_0", None),))


MODELS = {
    "gpt-jax": gpt_jax, "lm1b": lm1b, "flax-gemma": flax_gemma, "tunix-llama": tunix_llama,
    "gemma": gemma, "hybrid-vit": hybrid_vit, "vit": vit, "dit": dit, "seq2seq": seq2seq,
    "seq2seq-with-head": seq2seq_with_head,
}  # fmt: skip


def load(name: str, path: str) -> Public:
    """Import a model from a folder."""
    sys.path.insert(0, path)
    return MODELS[name]()
