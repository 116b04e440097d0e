"""What vLLM and SGLang ask of a folder, checked without them: they need a GPU.

The rules were read in vLLM 0.33.0 (below `vllm/model_executor/`) and SGLang 0.5.23 (below
`sglang/srt/`), and those of ModelOpt in its release 0.47.0. They are facts about names, dtypes,
shapes and fields, in our words. `faults` applies them to a folder. It shares no code with
`jaxfp8.checkpoint`, and the tables of merged matrices are its own.
"""

import fnmatch
import json
import re
from pathlib import Path

import numpy as np
from loaders import plain_files

_Q = "layers/quantization"
RULES = {
    # rule: (file and function, what it asks for)
    "V1": (f"vLLM {_Q}/fp8.py Fp8Config.from_config",
           "quant_method and activation_scheme are there; weight_block_size is null or two ints"),
    "V2": (f"vLLM {_Q}/fp8.py Fp8Config.__init__",
           "activation_scheme is static or dynamic, and dynamic with blocks"),
    "V3": (f"vLLM {_Q}/fp8.py create_weights",
           "the scale of blocks is X.weight_scale_inv [ceil(N/128), ceil(K/128)]"),
    "V4": (f"vLLM {_Q}/utils/w8a8_utils.py requantize_with_max_scale",
           "merged matrices with one scale each have the same; from 2^-14 up float16 keeps it"),
    "V5": (f"vLLM {_Q}/utils/fp8_utils.py validate_fp8_block_shape",
           "merged parts and shards are whole blocks; the last uncut part may be ragged"),
    "V6": (f"vLLM {_Q}/utils/fp8_utils.py validate_fp8_block_shape_moe",
           "the inner size of experts on a device is a multiple of a block"),
    "V7": ("vLLM parameter.py PerTensorScaleParameter", "one scale is [] or [1]"),
    "V8": (f"vLLM {_Q}/fp8.py create_weights", "scales of blocks are values, not bytes"),
    "V9": ("vLLM transformers_utils/config.py", "with scale_fmt ue8m0 scales are powers of two"),
    "V10": (f"vLLM {_Q}/utils/quant_utils.py is_layer_skipped",
            "the list has exact names of modules; of merged ones all or none"),
    "V11": ("vLLM models/qwen3_moe.py", "routers that are linear layers are listed"),
    "V12": ("vLLM models/utils.py AutoWeightsLoader",
            "no name is unknown; nobody notices a missing one, so none is missing"),
    "V13": ("vLLM models, make_expert_params_mapping", "each expert has matrices of its own"),
    "V14": ("vLLM model_loader/weight_utils.py filter_duplicate_safetensors_files",
            "the index names files that are there, and all of them"),
    "K1": ("compressed-tensors 0.20.1 quantization/quant_args.py QuantizationArgs",
           "weights and input_activations have no other fields"),
    "K2": (f"vLLM {_Q}/compressed_tensors/utils.py is_activation_quantization_format",
           "format is one of those with activations, or that of MXFP8"),
    "K3": (f"vLLM {_Q}/compressed_tensors/compressed_tensors.py _is_fp8_w8a8",
           "weights are float, symmetric, static, by tensor, channel or block; inputs dynamic"),
    "K4": (f"vLLM {_Q}/compressed_tensors/schemes/compressed_tensors_w8a8_fp8.py",
           "X.weight_scale float32: [] or [1], [N, 1], or that of blocks"),
    "K6": (f"vLLM {_Q}/compressed_tensors/compressed_tensors.py _is_mxfp8",
           "groups of 32, scale_dtype torch.uint8, X.weight_scale U8 [N, K/32]"),
    "K7": (f"vLLM {_Q}/compressed_tensors/utils.py find_matched_target", "targets are Linear"),
    "K8": (f"vLLM {_Q}/compressed_tensors/utils.py should_ignore_layer",
           "ignore has exact names or re: patterns; of merged modules all or none"),
    "M1": (f"vLLM {_Q}/modelopt.py override_quantization_method", "quant_algo is FP8"),
    "M2": ("vLLM model_loader/weight_utils.py get_quant_config",
           "hf_quant_config.json says the same as config.json, by a producer modelopt"),
    "M3": (f"vLLM {_Q}/modelopt.py KFp8StaticTensor",
           "X.weight_scale and X.input_scale float32, [] or [1]"),
    "M7": (f"vLLM {_Q}/modelopt.py is_layer_excluded, get_quant_method",
           "exclude has names, parts of names or wildcards; the head must be there"),
    "M8": ("vLLM maybe_remap_kv_scale_name", "no scales of a KV cache, which we do not calibrate"),
    "O4": ("ModelOpt torch/export/unified_export_hf.py",
           "hf_quant_config.json has producer and quantization with three keys"),
    "O5": ("ModelOpt torch/export/convert_hf_config.py",
           "config.json has quant_method, quant_algo, ignore, producer, and groups of 8 bits"),
    "S1": (f"SGLang {_Q}/utils.py is_layer_skipped",
           "a listed path is equal, a beginning, or a part of the name between dots"),
    "S2": (f"SGLang {_Q}/fp8.py create_weights", "all parts of merged matrices are whole blocks"),
    "S4": (f"SGLang {_Q}/../parameter.py copy_with_check", "bytes are copied into bytes only"),
    "S6": (f"SGLang {_Q}/compressed_tensors/compressed_tensors.py", "there is no MXFP8 scheme"),
    "S7": (f"SGLang {_Q}/modelopt_quant.py ModelOptFp8Config", "FP8 with both scales"),
    "S10": ("SGLang models/llama.py load_weights",
            "Llama's loader renames weight_scale_inv, so its blocks lose their scales"),
}  # fmt: skip

