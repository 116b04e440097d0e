"""What `load` refuses: one error that names the tensor, and nothing changes."""

import contextlib
import json

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from messages import Message, check
from weight_files import (
    CELLS,
    contents,
    shapes_of,
    write,
)

import jaxfp8 as fp8
from jaxfp8 import checkpoint
from jaxfp8.checkpoint import CheckpointError
from jaxfp8.checkpoint._formats import format_of_config

# Refusals: one error that names the tensor, and no change.

LIKE = {
    "a": {"kernel": jnp.zeros((384, 256), jnp.bfloat16)},
    "n": {"scale": jnp.zeros(8, jnp.float32)},
}
VALUES = np.ones((256, 384), ml_dtypes.float8_e4m3fn)
SCALES = np.ones((2, 3), np.float32)
GOOD = {"a.weight": VALUES, "a.weight_scale_inv": SCALES, "n.weight": np.ones(8, np.float32)}
CONFIG = checkpoint.FORMATS["hf-fp8"].config(checkpoint.FORMATS["hf-fp8"], [])
WITHOUT_SCALE = {k: v for k, v in GOOD.items() if k != "a.weight_scale_inv"}


def weights_of(recipe, state=(), **options):
    return shapes_of(
        fp8.quantize_params({"a": LIKE["a"]}, recipe, state=state, **{"primary": True} | options)
    ) | {"n": LIKE["n"]}


