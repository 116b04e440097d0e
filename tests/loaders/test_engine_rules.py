"""Exports keep the rules of engines, `export` refuses what breaks them, and each rule can fail."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loaders import plain_files
from loaders.engine_rules import RULES, faults
from loaders.model_trees import TREES, names_of
from loaders.tiny_models import FAMILIES, Tiny

import jaxfp8 as fp8

pytestmark = pytest.mark.loaders
FORMATS = list(fp8.checkpoint.FORMATS)
# What an engine cannot do with a format, whatever the file says.
CANNOT = {("sglang", "compressed-mxfp8"): {"S6"}}
OF_LLAMA = {("sglang", "hf-fp8"): {"S10"}, ("sglang", "hf-fp8-ue8m0"): {"S10"}}
RECIPE = fp8.recipes.delayed(history_length=4)


def states_of(params):
    """A state of delayed scaling for each matrix, at its path. The scales of x are 1/64, 2/64..."""
    count = iter(range(1, 1000))

    def one(path, kernel):
        if not jax.tree_util.keystr(path).endswith("['kernel']"):
            return {}
        state = fp8.init_state(RECIPE)
        return type(state)(**vars(state) | {"scale": jnp.full_like(state.scale, next(count) / 64)})

    return jax.tree_util.tree_map_with_path(one, params)


def export(tiny, folder, format, **options):
    if format == "modelopt-fp8":
        options["state"] = states_of(tiny.params)
    return tiny.export(folder, format, **options)


def known(tiny, engine, format):
    found = CANNOT.get((engine, format), set())
    return found | (OF_LLAMA.get((engine, format), set()) if tiny.family == "llama" else set())


def rows(names, fast):
    """The names, of which only some are in the default selection."""
    return [pytest.param(n, marks=() if n in fast else pytest.mark.slow) for n in names]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "family", rows(FAMILIES, ("llama", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"))
)
def test_rules(tiny, family, format, tmp_path):
    tiny = tiny(family)
    export(tiny, tmp_path, format)
    for engine in ("vllm", "sglang"):
        assert faults(tmp_path, tiny.folder, engine).keys() == known(tiny, engine, format)


# Sides that some blocks or some numbers of devices do not divide.
SIZES = {
    "whole": ("llama", {"head_dim": 128, "num_key_value_heads": 4, "intermediate_size": 512}),
    "one_head": ("qwen3", {"head_dim": 128, "intermediate_size": 512}),
    "narrow": ("llama", {}),
    "ragged": ("qwen3", {"intermediate_size": 320, "head_dim": 72}),
    "experts": ("qwen3_moe", {"moe_intermediate_size": 256}),
    "ragged_experts": ("qwen3_moe", {"moe_intermediate_size": 192}),
    "latent": ("deepseek_v3", {"kv_lora_rank": 128, "num_hidden_layers": 2}),
    "ragged_latent": ("deepseek_v3", {"q_lora_rank": 192, "num_hidden_layers": 2}),
    "tiny": ("mixtral", {"hidden_size": 80, "intermediate_size": 48, "head_dim": 24}),
}
# Engines copy a head of keys if there are more devices. `export` is told shapes, not heads.
REFUSED_FOR_NO_RULE = {("one_head", 4)}


@pytest.mark.parametrize(
    "sizes", rows(SIZES, ("one_head", "narrow", "ragged", "ragged_experts", "ragged_latent"))
)
def test_what_an_engine_cannot_load_is_refused(sizes, tmp_path):
    """And nothing else is: arguments are refused if and only if a rule is broken."""
    family, options = SIZES[sizes]
    tiny = Tiny(family, tmp_path / "model", **{"num_hidden_layers": 1} | options)
    for format in ("hf-fp8", "compressed-channel", "compressed-block", "compressed-mxfp8"):
        # No refusal, so that the rules see what it would have written.
        written = forced(tiny, tmp_path / format, format)
        for devices in (1, 2, 4):
            broken = {
                engine: faults(written, tiny.folder, engine, devices).keys()
                - known(tiny, engine, format)
                for engine in ("vllm", "sglang")
            }
            options = {"names": tiny.names, "tensor_parallel": devices}
            try:
                fp8.checkpoint.weights(tiny.params, format, **options)
            except ValueError:
                refused = True
            else:
                refused = False
            if not refused or (sizes, devices) not in REFUSED_FOR_NO_RULE:
                assert refused == any(broken.values()), (format, devices, broken)


def forced(tiny, folder, format):
    """The file that `export` would write without its rules of engines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxfp8.checkpoint._plan._check_split", lambda *_, **__: None)
        export(tiny, folder, format)
    return folder


