"""examples/llama_model.py computes what transformers computes, and exports what it loads."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8 as fp8

torch = pytest.importorskip("torch", reason="needs torch, transformers and accelerate")
transformers = pytest.importorskip("transformers", reason="needs torch and transformers")

SMALL = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama with biases": ("Llama", {"attention_bias": True}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA_3}),
    "qwen 2": ("Qwen2", {}),
    "qwen 2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen 3": ("Qwen3", {"head_dim": 64}),
    "qwen 3 tied": ("Qwen3", {"head_dim": 64, "tie_word_embeddings": True}),
}


@pytest.fixture
def example(monkeypatch):
    root = fp8.__path__[0]
    monkeypatch.syspath_prepend(f"{root}/../examples")
    return importlib.import_module("llama_model")


def write(folder, family, more, dtype):
    """A checkpoint of transformers with random weights: the model, which wrote it."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL, **more)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            of_norm = "norm" in name
            noise = torch.randn_like(parameter) * (0.3 if of_norm else 0.08)
            parameter.copy_(noise + of_norm)
    model = model.to(dtype)
    model.save_pretrained(folder)
    return model


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(example, tmp_path, case):
    theirs = write(tmp_path, *CASES[case], torch.float32)
    config = example.read_config(tmp_path)
    ours = example.Decoder(config, None, dtype=jnp.float32, seed=1)
    ours = fp8.checkpoint.load(tmp_path, like=ours, names=example.rows(config))
    tokens = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (2, 100))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    with jax.default_matmul_precision("highest"):
        found = np.asarray(ours(jnp.asarray(tokens)))
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("case", ["llama", "qwen 2", "qwen 3 tied"])
def test_transformers_loads_what_is_exported(example, tmp_path, case):
    """In bfloat16 each bit, and in FP8 each weight that training had."""
    source, plain, in_fp8 = (tmp_path / name for name in ("source", "plain", "fp8"))
    family, _ = CASES[case]
    theirs = write(source, *CASES[case], torch.bfloat16)
    config = example.read_config(source)
    names, recipe = example.rows(config), fp8.recipes.blockwise()
    model = example.Decoder(config, recipe)
    model = fp8.checkpoint.load(source, like=model, names=names)
    kind = getattr(transformers, f"{family}ForCausalLM")

    written = {"names": names, "config": source, "dtype": jnp.bfloat16}
    fp8.checkpoint.export(model, plain, format=None, **written)
    again = kind.from_pretrained(plain, dtype=torch.bfloat16).state_dict()
    expected = theirs.state_dict()
    assert set(again) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(again[name], tensor), name

    rules = [("layers/.*_proj/kernel", fp8.weights.WeightAxes())]
    weights = fp8.quantize_params(model, recipe, rules=rules, primary=True, dtype=jnp.bfloat16)
    fp8.checkpoint.export(weights, in_fp8, format="hf-fp8", **written)
    again = kind.from_pretrained(in_fp8, dtype=torch.bfloat16).state_dict()
    trained = dict(fp8.checkpoint.weights(weights, None, names=names, dtype=jnp.float32))
    changed = 0
    for name, array in trained.items():
        np.testing.assert_array_equal(again[name].float().numpy(), array, err_msg=name)
        changed += not torch.equal(again[name], expected[name])
    assert changed == 7 * config["num_hidden_layers"]  # FP8 rounds, or this compares nothing
