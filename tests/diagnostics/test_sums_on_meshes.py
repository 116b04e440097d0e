"""Sums of tensor cores on meshes: the sample is that of one device."""

import functools
import itertools

import jax
import numpy as np
import pytest
from diagnostics.test_sums import RECIPES, array, state_of, step, sums_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8

OF_MESH = array(512, 128), array(128, 256), array(512, 256)
MESHES = ("delayed", "rowwise", "mxfp8", "blockwise")


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


@functools.cache
def on_one_device(name, shards=1):
    """The rows of a step, on the first of so many shards of tokens."""
    recipe, (x, w, c) = RECIPES[name], OF_MESH
    x, c = x[: 512 // shards], c[: 512 // shards]
    return sums_of(lambda: jax.jit(step, static_argnums=0)(recipe, state_of(recipe), x, w, c))


def assert_same(rows, expected, calls=1):
    assert rows.keys() == expected.keys()
    for matmul, row in rows.items():
        one = expected[matmul]
        assert (row.k, row.calls, row.outputs) == (one.k, calls, calls * one.outputs)
        assert row.one_sign == pytest.approx(one.one_sign, rel=1e-5)
        found, wanted = ((each.fast, each.promoted) for each in (row, one))
        # The exact sums of a mesh may be added in another order.
        assert found == pytest.approx(wanted, rel=0.01, nan_ok=True)


# Specs of x, w and g, which split each axis of each tensor once.
SPECS = {
    "kept": (P("data"), P(None, "model"), P("data", "model")),
    "contracted": (P("data", "model"), P("model"), P("data")),
}
FEW = {("mxfp8", AxisType.Explicit, "contracted")}


@pytest.mark.parametrize(
    ("name", "kind", "split"),
    [
        pytest.param(*case, marks=() if case in FEW else pytest.mark.slow)
        for case in itertools.product(MESHES, (AxisType.Auto, AxisType.Explicit), SPECS)
        # A tile of w has 128 x 128 values, and w has 128 rows.
        if (case[0], case[2]) != ("blockwise", "contracted")
    ],
)
def test_global_arrays(name, kind, split):
    recipe, mesh = RECIPES[name], mesh_of(kind)
    with jax.set_mesh(mesh):
        x, w, c = (
            jax.device_put(each, NamedSharding(mesh, spec))
            for each, spec in zip(OF_MESH, SPECS[split], strict=True)
        )
        options = {"out_sharding": SPECS[split][2]} if kind == AxisType.Explicit else {}
        run = jax.jit(functools.partial(step, **options), static_argnums=0)
        rows = sums_of(lambda: run(recipe, state_of(recipe), x, w, c))
    assert_same(rows, on_one_device(name))


SHARDED = {("delayed", True)}


@pytest.mark.parametrize(
    ("name", "gathered"),
    [
        pytest.param(name, gathered, marks=() if (name, gathered) in SHARDED else pytest.mark.slow)
        for name in MESHES
        for gathered in (False, True)
        if (name, gathered) != ("blockwise", True)
    ],
)
def test_shard_map(name, gathered):
    """Each device samples its own sums, of whole weights. Here all devices have the same tokens."""
    recipe, mesh = RECIPES[name], mesh_of(AxisType.Auto)
    x, w, c = OF_MESH
    x, c = (np.concatenate([each[:128]] * 4) for each in (x, c))
    of_w = P(None, "data") if gathered else P()
    options = {"w_shard": fp8.Shard(1, "data")} if gathered else {}

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), of_w, P("data")), out_specs=of_w
    )
    def run(state, x, w, c):
        _, (_, dw), _ = step(recipe, state, x, w, c, **options)
        return dw

    assert_same(sums_of(lambda: run(state_of(recipe), x, w, c)), on_one_device(name, 4), calls=8)
