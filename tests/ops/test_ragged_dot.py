"""`fp8.ragged_dot` against a loop over groups of `fp8.dot`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import needs_mosaic

import jaxfp8 as fp8
from jaxfp8.recipes import Operands, Recipe

K, N = 160, 96  # no multiples of 128
RECIPES = {
    "delayed": fp8.recipes.delayed(history_length=3),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "rowwise_high": fp8.recipes.rowwise(high_precision_wgrad=True),
    "blockwise": fp8.recipes.blockwise(),
    "float32_scales": fp8.recipes.blockwise(power_of_two=False),
    "mxfp8": fp8.recipes.mxfp8(),
    "identity": fp8.recipes.identity(),
}
SIZES = {
    "some_empty": [0, 37, 0, 130, 5],
    "all_in_one": [0, 0, 200, 0, 0],
    "none": [0, 0, 0, 0, 0],
    "full": [40, 40, 40, 40, 40],
    "one_row": [1, 0, 1, 128, 70],
}
T, E = 200, 5


def arrays(seed=0, dtype=jnp.bfloat16, t=T, e=E):
    keys = jax.random.split(jax.random.key(seed), 4)
    x = jax.random.normal(keys[0], (t, K), jnp.float32)
    x *= jnp.exp(2 * jax.random.normal(keys[3], (t, 1), jnp.float32))
    w = jax.random.normal(keys[1], (e, K, N), jnp.float32) * jnp.arange(1.0, e + 1)[:, None, None]
    g = jax.random.normal(keys[2], (t, N), jnp.float32) * 1e-3
    return x.astype(dtype), w.astype(dtype), g.astype(dtype)


def loop(x, w, sizes, recipe, states=None):
    """The rows of each group by `fp8.dot`, one group after the other. Empty groups are left out."""
    y = jnp.zeros((x.shape[0], w.shape[2]), jnp.promote_types(x.dtype, w.dtype))
    start = 0
    for e, size in enumerate(sizes):
        if size:
            rows = slice(start, start + size)
            state = None if states is None else states[e]
            y = y.at[rows].set(fp8.dot(x[rows], w[e], recipe=recipe, state=state))
        start += size
    return y


def clear(x, sizes, value):
    """`x` with a value in the rows of no group."""
    return jnp.where((jnp.arange(len(x)) < sum(sizes))[:, None], x, jnp.array(value, x.dtype))


def poisoned(x, sizes):
    return clear(x, sizes, jnp.nan)


def sizes_of(groups):
    """Strategy: sizes of so many groups, which add up to T rows at most."""
    ends = st.lists(st.integers(0, T), min_size=groups, max_size=groups)
    return ends.map(lambda ends: np.diff([0, *sorted(ends)]).tolist())


def close(got, want, bound=2e-2):
    """A bfloat16 result may differ by a last bit, because float32 sums have another order."""
    got, want = (np.asarray(each, np.float64) for each in (got, want))
    assert np.isfinite(got).all()
    size = np.linalg.norm(want)
    assert np.linalg.norm(got - want) <= bound * 2e-1 * size + 1e-30, (
        np.linalg.norm(got - want) / size
    )


def cotangents(function, x, w, g):
    y, pull = jax.vjp(function, x, w)
    return (y, *pull(g))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "delayed"])
def test_equals_a_loop_over_groups(name, sizes):
    recipe = RECIPES[name]
    x, w, g = arrays()
    dirty = poisoned(x, sizes), w, poisoned(g, sizes)
    got = jax.jit(
        lambda x, w, g, s: cotangents(lambda x, w: fp8.ragged_dot(x, w, s, recipe=recipe), x, w, g)
    )(*dirty, jnp.array(sizes))
    want = cotangents(lambda x, w: loop(x, w, sizes, recipe), x, w, g)
    for mine, other in zip(got, want, strict=True):
        close(mine, other)
    filled = sum(sizes)
    assert not np.asarray(got[0][filled:], np.float32).any()
    assert not np.asarray(got[1][filled:], np.float32).any()
    assert not np.asarray(got[2], np.float32)[np.array(sizes) == 0].any()


def operands_of(recipe, sizes, x, w, g):
    """The FP8 operands of the three matmuls of each group: values and scales, rows unpadded."""
    from jaxfp8.kernels.grouped_matmul import _api

    seen = []
    real = _api.multiply

    def spy(lhs, rhs, groups, call, attempts):
        seen.append((call, lhs, rhs, groups))
        return real(lhs, rhs, groups, call, attempts)

    with pytest.MonkeyPatch.context() as patch, jax.disable_jit():
        patch.setattr(_api, "multiply", spy)
        cotangents(lambda x, w: fp8.ragged_dot(x, w, jnp.array(sizes), recipe=recipe), x, w, g)
    return seen


@pytest.mark.parametrize("name", ["current", "rowwise", "blockwise", "float32_scales", "mxfp8"])
def test_payloads_and_scales_are_those_of_each_group_alone(name):
    recipe, sizes = RECIPES[name], SIZES["one_row"]
    x, w, g = arrays(1)
    (_, x_f, w_f, groups), (_, g_d, w_d, _), (_, x_w, g_w, _) = operands_of(
        recipe, sizes, poisoned(x, sizes), w, poisoned(g, sizes)
    )
    start = 0
    for e, size in enumerate(sizes):
        rows, first, count = (
            slice(start, start + size),
            *(int(each[e]) for each in (groups.first_tile, groups.tiles)),
        )
        start += size
        if not size:
            continue
        for stack, tensor, quantizer, kept in (
            (x_f, x[rows], recipe.fprop.lhs, (0,)),
            (g_d, g[rows], recipe.dgrad.lhs, (0,)),
            (x_w, x[rows], recipe.wgrad.lhs, (1,)),
            (g_w, g[rows], recipe.wgrad.rhs, (1,)),
        ):
            alone = cast_alone(tensor, quantizer, kept)
            tiles = stack.values[first : first + count]
            values = tiles.reshape(-1, tiles.shape[-1])[:size]
            np.testing.assert_array_equal(bits(values), bits(alone.values))
            for r in range(count):
                part = slice(r * groups.tile, min((r + 1) * groups.tile, size))
                mine = expanded(stack.scale[first + r], stack.granularity, stack.values.shape[1:])
                other = expanded(alone.scale, alone.granularity, alone.shape)
                rows_here = part.stop - part.start
                np.testing.assert_array_equal(mine[:rows_here], other[part])
        for stack, quantizer, kept in (
            (w_f, recipe.fprop.rhs, (1,)),
            (w_d, recipe.dgrad.rhs, (0,)),
        ):
            alone = cast_alone(w[e], quantizer, kept)
            np.testing.assert_array_equal(bits(stack.values[e]), bits(alone.values))
            np.testing.assert_array_equal(
                np.asarray(stack.scale[e], np.float32), np.asarray(alone.scale, np.float32)
            )


def cast_alone(x, quantizer, kept):
    rule = quantizer.rule
    return fp8.quantize(
        x, quantizer.value_format, quantizer.granularity.for_matmul(kept, 2),
        power_of_two=rule.power_of_two, scale_format=rule.scale_format,
    )  # fmt: skip


def expanded(scale, granularity, shape):
    scale = jnp.asarray(scale).astype(jnp.float32)
    return np.broadcast_to(granularity.expand(scale, shape), shape)


def bits(values):
    return np.asarray(jax.lax.bitcast_convert_type(values, jnp.uint8))


def test_a_state_of_each_group_is_that_of_a_loop():
    recipe, sizes = RECIPES["delayed"], SIZES["some_empty"]
    x, w, g = arrays(2)
    state = jax.tree.map(lambda leaf: jnp.stack([leaf] * E), fp8.init_state(recipe))
    states = [fp8.init_state(recipe) for _ in range(E)]
    for step in range(3):
        x, g = x * (1.5 + step), g * 0.5

        def loss(w, state, x, g):
            y = fp8.ragged_dot(x, w, jnp.array(sizes), recipe=recipe, state=state)
            return jnp.sum(y.astype(jnp.float32) * g.astype(jnp.float32))

        def looped(w, states, x, g):
            y = loop(x, w, sizes, recipe, states)
            return jnp.sum(y.astype(jnp.float32) * g.astype(jnp.float32))

        _, dw, state = jax.jit(fp8.value_and_grad(loss))(w, state, poisoned_from(x, sizes), g)
        _, dw_loop, states = jax.jit(fp8.value_and_grad(looped))(w, states, x, g)
        close(dw, dw_loop)
        for e in range(E):
            for mine, other in zip(jax.tree.leaves(state), jax.tree.leaves(states[e]), strict=True):
                np.testing.assert_array_equal(np.asarray(mine[e]), np.asarray(other))


def poisoned_from(x, sizes):
    return x.at[sum(sizes) :].set(jnp.inf)


def test_one_state_for_all_groups_gets_the_largest_amax():
    recipe, sizes = RECIPES["delayed"], SIZES["some_empty"]
    x, w, g = arrays(3)
    state = fp8.init_state(recipe)

    def loss(w, state, x):
        y = fp8.ragged_dot(x, w, jnp.array(sizes), recipe=recipe, state=state)
        return jnp.sum(y.astype(jnp.float32) * g.astype(jnp.float32))

    _, _, new = jax.jit(fp8.value_and_grad(loss))(w, state, poisoned_from(x, sizes))
    filled, used = sum(sizes), np.array(sizes) > 0
    want = [
        np.abs(np.asarray(each, np.float32)).max() for each in (x[:filled], w[used], g[:filled])
    ]
    np.testing.assert_array_equal(new.amax_history[:, -1], np.float32(want))


@needs_mosaic
@pytest.mark.parametrize("casts", ["mosaic", "reference"])
@pytest.mark.parametrize("name", ["current", "rowwise", "blockwise", "mxfp8"])
def test_other_casts_give_the_same_bits(name, casts):
    """On a CPU the program for a GPU runs XLA's casts, of the same rows."""
    recipe, sizes = RECIPES[name], jnp.array(SIZES["one_row"])
    x, w, g = arrays(8)
    run = lambda kernels: jax.jit(
        lambda x, w, g: cotangents(
            lambda x, w: fp8.ragged_dot(x, w, sizes, recipe=recipe, kernels=kernels), x, w, g
        )
    )(x, w, g)
    (y, dx, dw), (y_xla, dx_xla, dw_xla) = run(fp8.Kernels(casts=casts)), run(None)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(y_xla))
    np.testing.assert_array_equal(np.asarray(dx), np.asarray(dx_xla))
    close(dw, dw_xla)  # tiles may have more rows, and sums another order


