"""The table of choices: it says what is chosen, by which rule, and what a kernel cannot do."""

import functools

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import LOADS_TRANSPOSED, needs_mosaic

import jaxfp8 as fp8
from jaxfp8.kernels._dispatch import recorded
from jaxfp8.kernels._timings import Time, Way
from jaxfp8.plan._autotune import _Recorder
from jaxfp8.plan._backends import faster_than_xla
from jaxfp8.plan._choices import _trace

RECIPES = {
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "blockwise": fp8.recipes.blockwise(),
    "blockwise, float32 scales": fp8.recipes.blockwise(power_of_two=False),
    "mxfp8": fp8.recipes.mxfp8(),
    "static": fp8.recipes.static(x_scale=1.0, w_scale=1.0, g_scale=1.0),
    "identity": fp8.recipes.identity(),
    "careful": fp8.recipes.rowwise(high_precision_wgrad=True),
}
CHIPS = ("a100", "l4", "l40s", "h100", "h200", "b200")
PARTS = ("x", "w", "g", "fprop", "dgrad", "wgrad")
SHAPE = (8192, 4096, 4096)


def by_part(kernels, recipe, shape=SHAPE):
    choices = kernels.choices(recipe, shape)
    return {part: getattr(choices, part) for part in PARTS}


@pytest.mark.parametrize("chip", [None, "tpu7x", "v5e", "cpu", "mi300x", "a100", "l4", "l40s"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_chips_without_kernels(chip, recipe):
    assert {c.backend for c in by_part(fp8.Kernels(chip), RECIPES[recipe]).values()} == {"xla"}


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "static", "identity"])
@pytest.mark.parametrize("chip", ["h100", "h200", "b200"])
def test_without_tiles_xla(recipe, chip):
    assert {c.backend for c in by_part(fp8.Kernels(chip), RECIPES[recipe]).values()} == {"xla"}


@needs_mosaic
@pytest.mark.parametrize("recipe", ["blockwise", "blockwise, float32 scales"])
@pytest.mark.parametrize("chip", ["h100", "h200"])
def test_tiles_on_hopper(recipe, chip):
    for choice in by_part(fp8.Kernels(chip), RECIPES[recipe]).values():
        assert (choice.backend, choice.evidence) == ("mosaic", "estimated")
        assert "; xla " in choice.why


@needs_mosaic
def test_tiles_of_32_on_hopper():
    """Its matmul scales each 32 products, which takes longer than XLA's in bfloat16.

    Squares on the right take less, yet longer than XLA's: an H200 ran a layer at 0.66 of bfloat16's
    speed, and at 0.81 by XLA. Of few tokens the bytes count, and they are half.
    """
    chosen = lambda recipe, shape: [
        choice.backend for choice in by_part(fp8.Kernels("h200"), recipe, shape).values()
    ]
    for recipe in (fp8.recipes.mxfp8(), fp8.recipes.mxfp8(w_tile_dim=2)):
        assert chosen(recipe, SHAPE) == ["mosaic"] * 3 + ["xla"] * 3
        assert chosen(recipe, (64, 4096, 8192)) == ["mosaic"] * 5 + ["xla"]


@needs_mosaic
def test_tiles_on_blackwell():
    for recipe in ("blockwise", "mxfp8"):
        backends = [c.backend for c in by_part(fp8.Kernels("b200"), RECIPES[recipe]).values()]
        assert backends == ["mosaic"] * 3 + ["cudnn"] * 3
    # Its tensor cores take powers of two.
    recipe = RECIPES["blockwise, float32 scales"]
    backends = [c.backend for c in by_part(fp8.Kernels("b200"), recipe).values()]
    assert backends == ["mosaic"] * 3 + ["xla"] * 3


@pytest.mark.skipif(LOADS_TRANSPOSED, reason="jax 0.11 has what the kernels need")
def test_an_old_jax_is_named():
    for choice in by_part(fp8.Kernels("h200"), RECIPES["blockwise"]).values():
        assert choice.backend == "xla"
        assert "Pallas of jax before 0.11" in choice.why


@needs_mosaic
def test_what_a_kernel_cannot_do_is_in_its_words():
    """Casts in Pallas take axes that are multiples of 32. The matmul takes any."""
    found = by_part(fp8.Kernels("h200"), RECIPES["blockwise"], (8200, 4096, 4096))
    assert [found[part].backend for part in PARTS] == ["xla", "mosaic", "xla"] + ["mosaic"] * 3
    assert "mosaic cannot: " in found["x"].why
    assert "8200" in found["x"].why
    stochastic = fp8.recipes.blockwise(gradient_rounding="stochastic")
    assert "rounding='stochastic'" in by_part(fp8.Kernels("h200"), stochastic)["g"].why


LAYERS = {name: RECIPES[name] for name in ("delayed", "careful", "blockwise", "mxfp8")}
LAYERS["stochastic"] = fp8.recipes.mxfp8(gradient_rounding="stochastic")


