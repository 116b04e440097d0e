"""Scales of inputs, from the quantizer state of training."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from weight_files import (
    dequantized,
    normal,
    read_folder,
)

import jaxfp8 as fp8
from jaxfp8 import checkpoint
from jaxfp8.checkpoint import Row


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