@functools.partial(jax.jit, static_argnames="recipe")
def one_by_one(x, w, sizes, recipe):
    """Each group by `fp8.dot`, with its rows first and then zeros, so that no shape changes."""
    y = jnp.zeros((x.shape[0], w.shape[2]), x.dtype)
    for e, start in enumerate(jnp.cumulative_sum(sizes, include_initial=True)[:-1]):
        rows = (jnp.arange(x.shape[0]) < sizes[e])[:, None]
        x_e = jnp.where(rows, jnp.roll(x, -start, 0), 0)
        y_e = jnp.where(rows, fp8.dot(x_e, w[e], recipe=recipe), 0)
        y += jnp.roll(y_e, start, 0)
    return y


@functools.partial(jax.jit, static_argnums=(0, 5))
def with_gradients(function, x, w, g, sizes, recipe):
    return cotangents(lambda x, w: function(x, w, sizes, recipe=recipe), x, w, g)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 3, 6]).flatmap(sizes_of), st.sampled_from(["rowwise", "mxfp8"]))
def test_any_sizes(sizes, name):
    """One program for each E: sizes change and nothing is compiled again."""
    x, w, g = arrays(4, jnp.float32, e=len(sizes))
    dirty, clean = (
        (clear(x, sizes, value), w, clear(g, sizes, value), jnp.array(sizes), RECIPES[name])
        for value in (jnp.nan, 0.0)
    )
    got, want = with_gradients(fp8.ragged_dot, *dirty), with_gradients(one_by_one, *clean)
    for mine, other in zip(got, want, strict=True):
        close(mine, other, bound=1e-4)
    assert with_gradients._cache_size() <= 12  # two functions, three E, two recipes


