"""The files of an export: shards, index, configs, and what stays if it fails."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax.numpy as jnp
import pytest
from weight_files import (
    contents,
    normal,
    read_file,
    read_folder,
    same,
    tree,
)

import jaxfp8 as fp8
from jaxfp8 import checkpoint
from jaxfp8.checkpoint._formats import format_of_config

FP8_8 = {"num_bits": 8, "type": "float", "symmetric": True}


def compressed(format, weights, inputs, **more):
    group = {
        "targets": ["Linear"],
        "weights": FP8_8 | more | {"dynamic": False} | weights,
        "input_activations": FP8_8 | more | {"dynamic": True} | inputs,
    }
    return {
        "quant_method": "compressed-tensors", "format": format,
        "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


FINE_GRAINED = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"],
}  # fmt: skip
OF_MODELOPT = {"dynamic": False, "num_bits": 8, "type": "float"}
CONFIGS = {
    "hf-fp8": FINE_GRAINED,
    "hf-fp8-ue8m0": FINE_GRAINED | {"scale_fmt": "ue8m0"},
    "compressed-tensor": compressed(
        "float-quantized", {"strategy": "tensor"}, {"strategy": "tensor"}
    ),
    "compressed-channel": compressed(
        "float-quantized", {"strategy": "channel"}, {"strategy": "token"}
    ),
    "compressed-block": compressed(
        "float-quantized", {"strategy": "block", "block_structure": [128, 128]},
        {"strategy": "group", "group_size": 128},
    ),
    "compressed-mxfp8": compressed(
        "mxfp8-quantized", {"strategy": "group", "group_size": 32},
        {"strategy": "group", "group_size": 32}, scale_dtype="torch.uint8",
    ),
    "modelopt-fp8": {
        "quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"],
        "producer": {"name": "modelopt"},
        "config_groups": {"group_0": {
            "input_activations": OF_MODELOPT, "weights": OF_MODELOPT, "targets": ["Linear"]}},
    },
}  # fmt: skip
"""What loaders were seen to need. A field that is missing or wrong is silent in some of them."""


@pytest.mark.parametrize("fmt", checkpoint.FORMATS)
def test_configs_have_the_fields_that_loaders_read(fmt, tmp_path):
    params = {"up": {"kernel": normal(0, 256, 128)}, "lm_head": {"kernel": normal(1, 256, 64)}}
    state = fp8.init_state(fp8.recipes.delayed())
    state = {"up": {"kernel": dataclasses.replace(state, scale=state.scale + 1)}}
    given = {"state": state} if fmt == "modelopt-fp8" else {}
    checkpoint.export(params, tmp_path, format=fmt, config={"model_type": "x"}, **given)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {"model_type": "x", "quantization_config": CONFIGS[fmt]}
    assert format_of_config(config["quantization_config"], "").name == fmt
    nested = tmp_path / "hf_quant_config.json"
    assert nested.exists() == (fmt == "modelopt-fp8")
    if nested.exists():
        assert json.loads(nested.read_text()) == {
            "producer": {"name": "modelopt"},
            "quantization": {
                "quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]
            },
        }  # fmt: skip
    raw = (tmp_path / "model.safetensors").read_bytes()
    assert raw[8:].startswith(b'{"__metadata__":{"format":"pt"},')
    checkpoint.export(params, tmp_path, format=None)  # nothing of the format stays
    assert json.loads((tmp_path / "config.json").read_text()) == {"model_type": "x"}
    assert not nested.exists()


def test_the_config_is_replaced_last(tmp_path, monkeypatch):
    """It says how to read the tensors."""
    moved = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (moved.append(Path(b).name), replace(a, b)))
    checkpoint.export(tree(), tmp_path, format="hf-fp8", max_shard_bytes=150_000)
    assert moved[-2:] == ["model.safetensors.index.json", "config.json"]
    assert len(moved) == 6


# Files: several of them, the index, the configs, and what stays if an export fails.


def test_several_files_and_their_index(tmp_path):
    params = tree()
    checkpoint.export(params, tmp_path / "one", format="hf-fp8")
    done = checkpoint.export(params, tmp_path / "many", format="hf-fp8", max_shard_bytes=150_000)
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert [path.name for path in shards] == [
        f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)
    ]
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: path.name for path in shards for name in read_file(path)}
    one, many = read_folder(tmp_path / "one"), read_folder(tmp_path / "many")
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in one.values())
    assert same(one, many)
    assert all(path.exists() for path in done.files)
    # A matrix and its scale are in the same file.
    for name, file in index["weight_map"].items():
        if name.endswith("_scale_inv"):
            assert index["weight_map"][name.removesuffix("_scale_inv")] == file
    assert same(
        checkpoint.load(tmp_path / "one", params), checkpoint.load(tmp_path / "many", params)
    )


def test_an_export_replaces_an_older_one_and_nothing_else(tmp_path):
    params = tree()
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"hidden_size": 256}')
    checkpoint.export(params, tmp_path, format="hf-fp8", max_shard_bytes=150_000)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["hidden_size"] == 256
    assert config["quantization_config"]["quant_method"] == "fp8"
    checkpoint.export(params, tmp_path, format=None)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert json.loads((tmp_path / "config.json").read_text()) == {"hidden_size": 256}


def failing(params, at):
    """Parameters of which one has a NaN: found when most of the file is written."""
    params["blocks"][1][at]["kernel"] = params["blocks"][1][at]["kernel"].at[3, 5].set(jnp.nan)
    return params


@pytest.mark.parametrize("fmt", ["hf-fp8", "compressed-tensor"])
def test_an_export_that_fails_leaves_the_old_files(fmt, tmp_path):
    checkpoint.export(tree(), tmp_path / "old", format="hf-fp8", max_shard_bytes=150_000)
    before = contents(tmp_path)
    for folder in ("old", "new"):
        with pytest.raises(ValueError, match=r"blocks\.1\.up\.weight has a value that is NaN"):
            checkpoint.export(failing(tree(), "up"), tmp_path / folder, format=fmt)
    weights = fp8.quantize_params(failing(tree(), "down"), fp8.recipes.blockwise(), primary=True)
    with pytest.raises(ValueError, match=r"blocks\.1\.down\.weight has a value that is NaN"):
        checkpoint.export(weights, tmp_path / "old", format="hf-fp8")
    assert contents(tmp_path) == before
    assert not (tmp_path / "new").exists()


def test_a_full_disk_leaves_the_old_files(tmp_path):
    """The process may write 64 KiB at most, as on a full disk."""
    checkpoint.export(tree(), tmp_path, format="hf-fp8")
    before = contents(tmp_path)
    code = """
        import resource, signal, sys
        import jax.numpy as jnp
        from jaxfp8 import checkpoint
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        params = {"a": {"kernel": jnp.ones((512, 512), jnp.bfloat16)}}
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        try:
            checkpoint.export(params, sys.argv[1], format="hf-fp8")
        except OSError as error:
            print("refused", error.errno)
    """
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    root = Path(checkpoint.__file__).parents[2]
    run = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("refused"), run.stderr
    assert contents(tmp_path) == before


def test_an_older_config_does_not_name_another_format(tmp_path):
    checkpoint.export(tree(), tmp_path, format="hf-fp8")
    checkpoint.export(tree(), tmp_path, format=None)
    assert json.loads((tmp_path / "config.json").read_text()) == {}
