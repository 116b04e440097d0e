"""transformers reads the weights that we wrote: all bits, and all bits of the logits.

"It loads" proves nothing: transformers loads a file whose scales are missing without a word.
"""

import json

import jax
import numpy as np
import pytest
from loaders import plain_files, torch_models
from loaders.plain_files import bits_apart
from loaders.tiny_models import Tiny
from loaders.torch_models import loaded, logits_of, weights_apart

import jaxfp8 as fp8

pytestmark = [pytest.mark.loaders, torch_models.IGNORED]
FORMATS = [
    "hf-fp8", "hf-fp8-ue8m0", "compressed-tensor", "compressed-channel", "compressed-block",
    "compressed-mxfp8",
]  # fmt: skip
MATRICES = {"llama": 14, "qwen3": 14, "mixtral": 32, "qwen3_moe": 32, "deepseek_v3": 28}
"""How many matrices of linear layers two layers have."""


def scales_of(folder):
    """The scales of all matrices in FP8 by name."""
    tensors = plain_files.read(folder)
    in_fp8 = [name for name, (dtype, _) in tensors.items() if dtype == "F8_E4M3"]
    scales = {name: tensors[plain_files.scale_name_of(tensors, name)] for name in in_fp8}
    return {name: plain_files.scale_of(*each) for name, each in scales.items()}


def check_in_fp8(folder, matrices, format):
    """The file has that many matrices in FP8, and scales that a fault would show in."""
    scales = scales_of(folder)
    assert len(scales) == matrices
    if format == "compressed-tensor":
        assert len({float(s) for s in map(np.max, scales.values())}) > 2
        return
    for name, scale in scales.items():
        if format.startswith(("hf", "compressed-block")):
            assert len(np.unique(scale)) > scale.size / 2, name
        else:
            assert len(np.unique(scale)) > 4, name
    # Most matrices have several scales, and not as many rows of them as columns.
    assert sum(scale.shape[0] != scale.shape[1] for scale in scales.values()) > matrices / 2


def same_bits(tiny, folder, plain):
    """A folder stands for the same bits in transformers, in our reader, and in NumPy.

    Returns how many bits of weights were compared.
    """
    expected = plain_files.dequantized(folder)
    # Our reader, written without FP8, is what the logits are compared with.
    tiny.export(plain, None, tiny.load(folder))
    ours = {name: bits for name, (_, bits) in plain_files.read(plain).items()}
    assert ours.keys() == expected.keys()
    assert sum(bits_apart(ours[name], expected[name])[0] for name in ours) == 0
    model, reference = loaded(folder), loaded(plain)
    apart, of = weights_apart(model, expected)
    assert (apart, weights_apart(reference, expected)[0]) == (0, 0), f"of {of} bits"
    apart, of_logits = bits_apart(logits_of(model), logits_of(reference))
    assert apart == 0
    assert of_logits == 16 * torch_models.TOKENS.numel() * 320
    return of


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_bit(tiny, family, format, tmp_path):
    tiny = tiny(family)
    done = tiny.export(tmp_path / "fp8", format)
    linear = [name for name in done.how if "_proj.weight" in name]
    assert {done.how[name] for name in linear} == {"cast"}
    check_in_fp8(tmp_path / "fp8", MATRICES[family], format)
    bits = same_bits(tiny, tmp_path / "fp8", tmp_path / "plain")
    assert bits == 16 * sum(leaf.size for leaf in jax.tree.leaves(tiny.params))


@pytest.mark.parametrize(
    ("family", "format"),
    [
        ("mixtral", "hf-fp8"),
        ("qwen3_moe", "hf-fp8-ue8m0"),
        ("qwen3_moe", "compressed-channel"),
        ("deepseek_v3", "hf-fp8"),
        pytest.param("mixtral", "compressed-channel", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "hf-fp8", marks=pytest.mark.slow),
        pytest.param("mixtral", "hf-fp8-ue8m0", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "compressed-channel", marks=pytest.mark.slow),
    ],
)
def test_every_bit_of_experts(tiny, family, format, tmp_path):
    """compressed-tensors has one format for experts: `torch_models.py`."""
    tiny = tiny(family)
    tiny.export(tmp_path / "fp8", format)
    check_in_fp8(tmp_path / "fp8", MATRICES[family], format)
    same_bits(tiny, tmp_path / "fp8", tmp_path / "plain")


