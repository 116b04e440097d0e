"""Models that transformers loads from a folder, and the bits of their weights and logits.

Facts about transformers 5.24 and compressed-tensors 0.20.1 on a CPU, which the tests rest on:

- `FineGrainedFP8Config` dequantizes. The side of a block is the side of the matrix, divided by the
  number of scales. So if a side above 128 is no multiple of 128, weights are wrong, or it raises
  (`integrations/finegrained_fp8.py`).
- A missing or misnamed scale is no error, and the weights are then raw FP8 values.
- `CompressedTensorsConfig(dequantize=True)` dequantizes. It reads experts with a scale for each
  channel only (`integrations/compressed_tensors.py`).
- Experts are fused in memory, and are matrices of their own in a file.
"""

import re

import numpy as np
import pytest
from loaders.plain_files import bits_apart, config_of
from loaders.tiny_models import torch, transformers

pytest.importorskip("compressed_tensors", reason="the extra `loaders` brings it")

# transformers warns that it takes the config of the file, and `dequantize` from the caller.
IGNORED = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
TOKENS = torch.tensor([[1, 5, 300, 17, 42, 8, 99, 256, 3, 200, 11, 7]])
torch.set_num_threads(1)  # beside the workers of pytest


def options_of(folder):
    """How to ask transformers for weights in bfloat16."""
    method = config_of(folder).get("quantization_config", {}).get("quant_method")
    options = {
        "fp8": lambda: transformers.FineGrainedFP8Config(dequantize=True),
        "compressed-tensors": lambda: transformers.CompressedTensorsConfig(dequantize=True),
    }
    return {"quantization_config": options[method]()} if method in options else {}


def loaded(folder, **options):
    """A model of transformers. No name is missing, and none is left."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True, **options_of(folder), **options
    )
    assert not any(report.values()), report
    return model.eval()


def bits_of(tensor):
    """A tensor of torch in bfloat16, as integers. Routers are in float32, with the same values."""
    narrow = tensor.detach().to(torch.bfloat16)
    assert torch.equal(narrow.to(tensor.dtype), tensor)
    return narrow.contiguous().view(torch.int16).numpy().view(np.uint16)


def weights_of(model):
    """The bits of all parameters by their names in a file. Experts are fused in the model."""
    found = {}
    block = "block_sparse_moe" if model.config.model_type == "mixtral" else "mlp"
    gate, up, down = ("w1", "w3", "w2") if block != "mlp" else ("gate_proj", "up_proj", "down_proj")
    for name, tensor in model.named_parameters():
        bits = bits_of(tensor)
        if not (match := re.fullmatch(r"(.*)\.mlp\.experts\.(\w+)", name)):
            found[name.replace(".mlp.gate.", f".{block}.gate.")] = bits
            continue
        for i, each in enumerate(bits):
            parts = {down: each} if match[2] == "down_proj" else {}
            parts = parts or dict(zip((gate, up), np.split(each, 2), strict=True))
            for last, part in parts.items():
                found[f"{match[1]}.{block}.experts.{i}.{last}.weight"] = part
    for name, tensor in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            found[name] = bits_of(tensor)
    if model.config.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    return found


def logits_of(model):
    with torch.no_grad():
        logits = model(TOKENS).logits
    assert torch.isfinite(logits).all()
    assert logits.std() > 0
    return bits_of(logits)


def weights_apart(model, expected):
    """How many bits of the weights differ, and of how many."""
    found = weights_of(model)
    assert found.keys() == expected.keys()
    counts = [bits_apart(found[name], expected[name]) for name in found]
    return tuple(sum(each) for each in zip(*counts, strict=True))
