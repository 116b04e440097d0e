"""`fp8.Kernels`: what it refuses, and that every door takes it."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casts import quantized
from contracts.own_quantizer import Smoothed
from flax import nnx
from hard_inputs import mentions
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8
from jaxfp8.ops import _dot_general
from jaxfp8.plan._kernels import check_kernels

H200 = fp8.Kernels("h200")
TIMINGS = fp8.plan.Timings(chip="h200", device="a GPU", versions=(), times=())
BLOCKWISE = fp8.recipes.blockwise()
SHAPE = (8192, 4096, 4096)


@pytest.mark.parametrize(
    ("error", "arguments", "parts"),
    [
        (ValueError, {"chip": "h300"}, ("chip='h300' is unknown", "'h200'")),
        (ValueError, {"casts": "mosiac"}, ("casts='mosiac'", "Use None or one of", "'mosaic'")),
        (ValueError, {"casts": "cudnn"}, ("casts='cudnn'", "no backend of casts")),
        (ValueError, {"matmuls": "triton"}, ("matmuls='triton'", "no backend of matmuls")),
        (ValueError, {"matmuls": TIMINGS}, ("matmuls=Timings(", "no backend of matmuls")),
        (ValueError, {"matmuls": "cudnn"}, ("made for Blackwell", "chip=None", '"b200"')),
        (ValueError, {"chip": "h200", "matmuls": "cudnn"}, ("made for Blackwell", "chip='h200'")),
        (ValueError, {"chip": "b200", "matmuls": "mosaic"}, ("made for Hopper", "chip='b200'")),
        (
            ValueError,
            {"chip": "l4", "casts": "mosaic"},
            ("casts='mosaic'", "Hopper and Blackwell", "'l4'"),
        ),
        (ValueError, {"chip": "a100", "casts": "triton"}, ("casts='triton'", "Ada and", "'a100'")),
        (ValueError, {"chip": "v6e", "casts": "triton"}, ("casts='triton'", "chip='v6e'", "Leave")),
        (ValueError, {"chip": "tpu"}, ("chip='tpu'", "'tpu7x', 'v6e', 'v5p', 'v5e'", "leave")),
        (ValueError, {"chip": "cpu", "matmuls": "mosaic"}, ("made for Hopper", "chip='cpu'")),
        (TypeError, {"chip": "h200", "timings": "h200.json"}, ("timings='h200.json'", ".load(")),
        (TypeError, {"timings": fp8.plan.Timings}, ("must be fp8.plan.Timings",)),
        (ValueError, {"timings": TIMINGS}, ("of chip 'h200'", "chip=None", "Kernels('h200', tim")),
        (ValueError, {"chip": "h100", "timings": TIMINGS}, ("of chip 'h200'", "chip='h100'")),
        (
            ValueError,
            {"chip": "h200", "matmuls": "xla", "timings": TIMINGS},
            ("matmuls='xla' and timings both", "Leave one out"),
        ),
    ],
)
def test_misuse(error, arguments, parts):
    with pytest.raises(error, match=mentions(*parts)):
        fp8.Kernels(**arguments)


@pytest.mark.parametrize(
    "kernels",
    [
        fp8.Kernels(),
        H200,
        fp8.Kernels("h100", casts="mosaic", matmuls="mosaic"),
        fp8.Kernels(casts="mosaic", matmuls="mosaic"),
        fp8.Kernels("h100", casts="triton"),
        fp8.Kernels("b200", casts="xla", matmuls="cudnn"),
        fp8.Kernels("h200", timings=TIMINGS),
    ],
    ids=repr,
)
def test_a_static_value(kernels):
    same = dataclasses.replace(kernels)
    assert same == kernels
    assert hash(same) == hash(kernels)
    if kernels.timings is None:
        assert eval(f"fp8.{kernels!r}") == kernels


X, W = jnp.ones((128, 128)), jnp.ones((128, 128))
Q = quantized(X, fp8.E4M3, fp8.PerBlock((1, 128)))
DOORS = {
    "dot": lambda k: fp8.dot(X, W, recipe=BLOCKWISE, kernels=k),
    "dot of identity": lambda k: fp8.dot(X, W, recipe=fp8.recipes.identity(), kernels=k),
    "dot_general": lambda k: fp8.dot_general(
        X, W, (((1,), (0,)), ((), ())), recipe=BLOCKWISE, kernels=k
    ),
    "einsum": lambda k: fp8.einsum("mk,kn->mn", X, W, recipe=BLOCKWISE, kernels=k),
    "einsum of identity": lambda k: fp8.einsum(
        "mk,kn->mn", X, W, recipe=fp8.recipes.identity(), kernels=k
    ),
    "quantize": lambda k: fp8.quantize(X, fp8.E4M3, kernels=k).dequantize(),
    "scaled_matmul": lambda k: fp8.scaled_matmul(
        Q, fp8.quantize(W, fp8.E4M3, fp8.PerBlock((128, 128))), kernels=k
    ),
    "FP8Dense": lambda k: fp8.linen.FP8Dense(128, recipe=BLOCKWISE, kernels=k).init_with_output(
        jax.random.key(0), X
    )[0],
    "FP8DotGeneral": lambda k: nn.Dense(
        128, dot_general_cls=fp8.linen.FP8DotGeneral.using(BLOCKWISE, kernels=k)
    ).init_with_output(jax.random.key(0), X)[0],
    "FP8Linear": lambda k: fp8.nnx.FP8Linear(
        128, 128, recipe=BLOCKWISE, kernels=k, rngs=nnx.Rngs(0)
    )(X),
    "nnx FP8DotGeneral": lambda k: nnx.Linear(
        128, 128, dot_general=fp8.nnx.FP8DotGeneral(BLOCKWISE, kernels=k), rngs=nnx.Rngs(0)
    )(X),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("given", "cure"), [("h200", "fp8.Kernels('h200')"), (TIMINGS, "fp8.Kernels('h200')")]
)
def test_every_door_refuses_what_are_no_kernels(door, given, cure):
    with pytest.raises(TypeError, match=mentions("kernels=", "Kernels are needed", cure)):
        DOORS[door](given)


@pytest.mark.parametrize("given", ["h200", "xla", "mosaic", "triton", "cudnn", "reference", X, 3])
def test_the_cure_works(given):
    with pytest.raises(TypeError, match="Kernels are needed") as raised:
        check_kernels(given)
    cure = str(raised.value).rpartition("kernels=fp8.")[2].removesuffix(".")
    assert isinstance(eval(cure, {"Kernels": fp8.Kernels}), fp8.Kernels)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("chip", ["h200", pytest.param("b200", marks=pytest.mark.slow), "tpu7x"])
def test_every_door_gives_the_same_on_a_cpu(door, chip):
    theirs = DOORS[door](None)
    np.testing.assert_array_equal(DOORS[door](fp8.Kernels(chip)), theirs, strict=True)


def test_equal_layers_with_kernels():
    one, other = (fp8.linen.FP8Dense(4, kernels=fp8.Kernels("h200")) for _ in range(2))
    assert one == other
    assert one != fp8.linen.FP8Dense(4, kernels=fp8.Kernels("h100"))


def test_compiler_options_need_a_chip():
    with pytest.raises(ValueError, match=mentions("Kernels() names no chip", 'Kernels("h200")')):
        fp8.Kernels().compiler_options(BLOCKWISE)


@pytest.mark.parametrize("recipe", [fp8.recipes.delayed(), BLOCKWISE], ids=lambda r: r.name)
def test_a_kernel_by_name_fails_loudly_and_one_by_chip_makes_way(recipe):
    """No kernel in Pallas takes rows of 24 values."""
    x, w = jnp.ones((8, 24)), jnp.ones((24, 8))
    dot = jax.jit(fp8.dot, static_argnames=("recipe", "kernels"))
    dot = functools.partial(dot, x, w, recipe=recipe, state=fp8.init_state(recipe))
    with pytest.raises(NotImplementedError):
        dot(kernels=fp8.Kernels("h200", casts="mosaic"))
    np.testing.assert_array_equal(dot(kernels=H200), dot())


def test_with_64_bits():
    """Hopper's matmul counts in int32; the casts do not mind."""
    with jax.enable_x64(True):
        x, w = jnp.ones((256, 128), jnp.bfloat16), jnp.ones((128, 256), jnp.bfloat16)
        dot = jax.jit(fp8.dot, static_argnames=("recipe", "kernels"))
        mine = dot(x, w, recipe=BLOCKWISE, kernels=H200)
        np.testing.assert_array_equal(mine, dot(x, w, recipe=BLOCKWISE))
        assert H200.choices(BLOCKWISE, (1024, 2048, 4096)).fprop.backend == "xla"
    with pytest.raises(TypeError, match="cannot be quantized"):
        H200.choices(BLOCKWISE, SHAPE, jnp.int32)


