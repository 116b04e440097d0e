"""On a mesh the shares, amaxes and scales are those of one device."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8

RECIPES = {
    "current": fp8.recipes.current(),
    "delayed": fp8.recipes.delayed(),
    "rowwise": fp8.recipes.rowwise(),
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(scale_rounding="floor"),
    "static": fp8.recipes.static(x_scale=0.001, w_scale=0.01, g_scale=0.01),
}
M, K, N = 512, 128, 256
RNG = np.random.default_rng(0)
SHARES = ("amax", "scale_min", "scale_max", "saturated", "underflowed")


def array(*shape):
    return (RNG.normal(size=shape) * np.exp2(RNG.integers(-16, 3, shape))).astype(np.float32)


X, W, C = array(M, K), array(K, N), array(M, N)


def step(recipe, state, x, w, c, **options):
    def loss(w, state, x, c):
        return jnp.sum(fp8.dot(x, w, recipe=recipe, state=state, name="layer", **options) * c)

    return fp8.value_and_grad(loss)(w, state, x, c)


def rows_of(run):
    with fp8.diagnostics.collect() as records:
        run()
    return {row.key: row for row in fp8.diagnostics.summary(records).rows}


@functools.cache
def on_one_device(name):
    recipe = RECIPES[name]
    return rows_of(lambda: jax.jit(step, static_argnums=0)(recipe, fp8.init_state(recipe), X, W, C))


def assert_same(rows, expected, calls=1):
    assert rows.keys() == expected.keys()
    for key, row in rows.items():
        assert row.calls == calls
        found, wanted = ({s: getattr(r, s) for s in SHARES} for r in (row, expected[key]))
        assert found == pytest.approx(wanted, rel=1e-6), key


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


def rows(parameters, few):
    """All of them; what is not among the few is slow."""
    return [pytest.param(*p, marks=() if p in few else pytest.mark.slow) for p in parameters]


# An unset state casts as current scaling does.
GLOBAL = {
    ("delayed", AxisType.Explicit), ("blockwise", AxisType.Explicit), ("mxfp8", AxisType.Auto),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    rows(itertools.product(RECIPES, (AxisType.Auto, AxisType.Explicit)), GLOBAL),
)
def test_global_arrays(name, kind):
    recipe, mesh = RECIPES[name], mesh_of(kind)
    with jax.set_mesh(mesh):
        x, w, c = (
            jax.device_put(each, NamedSharding(mesh, spec))
            for each, spec in ((X, P("data")), (W, P(None, "model")), (C, P("data", "model")))
        )
        rows = rows_of(
            lambda: jax.jit(step, static_argnums=0)(recipe, fp8.init_state(recipe), x, w, c)
        )
    assert_same(rows, on_one_device(name))
    for key, row in rows.items():
        assert row == on_one_device(name)[key]  # also the counts


# rowwise: the amaxes of columns of x are over all devices. blockwise with w_shard is refused.
SHARDED = {("delayed", True), ("rowwise", False), ("blockwise", True), ("mxfp8", True)}


@pytest.mark.parametrize(
    ("name", "gathered"), rows(itertools.product(RECIPES, (False, True)), SHARDED)
)
def test_shard_map(name, gathered):
    """Each device reports its shards. A replica counts as often as there are devices with it."""
    recipe, mesh = RECIPES[name], mesh_of(AxisType.Auto)
    options = {"w_shard": fp8.Shard(1, "data")} if gathered else {}
    w_spec = P(None, "data") if gathered else P()

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P("data"), w_spec, P("data")),
        out_specs=w_spec,
    )
    def run(state, x, w, c):
        _, dw, _ = step(recipe, state, x, w, c, **options)
        return dw

    if gathered and recipe.tile == 128:  # a tile of w would span two devices
        with pytest.raises(ValueError, match="tile"):
            run(fp8.init_state(recipe), X, W, C)
        return
    rows = rows_of(lambda: run(fp8.init_state(recipe), X, W, C))
    expected = on_one_device(name)
    assert_same(rows, expected, calls=8)
    # "model" splits nothing, so each shard is there twice, and w is there 8 times.
    assert rows["x" if "x" in rows else "x/fprop"].values == 2 * X.size
    assert rows["w" if "w" in rows else "w/fprop"].values == (2 if gathered else 8) * W.size


def test_shard_map_without_types():
    recipe, mesh = RECIPES["delayed"], mesh_of(AxisType.Auto)

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P("data"), P(), P("data")),
        out_specs=P(),
        check_vma=False,
    )
    def run(state, x, w, c):
        def loss(w, state, x, c):
            return jnp.sum(fp8.dot(x, w, recipe=recipe, state=state, name="layer") * c)

        _, dw, _ = fp8.value_and_grad(loss, reduce_axes=("data",))(w, state, x, c)
        return jax.lax.psum(dw, "data")

    # The first step quantizes with current amaxes, which are reduced over the named axes.
    rows = rows_of(lambda: run(fp8.init_state(recipe), X, W, C))
    assert_same(rows, on_one_device("delayed"), calls=8)
