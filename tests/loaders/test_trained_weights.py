"""Weights that training held in FP8 go out with their values and scales, bit for bit."""

import dataclasses
import filecmp

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loaders import plain_files, torch_models
from loaders.model_trees import TREES, names_of
from loaders.plain_files import bits_apart

import jaxfp8 as fp8

pytestmark = [pytest.mark.loaders, torch_models.IGNORED]
recipes = fp8.recipes
RECIPES = {
    "blockwise": recipes.blockwise(),
    "blockwise_ue8m0": recipes.blockwise(power_of_two=True),
    "current": recipes.current(),
    "rowwise": recipes.rowwise(),
    "mxfp8": recipes.mxfp8(),
    "mxfp8_2d": recipes.mxfp8(w_tile_dim=2),
    "delayed": recipes.delayed(history_length=4),
}
# Formats whose cells have the scales of a recipe.
HELD = [
    ("blockwise", "hf-fp8"),
    ("blockwise", "compressed-block"),
    ("blockwise_ue8m0", "hf-fp8-ue8m0"),
    ("blockwise_ue8m0", "hf-fp8"),
    ("blockwise_ue8m0", "compressed-mxfp8"),
    ("current", "compressed-channel"),
    ("current", "hf-fp8"),
    ("rowwise", "compressed-channel"),
    ("mxfp8", "compressed-mxfp8"),
    ("mxfp8_2d", "compressed-mxfp8"),
    ("delayed", "compressed-channel"),
]
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def is_weight(node):
    return isinstance(node, fp8.weights.QuantizedWeight)


def states_of(params, recipe):
    """A state with a scale of its own for each kernel, at the path of the kernel."""
    count = iter(range(1000))

    def one(path, kernel):
        if "_proj" not in jax.tree_util.keystr(path):
            return {}
        i = next(count)
        state = fp8.init_state(recipe)
        return dataclasses.replace(state, scale=jnp.full_like(state.scale, (1 + i) / 512))

    return jax.tree_util.tree_map_with_path(one, params)


def quantized(params, recipe, rules):
    state = states_of(params, recipe) if recipe.rows else ()
    return fp8.quantize_params(params, recipe, rules=rules, state=state, primary=True)


def dequantized(weight):
    """float32 [N, K] of a kernel [K, N]: each axis of a scale divides that of the values."""
    values, scale = (np.asarray(each[0]) for each in (weight.values, weight.scales))
    if scale.dtype == np.dtype(jnp.float8_e8m0fnu):
        scale = plain_files.scale_of("F8_E8M0", scale.view(np.uint8))
    scale = scale.reshape(scale.shape or (1, 1))
    for axis, size in enumerate(values.shape):
        scale = np.repeat(scale, size // scale.shape[axis], axis)
    return (plain_files.e4m3(values.view(np.uint8)) * scale).T


def scaled(weight):
    """float32 [...] of a weight with one scale for each stacked layer."""
    values, scale = (np.asarray(each[0]) for each in (weight.values, weight.scales))
    scale = scale.reshape(scale.shape + (1,) * (values.ndim - scale.ndim))
    return plain_files.e4m3(values.view(np.uint8)) * scale


def weights_by_name(params):
    """{name in the file: weight} of the tree whose paths are the names of the file."""
    leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_weight)
    path = lambda keys: jax.tree_util.keystr(keys, simple=True, separator=".")
    return {
        path(keys).replace(".kernel", ".weight"): leaf for keys, leaf in leaves if is_weight(leaf)
    }


@pytest.mark.parametrize(("recipe", "format"), HELD)
def test_as_it_is(tiny, recipe, format, tmp_path):
    tiny = tiny("llama")
    params = quantized(tiny.params, RECIPES[recipe], TREES["flat"][3])
    done = tiny.export(tmp_path / "fp8", format, params)
    weights = weights_by_name(params)
    assert len(weights) == 2 * len(MATRICES)
    assert {done.how[name] for name in weights} == {"as it is"}
    tensors, wide = plain_files.read(tmp_path / "fp8"), plain_files.wide(tmp_path / "fp8")
    assert wide.keys() == weights.keys()
    for name, weight in weights.items():
        held = np.asarray(weight.values[0]).view(np.uint8).T
        assert bits_apart(tensors[name][1], np.ascontiguousarray(held))[0] == 0
        # In float32, before bfloat16 hides a difference.
        np.testing.assert_array_equal(wide[name], dequantized(weight))
    # In a model of transformers.
    model = torch_models.loaded(tmp_path / "fp8")
    apart, of = torch_models.weights_apart(model, plain_files.dequantized(tmp_path / "fp8"))
    assert apart == 0
    assert of > 10**7


