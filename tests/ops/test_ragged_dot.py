"""`fp8.ragged_dot` against a loop over groups of `fp8.dot`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import needs_mosaic
from ragged_cases import RECIPES, SIZES, E, K, N, T, arrays, clear, close, cotangents

import jaxfp8 as fp8
from jaxfp8.recipes import Operands, Recipe


def poisoned(x, sizes):
    return clear(x, sizes, np.nan)


def sizes_of(groups):
    """Strategy: sizes of so many groups, which add up to T rows at most."""
    ends = st.lists(st.integers(0, T), min_size=groups, max_size=groups)
    return ends.map(lambda ends: np.diff([0, *sorted(ends)]).tolist())


def one_by_one(x, w, sizes, *, recipe):
    """Each group by `fp8.dot`, with its rows first and then zeros, so that no shape changes."""
    row = jnp.arange(x.shape[0])[:, None]

    def one(y, group):
        w, size, start = group
        x_e = jnp.where(row < size, jnp.roll(x, -start, 0), 0)
        y_e = jnp.where(row < size, fp8.dot(x_e, w, recipe=recipe), 0)
        return y + jnp.roll(y_e, start, 0), None

    y = jnp.zeros((x.shape[0], w.shape[2]), x.dtype)
    return jax.lax.scan(one, y, (w, sizes, jnp.cumulative_sum(sizes) - sizes))[0]


@functools.partial(jax.jit, static_argnums=(0, 5))
def with_gradients(function, x, w, g, sizes, recipe):
    """One program for all sizes: they change and nothing is compiled again."""
    return cotangents(lambda x, w: function(x, w, sizes, recipe=recipe), x, w, g)


FEW, SLOW = ("some_empty", "none", "full"), pytest.mark.slow
DTYPES = {"rowwise": jnp.float32, "mxfp8": jnp.float32}  # else bfloat16


def check_groups(name, sizes, seed):
    """Results and gradients are those of a loop over groups. Rows of no group are not read."""
    dtype = DTYPES.get(name, jnp.bfloat16)
    x, w, g = arrays(seed, dtype)
    dirty, clean = (
        (clear(x, sizes, value), w, clear(g, sizes, value), np.int32(sizes), RECIPES[name])
        for value in (np.nan, 0.0)
    )
    got, want = with_gradients(fp8.ragged_dot, *dirty), with_gradients(one_by_one, *clean)
    for mine, other in zip(got, want, strict=True):
        close(mine, other, bound=1e-4 if dtype == jnp.float32 else 2e-2)
    filled, (y, dx, dw) = sum(sizes), (np.asarray(each, np.float32) for each in got)
    assert not y[filled:].any()
    assert not dx[filled:].any()
    assert not dw[np.array(sizes) == 0].any()


# A recipe is two programs. Those of `DTYPES` get any sizes below.
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param(name, sizes, marks=() if quick else SLOW)
        for name in RECIPES
        if name != "delayed"
        for sizes in SIZES
        # Float32 scales are those of a tile, whatever group it is of.
        for quick in [name == "blockwise" or (sizes in FEW and name != "float32_scales")]
    ],
)
def test_equals_a_loop_over_groups(name, sizes):
    check_groups(name, SIZES[sizes], 0)


@settings(max_examples=12, deadline=None)
@given(sizes_of(E), st.sampled_from([*DTYPES]))
def test_any_sizes(sizes, name):
    check_groups(name, sizes, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("groups", [1, 3, 6])
def test_any_number_of_groups(name, groups):
    x, w, g = arrays(4, jnp.float32, e=groups)
    sizes = np.full(groups, T // groups, np.int32)
    got, want = (
        with_gradients(function, x, w, g, sizes, RECIPES[name])
        for function in (fp8.ragged_dot, one_by_one)
    )
    for mine, other in zip(got, want, strict=True):
        close(mine, other, bound=1e-4)


def operands_of(recipe, sizes, x, w, g):
    """The FP8 operands of the three matmuls of each group: values and scales, rows unpadded."""
    from jaxfp8.kernels.grouped_matmul import _api

    seen = []
    real = _api.multiply

    def spy(lhs, rhs, groups, call, attempts):
        jax.debug.callback(lambda *operands: seen.append(operands), lhs, rhs, groups, ordered=True)
        return real(lhs, rhs, groups, call, attempts)

    # JAX keeps traces by recipe. One without the spy must not be found.
    spied = dataclasses.replace(recipe, name=f"{recipe.name}, spied")

    def dot(x, w):
        return fp8.ragged_dot(x, w, jnp.array(sizes), recipe=spied)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_api, "multiply", spy)
        jax.block_until_ready(jax.jit(lambda x, w, g: cotangents(dot, x, w, g))(x, w, g))
        jax.effects_barrier()
    return seen


@functools.partial(jax.jit, static_argnums=(0, 1))
def operands_alone(recipe, sizes, x, w, g):
    """The same of each group by `fp8.quantize`: of its rows, and of its matrix. In one program."""
    ends = np.cumsum(sizes)
    groups = []
    for e, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        x_e, g_e = x[end - size : end], g[end - size : end]
        casts = (
            (x_e, recipe.fprop.lhs, (0,)),
            (g_e, recipe.dgrad.lhs, (0,)),
            (x_e, recipe.wgrad.lhs, (1,)),
            (g_e, recipe.wgrad.rhs, (1,)),
            (w[e], recipe.fprop.rhs, (1,)),
            (w[e], recipe.dgrad.rhs, (0,)),
        )
        alone = [cast_alone(*each) for each in casts] if size else []
        groups.append([(q.values, q.scale, expanded(q.scale, q)) for q in alone])
    return groups


@jax.jit
def expanded_tiles(stack):
    """The scale of each value of a stack of tiles."""
    return jax.vmap(lambda tile: expanded(tile.scale, tile))(stack)


def expanded(scale, q):
    scale = q.granularity.expand(scale.astype(jnp.float32), q.shape)
    return jnp.broadcast_to(scale, q.shape)


@pytest.mark.parametrize(
    "name",
    [
        *("current", "blockwise"),
        *(pytest.param(name, marks=SLOW) for name in ("rowwise", "float32_scales", "mxfp8")),
    ],
)
def test_payloads_and_scales_are_those_of_each_group_alone(name):
    recipe, sizes = RECIPES[name], SIZES["one_row"]
    x, w, g = arrays(1)
    (x_f, w_f, groups), (g_d, w_d, _), (x_w, g_w, _) = operands_of(
        recipe, sizes, poisoned(x, sizes), w, poisoned(g, sizes)
    )
    in_rows = [(stack, expanded_tiles(stack)) for stack in (x_f, g_d, x_w, g_w)]
    for e, alone in enumerate(operands_alone(recipe, tuple(sizes), x, w, g)):
        first, count = (int(each[e]) for each in (groups.first_tile, groups.tiles))
        if not alone:
            continue
        for (stack, scales), (values, _, scale) in zip(in_rows, alone[:4], strict=True):
            tiles = slice(first, first + count)
            for mine, other in ((bits(stack.values), bits(values)), (scales, scale)):
                mine = np.asarray(mine)[tiles].reshape(-1, stack.values.shape[-1])
                np.testing.assert_array_equal(mine[: sizes[e]], other)
        for stack, (values, scale, _) in zip((w_f, w_d), alone[4:], strict=True):
            np.testing.assert_array_equal(bits(stack.values)[e], bits(values))
            np.testing.assert_array_equal(
                np.asarray(stack.scale[e], np.float32), np.asarray(scale, np.float32)
            )


def cast_alone(x, quantizer, kept):
    rule = quantizer.rule
    return fp8.quantize(
        x, quantizer.value_format, quantizer.granularity.for_matmul(kept, 2),
        power_of_two=rule.power_of_two, scale_format=rule.scale_format,
    )  # fmt: skip


def bits(values):
    return np.asarray(values).view(np.uint8)


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


def test_the_bias_of_each_group():
    x, w, g = arrays(7)
    sizes = SIZES["some_empty"]
    bias = np.random.default_rng(9).standard_normal((E, N)).astype(jnp.bfloat16)
    ids, filled = np.repeat(np.arange(E), sizes), sum(sizes)

    @jax.jit
    def run(bias):
        ragged = functools.partial(fp8.ragged_dot, x, w, sizes, recipe=RECIPES["blockwise"])
        y, pull = jax.vjp(lambda bias: ragged(bias=bias), bias)
        return y, pull(g)[0], ragged()[:filled] + bias[ids]

    y, gradient, added = run(bias)
    np.testing.assert_array_equal(np.asarray(y[:filled]), np.asarray(added))
    assert not np.asarray(y[filled:], np.float32).any()
    want = np.zeros((E, N))
    np.add.at(want, ids, np.asarray(g[:filled], np.float64))
    close(gradient, want)


def test_tiles_of_two_lengths():
    """Blocks of rows have whole tiles of 32 rows, of fprop, and of 48 rows, of wgrad."""
    tiles = lambda *sides: fp8.quantizers.Current(format=fp8.E4M3, granularity=fp8.PerBlock(sides))
    recipe = Recipe(
        name="two lengths",
        fprop=Operands(lhs=tiles(32, 32), rhs=tiles(1, 32)),
        dgrad=Operands(lhs=tiles(1, 32), rhs=tiles(1, 32)),
        wgrad=Operands(lhs=tiles(1, 48), rhs=tiles(1, 48)),
    )
    assert recipe.whole_tiles == 96
    x, w, g = arrays(11)
    sizes = SIZES["some_empty"]
    x, g = clear(x, sizes, 0), clear(g, sizes, 0)
    got, want = (
        with_gradients(function, x, w, g, np.int32(sizes), recipe)
        for function in (fp8.ragged_dot, one_by_one)
    )
    for mine, other in zip(got, want, strict=True):
        close(mine, other, bound=5e-3)


def test_the_gradient_of_a_bias_in_bfloat16_is_summed_in_float32():
    x, w, g = arrays(12, jnp.float32)
    g = np.round(1e5 * g)  # integers have one sum, which bfloat16 cannot count up to
    bias, sizes = np.zeros((E, N), jnp.bfloat16), SIZES["full"]
    biased = lambda bias: fp8.ragged_dot(x, w, sizes, recipe=RECIPES["current"], bias=bias)
    got = jax.jit(lambda bias: jax.vjp(biased, bias)[1](g)[0])(bias)
    want = np.asarray(g, np.float64).reshape(E, -1, N).sum(1)
    np.testing.assert_array_equal(got, want.astype(np.float32).astype(jnp.bfloat16))


def test_without_quantizers_float64_stays():
    given, sizes = arrays(13, jnp.float32), SIZES["full"]

    def batched(x, w):
        return jax.lax.batch_matmul(x.reshape(E, -1, K), w).reshape(T, N)

    def ragged(x, w):
        return fp8.ragged_dot(x, w, jnp.array(sizes), recipe=RECIPES["identity"])

    with jax.enable_x64(True):
        x, w, g = (jnp.asarray(np.asarray(each, np.float64)) for each in given)
        got, want = jax.jit(lambda *a: [cotangents(f, *a) for f in (ragged, batched)])(x, w, g)
    for mine, other in zip(got, want, strict=True):
        assert mine.dtype == jnp.float64
        np.testing.assert_allclose(mine, other, rtol=1e-11, atol=1e-11)
