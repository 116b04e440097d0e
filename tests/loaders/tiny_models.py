"""Tiny models of transformers with random weights, and their parameters in our trees.

All matrices of linear layers have sides that are multiples of 128, because transformers on a CPU
cannot read ragged blocks (`torch_models.py`). Most of them are not square.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from loaders.plain_files import HEADER_DTYPES, header_of

import jaxfp8 as fp8

torch = pytest.importorskip("torch", reason="the extra `loaders` brings it")
transformers = pytest.importorskip("transformers", reason="the extra `loaders` brings it")

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES = {
    "vocab_size": 320, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
HEADS = {"head_dim": 64}  # q 256, k and v 128
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 256, "kv_lora_rank": 96, "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32, "v_head_dim": 96, "n_routed_experts": 4, "n_shared_experts": 1,
    "moe_intermediate_size": 128, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
EXPERTS, LOCAL = {"num_experts_per_tok": 2}, {"num_local_experts": 4}


def _family(name, sizes):
    """A function of other sizes, which makes the config of a class."""
    return lambda **options: getattr(transformers, name)(**(sizes | options))


# The layout of each family, and its config.
FAMILIES = {
    "llama": ("llama", _family("LlamaConfig", SIZES | HEADS)),
    "qwen2": ("qwen", _family("Qwen2Config", SIZES)),
    "qwen3": ("qwen", _family("Qwen3Config", SIZES | HEADS)),
    "gemma2": ("gemma", _family("Gemma2Config", SIZES | HEADS)),
    "gemma3": ("gemma", _family("Gemma3TextConfig", SIZES | HEADS)),
    "qwen3_moe": (
        "qwen",
        _family(
            "Qwen3MoeConfig",
            SIZES | HEADS | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 128},
        ),
    ),
    "mixtral": ("mixtral", _family("MixtralConfig", SIZES | HEADS | EXPERTS | LOCAL)),
    "deepseek_v3": ("deepseek", _family("DeepseekV3Config", SIZES | EXPERTS | LATENT)),
    "gpt_oss": ("gpt_oss", _family("GptOssConfig", SIZES | HEADS | EXPERTS | LOCAL)),
}


def save(family, folder, seed=0, calm=False, save_options=None, **sizes):
    """Save a model in bfloat16. Neighbouring rows, and neighbouring blocks, differ in size.

    `calm` leaves the weights as transformers draws them: small, so that layers change little.
    """
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family][1](**sizes))
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters() if not calm else ():
            parameter.normal_(generator=random)
            if parameter.ndim > 1 and "embed" not in name:
                for axis, drop in ((-1, 3), (-2, 2)):  # blocks have scales of their own
                    steps = torch.randint(-2, 3, (parameter.shape[axis],), generator=random)
                    blocks = torch.arange(parameter.shape[axis]) // 128
                    size = 2.0 ** (steps - 2 - drop * blocks)
                    parameter.mul_(size if axis == -1 else size[:, None])
            parameter.copy_(parameter if "norm" not in name else 1 + parameter / 4)
    model.to(torch.bfloat16).save_pretrained(folder, **(save_options or {}))
    return folder


def like_of(folder, names, dtype=None):
    """What `load` needs: a tree of shapes for the tensors of a file, with paths by rows."""
    tree = {}
    for name, spec in header_of(folder).items():
        for row in names:
            parts = re.split(r"\{(\w+)\}", row.name)
            pattern = "".join(
                rf"(?P<{p}>\d+)" if i % 2 else re.escape(p) for i, p in enumerate(parts)
            )
            if match := re.fullmatch(pattern, name):
                break
        else:
            raise KeyError(name)
        shape = spec["shape"][::-1] if row.kind in ("linear", "router", "head") else spec["shape"]
        *modules, last = row.found_at.format(**match.groupdict()).split("/")
        node = tree
        for module in modules:
            node = node.setdefault(module, {})
        own = dtype or HEADER_DTYPES[spec["dtype"]]
        node[last] = jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(own))
    return tree


class Tiny:
    """A saved model, and its parameters in a tree of arrays."""

    def __init__(self, family, folder, **options):
        self.family, self.folder = family, save(family, folder, **options)
        self.names = fp8.checkpoint.names(FAMILIES[family][0])
        self.like = like_of(folder, self.names)
        self.params = fp8.checkpoint.load(folder, self.like, names=self.names)

    def export(self, folder, format, params=None, **options):
        params = self.params if params is None else params
        options = {"names": self.names, "config": self.folder} | options
        return fp8.checkpoint.export(params, folder, format=format, **options)

    def load(self, folder):
        return fp8.checkpoint.load(folder, self.like, names=self.names)