def test_ragged_blocks(tmp_path):
    """transformers on a CPU reads other scales for a matrix whose last block is not whole.

    DeepSeek's own kv_a_proj_with_mqa is such a matrix, with 576 rows. So our
    reader and NumPy are compared here, and transformers for all other matrices.
    """
    tiny = Tiny("deepseek_v3", tmp_path / "model", kv_lora_rank=128)
    tiny.export(tmp_path / "fp8", "hf-fp8")
    tiny.export(tmp_path / "plain", None, tiny.load(tmp_path / "fp8"))
    expected = plain_files.dequantized(tmp_path / "fp8")
    ours = {name: bits for name, (_, bits) in plain_files.read(tmp_path / "plain").items()}
    theirs = torch_models.weights_of(loaded(tmp_path / "fp8"))
    ragged = [name for name in expected if "kv_a_proj_with_mqa" in name]
    assert [expected[name].shape for name in ragged] == [(160, 256)] * 2
    for name, bits in expected.items():
        assert bits_apart(ours[name], bits)[0] == 0
        assert (bits_apart(theirs[name], bits)[0] == 0) == (name not in ragged)


def test_some_layers_in_high_precision(tiny, tmp_path):
    tiny = tiny("qwen3")
    ignore = ("*.layers.0.self_attn.[qkv]_proj", "*.layers.1.mlp.down_proj")
    tiny.export(tmp_path / "fp8", "hf-fp8", ignore=ignore)
    check_in_fp8(tmp_path / "fp8", MATRICES["qwen3"] - 4, "hf-fp8")
    same_bits(tiny, tmp_path / "fp8", tmp_path / "plain")
    kept = plain_files.config_of(tmp_path / "fp8")["quantization_config"]["modules_to_not_convert"]
    of_layer_0 = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    assert sorted(kept) == sorted([*of_layer_0, "model.layers.1.mlp.down_proj", "lm_head"])


def test_several_files(tiny, tmp_path):
    tiny = tiny("llama")
    done = tiny.export(tmp_path / "fp8", "hf-fp8", max_shard_bytes=300_000)
    assert sum(file.suffix == ".safetensors" for file in done.files) > 2
    same_bits(tiny, tmp_path / "fp8", tmp_path / "plain")


@pytest.mark.parametrize("format", ["compressed-channel", "compressed-block"])
def test_activations_in_fp8(tiny, format, tmp_path):
    """compressed-tensors also casts the inputs of layers, to the values that our matmuls would."""
    tiny = Tiny("llama", tmp_path / "model", calm=True)
    tiny.export(tmp_path / "fp8", format)
    tiny.export(tmp_path / "plain", None, tiny.load(tmp_path / "fp8"))
    model, _ = torch_models.transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8", dtype=torch_models.torch.bfloat16, output_loading_info=True
    )
    wide = lambda bits: plain_files.scale_of("BF16", bits).astype(np.float64)
    found = wide(logits_of(model.eval()))
    expected = wide(logits_of(loaded(tmp_path / "plain")))
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert 0 < error < 0.05


# Planted faults: each of the comparisons above can fail.

SQUARE, WIDE = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"


def without_scale(tensors):
    del tensors[plain_files.scale_name_of(tensors, WIDE)]


def reciprocal(tensors):
    name = plain_files.scale_name_of(tensors, WIDE)
    dtype, bits = tensors[name]
    if dtype == "F32":
        tensors[name] = dtype, (1 / bits.view(np.float32)).view(np.uint32)
    else:
        tensors[name] = dtype, 254 - bits