MERGED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
COLUMNS = (*MERGED["qkv_proj"], *MERGED["gate_up_proj"], "w1", "w3", "q_b_proj", "kv_b_proj")
ROWS = ("o_proj", "down_proj", "w2")
WHOLE = ("q_a_proj", "kv_a_proj_with_mqa")
LINEAR = (*COLUMNS, *ROWS, *WHOLE)
OF_WEIGHTS = {
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic",
    "actorder", "scale_dtype", "zp_dtype", "observer", "observer_kwargs",
}  # fmt: skip
ACTIVE_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized")
NO_GROUP = "is no linear layer"


class Folder:
    """An export, and the names and shapes of the model that it should hold."""

    def __init__(self, path, model):
        self.path, self.tensors = Path(path), plain_files.read(path)
        self.config = plain_files.config_of(path)
        self.quantization = self.config["quantization_config"]
        self.method = self.quantization.get("quant_method")
        self.model = {name: spec["shape"] for name, spec in plain_files.header_of(model).items()}
        self.family = self.config["model_type"]
        self.found = []

    def fault(self, rule, *what):
        assert rule in RULES
        self.found.append((rule, " ".join(map(str, what))))

    def need(self, rule, holds, *what):
        if not holds:
            self.fault(rule, *what)

    # The modules that an engine has.

    @property
    def linear(self):
        """Names of the linear layers."""
        return [
            name.removesuffix(".weight")
            for name, shape in self.model.items()
            if name.endswith(".weight") and len(shape) == 2 and name.split(".")[-2] in LINEAR
        ]

    @property
    def routers(self):
        """Those that vLLM would make in FP8."""
        named = [name.removesuffix(".weight") for name in self.model]
        return [n for n in named if n.endswith("mlp.gate")] if self.family == "qwen3_moe" else []

    def merged(self, module):
        """The modules that an engine merges with this one, and itself, in order."""
        block, _, last = module.rpartition(".")
        groups = [parts for parts in MERGED.values() if last in parts]
        parts = [f"{block}.{part}" for part in groups[0]] if groups else [module]
        return [part for part in parts if f"{part}.weight" in self.model]

    def rows_of(self, name, n, devices):
        """The outputs of a matrix on each device. A head of keys is copied to several."""
        heads = self.config.get("num_key_value_heads", 1)
        copied = name in ("k_proj", "v_proj") and devices > heads
        return n // heads if copied else n // devices

    def in_fp8(self, module):
        return self.tensors.get(f"{module}.weight", ("",))[0] == "F8_E4M3"

    def tensor(self, module, last):
        return self.tensors.get(f"{module}.{last}")

    def text(self, name):
        file = self.path / name
        return json.loads(file.read_text()) if file.exists() else None


