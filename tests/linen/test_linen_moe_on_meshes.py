"""`linen.FP8MoE` on meshes, against one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from linen_made import made
from linen_moe_cases import IDENTITY, E, F, K, mesh_of_four, run, tokens, wide

import jaxfp8 as fp8
from jaxfp8.linen import COLLECTION, FP8MoE
from jaxfp8.moe import ExpertParallel


def assert_same(got, want):
    # Programs of several devices fuse and add in another order, in the last bits of float32. Such a
    # bit may move a value to the next one of FP8, so single elements say less than norms.
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        far = np.linalg.norm(wide(a) - wide(b))
        assert far <= 5e-3 * np.linalg.norm(wide(b)), (jax.tree_util.keystr(path), far)


DELAYED, SLOW = fp8.recipes.delayed(), pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "recipe", "shared"),
    [
        pytest.param(AxisType.Auto, DELAYED, 0, marks=SLOW),
        (AxisType.Explicit, IDENTITY, 16),
        pytest.param(AxisType.Explicit, DELAYED, 16, marks=SLOW),
        pytest.param(AxisType.Auto, IDENTITY, 16, marks=SLOW),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_mesh_gives_the_results_of_one_device(kind, recipe, shared):
    fields = {"experts": E, "hidden": F, "k": 2, "recipe": recipe, "shared": shared}
    x = tokens()
    variables = made(FP8MoE(**fields), x)
    want = run(FP8MoE(**fields), variables, x)
    layer = FP8MoE(**fields, parallel=ExpertParallel(axis="expert"))
    mesh = mesh_of_four(kind)
    with jax.set_mesh(mesh):
        split = jax.tree_util.tree_map_with_path(
            lambda path, leaf: jax.device_put(
                leaf, jax.P("expert" if path[1].key in ("w_in", "w_out") else None)
            ),
            variables,
        )
        got = run(layer, split, jax.device_put(x, jax.P("expert")))
        if kind == AxisType.Explicit:
            assert jax.typeof(got[0]).sharding.spec == jax.P("expert", None, None)
    assert_same(got, want)


@pytest.mark.parametrize(
    "recipe", [pytest.param(DELAYED, marks=SLOW), IDENTITY], ids=["delayed", "identity"]
)
def test_a_manual_mesh_gives_the_results_of_one_device(recipe):
    fields = {"experts": E, "hidden": F, "k": 2, "recipe": recipe, "shared": 16}
    x = tokens()
    variables = made(FP8MoE(**fields), x)
    want = run(FP8MoE(**fields), variables, x)
    layer = FP8MoE(**fields, parallel=ExpertParallel(axis="expert"))
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    specs = jax.tree_util.tree_map_with_path(
        lambda path, _: jax.P("expert" if path[1].key in ("w_in", "w_out") else None), variables
    )
    rows = jax.P(("data", "expert"))

    def loss(params, state, x):
        y, stats = layer.apply({"params": params, COLLECTION: state}, x)
        device = jax.lax.axis_index("data") * 4 + jax.lax.axis_index("expert")
        place = jnp.arange(y.size, dtype=jnp.float32) + (device * y.size).astype(jnp.float32)
        value = jax.lax.psum(jnp.sum(y * jnp.cos(place).reshape(y.shape)), ("data", "expert"))
        return value + 0.1 * stats.load_balancing_loss + 0.01 * stats.z_loss, (y, stats)

    def step(params, state, x):
        (_, (y, stats)), grads, state = fp8.value_and_grad(loss, has_aux=True)(params, state, x)
        return y, stats, grads, state

    params, state = specs["params"], specs.get(COLLECTION, {})
    got = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(params, state, rows),
            out_specs=(rows, jax.P(), params, state),
        )
    )(variables["params"], variables.get(COLLECTION, {}), x)  # fmt: skip
    assert_same(got, want)


def test_init_inside_shard_map_makes_parts_of_one_layer():
    layer = FP8MoE(E, F, 2, parallel=ExpertParallel(axis="expert"), recipe=fp8.recipes.delayed())
    x, split = tokens(4, 6), jax.P("expert")
    mesh = mesh_of_four()
    specs = {"router": jax.P(), "w_in": split, "w_out": split}
    specs = {"params": specs, COLLECTION: {"w_in": split, "w_out": split}}
    got = jax.jit(jax.shard_map(layer.init, mesh=mesh, in_specs=(jax.P(), split), out_specs=specs))(
        jax.random.key(0), x
    )
    want = jax.jit(layer.init)(jax.random.key(0), x)  # `init` outside needs no mesh
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), got, want)


def test_losses_without_varying_types_are_those_of_the_named_axes():
    layer = FP8MoE(E, F, 2, parallel=ExpertParallel(axis="expert"), recipe=IDENTITY)
    x = tokens()
    variables = made(layer, x)
    _, want = jax.jit(FP8MoE(E, F, 2, recipe=IDENTITY).apply)(variables, x)
    split = jax.P("expert")
    specs = {"params": {"router": jax.P(), "w_in": split, "w_out": split}}
    mesh = mesh_of_four()
    _, got = jax.jit(
        jax.shard_map(
            layer.apply, mesh=mesh, in_specs=(specs, split), out_specs=(split, jax.P()),
            check_vma=False,
        )
    )(variables, x)  # fmt: skip
    np.testing.assert_array_equal(np.asarray(got.load), np.asarray(want.load))
    np.testing.assert_allclose(got.load_balancing_loss, want.load_balancing_loss, rtol=1e-5)
    np.testing.assert_allclose(got.z_loss, want.z_loss, rtol=1e-5)


def test_dropped_choices_are_counted():
    parallel = ExpertParallel(axis="expert", capacity_factor=1.0)
    layer = FP8MoE(E, F, 1, parallel=parallel, recipe=IDENTITY)
    x = np.abs(tokens())
    params = made(layer, x)["params"] | {
        "router": np.float32([[each == 5 for each in range(E)]] * K)
    }
    mesh = mesh_of_four()
    with jax.set_mesh(mesh):
        y, stats = jax.jit(layer.apply)({"params": params}, x)
    assert int(stats.dropped) == 24 - 4 * 2  # 6 tokens of each device, 2 slots for each device
    assert (np.asarray(y).reshape(24, K) == 0).all(axis=1).sum() == 16
