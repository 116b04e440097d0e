"""Each matmul of experts alone: what it sends in FP8, and the second cast for wgrad."""

import functools

import jax
import jax.numpy as jnp
import moe_cases as cases
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import RECIPES, E, F, T, assert_same, distance

import jaxfp8 as fp8

SLOW = pytest.mark.slow


@functools.partial(jax.jit, static_argnums=0)
def row_and_column_casts(name, x):
    """The column copies that wgrad reads, from the row copy and from high precision.

    Each with its scales, of the shape of the values.
    """
    quantizer = RECIPES[name].wgrad.lhs
    options = {"power_of_two": True, "scale_format": quantizer.scale_format}
    side = quantizer.granularity.tile[1]
    row, column = fp8.PerBlock((1, side)), fp8.PerBlock((side, 1))
    if quantizer.scale_format is not None:
        options = {"scale_format": quantizer.scale_format}
    rows = fp8.quantize(x, quantizer.format, row, **options)
    again = fp8.quantize(rows.dequantize(jnp.bfloat16), quantizer.format, column, **options)
    direct = fp8.quantize(x, quantizer.format, column, **options)
    return [
        (q.values, q.granularity.expand(q.scale.astype(jnp.float32), q.shape))
        for q in (rows, again, direct)
    ]


def wide(cast):
    values, scale = (np.asarray(each, np.float64) for each in cast)
    scale = np.broadcast_to(scale, values.shape)
    return values * scale, scale


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31 - 1), spread=st.sampled_from([0.0, 2.0, 8.0, 30.0]))
@pytest.mark.parametrize("name", ["blockwise", "mxfp8"])
def test_the_second_cast_changes_exponents_only(name, seed, spread):
    """Values that are normal in both copies are equal. Others differ by a step of a subnormal."""
    normal = np.random.default_rng(seed).standard_normal
    power = spread * normal((256, 1)) + spread * normal((1, 128)) / 2
    x = np.clip(normal((256, 128)) * np.exp2(power), -1e30, 1e30).astype(np.float32)
    casts = row_and_column_casts(name, np.where(np.abs(x) < 2.0**-126, 0, x))
    (of_rows, row_scale), (got, scale), (want, want_scale) = map(wide, casts)
    assert np.isfinite(got).all()
    # Nothing is rounded, except below 2^-6 of a scale, or below the smallest bfloat16.
    exact = (np.abs(of_rows) >= 2.0**-6 * scale) | (of_rows == 0)
    np.testing.assert_array_equal(got[exact], of_rows[exact])
    assert (np.abs(got - of_rows) <= 2.0**-10 * scale + 2.0**-133).all()
    bound = 2.0**-10 * (row_scale + scale + want_scale) + 2.0**-133
    assert (np.abs(got - want) <= bound).all()
    same = np.abs(want) >= 2.0**-6 * np.maximum(np.maximum(scale, want_scale), row_scale)
    same &= scale == want_scale
    np.testing.assert_array_equal(got[same], want[same])


FIRST_IN_HIGH_PRECISION = fp8.Recipe(
    name="fprop_in_high_precision",
    fprop=fp8.recipes.Operands(lhs=fp8.quantizers.Identity(), rhs=fp8.quantizers.Identity()),
    dgrad=RECIPES["delayed"].dgrad,
    wgrad=RECIPES["delayed"].wgrad,
)


def dispatched(in_fp8, recipe, given, state):
    """y, the gradients of x and of w, and the next state, of the first matmul."""
    x, _, chosen, w, _, _ = given

    def loss(params, state):
        way = fp8.moe.route(chosen, experts=E)
        y = fp8.moe.dispatch_matmul(*params, way, recipe=recipe, state=state, sent_in_fp8=in_fp8)
        return jnp.sum(y.astype(jnp.float32) * jnp.cos(jnp.arange(y.shape[1]))[None]), y

    (_, y), (dx, dw), new = fp8.value_and_grad(loss, has_aux=True)((x, w), state)
    return y, dx, dw, new


def combined(in_fp8, recipe, given, state):
    """y, the gradients of h and of w, and the next state, of the last matmul."""
    _, _, chosen, _, w, g = given
    h = np.random.default_rng(1).standard_normal((2 * T, F)).astype(jnp.bfloat16)

    def loss(params, state):
        y = fp8.moe.matmul_combine(
            *params, fp8.moe.route(chosen, experts=E), recipe=recipe, state=state,
            gradient_sent_in_fp8=in_fp8,
        )  # fmt: skip
        return jnp.sum(y.astype(jnp.float32) * g.astype(jnp.float32)), y

    (_, y), (dh, dw), new = fp8.value_and_grad(loss, has_aux=True)((h, w), state)
    return y, dh, dw, new


E5M2, SQUARE = fp8.recipes.blockwise(gradient=fp8.E5M2), fp8.recipes.mxfp8(w_tile_dim=2)


@pytest.mark.parametrize(
    ("matmul", "recipe"),
    [
        (dispatched, FIRST_IN_HIGH_PRECISION),
        (combined, SQUARE),
        pytest.param(dispatched, SQUARE, marks=SLOW),
        pytest.param(combined, FIRST_IN_HIGH_PRECISION, marks=SLOW),
        pytest.param(combined, E5M2, marks=SLOW),
        pytest.param(dispatched, E5M2, marks=SLOW),
    ],
    ids=lambda value: getattr(value, "__name__", None) or value.name,
)
def test_other_recipes(matmul, recipe):
    @jax.jit  # one program, whose two halves share much
    def both(given, state):
        return [matmul(in_fp8, recipe, given, state) for in_fp8 in (True, False)]

    got, want = both(cases.arrays(), cases.states(recipe, True)[0])
    assert_same((got[:2], got[3]), (want[:2], want[3]))
    assert np.asarray(want[2], np.float32).any()
    assert distance(got[2], want[2]) <= 5e-4


def test_stochastic_rounding_of_sent_gradients_is_unbiased():
    recipe, random = RECIPES["blockwise"], np.random.default_rng(1)
    h, w, g = (
        random.standard_normal(size).astype(np.float32)
        for size in ((128, 32), (2, 32, 40), (64, 40))
    )
    chosen = np.argsort(random.standard_normal((64, 2)), axis=1).astype(np.int32)
    high = fp8.quantizers.Identity()
    exact_gradient = fp8.Recipe(
        name="exact_gradient",
        fprop=recipe.fprop,
        dgrad=fp8.recipes.Operands(lhs=high, rhs=recipe.dgrad.rhs),
        wgrad=fp8.recipes.Operands(lhs=recipe.wgrad.lhs, rhs=high),
    )

    @functools.partial(jax.jit, static_argnums=0)
    def dw(recipe, key, h, w, g, chosen):
        def loss(w):
            y = fp8.moe.matmul_combine(
                h, w, fp8.moe.route(chosen, experts=2), recipe=recipe, key=key,
                gradient_sent_in_fp8=key is not None,
            )  # fmt: skip
            return jnp.sum(y * g)

        return jax.grad(loss)(w)

    want = dw(exact_gradient, None, h, w, g, chosen)
    recipe = fp8.recipes.blockwise(gradient_rounding="stochastic")
    draws = [
        np.asarray(dw(recipe, np.array([0, seed], np.uint32), h, w, g, chosen), np.float64)
        for seed in range(32)
    ]
    assert distance(draws[0], draws[1]) > 1e-2
    assert distance(sum(draws) / 32, want) < 0.25 * distance(draws[0], want)
