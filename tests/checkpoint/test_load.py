"""`load`: what comes back is what was written."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from weight_files import (
    CELLS,
    contents,
    dequantized,
    matrices,
    normal,
    read_folder,
    same,
    shapes_of,
    tree,
    write,
)

import jaxfp8 as fp8
from jaxfp8 import checkpoint


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_high_precision_comes_back_bit_for_bit(dtype, tmp_path):
    params = tree(dtype)
    checkpoint.export(params, tmp_path / "a", format=None)
    back = checkpoint.load(tmp_path / "a", shapes_of(params))
    assert same(params, back)
    checkpoint.export(back, tmp_path / "b", format=None)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("fmt", CELLS)
def test_fp8_is_dequantized_exactly(fmt, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxfp8.checkpoint._encode.PIECE", 128 * 200)  # many pieces
    params = tree(dtype)
    checkpoint.export(params, tmp_path, format=fmt)
    back = checkpoint.load(tmp_path, shapes_of(params))
    tensors = read_folder(tmp_path)
    for name, w in matrices(back).items():
        exact = dequantized(tensors, name, fmt)
        np.testing.assert_array_equal(w, exact.astype(np.float32).astype(w.dtype))
        # An FP8 weight is near the weight: the scale is no other one's.
        own = np.asarray(matrices(params)[name], np.float64)
        assert np.linalg.norm(exact - own) < 0.04 * np.linalg.norm(own)


def test_parameters_that_are_no_matrices(tmp_path):
    """Scalars, empty arrays and integers. Only floats are cast."""
    params = {
        "scalar": jnp.float32(2.5),
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
        "no_columns": jnp.zeros((3, 0), jnp.bfloat16),
        "ids": jnp.arange(6, dtype=jnp.int32).reshape(1, 2, 3),
    }
    checkpoint.export(params, tmp_path, format="hf-fp8", dtype=jnp.bfloat16)
    tensors = dict(checkpoint.weights(params, "hf-fp8", dtype=jnp.bfloat16))
    assert tensors["scalar"].dtype == ml_dtypes.bfloat16
    assert tensors["scalar"].shape == ()
    back = checkpoint.load(tmp_path, shapes_of(params))
    assert same(back, params)


# The recipes whose weights a file can fill, and formats of their scales.
FILLS = {
    "blockwise": (fp8.recipes.blockwise(), ("hf-fp8", "hf-fp8-ue8m0", "compressed-block")),
    "float_scales": (fp8.recipes.blockwise(power_of_two=False), ("hf-fp8", "compressed-block")),
    "current": (fp8.recipes.current(), ("compressed-tensor", "compressed-channel", "hf-fp8")),
    "mxfp8_2d": (fp8.recipes.mxfp8(w_tile_dim=2), ("compressed-mxfp8",)),
}
ROWS = [(name, fmt) for name, (_, formats) in FILLS.items() for fmt in formats]


@pytest.mark.parametrize(("name", "fmt"), ROWS)
def test_fp8_weights_and_their_files_have_the_same_bytes(name, fmt, tmp_path):
    """Weights of training out, in, and out again."""
    recipe = FILLS[name][0]
    weights = fp8.quantize_params(tree(), recipe, primary=True)
    done = checkpoint.export(weights, tmp_path / "a", format=fmt)
    assert set(done.how.values()) == {"as it is"}
    tensors = read_folder(tmp_path / "a")
    for i in range(2):
        w = weights["blocks"][i]["up"]["kernel"]
        np.testing.assert_array_equal(
            tensors[f"blocks.{i}.up.weight"].view(np.uint8),
            np.asarray(w.values[0]).T.view(np.uint8),
        )
    back = checkpoint.load(tmp_path / "a", shapes_of(weights))
    assert same(weights, back)
    checkpoint.export(back, tmp_path / "b", format=fmt)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize("name", FILLS)
def test_a_file_in_high_precision_fills_fp8_weights_by_their_cast(name, tmp_path):
    recipe = FILLS[name][0]
    checkpoint.export(tree(), tmp_path, format=None)
    weights = fp8.quantize_params(tree(), recipe, primary=True)
    assert same(weights, checkpoint.load(tmp_path, shapes_of(weights)))
    both = fp8.quantize_params(tree(), recipe)  # with the original, to train
    assert same(both, checkpoint.load(tmp_path, shapes_of(both)))


def test_a_cast_by_the_recipe_survives_any_format_with_finer_cells(tmp_path):
    """The scale of a tensor is the scale of each of its rows and blocks."""
    weights = fp8.quantize_params(tree("float32"), fp8.recipes.current(), primary=True)
    like = shapes_of(tree("float32"))
    checkpoint.export(weights, tmp_path / "none", format=None)
    want = checkpoint.load(tmp_path / "none", like)
    for fmt in ("compressed-tensor", "compressed-channel", "compressed-block", "hf-fp8"):
        done = checkpoint.export(weights, tmp_path / fmt, format=fmt)
        assert set(done.how.values()) == {"as it is"}
        assert same(want, checkpoint.load(tmp_path / fmt, like))


@pytest.mark.parametrize("fmt", ["hf-fp8-ue8m0", "compressed-mxfp8"])
def test_values_are_cast_again_where_a_scale_is_narrowed(fmt, tmp_path):
    weights = fp8.quantize_params(tree(), fp8.recipes.current(), primary=True)
    done = checkpoint.export(weights, tmp_path / "a", format=fmt)
    assert done.how["blocks.0.up.weight"] == "cast again"
    # As a cast of what the values stand for, which float32 holds exactly enough.
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), shapes_of(tree()))
    checkpoint.export(weights, tmp_path / "wide", format=None, dtype=jnp.float32)
    checkpoint.export(checkpoint.load(tmp_path / "wide", like), tmp_path / "b", format=fmt)
    a, b = read_folder(tmp_path / "a"), read_folder(tmp_path / "b")
    for name in a:
        if "up" in name and "bias" not in name:
            assert same(a[name], b[name])


def test_files_of_others_have_scales_in_bfloat16_and_other_shapes(tmp_path):
    values = np.asarray(normal(0, 256, 384), np.float32).astype(ml_dtypes.float8_e4m3fn)
    for fmt, shape in (
        ("compressed-tensor", ()),
        ("compressed-tensor", (1, 1)),
        ("hf-fp8", (2, 3)),
    ):
        folder = tmp_path / f"{fmt}{len(shape)}"
        scale = np.asarray(np.abs(normal(1, *shape)) + 0.5, ml_dtypes.bfloat16).reshape(shape)
        config = checkpoint.FORMATS[fmt].config(checkpoint.FORMATS[fmt], [])
        name = checkpoint.FORMATS[fmt].scale_name
        write(folder, {"a.weight": values, f"a.{name}": scale}, config)
        out = checkpoint.load(folder, {"a": {"kernel": jnp.zeros((384, 256), jnp.float32)}})
        wide = dequantized(read_folder(folder), "a", fmt)
        np.testing.assert_array_equal(np.asarray(out["a"]["kernel"]).T, wide.astype(np.float32))


# Models and devices.


class Model(nnx.Module):
    def __init__(self, rngs, recipe):
        self.layers = nnx.List(
            [fp8.nnx.FP8Linear(256, 256, recipe=recipe, rngs=rngs) for _ in range(2)]
        )
        self.norm = nnx.RMSNorm(256, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def test_an_nnx_model_keeps_all_but_its_parameters(tmp_path):
    recipe = fp8.recipes.delayed()
    model, other = (Model(nnx.Rngs(seed), recipe) for seed in (0, 1))
    checkpoint.export(model, tmp_path, format=None)
    loaded = checkpoint.load(tmp_path, other)
    assert isinstance(loaded, Model)
    assert same(nnx.state(loaded, nnx.Param), nnx.state(model, nnx.Param))
    states = [nnx.state(each, fp8.nnx.FP8State) for each in (loaded, other)]
    assert same(*states)
    assert jax.tree.leaves(states[0])
    assert not same(nnx.state(other, nnx.Param), nnx.state(model, nnx.Param))  # it did not change
    abstract = nnx.eval_shape(lambda: Model(nnx.Rngs(2), recipe))
    assert same(
        nnx.state(checkpoint.load(tmp_path, abstract), nnx.Param), nnx.state(model, nnx.Param)
    )


class Tied(nnx.Module):
    def __init__(self):
        self.a = nnx.Param(jnp.ones((256, 128)))
        self.value = nnx.Param(jnp.zeros((256, 128)))  # a name that Variables have, too


def test_one_variable_at_two_places_is_refused(tmp_path):
    """It would come back as two parameters, which the next step would move apart."""
    model = Tied()
    checkpoint.export(model, tmp_path, format=None)
    loaded = checkpoint.load(tmp_path, Tied())
    assert same(nnx.state(loaded), nnx.state(model))
    model.value = model.a
    with pytest.raises(ValueError, match=r"a and value are one Variable.*nnx\.state"):
        checkpoint.export(model, tmp_path, format=None)
    with pytest.raises(ValueError, match=r"a and value are one Variable.*nnx\.update"):
        checkpoint.load(tmp_path, model)
    once = nnx.state(model, nnx.Param)
    checkpoint.export(once, tmp_path, format=None)
    nnx.update(model, checkpoint.load(tmp_path, once))
    assert model.value is model.a


@pytest.mark.parametrize("file", [None, "hf-fp8"])
def test_an_nnx_model_gets_weights_in_fp8(file, tmp_path):
    recipe = fp8.recipes.blockwise()
    model = fp8.quantize_params(Model(nnx.Rngs(0), recipe), recipe, primary=True)
    if file is None:
        checkpoint.export(Model(nnx.Rngs(0), recipe), tmp_path, format=None)
    else:
        checkpoint.export(model, tmp_path, format=file)
    other = fp8.quantize_params(Model(nnx.Rngs(1), recipe), recipe, primary=True)
    loaded = checkpoint.load(tmp_path, other)
    x = normal(0, 4, 256, dtype="float32")
    assert same(nnx.state(loaded, nnx.Param), nnx.state(model, nnx.Param))
    assert same(loaded.layers[0](x), model.layers[0](x))


def test_a_linen_model_with_boxes_keeps_its_boxes(tmp_path):
    init = nn.with_partitioning(nn.initializers.normal(), ("a", "b"))
    layer = fp8.linen.FP8Dense(384, kernel_init=init, recipe=fp8.recipes.current())
    params = layer.init(jax.random.key(0), jnp.ones((4, 256)))["params"]
    checkpoint.export(params, tmp_path, format=None)
    other = layer.init(jax.random.key(1), jnp.ones((4, 256)))["params"]
    loaded = checkpoint.load(tmp_path, other)
    assert isinstance(loaded["kernel"], nn.Partitioned)
    assert same(loaded, params)


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_arrays_get_the_shardings_of_the_model(kind, tmp_path):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind, kind))
    params = tree()
    checkpoint.export(params, tmp_path / "a", format="hf-fp8")
    sharding = jax.NamedSharding(mesh, jax.P("b", "a"))

    def place(x):
        split = x.shape in ((256, 384), (384, 256))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding if split else None)

    whole = checkpoint.load(tmp_path / "a", params)
    back = checkpoint.load(tmp_path / "a", jax.tree.map(place, params))
    assert back["blocks"][0]["up"]["kernel"].sharding == sharding
    assert same(whole, back)
    weights = fp8.quantize_params(params, fp8.recipes.blockwise(), primary=True)
    checkpoint.export(weights, tmp_path / "b", format="hf-fp8")
    placed = checkpoint.load(tmp_path / "b", jax.tree.map(place, shapes_of(weights)))
    assert placed["blocks"][0]["up"]["kernel"].values[0].sharding == sharding
    assert same(weights, placed)


class Values(nnx.Module):
    """Its attributes are called as the field of a Variable."""

    def __init__(self, x):
        self.value, self.value_bias = nnx.Param(jnp.full(3, x)), nnx.Param(jnp.full(3, x + 1))


def test_parameters_called_value(tmp_path):
    done = checkpoint.export(Values(1.0), tmp_path, format=None)
    assert set(done.how) == {"value", "value_bias"}
    loaded = checkpoint.load(tmp_path, Values(7.0))
    assert same(nnx.state(loaded), nnx.state(Values(1.0)))


def test_two_parameters_with_one_path(tmp_path):
    params = {"a/b": jnp.ones(3), "a": {"b": jnp.zeros(3)}}
    with pytest.raises(ValueError, match="two parameters have the path a/b"):
        checkpoint.export(params, tmp_path, format=None)
