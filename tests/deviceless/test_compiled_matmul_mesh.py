"""Hopper's scaled matmul on eight H200 that are not there: each multiplies its own part, and no operand is gathered."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from targets import topology

import jaxfp8 as fp8
from jaxfp8.sharding import wire_report

pytestmark = [
    pytest.mark.deviceless,
    pytest.mark.skipif("idx" in inspect.signature(plgpu.load).parameters, reason="the kernels need jax 0.11"),
]

M, K, N = 4096, 2048, 1024
KERNELS = fp8.Implementations(casts="mosaic", matmuls="mosaic")


def mesh_of(kind):
    devices = np.array(topology("h200", "1x1x8").devices).reshape(4, 2)
    return Mesh(devices, ("data", "tensor"), axis_types=(kind,) * 2)


def placed(mesh, shape, *spec):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))


def compiled(function, *arguments, mesh_is_set=True):
    options = {"compiler_options": fp8.compiler_options(fp8.recipes.blockwise(), "h200")}
    if not mesh_is_set:
        return jax.jit(function, **options).lower(*arguments).compile()
    with jax.set_mesh(arguments[0].sharding.mesh):
        return jax.jit(function, **options).lower(*arguments).compile()


def kernels(program):
    return program.as_text().count('custom_call_target="mosaic_gpu')


@pytest.mark.parametrize("mesh_is_set", [True, False])
@pytest.mark.parametrize(
    "recipe", [fp8.recipes.blockwise(), fp8.recipes.rowwise(), fp8.recipes.mxfp8()], ids=lambda recipe: recipe.name
)
def test_a_layer_split_by_tokens_and_features(recipe, mesh_is_set):
    """x by tokens, w by columns: of the forward pass nothing goes over the wire but amaxes of columns."""
    mesh = mesh_of(AxisType.Auto)
    x, w = placed(mesh, (M, K), "data"), placed(mesh, (K, N), None, "tensor")
    program = compiled(lambda x, w: fp8.dot(x, w, recipe=recipe, implementation=KERNELS), x, w, mesh_is_set=mesh_is_set)
    assert kernels(program) >= 3  # two casts and a matmul
    assert not [t for t in wire_report(program).transfers if t.kind != "all-reduce"]


def test_a_train_step_of_data_parallel_layers():
    """Gradients of weights are summed over the data axis, and nothing else that is large travels."""
    mesh = mesh_of(AxisType.Auto)
    x, w, c = placed(mesh, (M, K), "data"), placed(mesh, (K, N)), placed(mesh, (M, N), "data")

    def loss(x, w, c):
        return jnp.sum((fp8.dot(x, w, recipe=fp8.recipes.blockwise(), implementation=KERNELS) * c).astype(jnp.float32))

    program = compiled(jax.grad(loss, (0, 1)), x, w, c)
    assert kernels(program) == 5  # three casts, dgrad and wgrad; y itself is not asked for
    transfers = wire_report(program).transfers
    assert {t.kind for t in transfers} <= {"all-reduce", "reduce-scatter"}, transfers
    dots = [line for line in program.as_text().splitlines() if " dot(" in line or "__cublas" in line]
    assert not dots


def test_what_it_refuses():
    explicit = mesh_of(AxisType.Explicit)
    x, w = placed(explicit, (M, K), "data"), placed(explicit, (K, N))
    with pytest.raises(NotImplementedError, match="Explicit"):
        compiled(lambda x, w: fp8.dot(x, w, recipe=fp8.recipes.blockwise(), implementation=KERNELS), x, w)
    auto = mesh_of(AxisType.Auto)
    x, w, c = placed(auto, (M, K), "data"), placed(auto, (K, N)), placed(auto, (M, N), "data")

    def add(x, w, c):
        tiles = fp8.PerBlock((1, 128)), fp8.PerBlock((128, 128))
        operands = (fp8.quantize(v, fp8.E4M3, tile) for v, tile in zip((x, w), tiles, strict=True))
        return fp8.scaled_matmul(*operands, add_to=c, implementation="mosaic")

    with pytest.raises(NotImplementedError, match="add_to"):
        compiled(add, x, w, c)
