"""`weights`: the bytes of the file, and after a step only what changed."""

import jax.numpy as jnp
import numpy as np
import pytest
from weight_files import CELLS, normal, read_folder, same, tree

import jaxfp8 as fp8
from jaxfp8 import checkpoint


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("fmt", [None, *CELLS])
def test_the_bytes_are_those_of_the_file(fmt, in_fp8, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxfp8.checkpoint._encode.PIECE", 128 * 100)  # many pieces
    params = tree()
    if in_fp8:
        params = fp8.quantize_params(params, fp8.recipes.blockwise(), primary=True)
    checkpoint.export(params, tmp_path, format=fmt)
    sent = list(checkpoint.weights(params, fmt))
    stored = read_folder(tmp_path)
    assert len(sent) == len(stored)
    for name, array in sent:
        assert same(array, stored[name])


def test_only_modules_that_changed_are_sent():
    params, seen = tree(), {}
    everything = dict(checkpoint.weights(params, "hf-fp8", seen=seen))
    assert list(checkpoint.weights(params, "hf-fp8", seen=seen)) == []
    # A change of one value within a block leaves the scale as it is.
    kernel = params["blocks"][0]["up"]["kernel"]
    largest = np.unravel_index(np.argmax(np.abs(np.asarray(kernel, np.float32))), kernel.shape)
    params["blocks"][0]["up"]["kernel"] = kernel.at[(largest[0] + 1) % 256, largest[1]].set(0)
    params["blocks"][1]["norm"]["scale"] = params["blocks"][1]["norm"]["scale"] * 2
    changed = dict(checkpoint.weights(params, "hf-fp8", seen=seen))
    up = ("bias", "weight", "weight_scale_inv")
    assert set(changed) == {"blocks.1.norm.weight", *(f"blocks.0.up.{each}" for each in up)}
    fresh = dict(checkpoint.weights(params, "hf-fp8"))
    held = everything | changed
    assert same(held, fresh)


@pytest.mark.parametrize("changed", ["q_proj/kernel", "v_proj/bias"])
def test_an_engine_gets_all_that_it_merges(changed):
    """It makes such a module anew, from what arrives."""
    attention = {
        f"{n}_proj": {"kernel": normal(0, 256, 128), "bias": normal(1, 128)} for n in "qkv"
    }
    attention["o_proj"] = {"kernel": normal(2, 128, 256)}
    experts = {str(i): {"up_proj": {"kernel": normal(i, 256, 128)}} for i in range(3)}
    params = {"model": {"layers": {"0": {"self_attn": attention, "mlp": {"experts": experts}}}}}
    names, seen = checkpoint.names("llama") + checkpoint.names("qwen")[-3:], {}
    every = dict(checkpoint.weights(params, "hf-fp8", names=names, seen=seen))
    module, leaf = changed.split("/")
    attention[module][leaf] = attention[module][leaf].at[3].set(0)
    sent = dict(checkpoint.weights(params, "hf-fp8", names=names, seen=seen))
    merged = {name for name in every if any(f"{n}_proj." in name for n in "qkv")}
    assert len(merged) == 9
    assert set(sent) == merged
    assert list(checkpoint.weights(params, "hf-fp8", names=names, seen=seen)) == []
    experts["1"]["up_proj"]["kernel"] = experts["1"]["up_proj"]["kernel"] * 2
    sent = dict(checkpoint.weights(params, "hf-fp8", names=names, seen=seen))
    assert set(sent) == {name for name in every if ".experts." in name}
    assert len(sent) == 6


@pytest.mark.parametrize("last", ["blocks.0.up.weight", "blocks.0.norm.weight"])
def test_a_tensor_whose_sending_failed_is_sent_again(last):
    """Also if it is the last one of its module."""
    params, seen = tree(), {}
    for name, _ in checkpoint.weights(params, "hf-fp8", seen=seen):
        if name == last:
            break
    rest = [name for name, _ in checkpoint.weights(params, "hf-fp8", seen=seen)]
    assert {last, "blocks.0.up.weight", "blocks.0.up.bias"} <= set(rest)
    assert "blocks.0.down.weight" not in rest


def test_arguments_are_checked_before_the_first_tensor():
    with pytest.raises(ValueError, match="format='fp8' is unknown"):
        checkpoint.weights({"a": {"kernel": jnp.ones((8, 16))}}, "fp8")
    with pytest.raises(TypeError, match="seen="):
        checkpoint.weights({"a": {"kernel": jnp.ones((8, 16))}}, None, seen=set())


def test_a_module_whose_sending_failed_is_sent_again_as_a_whole():
    """Only one of its matrices changed, and the loop ended at another one."""
    attention = {f"{n}_proj": {"kernel": normal(0, 256, 128)} for n in "kqv"}
    params = {"model": {"layers": {"0": {"self_attn": attention}}}}
    names, seen = checkpoint.names("llama"), {}
    every = dict(checkpoint.weights(params, "hf-fp8", names=names, seen=seen))
    attention["k_proj"]["kernel"] = attention["k_proj"]["kernel"] * 3
    for name, _ in checkpoint.weights(params, "hf-fp8", names=names, seen=seen):
        if "q_proj" in name:
            break
    assert set(dict(checkpoint.weights(params, "hf-fp8", names=names, seen=seen))) == set(every)
    assert list(checkpoint.weights(params, "hf-fp8", names=names, seen=seen)) == []
