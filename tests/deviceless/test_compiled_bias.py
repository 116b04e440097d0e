"""The gradient of a bias, compiled for an H200.

What casts the product's gradient sums it, which XLA reads once more for.
"""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from casts import cast_in
from casts import known as known_scales
from interpreter import needs_mosaic
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from program import Program
from targets import array, topology

import jaxfp8 as fp8
from jaxfp8.kernels.cast._api import cast_copies
from jaxfp8.programs import wire_report

pytestmark = [pytest.mark.deviceless, needs_mosaic]

M, K, N = 2048, 512, 1024
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
BRINGS_A_TILE = re.compile(r"cp\.async\.bulk\.tensor\.[2-5]d\.shared::\w+\.global")


def devices(shape="1x1x1"):
    return Mesh(np.array(topology("h200", shape).devices), ("a",), axis_types=(AxisType.Auto,))


def step(recipe, casts, bias):
    """With a bias inside the matmul, beside it, or none."""

    def train(params, c, state):
        def loss(params, state):
            x, w, b = params
            kernels = fp8.Kernels(casts=casts)
            y = fp8.dot(
                x,
                w,
                recipe=recipe,
                state=state,
                kernels=kernels,
                bias=b if bias == "inside" else None,
            )
            y = y + b[None] if bias == "beside" else y
            # its gradient depends on its result, as in a model
            return jnp.sum((y * c).astype(jnp.float32) ** 2)

        return fp8.value_and_grad(loss)(params, state)

    return train


def compiled(recipe, casts, bias, mesh, spec=None):
    place = lambda x, spec=None: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=NamedSharding(mesh, spec or P())
    )
    params = place(array(M, K), spec), place(array(K, N)), place(array(N))
    state = jax.tree.map(place, fp8.init_state(recipe))
    with jax.set_mesh(mesh):
        run = jax.jit(
            step(recipe, casts, bias), compiler_options=fp8.Kernels("h200").compiler_options(recipe)
        )
        return run.lower(params, place(array(M, N), spec), state).compile()


def moved(recipe, casts, bias):
    program = Program(compiled(recipe, casts, bias, devices()).as_text())
    return program.traffic(program.entry)


@pytest.mark.parametrize(
    "recipe",
    [
        fp8.recipes.delayed(),
        fp8.recipes.blockwise(),
        fp8.recipes.mxfp8(w_tile_dim=2),
        pytest.param(fp8.recipes.current(), marks=pytest.mark.slow),
    ],
    ids=lambda recipe: recipe.name,
)
def test_bytes_of_a_training_step(recipe):
    """Beside the matmul its gradient is read once more.

    Inside, a float32 for 128 (32) of a column is written and read.
    """
    none, beside, inside = (
        moved(recipe, "mosaic", bias) / (2 * M * N) for bias in (None, "beside", "inside")
    )
    assert beside - none == pytest.approx(1, abs=0.02)
    assert inside - none == pytest.approx(4 / (recipe.tile or 128), abs=0.02)


TILES = {
    "128": ((1, 128), (128, 1)),
    "32": ((1, 32), (32, 1)),
    "rows alone": ((1, 128),),
    "squares": ((128, 128),),
}


def tiles(x, name):
    granularities = tuple(map(fp8.PerBlock, TILES[name]))
    cast = cast_in(fp8.E4M3, *granularities, column_sums=True, backends=("mosaic",))
    return cast_copies(x, cast)


def known(x):
    cast = cast_in(
        fp8.E5M2,
        *[fp8.PerTensor()] * 2,
        transposed=(False, True),
        column_sums=True,
        backends=("mosaic",),
    )
    return cast_copies(x, cast, known_scales(*[jnp.float32(3.0)] * 2))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", [*TILES, "known"])
def test_one_read_and_no_spills(name, dtype, tmp_path):
    def run(x):
        copies, extras = known(x) if name == "known" else tiles(x, name)
        return copies, extras.column_sums

    mesh = devices()
    x = jax.ShapeDtypeStruct((640, 384), dtype, sharding=NamedSharding(mesh, P()))
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(tmp_path)
    try:
        with jax.set_mesh(mesh):
            jax.jit(run).lower(x).compile()
    finally:
        del os.environ["MOSAIC_GPU_DUMP_TO"]
    (log,), (code,) = (list(tmp_path.glob(f"*.{kind}")) for kind in ("ptxas", "ptx"))
    assert set(SPILLS.findall(log.read_text())) == {("0", "0")}
    text = code.read_text()
    assert len(BRINGS_A_TILE.findall(text)) == 1
    assert text.count("ld.global") == (2 if name == "known" else 0)  # multipliers
    # 128 values a thread of a tile, in 2 or more parts
    assert len(re.findall(r"add\.f32", text)) >= 127


@pytest.mark.parametrize(
    "recipe", [fp8.recipes.delayed(), fp8.recipes.blockwise()], ids=lambda recipe: recipe.name
)
def test_only_sums_travel(recipe):
    """Of tokens on eight devices: no more than without a bias, and the sums of its gradient."""
    mesh = devices("1x1x8")
    with_bias, without = (
        wire_report(compiled(recipe, "mosaic", bias, mesh, P("a"))).transfers
        for bias in ("inside", None)
    )
    more = sum(t.bytes for t in with_bias) - sum(t.bytes for t in without)
    assert {t.kind for t in with_bias} == {t.kind for t in without} == {"all-reduce"}
    assert 0 < more <= 4 * N
