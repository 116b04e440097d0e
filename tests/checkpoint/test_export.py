"""What is in the files of `export`, beside casts by the oracle, and what it refuses."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from weight_files import (
    CELLS,
    SCALE,
    contents,
    matrices,
    normal,
    read_folder,
    same,
    tree,
)

import jaxfp8 as fp8
from jaxfp8 import checkpoint

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