@pytest.mark.parametrize("recipe", ["blockwise_ue8m0", "mxfp8", "mxfp8_2d"])
def test_the_matmul_reads_these_values(tiny, recipe, tmp_path):
    """x is the identity, which scales that are powers of two hold. So y is the weight, exactly."""
    tiny, recipe = tiny("llama"), RECIPES[recipe]
    params = quantized(tiny.params, recipe, TREES["flat"][3])
    format = "hf-fp8" if recipe.name == "blockwise" else "compressed-mxfp8"
    tiny.export(tmp_path, format, params)
    for name, weight in weights_by_name(params).items():
        x = jnp.eye(weight.shape[0], dtype=jnp.float32)
        y = jax.jit(lambda x, w: fp8.dot(x, w, recipe=recipe))(x, weight)
        np.testing.assert_array_equal(y.T, plain_files.wide(tmp_path)[name])


@pytest.mark.parametrize(
    ("recipe", "format"),
    [
        ("blockwise", "hf-fp8"),
        ("current", "compressed-channel"),
        pytest.param("mxfp8", "compressed-mxfp8", marks=pytest.mark.slow),
        pytest.param("rowwise", "compressed-channel", marks=pytest.mark.slow),
        pytest.param("mxfp8_2d", "compressed-mxfp8", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("tree", [tree for tree in TREES if tree != "flat"])
def test_trees(tiny, tree, recipe, format, tmp_path):
    """More axes, stacked layers and experts: the file of the flat tree, byte for byte."""
    family, change, _, rules = TREES[tree]
    tiny, recipe, names = tiny(family), RECIPES[recipe], names_of(tree)
    flat = quantized(tiny.params, recipe, TREES["flat"][3])
    other = quantized(change(tiny.params), recipe, rules)
    expected = tiny.export(tmp_path / "flat", format, flat)
    done = fp8.checkpoint.export(
        other, tmp_path / "other", format=format, names=names, config=tiny.folder
    )
    assert expected.how == done.how
    file = "model.safetensors"
    same = filecmp.cmp(tmp_path / "flat" / file, tmp_path / "other" / file, shallow=False)
    if recipe.name != "current" or "experts" not in rules[0][0]:
        assert same
        return
    # A matmul with experts has one scale for all of them. So the files differ.
    assert not same
    plain = jax.tree.map(lambda w: scaled(w) if is_weight(w) else w, other, is_leaf=is_weight)
    options = {"format": None, "names": names, "dtype": jnp.float32}
    fp8.checkpoint.export(plain, tmp_path / "plain", **options)
    tensors, wide = plain_files.read(tmp_path / "plain"), plain_files.wide(tmp_path / "other")
    for name, values in wide.items():
        np.testing.assert_array_equal(values, tensors[name][1].view(np.float32))


@pytest.mark.parametrize(
    ("recipe", "format"),
    [
        ("blockwise", "hf-fp8"),
        ("blockwise_ue8m0", "hf-fp8-ue8m0"),
        ("current", "compressed-channel"),
        ("mxfp8_2d", "compressed-mxfp8"),
        pytest.param("blockwise", "compressed-block", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("tree", ["flat", "both"])
def test_out_and_in_and_out(tiny, tree, recipe, format, tmp_path):
    """FP8 weights of a file become those of a model, and the same file again."""
    family, change, _, rules = TREES[tree]
    tiny, recipe, names = tiny(family), RECIPES[recipe], names_of(tree)
    params = quantized(change(tiny.params), recipe, rules)
    options = {"format": format, "names": names, "config": tiny.folder}
    fp8.checkpoint.export(params, tmp_path / "one", **options)
    like = jax.eval_shape(lambda: params)
    back = fp8.checkpoint.load(tmp_path / "one", like, names=names)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    for one, other in zip(*map(jax.tree.leaves, (back, params)), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    done = fp8.checkpoint.export(back, tmp_path / "two", **options)
    assert "cast" not in done.how.values()
    for file in done.files:
        assert filecmp.cmp(tmp_path / "one" / file.name, file, shallow=False)