CASES = {
    "missing": ({k: v for k, v in GOOD.items() if k != "n.weight"}, CONFIG, LIKE, {},
                ("n.weight is missing", "n/scale", "names=")),
    "unexpected": (GOOD | {"b": SCALES}, CONFIG, LIKE, {},
                   ("b is no parameter", "names=", "skip=")),
    "shape": (GOOD | {"n.weight": np.ones(9, np.float32)}, CONFIG, LIKE, {},
              ("n.weight has the shape [9]", "[8] is needed", "n/scale")),
    "narrow": (GOOD, CONFIG, LIKE | {"n": {"scale": jnp.zeros(8, jnp.bfloat16)}}, {},
               ("n.weight is float32", "bfloat16 cannot hold", "Load it as float32")),
    "no_scale": (WITHOUT_SCALE, CONFIG, LIKE, {},
                 ("a.weight has no scale", "a.weight_scale_inv is missing", "a/kernel")),
    "misnamed_scale": (WITHOUT_SCALE | {"a.weight_scale": SCALES}, CONFIG, LIKE, {},
                       ("a.weight has no scale", "a.weight_scale is no parameter", "skip=")),
    "transposed_scale": (GOOD | {"a.weight_scale_inv": SCALES.T.copy()}, CONFIG, LIKE, {},
                         ("scale float32[3, 2]", "needs float32[2, 3]", "a/kernel")),
    "bytes_for_float_scales": (GOOD | {"a.weight_scale_inv": np.ones((2, 3), np.uint8)}, CONFIG,
                               LIKE, {}, ("scale uint8[2, 3]", "needs float32[2, 3]", "a/kernel")),
    "negative_scale": (GOOD | {"a.weight_scale_inv": -SCALES}, CONFIG, LIKE, {},
                       ("a.weight_scale_inv holds -1.0", "positive", "again")),
    "zero_scale": (GOOD | {"a.weight_scale_inv": 0 * SCALES}, CONFIG, LIKE, {},
                   ("a.weight_scale_inv holds 0.0", "positive", "again")),
    "inf_scale": (GOOD | {"a.weight_scale_inv": SCALES * np.inf}, CONFIG, LIKE, {},
                  ("a.weight_scale_inv holds inf", "finite", "again")),
    "large_scale": (GOOD | {"a.weight_scale_inv": SCALES * np.float32(1e38)}, CONFIG, LIKE, {},
                    ("a.weight_scale_inv holds 1e+38", "overflow float32", "again")),
    "subnormal_scale": (GOOD | {"a.weight_scale_inv": SCALES * np.float32(1e-40)}, CONFIG, LIKE,
                        {}, ("a.weight_scale_inv holds 1e-40", "positive", "again")),
    "vector": (GOOD | {"a.weight": VALUES[0]}, CONFIG, LIKE, {},
               ("a.weight has the shape [384]", "[256, 384] is needed", "a/kernel")),
    "float64": (GOOD, CONFIG, LIKE | {"n": {"scale": np.zeros(8)}}, {},
                ("n.weight is for float64", "jax_enable_x64", "n/scale")),
    "nan_scale": (GOOD | {"a.weight_scale_inv": SCALES * np.nan}, CONFIG, LIKE, {},
                  ("a.weight_scale_inv holds nan", "finite", "again")),
    "no_config": (GOOD, None, LIKE, {}, ("a.weight is float8_e4m3fn", "no config", "Pass format=")),
    "e5m2": (GOOD | {"a.weight": VALUES.astype(ml_dtypes.float8_e5m2)}, CONFIG, LIKE, {},
             ("float8_e5m2", "float8_e4m3fn", "a/kernel")),
    "fp8_norm": (GOOD | {"n.weight": np.ones(8, ml_dtypes.float8_e4m3fn)}, CONFIG, LIKE, {},
                 ("n.weight is float8_e4m3fn", "linear layers", "n/scale")),
    "unknown_method": (GOOD, {"quant_method": "gptq"}, LIKE, {},
                       ("'gptq'", "can be read", "format=")),
    "unknown_block": (GOOD, CONFIG | {"weight_block_size": [64, 64]}, LIKE, {},
                      ("[64, 64]", "can be read", "format=")),
    "no_object": (GOOD, 3, LIKE, {}, ("quantization_config must be an object", "3", "config.json")),
    "two_copies": (GOOD, CONFIG, weights_of(fp8.recipes.rowwise()), {},
                   ("2 copies", "one copy", "load it as an array")),
    "original": (GOOD, CONFIG, weights_of(fp8.recipes.blockwise(), primary=False), {},
                 ("original=True", "primary=True", "load it as an array")),
    "state": (GOOD, CONFIG, weights_of(fp8.recipes.delayed(), {"a": {
        "kernel": fp8.init_state(fp8.recipes.delayed())}}), {},
        ("delayed", "quantizer state", "quantize_params")),
    "other_cells": (GOOD | {"a.weight_scale_inv": np.arange(1, 7, dtype=np.float32).reshape(2, 3)},
                    CONFIG, weights_of(fp8.recipes.current()), {},
                    ("a.weight", "other cells", "Load it as an array")),
    "no_powers_of_two": (GOOD | {"a.weight_scale_inv": 3 * SCALES}, CONFIG,
                         weights_of(fp8.recipes.blockwise(power_of_two=True)), {},
                         ("a.weight", "powers of two", "Load it as an array")),
}  # fmt: skip
OF_MODEL = ("two_copies", "original", "state", "other_cells", "no_powers_of_two")
"""What the file has is right, and the model cannot hold it."""


@pytest.mark.parametrize("name", CASES)
def test_what_is_refused(name, tmp_path):
    tensors, config, like, options, parts = CASES[name]
    write(tmp_path, tensors, config)
    before = contents(tmp_path)
    is_of_file = name not in OF_MODEL
    error = CheckpointError if is_of_file else ValueError
    check(Message(error, lambda: checkpoint.load(tmp_path, like, **options), *parts))
    assert contents(tmp_path) == before


def test_numbers_that_the_model_cannot_hold_are_refused(tmp_path):
    write(tmp_path, GOOD | {"a.weight_scale_inv": 10**5 * SCALES}, CONFIG)
    like = LIKE | {"a": {"kernel": jnp.zeros((384, 256), jnp.float16)}}
    with pytest.raises(ValueError, match=r"a\.weight has numbers up to 100000.*float16 cannot"):
        checkpoint.load(tmp_path, like)