# Lists of modules in high precision.


def _exact(module, listed):
    return module in listed


def _exact_or_experts(module, listed):
    prefix = re.match(r".*\.experts(?=\.)", module)
    if prefix is None:
        return module in listed
    return any("experts" in each and prefix[0] in each for each in listed)


def _pattern(module, listed):
    return any(
        re.match(each[3:], module) if each.startswith("re:") else each == module for each in listed
    )


def _part_or_wildcard(module, listed):
    return any(each in module or fnmatch.fnmatchcase(module, each) for each in listed)


def _by_path(module, listed):
    return any(f".{each}." in f".{module}." for each in listed)


def _wildcard(module, listed):
    return any(re.fullmatch(re.escape(each).replace(r"\*", ".*"), module) for each in listed)


SKIPPED = {
    ("vllm", "fp8"): ("V10", _exact_or_experts),
    ("vllm", "compressed-tensors"): ("K8", _pattern),
    ("vllm", "modelopt"): ("M7", _part_or_wildcard),
    ("sglang", "fp8"): ("S1", _by_path),
    ("sglang", "compressed-tensors"): ("K8", _pattern),
    ("sglang", "modelopt"): ("M7", _wildcard),
}


def _check_lists(folder, engine):
    """An engine makes the same modules in FP8 as the file has."""
    quantization = folder.quantization
    listed = quantization.get("modules_to_not_convert") or quantization.get("ignore") or []
    rule, skips = SKIPPED[engine, folder.method]
    for module in folder.linear:
        parts = folder.merged(module)
        skipped = {skips(part, listed) for part in parts}
        folder.need(rule, len(skipped) == 1, "some but not all of", parts, "are listed")
        held = {folder.in_fp8(part) for part in parts}
        folder.need(rule, len(held) == 1, "some but not all of", parts, "are in FP8")
        if len(held) == len(skipped) == 1:
            folder.need(rule, held != skipped, module, "listed and in FP8, or neither")
    if engine == "vllm":  # SGLang's routers have no config
        for router in folder.routers:
            folder.need("V11", skips(router, listed), router, "is not listed")
    if folder.method == "modelopt":
        folder.need("M7", skips("lm_head", listed), "lm_head is not listed")


# Names, shapes and dtypes of tensors.


def _check_names(folder, scale, inputs):
    """Each matrix in FP8 has its scales, and there is nothing else."""
    wanted = set(folder.model)
    for module in folder.linear:
        if folder.in_fp8(module):
            wanted |= {f"{module}.{scale}"} | ({f"{module}.input_scale"} if inputs else set())
    for name in folder.tensors.keys() - wanted:
        folder.fault("M8" if re.search(r"[kv]_scale$", name) else "V12", name, "is unknown")
    for name in wanted - folder.tensors.keys():
        folder.fault("V12", name, "is missing")
    for name, (dtype, bits) in folder.tensors.items():
        expected = list(bits.shape) == folder.model.get(name, list(bits.shape))
        per_expert = "experts" not in name or bits.ndim < 3 or folder.family == "gpt_oss"
        folder.need("V12" if per_expert else "V13", expected and per_expert, name, bits.shape)
        of_linear = name.removesuffix(".weight") in folder.linear
        folder.need("V12", dtype != "F8_E4M3" or of_linear, name, NO_GROUP)


def _check_index(folder):
    files = {file.name for file in folder.path.glob("*.safetensors")}
    index = folder.text("model.safetensors.index.json")
    if index is None:
        folder.need("V14", files == {"model.safetensors"}, files, "and no index")
        return
    folder.need("V14", "metadata" in index, "the index has no metadata")
    folder.need("V14", set(index["weight_map"].values()) == files, "files are", files)
    folder.need("V14", index["weight_map"].keys() == folder.tensors.keys(), "names of the index")