def test_a_quantizer_of_ones_own():
    """Nothing is known of the quantizer's casts, so XLA casts."""
    own = fp8.recipes.Operands(lhs=Smoothed(), rhs=Smoothed())
    recipe = fp8.Recipe(name="own", fprop=own, dgrad=own, wgrad=own)
    assert H200.backends(recipe, SHAPE).x == ("xla",)
    assert "nothing is known" in H200.choices(recipe, SHAPE).x.why
    state = fp8.init_state(recipe)
    mine = fp8.dot(X, W, recipe=recipe, state=state, kernels=H200)
    np.testing.assert_array_equal(mine, fp8.dot(X, W, recipe=recipe, state=state))


def test_an_exported_program_with_symbolic_sizes():
    """Nothing can be estimated from symbols, so XLA computes."""
    (m,) = jax.export.symbolic_shape("m")
    recipe = fp8.recipes.current()
    dot = jax.jit(lambda x, w: fp8.dot(x, w, recipe=recipe, kernels=H200))
    exported = jax.export.export(dot)(jax.ShapeDtypeStruct((m, 128), jnp.float32), W)
    np.testing.assert_array_equal(exported.call(X, W), fp8.dot(X, W, recipe=recipe))


@pytest.fixture
def sizes(monkeypatch):
    """(M, K, N) for which a door asks for backends."""
    seen = []
    backends = fp8.Kernels.backends

    def spy(self, recipe, shape):
        seen.append(shape)
        return backends(self, recipe, shape)

    monkeypatch.setattr(fp8.Kernels, "backends", spy)
    return seen


