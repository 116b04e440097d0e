"""`fp8.ragged_dot` with experts split over devices, in every kind of mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxfp8 as fp8

E, K, N, ROWS = 4, 64, 32, 96
DATA = 2
RECIPES = {
    "delayed": fp8.recipes.delayed(history_length=3),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
}
# Each of two devices along "expert" has two experts and 96 rows of its own, of which it fills some.
SIZES = np.array([20, 0, 50, 46], np.int32)


def rows(*default):
    """The names of all recipes. The others are slow."""
    return [
        pytest.param(name, marks=() if name in default else pytest.mark.slow) for name in RECIPES
    ]


@functools.cache
def arrays():
    random = np.random.default_rng(0)
    normal = lambda *shape: random.standard_normal(shape).astype(np.float32)
    x = normal(2 * ROWS, K) * np.linspace(0.1, 9.0, 2 * ROWS, dtype=np.float32)[:, None]
    w = normal(E, K, N) * np.float32([1, 2, 4, 8])[:, None, None]
    g = normal(2 * ROWS, N) * np.linspace(3.0, 0.2, 2 * ROWS, dtype=np.float32)[:, None]
    return x, w, g


def step(recipe, x, w, g, sizes, state):
    def loss(params, state):
        x, w = params
        y = fp8.ragged_dot(x, w, sizes, recipe=recipe, state=state)
        return jnp.sum(y * g), y

    out = fp8.value_and_grad(loss, has_aux=True)((x, w), state)
    (_, y), grads, state = out
    return y, grads, state


def stacked_state(recipe):
    if not recipe.rows:
        return ()
    return jax.tree.map(lambda leaf: np.stack([leaf] * E), fp8.init_state(recipe))


@functools.cache
def on_one_device(recipe):
    return jax.jit(functools.partial(step, recipe))


def part_of(tree, part):
    return jax.tree.map(lambda leaf: leaf[part], tree)


@functools.cache
def halves(recipe):
    """The result of each half of the experts and of their rows, without gradients."""
    run, (x, w, _) = jax.jit(functools.partial(fp8.ragged_dot, recipe=recipe)), arrays()
    parts = [
        run(x[i * ROWS : (i + 1) * ROWS], w[2 * i : 2 * i + 2], SIZES[2 * i : 2 * i + 2])
        for i in (0, 1)
    ]
    return np.concatenate(parts)


@pytest.mark.parametrize("name", rows("delayed"))
def test_experts_of_a_shard_map_are_those_of_one_device(name):
    recipe = RECIPES[name]
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,))
    x, w, g = arrays()
    split = P("expert")
    on_mesh = jax.shard_map(
        lambda *given: step(recipe, *given), mesh=mesh, in_specs=split, out_specs=split
    )
    got = jax.jit(on_mesh)(x, w, g, SIZES, stacked_state(recipe))
    # On one device the rows of no expert are behind those of all experts.
    filled = np.arange(2 * ROWS) % ROWS < np.repeat(SIZES.reshape(2, 2).sum(1), ROWS)
    order = np.argsort(~filled, kind="stable")
    want = on_one_device(recipe)(x[order], w, g[order], SIZES, stacked_state(recipe))
    (y, (dx, dw), state) = jax.device_get(got)
    got = y[order], (dx[order], dw), state
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(other))


@pytest.mark.parametrize("name", rows("delayed", "rowwise"))
def test_rows_of_one_expert_on_two_devices_share_its_scales(name):
    """The rows of each expert are on both devices of "data". Scales are those of all its rows."""
    recipe = RECIPES[name]
    mesh = jax.make_mesh((DATA,), ("data",), axis_types=(AxisType.Auto,))
    x, w, g = arrays()
    sizes = np.array(
        [32, 0, 32, 32], np.int32
    )  # on each device; tiles of tokens do not span devices
    whole = 2 * sizes
    # On one device the rows of each expert are together.
    ids = np.concatenate([np.repeat(np.arange(E), sizes)] * 2)
    order = np.argsort(ids, kind="stable")
    state = stacked_state(recipe)
    y, (dx, dw), new = jax.device_get(on_one_device(recipe)(x[order], w, g[order], whole, state))

    def local(x, w, g, sizes, state):
        return step(recipe, x, w, g, sizes, state)

    on_mesh = jax.shard_map(
        local, mesh=mesh, in_specs=(P("data"), P(), P("data"), P(), P()),
        out_specs=(P("data"), (P("data"), P()), P()),
    )  # fmt: skip
    got_y, (got_dx, got_dw), got_new = jax.jit(on_mesh)(x, w, g, sizes, state)
    np.testing.assert_array_equal(np.asarray(got_y)[order], np.asarray(y))
    np.testing.assert_allclose(np.asarray(got_dx)[order], np.asarray(dx), rtol=1e-5, atol=1e-4)
    if name not in ("blockwise",):  # its tiles of 128 rows are other tiles on two devices
        np.testing.assert_allclose(
            np.asarray(got_dw), np.asarray(dw), rtol=1e-5, atol=1e-5 * np.abs(dw).max()
        )
    for mine, other in zip(jax.tree.leaves(got_new), jax.tree.leaves(new), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(other))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if (name, kind) in default else pytest.mark.slow)
        for default in [{("delayed", "auto"), ("mxfp8", "explicit")}]
        for name in RECIPES
        for kind in ("auto", "explicit")
    ],
)
def test_global_arrays_give_the_result_of_one_device(name, kind):
    recipe = RECIPES[name]
    types = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}[kind]
    mesh = jax.make_mesh((2, 2), ("expert", "data"), axis_types=(types, types))
    x, w, g = arrays()
    state = stacked_state(recipe)
    want = on_one_device(recipe)(x, w, g, SIZES, state)
    with jax.set_mesh(mesh):
        rows, experts = P("data"), P("expert")
        put = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
        given = put(x, rows), put(w, experts), put(g, rows), put(SIZES, P())
        state = jax.tree.map(lambda leaf: put(leaf, experts), state)
        got = jax.jit(lambda *given: step(recipe, *given))(*given, state)
        if kind == "explicit":
            assert jax.typeof(got[0]).sharding.spec == P("data", None)
            assert jax.typeof(got[1][1]).sharding.spec[0] == "expert"
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        mine, other = np.asarray(mine), np.asarray(other)
        np.testing.assert_allclose(mine, other, rtol=1e-6, atol=1e-6 * np.abs(other).max())


def test_without_types_the_caller_names_axes():
    recipe = RECIPES["current"]
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,))
    x, w, _ = arrays()

    def local(x, w, sizes, axes):
        return fp8.ragged_dot(x, w, sizes, recipe=recipe, reduce_axes=axes)

    split = P("expert")
    run = lambda axes: jax.jit(
        jax.shard_map(
            lambda *given: local(*given, axes), mesh=mesh, in_specs=split, out_specs=split,
            check_vma=False,
        )
    )(x, w, SIZES)  # fmt: skip
    with pytest.raises(fp8.FP8StateError, match="reduce_axes"):
        run(None)
    want = halves(recipe)
    np.testing.assert_array_equal(np.asarray(run(())), np.asarray(want))


def test_a_contraction_over_devices_is_named():
    """K is split over "tensor", as in the second matmul of experts: their amaxes are of all K."""
    recipe = RECIPES["current"]
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,))
    x, w, _ = arrays()

    def local(x, w, sizes):
        y = fp8.ragged_dot(x, w, sizes, recipe=recipe, reduce_axes=("tensor",))
        return lax.psum(y, "tensor")

    got = jax.jit(
        jax.shard_map(
            local, mesh=mesh, in_specs=(P(None, "tensor"), P(None, "tensor"), P()), out_specs=P()
        )
    )(x, w, SIZES)
    want = jax.jit(functools.partial(fp8.ragged_dot, recipe=recipe))(x, w, SIZES)
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    "name", ["current", pytest.param("rowwise", marks=pytest.mark.slow), "delayed"]
)
def test_the_same_rows_may_belong_to_other_experts_on_another_device(name):
    """Rows are whole on both devices, matrices and sizes are not: amaxes are of each expert."""
    recipe = RECIPES[name]
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,))
    x, w, _ = arrays()
    x, split = x[:ROWS], P("expert")
    state = stacked_state(recipe)

    def value(x, w, sizes, state):
        return fp8.ragged_dot(x, w, sizes, recipe=recipe, state=state)

    on_mesh = jax.shard_map(value, mesh=mesh, in_specs=(P(), split, split, split), out_specs=split)
    got = jax.jit(on_mesh)(x, w, SIZES, state)
    alone, want = jax.jit(value), []
    for part in (slice(0, 2), slice(2, 4)):
        want.append(alone(x, w[part], SIZES[part], part_of(state, part)))
    np.testing.assert_array_equal(np.asarray(got), np.concatenate(want))


def test_a_partly_manual_explicit_mesh():
    recipe = RECIPES["current"]
    mesh = jax.make_mesh((2, 2), ("expert", "data"), axis_types=(AxisType.Explicit,) * 2)
    x, w, _ = arrays()
    split = P("expert")
    with jax.set_mesh(mesh):
        on_mesh = jax.shard_map(
            lambda *given: fp8.ragged_dot(*given, recipe=recipe),
            in_specs=split, out_specs=split, axis_names={"expert"},
        )  # fmt: skip
        put = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
        rows = put(x, P(("expert", "data")))
        got = jax.jit(on_mesh)(rows, put(w, split), put(SIZES, split))
    np.testing.assert_allclose(np.asarray(got), halves(recipe), rtol=1e-6)


def test_an_explicit_mesh_that_splits_sizes_alone():
    recipe = RECIPES["blockwise"]
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Explicit,))
    x, w, _ = arrays()
    want = jax.jit(functools.partial(fp8.ragged_dot, recipe=recipe))(x, w, SIZES)
    with jax.set_mesh(mesh):
        sizes = jax.device_put(SIZES, jax.NamedSharding(mesh, P("expert")))
        got = jax.jit(lambda *given: fp8.ragged_dot(*given, recipe=recipe))(x, w, sizes)
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-6)


def test_rows_and_columns_on_one_axis_of_an_explicit_mesh_need_out_sharding():
    recipe = RECIPES["blockwise"]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    x, w, _ = arrays()
    with jax.set_mesh(mesh):
        put = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
        given = put(x, P("data")), put(w, P(None, None, "data")), put(SIZES, P())
        type_of = lambda **how: jax.eval_shape(
            functools.partial(fp8.ragged_dot, recipe=recipe, **how), *given
        )
        with pytest.raises(ValueError, match="out_sharding="):
            type_of()
        assert type_of(out_sharding=P("data")).sharding.spec == P("data", None)


def test_devices_with_states_of_their_own_have_amaxes_of_their_own():
    """Tokens are split, and so are states: unset scales are those of `fp8.dot` on each device."""
    recipe = RECIPES["delayed"]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    x, w, _ = arrays()
    states = jax.tree.map(lambda leaf: np.stack([leaf] * 2), fp8.init_state(recipe))

    def run(dot):
        on_mesh = jax.shard_map(
            lambda x, w, states: dot(x, w, part_of(states, 0)), mesh=mesh,
            in_specs=(P("data"), P(), P("data")), out_specs=P("data"),
        )  # fmt: skip
        return np.asarray(jax.jit(on_mesh)(x, w[0], states))

    dense = run(lambda x, w, state: fp8.dot(x, w, recipe=recipe, state=state))
    grouped = run(
        lambda x, w, state: fp8.ragged_dot(
            x, w[None], np.array([ROWS], np.int32), recipe=recipe, state=state
        )
    )
    np.testing.assert_array_equal(grouped, dense)
