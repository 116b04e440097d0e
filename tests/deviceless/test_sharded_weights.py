"""Fully sharded weights on eight H200: what travels is FP8, and the gradient is scattered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from targets import dense_step, state_of, topology

import jaxfp8 as fp8
from jaxfp8.sharding import Shard, assert_wire_dtype, wire_report

pytestmark = pytest.mark.deviceless

M, K, N, DEVICES = 2048, 1024, 1024, 8
RECIPES = {
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
    "mxfp8, 32x32 weights": fp8.recipes.mxfp8(w_tile_dim=2),
}


@pytest.mark.parametrize("name", RECIPES)
def test_weights_travel_in_fp8(name):
    recipe = RECIPES[name]
    mesh = Mesh(np.array(topology("h200", "1x1x8").devices), ("fsdp",), axis_types=(AxisType.Auto,))
    specs = P("fsdp"), P("fsdp"), P("fsdp"), P()
    state = state_of(recipe)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((M, K), (K, N), (M, N))]
    arrays = [
        jax.tree.map(
            lambda s, spec=spec: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, spec)), tree
        )
        for tree, spec in zip((*shapes, state), specs, strict=True)
    ]

    def dot(x, w, state):
        return fp8.dot(x, w, recipe=recipe, state=state, rhs_shard=Shard(0, "fsdp"))

    def local(*arguments):
        loss, grads, new = dense_step(recipe, dot)(*arguments)
        return jax.lax.psum(loss, "fsdp"), grads, new

    step = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(), (P("fsdp"), P("fsdp")), P()))
    report = wire_report(jax.jit(step).lower(*arrays).compile(fp8.compiler_options(recipe, "h200")))

    values = K * N // DEVICES
    gathers = report.only(kind="all-gather", at_least=values)
    # Another copy in each direction, or one copy, whose second gather XLA shares with the first in a program this small.
    copies = 2 if name in ("rowwise", "mxfp8") else 1
    assert [(t.dtype, t.times * t.bytes) for t in gathers.transfers] == [("uint8", values)] * copies, report
    # Scales: none for a whole tensor, else a float32 or a byte a cell.
    scales = sum(t.times * t.bytes for t in report.only(kind="all-gather").transfers) - copies * values
    assert scales <= {"rowwise": 4 * K}.get(name, values // 16 if "mxfp8" in name else values // 1024), report
    scattered = report.only(kind="reduce-scatter")
    assert sum(t.times * t.bytes for t in scattered.transfers) == 2 * K * N, report
    # Amaxes cross the mesh as vectors at most; recipes in tiles have none.
    for transfer in report.only(kind="all-reduce").transfers:
        assert transfer.bytes <= 4 * 2 * (K + N), report
    if recipe.tile is not None:
        assert sum(t.bytes for t in report.only(kind="all-reduce").transfers) <= 4, report


# What an Auto mesh gathers of sharded weights (README, On a mesh).
AUTO = {
    "delayed": (fp8.recipes.delayed(), "h200", "float8_e4m3fn"),
    "current": (fp8.recipes.current(), "h200", "float8_e4m3fn"),
    "rowwise": (fp8.recipes.rowwise(), "h200", "float8_e4m3fn"),
    "blockwise": (fp8.recipes.blockwise(), "h200", "bfloat16"),
    "mxfp8": (fp8.recipes.mxfp8(), "h200", "bfloat16"),
    "mxfp8, b200": (fp8.recipes.mxfp8(chip="b200"), "b200", "float8_e4m3fn"),
}


@pytest.mark.parametrize("name", AUTO)
def test_what_an_auto_mesh_gathers(name):
    recipe, chip, dtype = AUTO[name]
    mesh = Mesh(np.array(topology(chip, "1x1x8").devices), ("fsdp",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P())
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=split) for shape in ((M, K), (K, N), (M, N))]
    state = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=whole), state_of(recipe))
    with jax.set_mesh(mesh):
        step = jax.jit(dense_step(recipe), out_shardings=(None, (split, split), None))
        compiled = step.lower(*arrays, state).compile(fp8.compiler_options(recipe, chip))
    assert_wire_dtype(compiled, "all-gather", dtype, at_least=K * N // DEVICES)
