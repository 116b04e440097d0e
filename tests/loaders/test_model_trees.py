"""One model in several trees of parameters is one file, byte for byte, and comes back."""

import filecmp

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from loaders import plain_files
from loaders.model_trees import TREES, LinenModel, NnxModel, flax_names, names_of
from loaders.tiny_models import FAMILIES, like_of, save

import jaxfp8 as fp8

pytestmark = pytest.mark.loaders
FORMATS = [None, "hf-fp8", "compressed-channel", "compressed-mxfp8"]


def same_leaves(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()


def same_file(left, right):
    return filecmp.cmp(left / "model.safetensors", right / "model.safetensors", shallow=False)


@pytest.mark.parametrize("tree", [tree for tree in TREES if tree != "flat"])
def test_one_file(tiny, tree, tmp_path):
    tiny, names = tiny(TREES[tree][0]), names_of(tree)
    params = TREES[tree][1](tiny.params)
    for format in FORMATS:
        one, other = tmp_path / f"one {format}", tmp_path / f"other {format}"
        done = tiny.export(one, format)
        assert fp8.checkpoint.export(
            params, other, format=format, names=names, config=tiny.folder
        ).how == done.how  # fmt: skip
        assert same_file(one, other)
        assert (one / "config.json").read_text() == (other / "config.json").read_text()
        back = fp8.checkpoint.load(other, params, names=names)
        same_leaves(back, TREES[tree][1](tiny.load(one)))
    assert same_file(tmp_path / "one None", tiny.folder)


def test_linen(tiny, tmp_path):
    """From transformers into a linen model and back, and out in FP8."""
    tiny, names = tiny("llama"), flax_names("block_{layer}")
    tokens = jnp.zeros((1, 2), jnp.int32)
    like = jax.eval_shape(LinenModel().init, jax.random.key(0), tokens)["params"]
    params = fp8.checkpoint.load(tiny.folder, like, names=names)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
    options = {"names": names, "config": tiny.folder, "dtype": jnp.bfloat16}
    fp8.checkpoint.export(params, tmp_path / "plain", format=None, **options)
    assert same_file(tmp_path / "plain", tiny.folder)
    fp8.checkpoint.export(params, tmp_path / "fp8", format="hf-fp8", **options)
    tiny.export(tmp_path / "flat", "hf-fp8")
    assert same_file(tmp_path / "fp8", tmp_path / "flat")


def test_nnx(tiny, tmp_path):
    tiny, names = tiny("llama"), flax_names("blocks/{layer}")
    like = NnxModel(nnx.Rngs(0))
    model = fp8.checkpoint.load(tiny.folder, like, names=names)
    assert isinstance(model, NnxModel)
    options = {"names": names, "config": tiny.folder, "dtype": jnp.bfloat16}
    fp8.checkpoint.export(model, tmp_path / "plain", format=None, **options)
    assert same_file(tmp_path / "plain", tiny.folder)
    fp8.checkpoint.export(model, tmp_path / "fp8", format="compressed-block", **options)
    tiny.export(tmp_path / "flat", "compressed-block")
    assert same_file(tmp_path / "fp8", tmp_path / "flat")
    back = fp8.checkpoint.load(tmp_path / "fp8", nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0))),
                               names=names)  # fmt: skip
    kernel = np.asarray(back.blocks[1].down.kernel.get_value())
    expected = plain_files.wide(tmp_path / "fp8")["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(kernel.T, expected)


# All families: what transformers wrote, we write.


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_of_transformers(tiny, family, tmp_path):
    tiny = tiny(family)
    tiny.export(tmp_path, None)
    assert same_file(tmp_path, tiny.folder)
    assert plain_files.config_of(tmp_path) == plain_files.config_of(tiny.folder)


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_files_of_transformers(family, tmp_path):
    """Several files and their index: into one, and into several of ours."""
    saved = save(family, tmp_path / "saved", save_options={"max_shard_size": "400KB"})
    assert len(list(saved.glob("*.safetensors"))) > 2
    names = fp8.checkpoint.names(FAMILIES[family][0])
    params = fp8.checkpoint.load(saved, like_of(saved, names), names=names)
    options = {"format": None, "names": names, "config": saved}
    fp8.checkpoint.export(params, tmp_path / "one", **options)
    fp8.checkpoint.export(params, tmp_path / "several", max_shard_bytes=400_000, **options)
    assert same_file(tmp_path / "one", save(family, tmp_path / "whole"))
    assert plain_files.read(tmp_path / "several").keys() == plain_files.read(saved).keys()
    for name, (dtype, bits) in plain_files.read(saved).items():
        for folder in ("one", "several"):
            found = plain_files.read(tmp_path / folder)[name]
            assert found[0] == dtype
            assert np.array_equal(found[1], bits)
    ours, theirs = (plain_files.index_of(folder) for folder in (tmp_path / "several", saved))
    assert ours.keys() == theirs.keys()
    assert ours["weight_map"].keys() == theirs["weight_map"].keys()
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_of_all_families(tiny, family, tmp_path):
    """Without torch: NumPy and our reader agree. gpt_oss keeps its experts in bfloat16."""
    tiny = tiny(family)
    for format in ("hf-fp8", "compressed-channel"):
        tiny.export(tmp_path / format, format)
        tiny.export(tmp_path / "plain", None, tiny.load(tmp_path / format))
        expected = plain_files.dequantized(tmp_path / format)
        ours = {name: bits for name, (_, bits) in plain_files.read(tmp_path / "plain").items()}
        assert ours.keys() == expected.keys()
        assert sum(plain_files.bits_apart(ours[n], expected[n])[0] for n in ours) == 0