def scale_transposed(tensors):
    """In the memory of the other order, with the shape that it should have."""
    name = plain_files.scale_name_of(tensors, WIDE)
    dtype, bits = tensors[name]
    tensors[name] = dtype, np.ascontiguousarray(bits.T).reshape(bits.shape)


def scale_shifted(tensors):
    """By one cell."""
    name = plain_files.scale_name_of(tensors, WIDE)
    dtype, bits = tensors[name]
    tensors[name] = dtype, np.roll(bits, 1)


def values_transposed(tensors):
    dtype, bits = tensors[SQUARE]
    assert bits.shape[0] == bits.shape[1]
    tensors[SQUARE] = dtype, np.ascontiguousarray(bits.T)


def scale_misnamed(tensors):
    name = plain_files.scale_name_of(tensors, WIDE)
    inverse = name.endswith("_inv")
    tensors[name.removesuffix("_inv") if inverse else f"{name}_inv"] = tensors.pop(name)


def last_bit(tensors):
    """One bit of one value."""
    dtype, bits = tensors[WIDE]
    bits = bits.copy()
    bits[-1, -1] ^= 1
    tensors[WIDE] = dtype, bits


FAULTS = [
    without_scale, reciprocal, scale_transposed, scale_shifted, values_transposed, scale_misnamed,
    last_bit,
]  # fmt: skip
FAULTY = [
    (format, fault)
    for format in ("hf-fp8", "hf-fp8-ue8m0", "compressed-channel", "compressed-mxfp8")
    for fault in FAULTS
    # A column of scales has the same memory in both orders.
    if (format, fault) != ("compressed-channel", scale_transposed)
]


@pytest.mark.parametrize(("format", "fault"), FAULTY)
def test_planted_fault(tiny, format, fault, tmp_path):
    tiny = tiny("llama")
    tiny.export(tmp_path, format)
    expected = plain_files.dequantized(tmp_path)
    tensors = plain_files.read(tmp_path)
    fault(tensors)
    plain_files.write(tmp_path, tensors)
    report, apart = {}, 0
    try:
        model, report = torch_models.transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch_models.torch.bfloat16, output_loading_info=True,
            **torch_models.options_of(tmp_path),
        )  # fmt: skip
        apart, _ = weights_apart(model, expected)
    except (RuntimeError, ValueError, KeyError, AssertionError) as error:
        report = {"error": error}
    assert apart > 0 or any(report.values())
    if format == "hf-fp8" and fault is without_scale:
        assert apart > 0
        assert not any(report.values())
    # Our reader refuses, or has other bits.
    try:
        found = tiny.load(tmp_path)
    except fp8.checkpoint.CheckpointError:
        assert fault in (without_scale, scale_misnamed)
    else:
        tiny.export(tmp_path / "plain", None, found)
        ours = {name: bits for name, (_, bits) in plain_files.read(tmp_path / "plain").items()}
        assert sum(bits_apart(ours[name], expected[name])[0] for name in ours) > 0


def test_configs_are_those_of_the_libraries(tiny, tmp_path):
    """Both parse our config, and write no other value for what we say."""
    from compressed_tensors.quantization import QuantizationConfig

    tiny = tiny("llama")
    for format in FORMATS:
        tiny.export(tmp_path, format)
        given = plain_files.config_of(tmp_path)["quantization_config"]
        if format.startswith("hf"):
            back = torch_models.transformers.FineGrainedFP8Config.from_dict(given).to_dict()
        else:
            back = QuantizationConfig.model_validate(
                {key: value for key, value in given.items() if key != "quant_method"}
            ).to_dict()
            back["quant_method"] = "compressed-tensors"
        back = json.loads(json.dumps(back, default=str))
        given.pop("fmt", None)  # transformers knows E4M3 only
        assert _differing(given, back) == {}


def _differing(given, back):
    """The fields that we write and a library reads as something else."""
    if not isinstance(given, dict):
        return {} if given == back else {"given": given, "back": back}
    found = {key: _differing(value, back.get(key)) for key, value in given.items()}
    return {key: value for key, value in found.items() if value}
