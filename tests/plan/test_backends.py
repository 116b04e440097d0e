"""Which backends are taken for which recipe on which chip, by tables and estimates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hard_inputs import mentions

import jaxfp8 as fp8
from jaxfp8.kernels._dispatch import CHIPS, Backend, Route, chip_named, kernels_of
from jaxfp8.kernels.cast import _api as cast
from jaxfp8.kernels.grouped_matmul import _api as grouped_matmul
from jaxfp8.kernels.scaled_matmul import _api as scaled_matmul
from jaxfp8.plan._backends import Backends, _kernels_for, casting_backends, faster_than_xla
from jaxfp8.plan._costs import sides_of

SHAPE = (8192, 4096, 4096)
STATIC = {"x_scale": 0.1, "w_scale": 0.1, "g_scale": 0.1}
PER_TENSOR_AND_ROW = {
    "identity": fp8.recipes.identity(),
    "static": fp8.recipes.static(**STATIC),
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
}


def of_tiles(*tile, power_of_two=True):
    """A recipe that quantizes every tensor in such tiles."""
    quantizer = fp8.quantizers.Current(
        format=fp8.E4M3, granularity=fp8.PerBlock(tile), power_of_two=power_of_two
    )
    operands = fp8.recipes.Operands(lhs=quantizer, rhs=quantizer)
    return fp8.Recipe(name=f"{tile}", fprop=operands, dgrad=operands, wgrad=operands)


TILES = {
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
    "mxfp8, 32x32": fp8.recipes.mxfp8(w_tile_dim=2),
}
# Tiles of 32: Hopper's kernel scales every 32 products, and XLA was faster on an H200.
SLOW_ON_HOPPER = dict.fromkeys(("mxfp8", "mxfp8, 32x32"), ("fprop", "dgrad", "wgrad"))
# What Blackwell's tensor cores cannot scale.
NOT_FOR_CUDNN = {
    "float32 scales": (
        fp8.recipes.blockwise(power_of_two=False),
        ("PerBlock(tile=(1, 128))", "power_of_two=False", "power-of-two scales"),
    ),
    "1x48": (of_tiles(1, 48), ("a tile of 48", "multiples of 32")),
    "scales of tensors": (
        fp8.recipes.current(power_of_two=True),
        ("PerTensor()", "it takes tiles"),
    ),
}


@pytest.mark.parametrize("chip", CHIPS)
def test_without_tiles_every_chip_takes_xla(chip):
    for recipe in PER_TENSOR_AND_ROW.values():
        assert fp8.Kernels(chip).backends(recipe, SHAPE) == Backends()


@pytest.mark.parametrize("chip", CHIPS)
def test_tiles(chip):
    matmul = {"h100": "mosaic", "h200": "mosaic", "b200": "cudnn"}.get(chip)
    for name, recipe in TILES.items():
        found = fp8.Kernels(chip).backends(recipe, SHAPE)
        if matmul is None:
            assert found == Backends(), name
            continue
        # XLA is there for what the kernel cannot do.
        slow = () if matmul == "cudnn" else SLOW_ON_HOPPER.get(name, ())
        for part in ("fprop", "dgrad", "wgrad"):
            want = ("xla",) if part in slow else (matmul, "xla")
            assert getattr(found, part) == want, (name, part)
        assert found.x == found.w == found.g == ("mosaic", "xla"), name


@pytest.mark.parametrize("name", NOT_FOR_CUDNN)
def test_what_cudnn_cannot_do(name):
    recipe, says = NOT_FOR_CUDNN[name]
    assert _kernels_for(sides_of(recipe.fprop), chip_named("b200")) == ()
    assert fp8.Kernels("b200").backends(recipe, SHAPE).fprop == ("xla",)
    # By name it says why.
    by_name = fp8.Kernels("b200", casts="xla", matmuls="cudnn")
    with pytest.raises(NotImplementedError, match=mentions(*says)):
        by_name.choices(recipe, SHAPE)


def test_names_are_taken_as_they_are():
    for chip in (None, "h200"):
        named = fp8.Kernels(chip, casts="xla", matmuls="mosaic")
        for recipe in (*TILES.values(), PER_TENSOR_AND_ROW["rowwise"]):
            assert named.backends(recipe, SHAPE) == Backends(*[("mosaic",)] * 3)


def test_without_a_chip_shapes_do_not_matter():
    for recipe in (*TILES.values(), *PER_TENSOR_AND_ROW.values()):
        assert fp8.Kernels().backends(recipe, (0, 0, 0)) == Backends()


def test_backends_that_are_written_for_a_chip():
    written = {name: kernels_of(chip, scaled_matmul.BACKENDS) for name, chip in CHIPS.items()}
    assert {name: kernels for name, kernels in written.items() if kernels} == {
        "h100": ("mosaic",),
        "h200": ("mosaic",),
        "b200": ("cudnn",),
    }
    tile = [fp8.PerBlock((1, 128))]
    casting = {chip for chip in CHIPS if casting_backends(chip, tile) != ("xla",)}
    assert casting == {"h100", "h200", "b200"}
    assert casting_backends("h200", [*tile, fp8.PerTensor()]) == ("xla",)


def test_a_grouped_matmul_has_the_name_of_a_matmul():
    assert grouped_matmul.BACKENDS.keys() <= scaled_matmul.BACKENDS.keys()


def test_a_kernel_for_a_tpu_is_a_row(monkeypatch):
    """The program has these kernels on a TPU. A CPU runs `elsewhere`."""
    multiply, cast_all = (of.BACKENDS["xla"].function for of in (scaled_matmul, cast))
    of_tpu = {"platform": "tpu", "families": ("Ironwood",)}
    matmul = Backend(
        function=lambda lhs, rhs, call: jnp.sin(multiply(lhs, rhs, call)),
        elsewhere=lambda like, *operands: multiply(*operands),
        route=Route.BLOCK_SCALED,
        **of_tpu,
    )
    casting = Backend(
        function=lambda x, cast, scales, *, key: cast_all(jnp.tanh(x), cast, scales, key=key),
        elsewhere=lambda like, *given, **how: cast_all(*given, **how),
        estimated=True,
        **of_tpu,
    )
    monkeypatch.setitem(scaled_matmul.BACKENDS, "of tpu", matmul)
    monkeypatch.setitem(cast.BACKENDS, "of tpu", casting)
    recipe, tpu, shape = TILES["blockwise"], fp8.Kernels("tpu7x"), (4096, 4096, 4224)
    # Choices are cached. No other test asks for this shape.
    assert set(tpu.backends(recipe, shape)) == {("of tpu", "xla")}
    assert "FP8, block-scaled; xla" in tpu.choices(recipe, shape).wgrad.why
    assert fp8.Kernels("h200").backends(recipe, shape).x == ("mosaic", "xla")
    with pytest.raises(ValueError, match=mentions("casts='of tpu' is made for Ironwood", "'h200'")):
        fp8.Kernels("h200", casts="of tpu")
    x, w = (jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in (shape[:2], shape[1:]))
    run = jax.jit(lambda x, w: fp8.dot(x, w, recipe=recipe, kernels=tpu))
    traced = run.trace(x, w)
    for platform, has in (("tpu", True), ("cpu", False)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert [f"stablehlo.{each}" in text for each in ("sine", "tanh")] == [has] * 2, platform
    x = jnp.asarray(np.random.default_rng(0).standard_normal((128, 128)), jnp.float32)
    dots = [
        fp8.dot(x, x, recipe=recipe, kernels=kernels)
        for kernels in (fp8.Kernels("tpu7x", casts="of tpu", matmuls="of tpu"), fp8.Kernels())
    ]
    np.testing.assert_array_equal(*dots)


def test_only_what_is_faster_is_taken():
    assert faster_than_xla({"a": 2.0, "b": 1.0, "c": 4.0, "xla": 3.0}) == ("b", "a", "xla")
    assert faster_than_xla({"a": 3.0, "xla": 3.0}) == ("xla",)


def test_sizes_that_are_symbols_are_left_to_xla():
    from jax import export

    (tokens,) = export.symbolic_shape("tokens")
    for recipe in TILES.values():
        assert fp8.Kernels("h200").backends(recipe, (tokens, 4096, 4096)).fprop == ("xla",)
