"""FP8 weights of any axes as matrices of a file: attention, scanned layers, experts.

The oracle spreads each scale over the values of its cell in the view of the matmul, and puts both
into the order of the file by `einops`-like index arithmetic of its own.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from weight_files import normal, read_folder, same

import jaxfp8 as fp8
from jaxfp8 import checkpoint
from jaxfp8.checkpoint import Row
from jaxfp8.matmul._tile_view import view_of_weight
from jaxfp8.weights import WeightAxes
from jaxfp8.weights._quantized_weight import plan_weight_casts

RECIPES = {
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "blockwise": fp8.recipes.blockwise(),
    "float_scales": fp8.recipes.blockwise(power_of_two=False),
    "mxfp8": fp8.recipes.mxfp8(),
    "mxfp8_2d": fp8.recipes.mxfp8(w_tile_dim=2),
}
# A shape, what its matmul does with it, the axes of the file, and how many tensors it stacks.
CASES = {
    "dense": ((384, 256), WeightAxes(), "out in -> in out"),
    "ragged": ((160, 200), WeightAxes(), "out in -> in out"),
    "query": ((192, 4, 64), WeightAxes(), "(heads features) in -> in heads features"),
    "wide_heads": ((64, 3, 128), WeightAxes(), "(heads features) in -> in heads features"),
    "ragged_heads": ((64, 3, 160), WeightAxes(), "(heads features) in -> in heads features"),
    "out": (
        (4, 64, 192), WeightAxes(contracted=(0, 1)), "out (heads features) -> heads features out"
    ),
    "transposed": ((256, 384), WeightAxes(contracted=(1,)), "out in -> out in"),
    "scanned": ((3, 384, 256), WeightAxes(stacked=1), "out in -> layer in out"),
    "scanned_query": (
        (2, 64, 2, 64), WeightAxes(stacked=1), "(heads features) in -> layer in heads features"
    ),
    "twice_scanned": ((2, 3, 64, 128), WeightAxes(stacked=2), "out in -> stage layer in out"),
    "experts": ((3, 160, 128), WeightAxes(contracted=(1,), batch=(0,)), "out in -> expert in out"),
    "last_experts": (
        (160, 128, 3), WeightAxes(contracted=(0,), batch=(2,)), "out in -> in out expert"
    ),
    "scanned_experts": (
        (2, 3, 160, 128), WeightAxes(contracted=(1,), batch=(0,), stacked=1),
        "out in -> layer expert in out",
    ),
}  # fmt: skip
STACKED = {"layer", "stage", "expert"}


def rows(names, recipes):
    """Each case with one recipe, and each recipe with two cases. All others are slow."""
    pairs = itertools.product(names, recipes)
    quick = [r == "blockwise" or n in ("query", "scanned_experts") for n, r in pairs]
    return [
        pytest.param(*pair, marks=() if is_quick else pytest.mark.slow)
        for pair, is_quick in zip(itertools.product(names, recipes), quick, strict=True)
    ]


def rows_of(name):
    axes = CASES[name][2]
    stacked = [word for word in axes.split("->")[1].split() if word in STACKED]
    inside = ".".join(["w", *(f"{{{word}}}" for word in stacked), "weight"])
    return [Row(name=inside, path="w", kind="linear", axes=axes)]


def exact(weight):
    """What the weight stands for, in float64: one layer after the other, without a file."""
    lead = weight.stacked
    out = np.zeros(weight.shape)
    view = view_of_weight(weight.recipe, weight.axes, weight.shape[lead:])
    copies = [
        (granularity, readers)
        for planned in plan_weight_casts(weight.recipe, view.geometry)
        for granularity, readers in zip(planned.cast.granularities, planned.readers, strict=True)
    ]
    (i,) = [i for i, (_, readers) in enumerate(copies) if "fprop" in readers]
    for at in itertools.product(*map(range, weight.shape[:lead])):
        values = jnp.asarray(weight.values[i][at].astype(jnp.float32))
        seen = np.asarray(view.of_w(values), np.float64)
        scale = np.asarray(weight.scales[i][at], np.float64)
        sides = copies[i][0].along(seen.ndim)
        for axis in range(scale.ndim):
            side = sides[axis] if sides[axis] > 1 else seen.shape[axis] // scale.shape[axis]
            scale = np.repeat(scale, side, axis).take(range(seen.shape[axis]), axis)
        product = jnp.asarray((seen * scale).astype(np.float32))
        out[at] = np.asarray(view.of_w.undo(product, values))
    return out


@pytest.mark.parametrize(("name", "recipe"), rows(CASES, RECIPES))
def test_a_weight_is_in_the_file_as_its_matmul_reads_it(name, recipe, tmp_path):
    shape, axes, _ = CASES[name]
    rules = [("w", axes)]
    params = {"w": normal(0, *shape, dtype="float32")}
    weights = fp8.quantize_params(params, RECIPES[recipe], rules=rules, primary=True)
    want = exact(weights["w"])
    rows = rows_of(name)
    checkpoint.export(weights, tmp_path / "wide", format=None, names=rows)
    np.testing.assert_array_equal(
        np.asarray(checkpoint.load(tmp_path / "wide", params, names=rows)["w"]), want
    )
    formats = ("hf-fp8", "compressed-channel", "compressed-mxfp8")
    for fmt in formats:
        done = checkpoint.export(weights, tmp_path / fmt, format=fmt, names=rows)
        back = np.asarray(checkpoint.load(tmp_path / fmt, params, names=rows)["w"])
        if set(done.how.values()) == {"as it is"}:
            np.testing.assert_array_equal(back, want)
        else:  # some are cast again, from what they stand for
            assert np.linalg.norm(back - want) < 0.04 * np.linalg.norm(want)
    # The formats that have the recipe's own scales.
    own = {"current": formats[:2], "rowwise": formats[1:2], "blockwise": formats[:1],
           "float_scales": formats[:1], "mxfp8": formats[2:], "mxfp8_2d": formats[2:]}  # fmt: skip
    if name == "ragged_heads" and recipe not in ("current", "rowwise"):
        return  # heads of 160 values begin inside of blocks
    for fmt in own[recipe]:
        done = checkpoint.export(weights, tmp_path / fmt, format=fmt, names=rows)
        assert set(done.how.values()) == {"as it is"}, (fmt, done.how)


@pytest.mark.parametrize(
    ("name", "recipe"),
    rows([n for n in CASES if n != "ragged_heads"], ["current", "blockwise", "mxfp8_2d"]),
)
def test_a_file_fills_the_weight_again(name, recipe, tmp_path):
    shape, axes, _ = CASES[name]
    params = {"w": normal(0, *shape, dtype="float32")}
    weights = fp8.quantize_params(params, RECIPES[recipe], rules=[("w", axes)], primary=True)
    fmt = "compressed-mxfp8" if recipe == "mxfp8_2d" else "hf-fp8"
    rows = rows_of(name)
    checkpoint.export(weights, tmp_path, format=fmt, names=rows)
    if recipe == "current" and "expert" in CASES[name][2]:
        return  # one scale for all experts is one for each in a file, and not the other way
    assert same(weights, checkpoint.load(tmp_path, jax.eval_shape(lambda: weights), names=rows))
    assert len(read_folder(tmp_path)) == 2 * np.prod([
        size for size, word in zip(shape, CASES[name][2].split("->")[1].split(), strict=True)
        if word in STACKED
    ], dtype=int)  # fmt: skip


def test_axes_in_another_order_than_the_matmul_are_refused(tmp_path):
    params = {"w": normal(0, 4, 64, 192, dtype="float32")}
    rules = [("w", WeightAxes(contracted=(0, 1)))]
    weights = fp8.quantize_params(params, fp8.recipes.blockwise(), rules=rules, primary=True)
    turned = "out (features heads) -> heads features out"
    for axes in (turned, "(heads features) out -> heads features out"):
        rows = [Row(name="w.weight", path="w", kind="linear", axes=axes)]
        with pytest.raises(ValueError, match="in the order of the matmul"):
            checkpoint.export(weights, tmp_path, format="hf-fp8", names=rows)
