"""What `export` refuses, before it writes a file."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import Message, check
from weight_files import (
    contents,
    normal,
    read_folder,
)

import jaxfp8 as fp8
from jaxfp8 import checkpoint
from jaxfp8.checkpoint import Row

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


def test_numbers_that_a_dtype_cannot_hold_are_refused(tmp_path):
    params = {"a": {"kernel": jnp.full((8, 16), 70000.0), "bias": jnp.array([1.0, jnp.inf])}}
    with pytest.raises(ValueError, match=r"a\.weight has numbers up to 70000.0.*float16 cannot"):
        checkpoint.export(params, tmp_path, format=None, dtype=jnp.float16)
    assert contents(tmp_path) == {}
    checkpoint.export(params, tmp_path, format=None, dtype=jnp.bfloat16)  # inf stays
    assert np.isinf(read_folder(tmp_path)["a.bias"].astype(np.float32)[1])


def test_ignore_without_fp8(tmp_path):
    checkpoint.export(ONE, tmp_path, format=None, ignore=("a",))