@pytest.mark.parametrize("shape", [(1024, 512, 256), (1000, 512, 320)])
@pytest.mark.parametrize(
    "kernels",
    [fp8.Kernels("h200"), fp8.Kernels("b200"), fp8.Kernels("h200", matmuls="xla")],
    ids=repr,
)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_dispatches_what_the_table_says(name, kernels, shape):
    """The trace of `choices` and that of a layer call the same backends, for the same reasons."""
    recipe, (m, k, n) = LAYERS[name], shape
    x, w = (jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((m, k), (k, n)))
    dot = functools.partial(fp8.dot, recipe=recipe, kernels=kernels, key=jax.random.key(0))
    state = fp8.freeze(fp8.init_state(recipe))

    def layer(x, w):
        y, pull_back = jax.vjp(functools.partial(dot, state=state), x, w)
        return pull_back(y)

    with recorded() as by_layer:
        jax.eval_shape(layer, x, w)
    names = kernels.backends(recipe, shape)
    traced = _trace(kernels, recipe, names, shape, jnp.dtype(jnp.bfloat16))
    by_table = [each for part in traced.values() for each in part]
    assert sorted(map(str, by_table)) == sorted(map(str, by_layer))
    choices = by_part(kernels, recipe, shape)
    for part, ran in traced.items():
        assert {each.backend for each in ran} <= {choices[part].backend, "xla"}


def test_a_record_takes_the_place_of_the_log(caplog):
    """`choices` asks what a kernel cannot do. That is no warning."""
    fp8.Kernels("h200").choices(RECIPES["blockwise"], (24, 40, 56))  # of no other test
    assert not caplog.records


def test_by_name():
    found = by_part(fp8.Kernels("h200", casts="reference", matmuls="xla"), RECIPES["mxfp8"])
    assert [c.backend for c in found.values()] == ["reference"] * 3 + ["xla"] * 3
    assert {(c.evidence, c.why) for c in found.values()} == {("compiled", "asked for by name")}
    with pytest.raises(NotImplementedError):
        fp8.Kernels(casts="triton").choices(RECIPES["delayed"], SHAPE)


def test_measured():
    """Timings win over the estimate, of the matmul that they have and of no other."""
    seen = _Recorder()
    recipe = RECIPES["blockwise"]
    fp8.Kernels("h200", timings=seen).choices(recipe, (64, 128, 256))
    assert len(seen.matmuls) == 3
    fprop = next(iter(seen.matmuls))
    time = Time(way=Way(backend="reference"), seconds=1e-6, quartiles=(1e-6, 1e-6))
    timings = fp8.plan.Timings(chip="h200", device="a GPU", versions=(), times=((fprop, (time,)),))
    found = by_part(fp8.Kernels("h200", timings=timings), recipe, (64, 128, 256))
    assert (found["fprop"].backend, found["fprop"].evidence) == ("reference", "measured")
    assert {found[part].evidence for part in ("dgrad", "wgrad")} == {"estimated"}


def test_in_high_precision():
    found = by_part(fp8.Kernels("h200"), RECIPES["careful"])
    assert found["wgrad"].why == "in high precision"
    assert by_part(fp8.Kernels("h200"), RECIPES["identity"])["x"].why == "in high precision"


def test_an_unknown_dtype_and_shape():
    with pytest.raises(ValueError, match="three positive integers"):
        fp8.Kernels("h200").choices(RECIPES["delayed"], (0, 1, 2))
    with pytest.raises(TypeError, match=r"fp8\.recipes\.delayed"):
        fp8.Kernels("h200").choices("delayed", SHAPE)
    table = str(fp8.Kernels("h200").choices(RECIPES["current"], SHAPE, jnp.float32))
    assert "current, [8192, 4096] @ [4096, 4096], Kernels('h200')" in table


# What is smaller, or not aligned, is chosen part by part too, but a layer may lose as a whole.
sizes = st.integers(8, 128).map(lambda n: 128 * n)


@settings(max_examples=60)
@given(st.sampled_from(sorted(RECIPES)), st.sampled_from(CHIPS), st.tuples(sizes, sizes, sizes))
def test_by_its_own_estimate_no_choice_loses(name, chip, shape):
    """The layer is estimated to take no longer than with XLA alone."""
    recipe = RECIPES[name]
    chosen = fp8.plan.roofline(shape, recipe=recipe, kernels=fp8.Kernels(chip)).total
    by_xla = fp8.Kernels(chip, casts="xla", matmuls="xla")
    xla = fp8.plan.roofline(shape, recipe=recipe, kernels=by_xla).total
    assert chosen.recipe.seconds <= xla.recipe.seconds * (1 + 1e-9)


def test_the_fastest_by_the_estimate():
    assert faster_than_xla({"a": 3.0, "b": 1.0, "xla": 2.0, "c": 1.5}) == ("b", "c", "xla")
    assert faster_than_xla({"a": 2.0, "xla": 2.0}) == ("xla",)