def test_tensors_that_the_model_lacks_are_skipped(tmp_path):
    write(tmp_path, GOOD | {"layers.0.inv_freq": np.ones(4, np.float32)}, CONFIG)
    loaded = checkpoint.load(tmp_path, LIKE, skip=("*.inv_freq",))
    np.testing.assert_array_equal(np.asarray(loaded["a"]["kernel"], np.float32), 1)


def test_scales_as_deepseek_v4_calls_them(tmp_path):
    renamed = {k.replace("weight_scale_inv", "scale"): v for k, v in GOOD.items()}
    renamed["a.scale"] = (2 * SCALES).astype(ml_dtypes.float8_e8m0fnu)
    write(tmp_path, renamed, CONFIG | {"scale_fmt": "ue8m0"})
    loaded = checkpoint.load(tmp_path, LIKE)
    np.testing.assert_array_equal(np.asarray(loaded["a"]["kernel"], np.float32), 2)


def test_a_format_by_hand_and_by_either_config(tmp_path):
    write(tmp_path, GOOD)
    checkpoint.load(tmp_path, LIKE, format="hf-fp8")
    model = {k.replace("_inv", ""): v for k, v in GOOD.items()}
    model["a.weight_scale"] = np.float32(0.5)
    model["a.input_scale"] = np.float32(0.25)
    for file, config in (
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}),
        ("config.json", {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}),
    ):
        folder = write(tmp_path / file.replace(".", "_"), model)
        (folder / file).write_text(json.dumps(config))
        loaded = checkpoint.load(folder, LIKE)
        np.testing.assert_array_equal(np.asarray(loaded["a"]["kernel"], np.float32), 0.5)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "[]", "\xff"])
def test_a_damaged_config_is_one_error(text, tmp_path):
    write(tmp_path, GOOD)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config.json"):
        checkpoint.load(tmp_path, LIKE)


METHODS = ("fp8", "compressed-tensors", "modelopt")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 200) | st.floats() | st.text(max_size=4)
    | st.sampled_from(["fp8", "compressed-tensors", "float", "tensor", "block", "group", "e4m3"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["weights", "type", "num_bits", "strategy", "block_structure", "g"]), inner
    ),
    max_leaves=12,
)  # fmt: skip
FIELDS = ("quant_method", "quant_algo", "fmt", "weight_block_size", "scale_fmt", "config_groups",
          "format")  # fmt: skip


@hypothesis.settings(max_examples=300)
@hypothesis.given(st.dictionaries(st.sampled_from(FIELDS), JSON), st.sampled_from([*METHODS]))
def test_a_hostile_config_is_a_format_or_one_error(config, method):
    for fields in (config, {**config, "quant_method": method}):
        with contextlib.suppress(CheckpointError):
            assert format_of_config(fields, "config.json") in checkpoint.FORMATS.values()


def test_no_file_is_read_that_no_one_named(tmp_path):
    with pytest.raises(CheckpointError, match="must hold"):
        checkpoint.load(tmp_path, LIKE)
    with pytest.raises(OSError, match="nowhere"):
        checkpoint.load(tmp_path / "nowhere", LIKE)


def test_skip_is_no_text(tmp_path):
    write(tmp_path, GOOD | {"b": SCALES}, CONFIG)
    with pytest.raises(TypeError, match=r"skip='\*\.inv_freq' must be patterns"):
        checkpoint.load(tmp_path, LIKE, skip="*.inv_freq")


@pytest.mark.parametrize("fmt", CELLS)
@pytest.mark.parametrize("shape", [(), (256,), (2, 128, 256), (0, 384)])
def test_fp8_that_is_no_matrix(shape, fmt, tmp_path):
    scale = f"a.{checkpoint.FORMATS[fmt].scale_name}"
    tensors = {"a.weight": np.zeros(shape, VALUES.dtype), scale: np.ones(1, np.float32)}
    write(tmp_path, tensors)
    for like in ({"a": LIKE["a"]}, {"a": {"kernel": jnp.zeros((384, 0))}}):
        with pytest.raises(CheckpointError, match=r"a\.weight"):
            checkpoint.load(tmp_path, like, format=fmt)