def test_modelopt(tiny, tmp_path):
    """Shapes, scales and configs of ModelOpt's FP8, by the package safetensors and by NumPy."""
    from safetensors import safe_open

    tiny = tiny("llama")
    state = states_of(tiny.params)
    tiny.export(tmp_path, "modelopt-fp8", state=state)
    tensors, matrices = plain_files.read(tmp_path), 0
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == tensors.keys()
        for name in tensors:
            part = file.get_slice(name)
            assert part.get_dtype() == tensors[name][0]
            assert part.get_shape() == list(tensors[name][1].shape)
    original = plain_files.read(tiny.folder)
    for i in range(2):
        layer = state["model"]["layers"][str(i)]
        for block, name in (("self_attn", n) for n in ("q_proj", "k_proj", "v_proj", "o_proj")):
            module = f"model.layers.{i}.{block}.{name}"
            dtype, bits = tensors[f"{module}.input_scale"]
            assert (dtype, bits.shape) == ("F32", ())
            expected = np.asarray(layer[block][name]["kernel"].scale)[0]
            assert bits.view(np.float32) == expected
            group = "qkv" if name != "o_proj" else "o"
            rows = [original[f"model.layers.{i}.{block}.{n}_proj.weight"] for n in group]
            amax = max(np.abs(plain_files.scale_of(*each)).max() for each in rows)
            scale = plain_files.scale_of(*tensors[f"{module}.weight_scale"])
            assert scale == np.float32(amax) / np.float32(448)  # one for all that are merged
            matrices += 1
    assert matrices == 8
    wide = plain_files.wide(tmp_path)
    for name, values in wide.items():
        step = plain_files.scale_of(*tensors[name.replace("weight", "weight_scale")])
        far = np.abs(values - plain_files.scale_of(*original[name]))
        assert np.all(far <= np.maximum(np.abs(values) / 8, step * 2**-9))
        assert far.max() > 0