def test_no_recompile_when_sizes_change():
    x, w, _ = arrays(5)
    compiled = jax.jit(lambda x, w, s: fp8.ragged_dot(x, w, s, recipe=RECIPES["blockwise"]))
    for sizes in SIZES.values():
        compiled(x, w, jnp.array(sizes))
    assert compiled._cache_size() == 1


def test_sizes_that_only_the_device_knows_are_clamped():
    x, w, _ = arrays(6)
    recipe = RECIPES["current"]
    compiled = jax.jit(lambda x, w, s: fp8.ragged_dot(x, w, s, recipe=recipe))
    got = compiled(x, w, jnp.array([-5, 150, 2**31 - 1, 7, -(2**31)]))
    want = compiled(x, w, jnp.array([0, 150, 50, 0, 0]))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ([1, -1, 0, 0, 0], ValueError, "must be at least 0"),
        ([200, 1, 0, 0, 0], ValueError, "add up to 201"),
        ([1, 2], ValueError, "has 5 groups"),
        ([1.0, 2.0, 0.0, 0.0, 0.0], TypeError, "pass integers"),
        (None, TypeError, "group_sizes is None"),
    ],
)
def test_wrong_sizes_are_refused(sizes, error, message):
    x, w, _ = arrays()
    with pytest.raises(error, match=message):
        fp8.ragged_dot(x, w, sizes, recipe=RECIPES["current"])


