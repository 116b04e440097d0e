"""Hopper's scaled matmul on eight H200 that are not there.

Each multiplies its own part, and no operand is gathered.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import needs_mosaic
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from targets import topology

import jaxfp8 as fp8
from jaxfp8.programs import wire_report

pytestmark = [pytest.mark.deviceless, needs_mosaic]

M, K, N = 4096, 2048, 1024
KERNELS = fp8.Kernels(casts="mosaic", matmuls="mosaic")


KINDS = {
    "auto": (AxisType.Auto, AxisType.Auto),
    "explicit": (AxisType.Explicit, AxisType.Explicit),
    "mixed": (AxisType.Explicit, AxisType.Auto),
}


def mesh_of(kind):
    devices = np.array(topology("h200", "1x1x8").devices).reshape(4, 2)
    return Mesh(devices, ("data", "tensor"), axis_types=KINDS[kind])


def placed(mesh, shape, *spec):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))


def compiled(function, *arguments, mesh_is_set=True):
    options = {"compiler_options": fp8.Kernels("h200").compiler_options(fp8.recipes.blockwise())}
    if not mesh_is_set:
        return jax.jit(function, **options).lower(*arguments).compile()
    with jax.set_mesh(arguments[0].sharding.mesh):
        return jax.jit(function, **options).lower(*arguments).compile()


def kernels(program):
    return program.as_text().count('custom_call_target="mosaic_gpu')


@pytest.mark.parametrize(
    ("kind", "mesh_is_set"),
    [("auto", True), ("auto", False), ("explicit", True), ("explicit", False)],
)
@pytest.mark.parametrize(
    "recipe",
    [fp8.recipes.blockwise(), fp8.recipes.rowwise(), fp8.recipes.mxfp8()],
    ids=lambda recipe: recipe.name,
)
def test_a_layer_split_by_tokens_and_features(recipe, kind, mesh_is_set):
    """x by tokens, w by columns.

    Of the forward pass nothing goes over the wire but amaxes of columns.
    """
    mesh = mesh_of(kind)
    x, w = placed(mesh, (M, K), "data"), placed(mesh, (K, N), None, "tensor")
    program = compiled(
        lambda x, w: fp8.dot(x, w, recipe=recipe, kernels=KERNELS),
        x,
        w,
        mesh_is_set=mesh_is_set,
    )
    assert kernels(program) >= 3  # two casts and a matmul
    assert not [t for t in wire_report(program).transfers if t.kind != "all-reduce"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_train_step_of_data_parallel_layers(kind):
    """Gradients of weights are summed over the data axis, and nothing else that is large
    travels.
    """
    mesh = mesh_of(kind)
    x, w, c = placed(mesh, (M, K), "data"), placed(mesh, (K, N)), placed(mesh, (M, N), "data")

    # casts take one kind of axes
    named = fp8.Kernels(matmuls="mosaic") if kind == "mixed" else KERNELS

    def loss(x, w, c):
        return jnp.sum(
            (fp8.dot(x, w, recipe=fp8.recipes.blockwise(), kernels=named) * c).astype(jnp.float32)
        )

    program = compiled(jax.grad(loss, (0, 1)), x, w, c)
    # three casts, dgrad and wgrad; y itself is not asked for
    assert kernels(program) == (2 if kind == "mixed" else 5)
    transfers = wire_report(program).transfers
    assert {t.kind for t in transfers} <= {"all-reduce", "reduce-scatter"}, transfers
    dots = [
        line for line in program.as_text().splitlines() if " dot(" in line or "__cublas" in line
    ]
    assert not dots


@pytest.mark.parametrize("name", ["rows", "tiles"])
def test_a_split_contraction_in_an_explicit_mesh(name):
    """JAX's rules: the caller says how the sum shall lie, or it is an error."""
    mesh = mesh_of("explicit")
    x, w = placed(mesh, (M, K), "data", "tensor"), placed(mesh, (K, N), "tensor")
    recipe = fp8.recipes.rowwise() if name == "rows" else fp8.recipes.blockwise()
    dot = functools.partial(fp8.dot, recipe=recipe, kernels=KERNELS)
    program = compiled(functools.partial(dot, out_sharding=P("data")), x, w)
    assert kernels(program) >= 3
    large = [t for t in wire_report(program).transfers if t.bytes > 2**16]
    assert [(t.kind, t.bytes) for t in large] == [("all-reduce", 2 * M // 4 * N)]
    with pytest.raises(Exception, match="out_sharding"):
        compiled(dot, x, w)


@pytest.mark.parametrize(
    ("sizes", "of_x", "of_w"),
    [((512, 256, 512), (None, "data"), ("data",)), ((512, 256, 160), (), (None, "data"))],
)
def test_fewer_tiles_than_devices(sizes, of_x, of_w):
    """Two along K or N on four devices: put together again."""
    mesh = mesh_of("auto")
    m, k, n = sizes
    x, w = placed(mesh, (m, k), *of_x), placed(mesh, (k, n), *of_w)
    program = compiled(
        lambda x, w: fp8.dot(x, w, recipe=fp8.recipes.blockwise(), kernels=KERNELS), x, w
    )
    assert kernels(program) == 3
    assert {t.kind for t in wire_report(program).transfers} == {"all-gather"}


def test_what_it_refuses():
    auto = mesh_of("auto")
    x, w, c = placed(auto, (M, K), "data"), placed(auto, (K, N)), placed(auto, (M, N), "data")
    multiply = lambda x, w: fp8.dot(x, w, recipe=fp8.recipes.blockwise(), kernels=KERNELS)
    in_part = jax.shard_map(
        multiply, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"}
    )
    with pytest.raises(NotImplementedError, match="Manual"):
        compiled(in_part, x, w)

    def add(x, w, c):
        tiles = fp8.PerBlock((1, 128)), fp8.PerBlock((128, 128))
        operands = (fp8.quantize(v, fp8.E4M3, tile) for v, tile in zip((x, w), tiles, strict=True))
        return fp8.scaled_matmul(*operands, add_to=c, kernels=fp8.Kernels(matmuls="mosaic"))

    with pytest.raises(NotImplementedError, match="add_to"):
        compiled(add, x, w, c)