@pytest.mark.parametrize("tree", ["scanned", "general"])
def test_modelopt_of_other_trees(tiny, tree, tmp_path):
    tiny = tiny("llama")
    state = states_of(tiny.params)
    tiny.export(tmp_path / "flat", "modelopt-fp8", state=state)
    change = TREES[tree][1] if tree == "scanned" else lambda state: state
    fp8.checkpoint.export(
        TREES[tree][1](tiny.params), tmp_path / "other", format="modelopt-fp8",
        names=names_of(tree), config=tiny.folder, state=change(state),
    )  # fmt: skip
    for file in ("model.safetensors", "hf_quant_config.json", "config.json"):
        assert (tmp_path / "flat" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()


# Planted faults. For each rule: a format, the engine, and the fault.

Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"


def edits(change, file="config.json"):
    """A fault in a config. `change` gets the part about quantization."""

    def plant(folder):
        text = json.loads((folder / file).read_text())
        change(text["quantization_config"] if file == "config.json" else text)
        (folder / file).write_text(json.dumps(text))

    return plant


def of_tensors(change):
    def plant(folder):
        tensors = plain_files.read(folder)
        change(tensors)
        plain_files.write(folder, tensors)

    return plant


def sets(name, change):
    """Another dtype and array in the place of a tensor."""
    return of_tensors(lambda tensors: tensors.update({name: change(*tensors[name])}))


def group_of(config):
    return config["config_groups"]["group_0"]


def renamed(old, new):
    return of_tensors(lambda tensors: tensors.update({new: tensors.pop(old)}))


def in_bfloat16(module):
    """A matrix in high precision that no list names."""

    def change(tensors):
        _, bits = tensors[f"{module}.weight"]
        tensors[f"{module}.weight"] = "BF16", bits.astype(np.uint16)
        for scale in plain_files.SCALES:
            tensors.pop(f"{module}.{scale}", None)

    return of_tensors(change)


def with_index(change):
    def plant(folder):
        names = dict.fromkeys(plain_files.read(folder), "model.safetensors")
        index = {"metadata": {"total_size": 0}, "weight_map": names}
        change(index)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return plant


half = lambda dtype, bits: (dtype, bits // 2)
as_bytes = lambda dtype, bits: ("U8", bits.astype(np.uint8))
drop = lambda name: of_tensors(lambda tensors: tensors.pop(name))
flat = lambda dtype, bits: (dtype, bits.reshape(-1))
hf = "hf_quant_config.json"
PLANTED = [
    ("V1", "hf-fp8", edits(lambda c: c.pop("activation_scheme"))),
    ("V1", "hf-fp8", edits(lambda c: c.update(weight_block_size=None))),
    ("V2", "hf-fp8", edits(lambda c: c.update(activation_scheme="static"))),
    ("V3", "hf-fp8", sets(f"{UP}.weight_scale_inv", lambda d, b: (d, b.T))),
    ("V4", "compressed-tensor", sets(f"{Q}.weight_scale", half)),
    ("V7", "compressed-tensor", sets(f"{Q}.weight_scale", lambda d, b: (d, b.reshape(1, 1)))),
    ("V8", "hf-fp8", sets(f"{UP}.weight_scale_inv", as_bytes)),
    ("V9", "hf-fp8", edits(lambda c: c.update(scale_fmt="ue8m0"))),
    ("V10", "hf-fp8", in_bfloat16(Q)),
    ("V10", "hf-fp8", edits(lambda c: c.update(modules_to_not_convert=["lm_head", Q]))),
    ("V12", "hf-fp8", drop(f"{UP}.weight_scale_inv")),
    ("V12", "hf-fp8", drop("model.norm.weight")),
    ("V12", "hf-fp8", renamed(f"{Q}.weight_scale_inv", f"{Q}.weight_scale")),
    ("V12", "compressed-channel", renamed(f"{Q}.weight_scale", f"{Q}.weight_scale_inv")),
    ("V12", "compressed-channel", sets(f"{UP}.weight", lambda d, b: (d, b.T))),
    ("V14", "hf-fp8", with_index(lambda i: i["weight_map"].popitem())),
    ("V14", "hf-fp8", with_index(lambda i: i["weight_map"].update({f"{Q}.weight": "other"}))),
    ("V14", "hf-fp8", with_index(lambda i: i.pop("metadata"))),
    ("K1", "compressed-block", edits(lambda c: group_of(c)["weights"].update(block=[1, 1]))),
    ("K2", "compressed-channel", edits(lambda c: c.pop("format"))),
    ("K3", "compressed-channel", edits(lambda c: group_of(c)["weights"].update(dynamic=True))),
    ("K4", "compressed-channel", sets(f"{UP}.weight_scale", flat)),
    ("K6", "compressed-mxfp8", edits(lambda c: group_of(c)["weights"].pop("scale_dtype"))),
    ("K6", "compressed-mxfp8", sets(f"{UP}.weight_scale", lambda d, b: ("F8_E8M0", b))),
    ("K7", "compressed-channel", edits(lambda c: group_of(c).update(targets=["Dense"]))),
    ("K8", "compressed-channel", edits(lambda c: c.update(ignore=["re:.*k_proj"]))),
    ("M1", "modelopt-fp8", edits(lambda c: c.update(quant_algo="MXFP8"))),
    ("M2", "modelopt-fp8", edits(lambda c: c["producer"].update(name="us"), hf)),
    ("M3", "modelopt-fp8", sets(f"{Q}.input_scale", lambda d, b: (d, b * 0))),
    ("V12", "modelopt-fp8", drop(f"{Q}.input_scale")),
    ("M7", "modelopt-fp8", edits(lambda c: c.update(ignore=[]))),
    ("M7", "modelopt-fp8", edits(lambda c: c["ignore"].append("model.layers.1"))),
    ("M8", "modelopt-fp8", of_tensors(
        lambda tensors: tensors.update({f"{Q}.k_scale": tensors[f"{Q}.input_scale"]}))),
    ("O4", "modelopt-fp8", edits(lambda c: c["quantization"].pop("kv_cache_quant_algo"), hf)),
    ("O5", "modelopt-fp8", edits(lambda c: c.pop("config_groups"))),
]  # fmt: skip
OF_SGLANG = [
    ("S1", "hf-fp8", edits(lambda c: c["modules_to_not_convert"].append("layers.1"))),
    ("S4", "hf-fp8", sets(f"{UP}.weight_scale_inv", as_bytes)),
    ("S7", "modelopt-fp8", edits(lambda c: c.update(quant_algo="fp8"))),
]
OF_EXPERTS = [
    ("V11", "hf-fp8", edits(lambda c: c.update(modules_to_not_convert=["lm_head"]))),
    ("V13", "hf-fp8", of_tensors(lambda tensors: tensors.update(
        {"model.layers.0.mlp.experts.up_proj": ("BF16", np.zeros((4, 8, 8), np.uint16))}))),
]  # fmt: skip
ELSEWHERE = {"V5", "V6", "S2", "S6", "S10"}  # in the tests above: shapes, and what is known


@pytest.fixture(scope="module")
def exported(tiny, tmp_path_factory):
    """A function of family and format, which returns a folder."""
    found = {}

    def of(family, format):
        if (family, format) not in found:
            found[family, format] = tmp_path_factory.mktemp("exported")
            export(tiny(family), found[family, format], format)
        return found[family, format]

    return of


ROWS = [
    *(("vllm", "qwen3", *row) for row in PLANTED),
    *(("sglang", "qwen3", *row) for row in OF_SGLANG),
    *(("vllm", "qwen3_moe", *row) for row in OF_EXPERTS),
]


@pytest.mark.parametrize("row", range(len(ROWS)), ids=lambda i: f"{ROWS[i][2]}-{i}")
def test_planted_fault_in_a_folder(tiny, exported, row, tmp_path):
    engine, family, rule, format, plant = ROWS[row]
    folder = shutil.copytree(exported(family, format), tmp_path / "folder")
    assert faults(folder, tiny(family).folder, engine) == {}
    plant(folder)
    assert rule in faults(folder, tiny(family).folder, engine)


def test_each_rule_can_fail():
    assert {row[2] for row in ROWS} | ELSEWHERE == RULES.keys()
    assert not {row[2] for row in ROWS} & ELSEWHERE