def test_wrong_shapes_are_refused():
    x, w, _ = arrays()
    sizes = jnp.array(SIZES["full"])
    for a, b in ((x[None], w), (x, w[0]), (x[:, 1:], w)):
        with pytest.raises(ValueError, match=r"lhs \[T, K\] and rhs \[E, K, N\]"):
            fp8.ragged_dot(a, b, sizes, recipe=RECIPES["current"])


def test_the_bias_of_each_group():
    x, w, g = arrays(7)
    sizes = SIZES["some_empty"]
    bias = jax.random.normal(jax.random.key(9), (E, N), jnp.bfloat16)
    recipe = RECIPES["blockwise"]

    def biased(bias):
        return fp8.ragged_dot(x, w, jnp.array(sizes), recipe=recipe, bias=bias)

    y, pull = jax.vjp(biased, bias)
    ids = np.repeat(np.arange(E), sizes)
    plain = fp8.ragged_dot(x, w, jnp.array(sizes), recipe=recipe)
    filled = sum(sizes)
    np.testing.assert_array_equal(np.asarray(y[:filled]), np.asarray(plain[:filled] + bias[ids]))
    assert not np.asarray(y[filled:], np.float32).any()
    want = np.zeros((E, N))
    np.add.at(want, ids, np.asarray(g[:filled], np.float64))
    close(pull(g)[0], want)


def test_no_rows():
    x, w, _ = arrays()
    y, dx, dw = cotangents(
        lambda x, w: fp8.ragged_dot(x, w, jnp.zeros(E, jnp.int32), recipe=RECIPES["blockwise"]),
        x[:0], w, jnp.zeros((0, N), jnp.bfloat16),
    )  # fmt: skip
    assert y.shape == (0, N)
    assert dx.shape == (0, K)
    assert not np.asarray(dw, np.float32).any()