def _scales(folder, last):
    for module in folder.linear:
        tensor = folder.tensor(module, last)
        if folder.in_fp8(module) and tensor is not None:
            yield module, tensor, folder.tensors[f"{module}.weight"][1].shape


def _check_blocks(folder, engine, last, tensor_parallel):
    """Blocks of 128 x 128, at some number of devices."""
    block = 128
    rule = "V3" if folder.method == "fp8" else "K4"
    for module, (dtype, bits), (n, k) in _scales(folder, last):
        shape = -(-n // block), -(-k // block)
        folder.need(rule, bits.shape == shape, module, "has scales", bits.shape)
        if engine == "sglang":
            folder.need("S4", dtype != "U8", module, "has scales in bytes")
        folder.need("V8", dtype in ("F32", "BF16", "F8_E8M0"), module, "has scales", dtype)
        name = module.rpartition(".")[2]
        parts = folder.merged(module)
        cut = tensor_parallel if name not in WHOLE else 1
        n = folder.rows_of(name, n, cut) if name in COLUMNS else n
        k = k // cut if name in ROWS else k
        if ".experts." in module:
            inner = n if name in COLUMNS else k
            folder.need("V6", inner % block == 0, module, "has", inner, "on a device")
            continue
        if name in ROWS:
            folder.need("V5", cut == 1 or k % block == 0, module, "has", k, "inputs on a device")
            continue
        # SGLang has one layer for the last two (models/deepseek_v2.py), and checks no parts.
        merged = len(parts) > 1 and not (engine == "sglang" and name in WHOLE)
        if cut > 1 or (merged and module != parts[-1]):
            folder.need("V5", n % block == 0, module, "has", n, "outputs on a device")
        if engine == "sglang" and merged:
            folder.need("S2", n % block == 0, module, "has", n, "outputs on a device")


def _check_tensors(folder, rule):
    """One scale for each matrix."""
    for module, (dtype, bits), _ in _scales(folder, "weight_scale"):
        folder.need("V7", bits.shape in ((), (1,)), module, "has a scale", bits.shape)
        folder.need(rule, dtype == "F32", module, "has a scale", dtype)
        held = [folder.tensor(part, "weight_scale") for part in folder.merged(module)]
        values = {float(plain_files.scale_of(*each).max()) for each in held if each is not None}
        folder.need("V4", len(values) == 1, module, "is merged, with scales", values)
        folder.need("V4", min(values) >= 2**-14, module, "has a scale", values)


# The methods.


def _check_fine_grained(folder, engine, tensor_parallel):
    quantization = folder.quantization
    block, scheme = (quantization.get(k) for k in ("weight_block_size", "activation_scheme"))
    folder.need("V1", scheme is not None, "activation_scheme is missing")
    folder.need("V1", block == [128, 128], "weight_block_size is", block)
    folder.need("V2", scheme == "dynamic", "activation_scheme is", scheme)
    renamed = engine == "sglang" and folder.family == "llama"
    folder.need("S10", not renamed, "the scales of Llama")
    _check_names(folder, "weight_scale_inv", inputs=False)
    _check_blocks(folder, engine, "weight_scale_inv", tensor_parallel)
    if "scale_fmt" in quantization:
        folder.need("V9", quantization["scale_fmt"] == "ue8m0", quantization["scale_fmt"])
        for module, tensor, _ in _scales(folder, "weight_scale_inv"):
            fractions, _ = np.frexp(plain_files.scale_of(*tensor))
            folder.need("V9", np.all(fractions == 0.5), module, "has no powers of two")


def _check_compressed(folder, engine, tensor_parallel):
    groups = folder.quantization.get("config_groups", {})
    for group in groups.values():
        weights, inputs = group["weights"], group["input_activations"]
        folder.need("K1", weights.keys() | inputs.keys() <= OF_WEIGHTS, weights, inputs)
        folder.need("K7", group["targets"] == ["Linear"], group["targets"])
        kind = weights.get("strategy")
        floats = all(each.get("type") == "float" and each.get("symmetric") and
                     each.get("num_bits") == 8 for each in (weights, inputs))  # fmt: skip
        static = weights.get("dynamic") is False and inputs.get("dynamic") is True
        _check_names(folder, "weight_scale", inputs=False)
        format = folder.quantization.get("format")
        if kind == "group":
            folder.need("S6", engine != "sglang", "MXFP8")
            _check_mxfp8(folder, weights, format, tensor_parallel)
            continue
        folder.need("K2", format in ACTIVE_FORMATS, "format is", format)
        folder.need("K3", floats and static and kind in ("tensor", "channel", "block"), group)
        if kind == "tensor":
            _check_tensors(folder, "K4")
        elif kind == "block":
            folder.need("K3", weights.get("block_structure") == [128, 128], weights)
            _check_blocks(folder, engine, "weight_scale", tensor_parallel)
        else:
            for module, (dtype, bits), (n, _) in _scales(folder, "weight_scale"):
                folder.need("K4", (dtype, bits.shape) == ("F32", (n, 1)), module, dtype, bits.shape)


def _check_mxfp8(folder, weights, format, tensor_parallel):
    folder.need("K2", format == "mxfp8-quantized", "format is", format)
    folder.need("K6", weights.get("group_size") == 32, weights)
    folder.need("K6", weights.get("scale_dtype") == "torch.uint8", weights)
    for module, (dtype, bits), (n, k) in _scales(folder, "weight_scale"):
        cut = tensor_parallel if module.rpartition(".")[2] in ROWS else 1
        folder.need("K6", k // cut % 32 == 0, module, "has", k, "inputs")
        folder.need("K6", (dtype, bits.shape) == ("U8", (n, k // 32)), module, dtype, bits.shape)


def _check_modelopt(folder, engine, tensor_parallel):
    del tensor_parallel
    quantization = folder.quantization
    folder.need("M1", str(quantization.get("quant_algo")).upper() == "FP8", quantization)
    if engine == "sglang":
        folder.need("S7", quantization.get("quant_algo") == "FP8", quantization)
    _check_names(folder, "weight_scale", inputs=True)
    _check_tensors(folder, "M3")
    for module, (dtype, bits), _ in _scales(folder, "input_scale"):
        fits = dtype == "F32" and bits.shape in ((), (1,))
        folder.need("M3", fits and np.all(plain_files.scale_of(dtype, bits) > 0), module, dtype)
        folder.need("S7", folder.tensor(module, "weight_scale") is not None, module)
    own = folder.text("hf_quant_config.json") or {}
    inside = own.get("quantization", {})
    keys = {"quant_algo", "kv_cache_quant_algo", "exclude_modules"}
    folder.need("O4", own.keys() == {"producer", "quantization"} and inside.keys() == keys, own)
    folder.need("M2", own.get("producer", {}).get("name") == "modelopt", own.get("producer"))
    same = inside.get("exclude_modules") == quantization.get("ignore")
    folder.need("M2", same and inside.get("quant_algo") == "FP8", "the two configs differ")
    keys = {"quant_method", "quant_algo", "ignore", "config_groups", "producer"}
    bits = {"dynamic": False, "num_bits": 8, "type": "float"}
    group = {"input_activations": bits, "weights": bits, "targets": ["Linear"]}
    folder.need("O5", quantization.keys() == keys, quantization.keys())
    folder.need("O5", quantization.get("config_groups") == {"group_0": group}, quantization)


METHODS = {
    "fp8": _check_fine_grained,
    "compressed-tensors": _check_compressed,
    "modelopt": _check_modelopt,
}


def faults(path, model, engine, tensor_parallel=1):
    """{rule: what is wrong} of a folder, for "vllm" or "sglang".

    `model` is the folder of the same model in bfloat16, which has its names and shapes.
    """
    folder = Folder(path, model)
    if folder.method not in METHODS:
        return {"V1": f"quant_method is {folder.method}"}
    _check_index(folder)
    METHODS[folder.method](folder, engine, tensor_parallel)
    _check_lists(folder, engine)
    return dict(reversed(folder.found))