def placed(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def test_estimates_are_of_one_device_where_types_tell(sizes):
    x, w = jnp.ones((512, 256)), jnp.ones((256, 512))
    dot = functools.partial(fp8.dot, recipe=BLOCKWISE, kernels=H200)

    def ask(x, w, **how):  # while it is traced; of what it computes nothing is claimed
        jax.eval_shape(functools.partial(dot, **how), x, w)

    ask(x, w)
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        ask(placed(mesh, x, "a"), placed(mesh, w, None, "b"))
    with jax.set_mesh(mesh):  # K is split on both sides: partial products
        ask(placed(mesh, x, None, "b"), placed(mesh, w, "b"), out_sharding=P(None, None))
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    mapped = jax.shard_map(dot, mesh=mesh, in_specs=(P("a"), P(None, "b")), out_specs=P("a", "b"))
    jax.eval_shape(mapped, x, w)
    ask(placed(mesh, x, "a"), placed(mesh, w, None, "b"))
    batched = functools.partial(
        fp8.dot_general,
        dimension_numbers=(((2,), (1,)), ((0,), (0,))),
        recipe=BLOCKWISE,
        kernels=H200,
    )
    jax.eval_shape(batched, jnp.ones((3, 128, 256)), jnp.ones((3, 256, 512)))
    assert sizes == [
        (512, 256, 512), (128, 256, 256), (512, 128, 512), (128, 256, 256), (512, 256, 512),
        (384, 256, 512),
    ]  # fmt: skip


def test_without_a_chip_no_size_is_asked_for(monkeypatch):
    monkeypatch.setattr(_dot_general.Given, "size", None)
    fp8.dot(X, W, recipe=BLOCKWISE)