@pytest.mark.parametrize("stacked", [False, True])
def test_no_rows_keep_the_state_in_the_gradient_channel(stacked):
    x, w, _ = arrays(10, jnp.float32)
    recipe, sizes = RECIPES["delayed"], jnp.array(SIZES["full"])
    state = fp8.init_state(recipe)
    if stacked:
        state = jax.tree.map(lambda leaf: jnp.stack([leaf] * E), state)

    def loss(state, x, sizes):
        y = fp8.ragged_dot(x, w, sizes, recipe=recipe, state=state, state_channel="gradient")
        return jnp.sum(y)

    state = jax.grad(loss)(state, x, sizes)
    kept = jax.grad(loss)(state, x[:0], 0 * sizes)
    np.testing.assert_array_equal(kept.scale, state.scale)
    fp8.check_state(kept, state)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "uint32"])
def test_sizes_of_any_integer_dtype(dtype):
    """T is larger than any int8 and uint8."""
    x, w = jnp.ones((300, K)), jnp.stack([jnp.ones((K, N)), jnp.full((K, N), 3.0)])
    bias = jnp.array([[1.0], [2.0]]) + jnp.zeros((2, N))
    sizes = np.array([127, 100], dtype)
    run = lambda sizes: fp8.ragged_dot(x, w, sizes, recipe=RECIPES["current"], bias=bias)
    want = np.repeat([K + 1.0, 3 * K + 2.0, 0.0], [127, 100, 73])
    for y in (run(sizes), run(jnp.asarray(sizes)), jax.jit(run)(sizes)):
        np.testing.assert_allclose(y, np.broadcast_to(want[:, None], (300, N)), rtol=1e-6)


@pytest.mark.parametrize("mapped", ["x", "w"])
@pytest.mark.parametrize("stacked", [False, True])
def test_a_state_that_a_mapped_axis_shares_sees_the_largest_amax(mapped, stacked):
    """All amaxes are in one bin of the ledger, so a sum of them would be rounded up."""
    recipe, sizes = RECIPES["delayed"], jnp.array([3, 0, 5])
    grow = jnp.array([1.0, 1.01, 1.02])
    x, w = 1.9 * jnp.ones((3, 8, 16)), 1.1 * jnp.ones((3, 3, 16, 8))
    x, w = (
        (x * grow[:, None, None], w[0]) if mapped == "x" else (x[0], w * grow[:, None, None, None])
    )
    state = fp8.init_state(recipe)
    if stacked:
        state = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), state)

    def loss(arrays, state):
        axes = (0, None) if mapped == "x" else (None, 0)
        dot = lambda x, w: fp8.ragged_dot(x, w, sizes, recipe=recipe, state=state)
        return jnp.sum(jax.vmap(dot, axes)(*arrays))

    _, _, new = jax.jit(fp8.value_and_grad(loss))((x, w), state)
    seen = np.reshape(new.amax_history, (-1, *new.amax_history.shape[-2:]))[:, :2, -1]
    want = np.array([x.max(), w.max()])
    np.testing.assert_array_equal(seen[0], want)
    if stacked:
        np.testing.assert_array_equal(seen, [want, [0, 0], want])


def test_an_unset_scale_that_a_mapped_axis_shares_is_of_the_largest_amax():
    recipe, state = RECIPES["delayed"], fp8.init_state(RECIPES["delayed"])
    x = jnp.stack([jnp.full((4, 16), 0.3), jnp.linspace(-5.0, 5.0, 64).reshape(4, 16)])
    w = jax.random.normal(jax.random.key(0), (16, 8))
    ragged = jax.vmap(lambda x: fp8.ragged_dot(x, w[None], [4], recipe=recipe, state=state))
    dense = jax.vmap(lambda x: fp8.dot(x, w, recipe=recipe, state=state))
    np.testing.assert_array_equal(ragged(x), dense(x))


