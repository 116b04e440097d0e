"""`fp8.ragged_dot` against a loop over groups in NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
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


def seen_in_fp8(x, quantizer, kept):
    """x as a matmul reads it, in float64: cast by the rules of `oracle`."""
    if isinstance(quantizer, fp8.quantizers.Identity):
        return np.asarray(x, np.float64)
    form, rule = quantizer.value_format.name, quantizer.rule
    granularity = quantizer.granularity.for_matmul(kept, 2)
    if isinstance(granularity, fp8.PerBlock):
        how = "power_of_two" if rule.power_of_two else "float32"
        how = how if rule.scale_format is None else rule.scale_rounding
        codes, scale = oracle.quantize_tiles(x, form, granularity.tile, how)
        return oracle.dequantize_tiles(codes, form, scale, granularity.tile, np.float64)
    kept = None if granularity.in_one else kept
    codes, scale = oracle.quantize(x, form, kept, power_of_two=rule.power_of_two)
    return codes.view(oracle.DTYPE[form]).astype(np.float64) * scale


def matrices_of(recipe, w):
    """Each matrix as fprop and dgrad read it."""
    kinds = (recipe.fprop.rhs, (1,)), (recipe.dgrad.rhs, (0,))
    return [[seen_in_fp8(w_e, *kind) for kind in kinds] for w_e in w]


def one_by_one(recipe, x, matrices, g, sizes):
    """y, dx and dw of each group by itself."""
    y, dx = np.zeros(g.shape), np.zeros(x.shape)
    dw = np.zeros((len(matrices), x.shape[1], g.shape[1]))
    ends = np.cumsum(sizes)
    for e, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        if not size:
            continue
        rows, (w_of_fprop, w_of_dgrad) = slice(end - size, end), matrices[e]
        x_e, g_e, wgrad = x[rows], g[rows], recipe.wgrad
        y[rows] = seen_in_fp8(x_e, recipe.fprop.lhs, (0,)) @ w_of_fprop
        dx[rows] = seen_in_fp8(g_e, recipe.dgrad.lhs, (0,)) @ w_of_dgrad.T
        dw[e] = seen_in_fp8(x_e, wgrad.lhs, (1,)).T @ seen_in_fp8(g_e, wgrad.rhs, (1,))
    return y, dx, dw


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(recipe, x, w, g, sizes):
    """One program for all sizes: they change and nothing is compiled again."""
    return cotangents(lambda x, w: fp8.ragged_dot(x, w, sizes, recipe=recipe), x, w, g)


SLOW = pytest.mark.slow
FEW = {
    "others": ("some_empty", "none", "full"),
    "rowwise_high": ("some_empty",),  # other sizes are those of rowwise and of identity
    "float32_scales": (),  # they are those of a tile, whatever group it is of
}
DTYPES = {"rowwise": jnp.float32, "mxfp8": jnp.float32}  # else bfloat16


@functools.cache
def operands_for(name, seed):
    x, w, g = arrays(seed, DTYPES.get(name, jnp.bfloat16))
    return x, w, g, matrices_of(RECIPES[name], w)


def check_groups(name, sizes, seed):
    """Results and gradients are those of a loop over groups. Rows of no group are not read."""
    recipe, (x, w, g, matrices) = RECIPES[name], operands_for(name, seed)
    got = with_gradients(recipe, poisoned(x, sizes), w, poisoned(g, sizes), np.int32(sizes))
    for mine, other in zip(got, one_by_one(recipe, x, matrices, g, sizes), strict=True):
        close(mine, other, bound=1e-4 if name in DTYPES else 2e-2)
    filled, (y, dx, dw) = sum(sizes), (np.asarray(each, np.float32) for each in got)
    assert not y[filled:].any()
    assert not dx[filled:].any()
    assert not dw[np.array(sizes) == 0].any()


# A recipe is a program. Those of `DTYPES` get any sizes below.
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param(name, sizes, marks=() if quick else SLOW)
        for name in RECIPES
        if name != "delayed"
        for sizes in SIZES
        for quick in [name == "blockwise" or sizes in FEW.get(name, FEW["others"])]
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
    got, recipe = with_gradients(RECIPES[name], x, w, g, sizes), RECIPES[name]
    for mine, other in zip(
        got, one_by_one(recipe, x, matrices_of(recipe, w), g, sizes), strict=True
    ):
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
    x, w, g = arrays(8, k=192, n=64)  # a gathered row is whole boxes of 128 bytes
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
    x, w, g = arrays(11, jnp.float32)
    sizes = SIZES["some_empty"]
    x, g = clear(x, sizes, 0), clear(g, sizes, 0)
    got = with_gradients(recipe, x, w, g, np.int32(sizes))
    for mine, other in zip(
        got, one_by_one(recipe, x, matrices_of(recipe, w), g, sizes), strict=True
    ):
        close(mine, other, bound=1e-4)


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
