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
from ragged_cases import RECIPES, SIZES, E, K, N, T, arrays, close, cotangents, loop

import jaxfp8 as fp8
from jaxfp8.recipes import Operands, Recipe


def clear(x, sizes, value):
    """`x` with a value in the rows of no group."""
    return jnp.where((jnp.arange(len(x)) < sum(sizes))[:, None], x, jnp.array(value, x.dtype))


def poisoned(x, sizes):
    return clear(x, sizes, jnp.nan)


def sizes_of(groups):
    """Strategy: sizes of so many groups, which add up to T rows at most."""
    ends = st.lists(st.integers(0, T), min_size=groups, max_size=groups)
    return ends.map(lambda ends: np.diff([0, *sorted(ends)]).tolist())


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


@pytest.mark.parametrize("name", ["current", "rowwise", "blockwise", "float32_scales", "mxfp8"])
def test_payloads_and_scales_are_those_of_each_group_alone(name):
    recipe, sizes = RECIPES[name], SIZES["one_row"]
    x, w, g = arrays(1)
    (x_f, w_f, groups), (g_d, w_d, _), (x_w, g_w, _) = operands_of(
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
    got = cotangents(lambda x, w: fp8.ragged_dot(x, w, sizes, recipe=recipe), x, w, g)
    want = cotangents(lambda x, w: loop(x, w, sizes, recipe), x, w, g)
    for mine, other in zip(got, want, strict=True):
        close(mine, other, bound=5e-3)


def test_the_gradient_of_a_bias_in_bfloat16_is_summed_in_float32():
    x, w, g = arrays(12, jnp.float32)
    bias, sizes = jnp.zeros((E, N), jnp.bfloat16), SIZES["full"]
    biased = lambda bias: fp8.ragged_dot(x, w, sizes, recipe=RECIPES["current"], bias=bias)
    got = jax.vjp(biased, bias)[1](g)[0]
    want = np.asarray(g, np.float64).reshape(E, -1, N).sum(1)
    np.testing.assert_array_equal(got, jnp.asarray(want, jnp.float32).astype(jnp.bfloat16))


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
