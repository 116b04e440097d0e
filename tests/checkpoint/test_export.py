"""What is in the files of `export`, beside casts by the oracle, and what it refuses."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from messages import Message, check
from weight_files import (
    CELLS,
    SCALE,
    contents,
    dequantized,
    matrices,
    normal,
    read_file,
    read_folder,
    same,
    tree,
)

import jaxfp8 as fp8
from jaxfp8 import checkpoint
from jaxfp8.checkpoint import Row
from jaxfp8.checkpoint._formats import format_of_config

FORMATS = [*CELLS]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_casts_are_those_of_the_oracle(fmt, dtype, tmp_path):
    params = tree(dtype)
    done = checkpoint.export(params, tmp_path, format=fmt)
    tensors = read_folder(tmp_path)
    cells, rule = CELLS[fmt]
    for name, w in matrices(params).items():
        if cells is None or cells == (0,):
            codes, scale = oracle.quantize(w, "E4M3", cells)
        else:
            codes, scale = oracle.quantize_tiles(w, "E4M3", cells, rule)
        stored = tensors[f"{name}.{SCALE.get(fmt, 'weight_scale')}"]
        np.testing.assert_array_equal(tensors[f"{name}.weight"].view(np.uint8), codes)
        np.testing.assert_array_equal(
            stored.view(np.uint8 if rule == "rceil" else np.float32).reshape(scale.shape), scale
        )
        assert done.how[f"{name}.weight"] == "cast"
    assert len(tensors) == 2 * 4 + 2 + 2 + 1
    # What is in high precision is there bit for bit.
    for i, block in enumerate(params["blocks"]):
        for key, leaf in (
            ("up.bias", block["up"]["bias"]),
            ("norm.weight", block["norm"]["scale"]),
        ):
            stored = tensors[f"blocks.{i}.{key}"]
            assert same(stored, leaf)


def test_pieces_do_not_change_a_bit(monkeypatch, tmp_path):
    """A piece is far smaller than a matrix here, and ragged at its end."""
    params = {"a": {"kernel": normal(0, 200, 700)}, "b": {"kernel": normal(1, 96, 130)}}
    for fmt in FORMATS:
        if fmt == "compressed-mxfp8":
            params["a"]["kernel"] = params["a"]["kernel"][:192]
        monkeypatch.undo()
        checkpoint.export(params, tmp_path / "whole", format=fmt)
        monkeypatch.setattr("jaxfp8.checkpoint._encode.PIECE", 128 * 200)
        checkpoint.export(params, tmp_path / "pieces", format=fmt)
        assert contents(tmp_path / "whole") == contents(tmp_path / "pieces")


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind, kind))


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
@pytest.mark.parametrize("spec", [("a", "b"), (None, ("b", "a")), ("b", None)])
def test_sharded_arrays_give_the_same_files(kind, spec, tmp_path):
    params = tree()
    sharding = jax.NamedSharding(mesh_of(kind), jax.P(*spec))
    split = jax.tree.map(lambda x: jax.device_put(x, sharding) if x.ndim == 2 else x, params)
    weights = fp8.quantize_params(params, fp8.recipes.blockwise(), primary=True)
    placed = jax.tree.map(
        lambda x: jax.device_put(x, sharding) if x.shape in ((256, 384), (384, 256)) else x, weights
    )
    for fmt, a, b in (
        ("hf-fp8", params, split),
        (None, params, split),
        ("hf-fp8", weights, placed),
    ):
        checkpoint.export(a, tmp_path / "one", format=fmt)
        checkpoint.export(b, tmp_path / "many", format=fmt)
        assert contents(tmp_path / "one") == contents(tmp_path / "many")


def test_one_scale_for_matrices_that_engines_merge(tmp_path):
    names = checkpoint.names("llama")
    sizes = {"q": 384, "k": 128, "v": 128}
    attention = {f"{n}_proj": {"kernel": normal(i, 256, sizes[n])} for i, n in enumerate(sizes)}
    params = {"model": {"layers": {"0": {"self_attn": attention}, "1": {"self_attn": attention}}}}
    attention["q_proj"]["kernel"] = attention["q_proj"]["kernel"] * 8
    checkpoint.export(params, tmp_path, format="compressed-tensor", names=names)
    tensors = read_folder(tmp_path)
    largest = max(
        float(np.abs(np.asarray(a["kernel"], np.float32)).max()) for a in attention.values()
    )
    for name, leaf in attention.items():
        module = f"model.layers.0.self_attn.{name}"
        m = oracle.multiplier(np.float32(largest), "E4M3")
        np.testing.assert_array_equal(tensors[f"{module}.weight_scale"], [oracle.inverse(m)])
        codes = oracle.cast(np.asarray(leaf["kernel"]).T, m, "E4M3")
        np.testing.assert_array_equal(tensors[f"{module}.weight"].view(np.uint8), codes)


def test_what_training_left_in_high_precision_stays_there(tmp_path):
    rules = [("blocks/1/.*", None), ("(.*/)?kernel", fp8.weights.WeightAxes())]
    params = tree()
    weights = fp8.quantize_params(params, fp8.recipes.blockwise(), rules=rules, primary=True)
    checkpoint.export(weights, tmp_path, format="hf-fp8")
    tensors = read_folder(tmp_path)
    assert tensors["blocks.0.up.weight"].dtype.name == "float8_e4m3fn"
    stored = tensors["blocks.1.up.weight"]
    assert same(stored, matrices(params)["blocks.1.up"])
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["modules_to_not_convert"] == ["blocks.1.down", "blocks.1.up"]


def test_experts_in_one_tensor_are_named_in_the_config(tmp_path):
    """Engines make FP8 experts of all modules that the list lacks, and would find no scale."""
    layer = {
        "mlp": {"experts": {"gate_up_proj": jnp.ones((2, 32, 64))}},
        "self_attn": {"o_proj": {"kernel": jnp.ones((32, 32))}},
    }
    params = {"model": {"layers": [layer]}}
    checkpoint.export(params, tmp_path, format="hf-fp8", names=checkpoint.names("gpt_oss"))
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["modules_to_not_convert"] == ["model.layers.0.mlp.experts", "lm_head"]


def test_kernels_of_other_axes_stay_if_nobody_wants_them_in_fp8(tmp_path):
    params = {"conv": {"kernel": normal(0, 3, 3, 8, 16)}, "up": {"kernel": normal(1, 256, 128)}}
    weights = fp8.quantize_params(
        params, fp8.recipes.blockwise(), rules=[("up/kernel", fp8.weights.WeightAxes())]
    )
    cases = ((params, None, ()), (params, "hf-fp8", ("conv",)), (weights, "hf-fp8", ()))
    for tree_, fmt, ignore in cases:
        checkpoint.export(tree_, tmp_path, format=fmt, ignore=ignore)
        assert same(read_folder(tmp_path)["conv.kernel"], params["conv"]["kernel"])
        assert same(checkpoint.load(tmp_path, params)["conv"], params["conv"])


def test_modules_to_ignore_and_the_head_are_named_in_the_config(tmp_path):
    layer = {
        "down_proj": {"kernel": normal(0, 384, 256)},
        "up_proj": {"kernel": normal(1, 256, 384)},
    }
    params = {
        "lm_head": {"kernel": normal(2, 256, 96)},
        "model": {"layers": {"0": {"mlp": layer}, "11": {"mlp": layer}}},
    }
    ignore = ("model.layers.1?.mlp.down_proj",)
    names = checkpoint.names("llama")
    for fmt, key in (
        ("hf-fp8", "modules_to_not_convert"),
        ("compressed-channel", "ignore"),
    ):
        done = checkpoint.export(params, tmp_path, format=fmt, names=names, ignore=ignore)
        config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
        assert config[key] == ["lm_head", "model.layers.11.mlp.down_proj"]
        assert done.how["lm_head.weight"] == "as it is"
        assert read_folder(tmp_path)["lm_head.weight"].dtype.name == "bfloat16"
    # So they are by default names, and where training had the head in FP8.
    trained = fp8.quantize_params(params, fp8.recipes.blockwise(), primary=True)
    done = checkpoint.export(trained, tmp_path, format="hf-fp8")
    assert done.how["lm_head.weight"] == "dequantized"
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["modules_to_not_convert"] == ["lm_head"]
    # Embeddings that are tied to the head: loaders make a head, and must not look for its scale.
    del params["lm_head"]
    checkpoint.export(params, tmp_path, format="hf-fp8", names=names)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["modules_to_not_convert"] == ["lm_head"]


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


def test_an_original_is_exported_where_the_format_casts(tmp_path):
    """FP8 weights that have their originals lose nothing by a second cast."""
    params = tree()
    both = fp8.quantize_params(params, fp8.recipes.current())
    checkpoint.export(both, tmp_path / "none", format=None)
    checkpoint.export(params, tmp_path / "exact", format=None)
    assert contents(tmp_path / "none") == contents(tmp_path / "exact")
    done = checkpoint.export(both, tmp_path / "a", format="compressed-mxfp8")
    assert done.how["blocks.0.up.weight"] == "cast"
    checkpoint.export(params, tmp_path / "b", format="compressed-mxfp8")
    assert same(read_folder(tmp_path / "a"), read_folder(tmp_path / "b"))
    done = checkpoint.export(both, tmp_path / "a", format="compressed-channel")
    assert done.how["blocks.0.up.weight"] == "as it is"


def test_cells_of_a_format_of_ones_own(tmp_path, monkeypatch):
    """Pieces begin at cells, however long these are."""
    own = dataclasses.replace(checkpoint.FORMATS["hf-fp8"], name="own", cells=(192, 64))
    w = normal(0, 130, 400)
    monkeypatch.setattr("jaxfp8.checkpoint._encode.PIECE", 130 * 200)
    checkpoint.export({"a": {"kernel": w}}, tmp_path, format=own)
    codes, scale = oracle.quantize_tiles(np.asarray(w).T, "E4M3", (192, 64), "float32")
    tensors = read_folder(tmp_path)
    np.testing.assert_array_equal(tensors["a.weight"].view(np.uint8), codes)
    np.testing.assert_array_equal(tensors["a.weight_scale_inv"], scale)


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


# Refusals.

LLAMA = checkpoint.names("llama")


def llama(name, *shape):
    return {
        "model": {
            "layers": {
                "0": {name.split("/")[0]: {name.split("/")[1]: {"kernel": jnp.zeros(shape)}}}
            }
        }
    }


def exported(params, **options):
    return lambda: checkpoint.export(params, "nowhere", **{"format": "hf-fp8"} | options)


ONE = {"a": {"kernel": jnp.ones((8, 16))}}
MESSAGES = {
    "format": Message(ValueError, exported(ONE, format="fp8"), "format='fp8'", "one of", "hf-fp8"),
    "no_rows": Message(
        ValueError, exported({"b": {"kernel": jnp.ones((8, 16))}}, names=LLAMA),
        "b/kernel [8, 16]", "no row of names=", "fp8.checkpoint.names(",
    ),
    "axes": Message(
        ValueError, exported({"a": {"kernel": jnp.ones((2, 8, 16))}}),
        "a.kernel [2, 8, 16]", "outputs and inputs", "Row(",
    ),
    "two_names": Message(
        ValueError,
        exported(
            {"a": jnp.ones(2), "b": jnp.ones(2)},
            names=[Row(name="x", path="a"), Row(name="x", path="b")],
        ),
        "a and b are both the tensor x", "both", "placeholder",
    ),
    "ignore": Message(
        ValueError, exported(ONE, ignore=("b",)), "['b']", "match no linear layer", "['a']"
    ),
    "merged_outputs": Message(
        ValueError, exported(llama("self_attn/k_proj", 256, 64), names=LLAMA),
        "model.layers.0.self_attn.k_proj.weight [64, 256]", "merge it with the others of 'qkv'",
        "compressed-channel",
    ),
    "split_outputs": Message(
        ValueError, exported(llama("mlp/up_proj", 256, 384), names=LLAMA, tensor_parallel=2),
        "mlp.up_proj.weight [384, 256]", "over 2 devices", "tensor_parallel=",
    ),
    "split_inputs": Message(
        ValueError, exported(llama("mlp/down_proj", 384, 256), names=LLAMA, tensor_parallel=2),
        "mlp.down_proj.weight [256, 384]", "inputs, 384", "compressed-channel",
    ),
    "mxfp8_inputs": Message(
        ValueError, exported({"a": {"kernel": jnp.ones((48, 16))}}, format="compressed-mxfp8"),
        "a.weight [16, 48]", "the last block must be whole", "ignore=('a',)",
    ),
    "half_of_a_merged_matrix": Message(
        ValueError,
        exported(
            {"model": {"layers": {"0": {"mlp": {
                n: {"kernel": jnp.ones((256, 384))} for n in ("gate_proj", "up_proj")}}}}},
            names=LLAMA, ignore=("*.gate_proj",),
        ),
        "mlp.up_proj is in FP8", "engines merge it with ['model.layers.0.mlp.gate_proj']",
        "ignore=",
    ),
    "no_state": Message(
        fp8.FP8StateError, exported(ONE, format="modelopt-fp8"), "a.weight",
        "a scale for the inputs", "state=",
    ),
    "dtype": Message(
        ValueError, exported(ONE, dtype=jnp.float8_e4m3fn), "dtype='float8_e4m3fn'", "unknown",
        "'bfloat16'",
    ),
    "dtype_by_a_wrong_name": Message(
        ValueError, exported(ONE, dtype="bf16"), "dtype='bf16'", "unknown", "'bfloat16'"
    ),
    "variables": Message(
        TypeError,
        exported({"params": ONE, "fp8": {"a": fp8.init_state(fp8.recipes.delayed())}}),
        "fp8/a is quantizer state", "arrays and weights in FP8", "variables['params']",
    ),
    "types": Message(
        TypeError, exported(jax.eval_shape(lambda: ONE)), "a/kernel is ShapeDtypeStruct",
        "needs arrays", "Pass the parameters",
    ),
    "keys": Message(
        TypeError, exported({"a": jax.random.key(0)}), "a is", "arrays and weights", "parameters"
    ),
    "a_path_twice": Message(
        ValueError, exported({"a/b": jnp.ones(2), "a": {"b": jnp.ones(2)}}), "two parameters",
        "path a/b", "Rename",
    ),
    "a_name_of_a_scale": Message(
        ValueError,
        exported({"a": {"kernel": jnp.ones((8, 16)), "weight_scale_inv": jnp.ones(2)}}),
        "a/kernel and a/weight_scale_inv", "a.weight_scale_inv", "Rename",
    ),
    "braces": Message(
        ValueError, exported({"a{0}": jnp.ones(2)}), "a{0} has braces", "placeholders", "names="
    ),
    "names": Message(
        ValueError, exported(ONE, names="bert"), "names='bert'", "unknown", "'llama'"
    ),
    "no_rows_but_text": Message(
        TypeError, exported(ONE, names=["llama"]), "names='llama'", "Row", "names(...)"
    ),
    "not_floats": Message(
        ValueError, exported({"a": {"kernel": jnp.ones((8, 16), jnp.int32)}}), "a/kernel is int32",
        "a float", "ignore=",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_what_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(MESSAGES[name])
    assert contents(tmp_path) == {}
    assert not Path("nowhere").exists()


def test_scales_of_their_own_in_a_merged_matrix_are_refused(tmp_path):
    """Engines would cast them again."""
    mlp = {n: {"kernel": normal(i, 256, 384)} for i, n in enumerate(("gate_proj", "up_proj"))}
    params = {"model": {"layers": {"0": {"mlp": mlp}}}}
    weights = fp8.quantize_params(params, fp8.recipes.current(), primary=True)
    with pytest.raises(ValueError, match=r"cast all of them again.*compressed-channel"):
        checkpoint.export(weights, tmp_path, format="compressed-tensor", names=LLAMA)
    done = checkpoint.export(weights, tmp_path, format="compressed-channel", names=LLAMA)
    assert set(done.how.values()) == {"as it is"}


def test_scales_of_inputs_of_stacked_layers(tmp_path):
    recipe = fp8.recipes.delayed()
    state = jax.tree.map(
        lambda x: jnp.stack([x] * 6).reshape(2, 3, *x.shape), fp8.init_state(recipe)
    )
    scale = state.scale + jnp.arange(1.0, 7.0).reshape(2, 3, 1)
    state = {"w": {"kernel": dataclasses.replace(state, scale=scale)}}
    params = {"w": {"kernel": jnp.ones((2, 3, 8, 16))}}
    axes = "out in -> stage layer in out"
    rows = [Row(name="{layer}.{stage}.weight", path="w/kernel", kind="linear", axes=axes)]
    checkpoint.export(params, tmp_path, format="modelopt-fp8", names=rows, state=state)
    tensors = read_folder(tmp_path)
    found = [[float(tensors[f"{i}.{j}.input_scale"]) for i in range(3)] for j in range(2)]
    assert found == [[1, 2, 3], [4, 5, 6]]
    flat = jax.tree.map(lambda x: x[0], state)
    with pytest.raises(fp8.FP8StateError, match=r"stacks \[3\] matmuls.*\['stage', 'layer'\]"):
        checkpoint.export(params, tmp_path, format="modelopt-fp8", names=rows, state=flat)


def test_numbers_that_a_dtype_cannot_hold_are_refused(tmp_path):
    params = {"a": {"kernel": jnp.full((8, 16), 70000.0), "bias": jnp.array([1.0, jnp.inf])}}
    with pytest.raises(ValueError, match=r"a\.weight has numbers up to 70000.0.*float16 cannot"):
        checkpoint.export(params, tmp_path, format=None, dtype=jnp.float16)
    assert contents(tmp_path) == {}
    checkpoint.export(params, tmp_path, format=None, dtype=jnp.bfloat16)  # inf stays
    assert np.isinf(read_folder(tmp_path)["a.bias"].astype(np.float32)[1])


# State: the scales of inputs.


def test_scales_of_inputs_are_those_of_the_state(tmp_path):
    recipe = fp8.recipes.delayed()
    layer = fp8.linen.FP8Dense(384, recipe=recipe, name="up", use_bias=False)
    x = normal(0, 8, 256, dtype="float32")
    variables = layer.init(jax.random.key(0), x)
    state = {"up": variables[fp8.linen.COLLECTION]}
    params = {"up": variables["params"]}
    with pytest.raises(fp8.FP8StateError, match=r"up/kernel: the scale of x is .* unset"):
        checkpoint.export(params, tmp_path, format="modelopt-fp8", state=state)

    def loss(params, state, x):
        variables = {"params": params["up"], fp8.linen.COLLECTION: state["up"]}
        return jnp.sum(layer.apply(variables, x) ** 2)

    _, _, state = fp8.value_and_grad(loss)(params, state, x)
    checkpoint.export(params, tmp_path, format="modelopt-fp8", state=state)
    tensors = read_folder(tmp_path)
    largest = np.float32(np.abs(np.asarray(x)).max())
    scale = oracle.inverse(oracle.multiplier(largest, "E4M3"))
    assert tensors["up.input_scale"].dtype == np.float32
    assert tensors["up.input_scale"].shape == ()
    np.testing.assert_array_equal(tensors["up.input_scale"], scale)
    codes, w_scale = oracle.quantize(np.asarray(params["up"]["kernel"]).T, "E4M3")
    np.testing.assert_array_equal(tensors["up.weight"].view(np.uint8), codes)
    np.testing.assert_array_equal(tensors["up.weight_scale"], w_scale)
    nested = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]
    assert nested == {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": []}
    dequantized(tensors, "up", "modelopt-fp8")


def test_scales_of_inputs_of_stacked_layers_of_experts():
    """The state is stacked by layers, and the weight also by experts."""
    state = fp8.init_state(fp8.recipes.delayed())
    layers = [jax.tree.map(lambda x, i=i: jnp.full_like(x, i), state) for i in (1, 2, 3)]
    stacked = jax.tree.map(lambda *each: jnp.stack(each), *layers)
    name = "{layer}.experts.{expert}.up.weight"
    rows = [Row(name=name, path="up/kernel", kind="linear")]
    params = {"up": {"kernel": jnp.ones((3, 2, 32, 16))}}
    sent = dict(
        checkpoint.weights(params, "modelopt-fp8", names=rows, state={"up": {"kernel": stacked}})
    )
    for layer in range(3):
        for expert in range(2):
            assert sent[f"{layer}.experts.{expert}.up.input_scale"] == layer + 1


def test_an_older_config_does_not_name_another_format(tmp_path):
    checkpoint.export(ONE, tmp_path, format="hf-fp8")
    checkpoint.export(ONE, tmp_path, format=None)
    assert json.loads((tmp_path / "config.json").read_text()) == {}


def test_ignore_without_fp8(tmp_path):
    checkpoint.export(ONE, tmp_path, format=None, ignore=("a",))