def test_tiles_of_two_lengths():
    """Blocks of rows have whole tiles of 32 and of 48 rows."""
    tiles = lambda side: fp8.quantizers.Current(
        format=fp8.E4M3, granularity=fp8.PerBlock((1, side))
    )
    recipe = Recipe(
        name="two lengths",
        fprop=Operands(lhs=tiles(32), rhs=tiles(32)),
        dgrad=Operands(lhs=tiles(32), rhs=tiles(32)),
        wgrad=Operands(lhs=tiles(48), rhs=tiles(48)),
    )
    assert recipe.whole_tiles == 96
    x, w, g = arrays(11)
    sizes = SIZES["some_empty"]
    got = cotangents(lambda x, w: fp8.ragged_dot(x, w, sizes, recipe=recipe), x, w, g)
    want = cotangents(lambda x, w: loop(x, w, sizes, recipe), x, w, g)
    for mine, other in zip(got, want, strict=True):
        close(mine, other)


def test_the_gradient_of_a_bias_in_bfloat16_is_summed_in_float32():
    x, w, g = arrays(12, jnp.float32)
    bias, sizes = jnp.zeros((E, N), jnp.bfloat16), SIZES["full"]
    biased = lambda bias: fp8.ragged_dot(x, w, sizes, recipe=RECIPES["current"], bias=bias)
    got = jax.vjp(biased, bias)[1](g)[0]
    want = np.asarray(g, np.float64).reshape(E, -1, N).sum(1)
    np.testing.assert_array_equal(got, jnp.asarray(want, jnp.float32).astype(jnp.bfloat16))


@pytest.mark.parametrize("sizes", [np.array([2**40, 1, 0, 0, 0]), [2**40, 0, 0, 0, 0],
                                   np.array([2**63, 2**63, 0, 0, 0], np.uint64)])  # fmt: skip
def test_sizes_beyond_32_bits_are_read_before_they_are_cut(sizes):
    x, w, _ = arrays()
    with pytest.raises(ValueError, match="add up to at most the 200 rows"):
        fp8.ragged_dot(x, w, sizes, recipe=RECIPES["current"])


def test_no_groups_are_refused():
    x, w, _ = arrays()
    with pytest.raises(ValueError, match="has no groups"):
        fp8.ragged_dot(x, w[:0], jnp.zeros(0, jnp.int32), recipe=RECIPES["current"])


def test_a_symbolic_number_of_rows_is_refused():
    (rows,) = jax.export.symbolic_shape("t")
    x = jax.ShapeDtypeStruct((rows, K), jnp.bfloat16)
    w, sizes = jnp.ones((E, K, N), jnp.bfloat16), jnp.array(SIZES["full"])
    run = jax.jit(lambda x: fp8.ragged_dot(x, w, sizes, recipe=RECIPES["current"]))
    with pytest.raises(ValueError, match="symbolic size"):
        jax.export.export(run)(x)


def test_without_quantizers_float64_stays():
    given, sizes = arrays(13, jnp.float32), SIZES["full"]

    def batched(x, w):
        return jax.lax.batch_matmul(x.reshape(E, -1, K), w).reshape(T, N)

    def ragged(x, w):
        return fp8.ragged_dot(x, w, jnp.array(sizes), recipe=RECIPES["identity"])

    with jax.enable_x64(True):
        x, w, g = (jnp.asarray(np.asarray(each, np.float64)) for each in given)
        got, want = cotangents(ragged, x, w, g), cotangents(batched, x, w, g)
    for mine, other in zip(got, want, strict=True):
        assert mine.dtype == jnp.float64
        np.testing.assert_allclose(mine, other, rtol=1e-11, atol=1e-11)
