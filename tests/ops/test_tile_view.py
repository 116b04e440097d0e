"""dot_general, einsum and dot in tiles, any axes and shapes.

On numbers that FP8 holds exactly they are the exact product.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jaxfp8 as fp8
from jaxfp8._geometry import TrainingGeometry
from jaxfp8.matmul._tile_view import view_for
from jaxfp8.quantizers import Current


def tiny(T, *, square=True, **fields):
    """A recipe in tiles so small that a few values fill several."""
    x, w = (
        Current(format=fp8.E4M3, granularity=fp8.PerBlock(tile), **fields)
        for tile in ((1, T), (T, T))
    )
    w = w if square else x
    return fp8.Recipe(
        name="tiny",
        fprop=fp8.recipes.Operands(lhs=x, rhs=w),
        dgrad=fp8.recipes.Operands(lhs=x, rhs=w),
        wgrad=fp8.recipes.Operands(lhs=x, rhs=x),
    )


# Scales are powers of two, so small integers are cast exactly, and so are their products added.
RECIPES = {
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
    "square 4": tiny(4, power_of_two=True),
    "E8M0, 4": tiny(4, square=False, scale_format=fp8.E8M0),
    "E8M0, square 3": tiny(3, scale_format=fp8.E8M0),
}
integers = lambda seed, shape: np.asarray(
    np.random.default_rng(seed).integers(-8, 9, shape), np.float32
)


def check(function, reference, *shapes):
    """Values and gradients are equal, bit for bit."""
    check_all([""], [(function, reference)], [shapes])


def check_all(names, pairs, shapes):
    """The same of several pairs of a function and its reference, in one program."""
    operands = []
    for (_, reference), both in zip(pairs, shapes, strict=True):
        x, w = (integers(seed, shape) for seed, shape in enumerate(both))
        operands.append((x, w, integers(2, jax.eval_shape(reference, x, w).shape)))

    @jax.jit
    def run(operands):
        found = []
        for pair, (x, w, g) in zip(pairs, operands, strict=True):
            (y, backward), (want, exact) = (jax.vjp(f, x, w) for f in pair)
            found.append(((y, *backward(g)), (want, *exact(g))))
        return found

    for name, (mine, theirs) in zip(names, run(operands), strict=True):
        for got, want in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(got, want, name, strict=True)


def pair_of_dot_general(recipe, dimension_numbers):
    return (
        functools.partial(fp8.dot_general, dimension_numbers=dimension_numbers, recipe=recipe),
        functools.partial(
            lax.dot_general, dimension_numbers=dimension_numbers, precision="highest"
        ),
    )


def check_dot_general(recipe, x_shape, w_shape, dimension_numbers):
    check(*pair_of_dot_general(recipe, dimension_numbers), x_shape, w_shape)


@st.composite
def geometries(draw):
    """Shapes and dimension numbers of up to two batch, two contracted and two kept axes on each
    side, in any order.
    """
    size = st.integers(1, 9)
    batch, contracted = (draw(st.lists(size, max_size=2)) for _ in range(2))
    shapes, groups = [], []
    for _ in range(2):
        kept = draw(st.lists(size, max_size=2))
        sizes = [*batch, *contracted, *kept]
        order = draw(st.permutations(range(len(sizes))))
        shapes.append(tuple(sizes[i] for i in order))
        groups.append([order.index(i) for i in range(len(batch) + len(contracted))])
    split = len(batch)
    pairs = draw(st.permutations(range(split, split + len(contracted))))
    of = lambda axes: tuple(tuple(group[i] for i in axes) for group in groups)
    return *shapes, (of(pairs), of(range(split)))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "recipe",
    [
        "square 4",
        *(pytest.param(n, marks=SLOW) for n in ("blockwise", "mxfp8", "E8M0, 4", "E8M0, square 3")),
    ],
)
@settings(max_examples=5)
@given(case=geometries())
def test_any_axes(recipe, case):
    check_dot_general(RECIPES[recipe], *case)


NAMED = {
    "vectors": ((7,), (7,), (((0,), (0,)), ((), ()))),
    "matrix and vector": ((3, 9), (9,), (((1,), (0,)), ((), ()))),
    "vector and matrix": ((9,), (9, 5), (((0,), (0,)), ((), ()))),
    "outer product": ((6,), (5,), (((), ()), ((), ()))),
    "outer product of matrices": ((2, 3), (5, 2), (((), ()), ((), ()))),
    "scalars": ((), (), (((), ()), ((), ()))),
    "scalar and matrix": ((), (3, 5), (((), ()), ((), ()))),
    "batch only": ((5,), (5,), (((), ()), ((0,), (0,)))),
    "heads": ((2, 6, 3, 5), (3, 5, 7), (((2, 3), (0, 1)), ((), ()))),
    "heads, crossed": ((2, 6, 3, 5), (5, 3, 7), (((2, 3), (1, 0)), ((), ()))),
    "batch last": ((6, 5, 3), (5, 7, 3), (((1,), (0,)), ((2,), (2,)))),
    "no rows": ((0, 5), (5, 7), (((1,), (0,)), ((), ()))),
    "no columns": ((3, 5), (5, 0), (((1,), (0,)), ((), ()))),
    "nothing contracted": ((3, 0), (0, 7), (((1,), (0,)), ((), ()))),
    "no batch": ((0, 3, 5), (0, 5, 7), (((2,), (1,)), ((0,), (0,)))),
    "axes of 1": ((1, 1, 9), (9, 1), (((2,), (0,)), ((), ()))),
}


# Between them each kind of axis is missing once, and each is there twice.
FEW = (
    "vectors",
    "outer product of matrices",
    "scalar and matrix",
    "batch only",
    "heads, crossed",
    "batch last",
    "no rows",
    "nothing contracted",
    "axes of 1",
)


def test_a_few_cases():
    """In one program."""
    pairs = [pair_of_dot_general(RECIPES["square 4"], NAMED[case][2]) for case in FEW]
    check_all(FEW, pairs, [NAMED[case][:2] for case in FEW])


@SLOW
@pytest.mark.parametrize("case", NAMED)
def test_named_cases(case):
    check_dot_general(RECIPES["square 4"], *NAMED[case])


@SLOW
@pytest.mark.parametrize(
    "recipe", [tiny(4, power_of_two=False), RECIPES["mxfp8"]], ids=["float32 scales", "mxfp8"]
)
@pytest.mark.parametrize("case", NAMED)
def test_named_cases_with_other_scales(case, recipe):
    """Float32 scales are no powers of two: what they give is close, and of the right shape."""
    if recipe.fprop.lhs.rule.exact:
        check_dot_general(recipe, *NAMED[case])
        return
    x_shape, w_shape, dimension_numbers = NAMED[case]
    x, w = integers(0, x_shape), integers(1, w_shape)
    y = fp8.dot_general(x, w, dimension_numbers, recipe=recipe)
    want = lax.dot_general(x, w, dimension_numbers)
    assert y.shape == want.shape
    np.testing.assert_allclose(y, want, rtol=0.1, atol=0.1 * math.sqrt(max(x.size, 1)) * 8)


EINSUMS = {
    "bshk,hkd->bsd": ((2, 6, 3, 5), (3, 5, 7)),
    "bshk,bthk->bhst": ((2, 5, 3, 4), (2, 6, 3, 4)),
    "ij,ij->": ((5, 6), (5, 6)),
    "ba,cb->ac": ((5, 6), (7, 5)),
}
OTHER_EINSUMS = {
    "bsd,dhk->bshk": ((2, 6, 5), (5, 3, 4)),
    "bhst,bthk->bshk": ((2, 3, 5, 6), (2, 6, 3, 4)),
    "ebd,edf->ebf": ((3, 4, 5), (3, 5, 6)),
    "i,j->ij": ((5,), (6,)),
    "ij,j->i": ((5, 6), (6,)),
}


def pair_of_einsum(equation):
    return (
        functools.partial(fp8.einsum, equation, recipe=RECIPES["square 4"]),
        functools.partial(jnp.einsum, equation, precision="highest"),
    )


def test_einsums():
    """In one program."""
    check_all(EINSUMS, [pair_of_einsum(equation) for equation in EINSUMS], EINSUMS.values())


@SLOW
@pytest.mark.parametrize("equation", OTHER_EINSUMS)
def test_other_einsums(equation):
    check(*pair_of_einsum(equation), *OTHER_EINSUMS[equation])


@pytest.mark.parametrize(
    "recipe", ["square 4", *(pytest.param(name, marks=SLOW) for name in ("blockwise", "mxfp8"))]
)
def test_forms_of_one_product_are_equal(recipe):
    """einsum, dot and dot_general quantize the same tiles, of any numbers."""
    recipe = RECIPES[recipe]
    x, w, g = (
        np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
        for seed, shape in enumerate(((2, 9, 40), (40, 36), (2, 9, 36)))
    )

    def products(form):
        y, backward = jax.vjp(form, x, w)
        return y, *backward(g)

    forms = (
        lambda x, w: fp8.dot(x, w, recipe=recipe),
        lambda x, w: fp8.einsum("bsd,df->bsf", x, w, recipe=recipe),
        lambda x, w: fp8.dot_general(x, w, (((2,), (0,)), ((), ())), recipe=recipe),
        lambda x, w: fp8.dot_general(x, w.T, (((2,), (1,)), ((), ())), recipe=recipe),
        lambda x, w: fp8.dot_general(
            x.transpose(2, 0, 1), w, (((0,), (0,)), ((), ())), recipe=recipe
        ),
    )
    want, *others = jax.jit(lambda: [products(form) for form in forms])()
    for other in others:
        for got, exact in zip(other, want, strict=True):
            np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)


# lhs, rhs, dimension numbers; the groups of the view for tiles of 128: batch, m, k, n
VIEWS = {
    "matrices": ((8, 16), (16, 4), (((1,), (0,)), ((), ())), ((), (8,), (16,), (4,))),
    "tokens stay": (
        (8, 512, 256),
        (256, 768),
        (((2,), (0,)), ((), ())),
        ((), (8, 512), (256,), (768,)),
    ),
    "few tokens are merged": (
        (8, 100, 256),
        (256, 768),
        (((2,), (0,)), ((), ())),
        ((), (800,), (256,), (768,)),
    ),
    "heads of 64 are merged": (
        (8, 512, 12, 64),
        (12, 64, 768),
        (((2, 3), (0, 1)), ((), ())),
        ((), (8, 512), (768,), (768,)),
    ),
    "heads of 128 stay": (
        (8, 512, 6, 128),
        (6, 128, 768),
        (((2, 3), (0, 1)), ((), ())),
        ((), (8, 512), (6, 128), (768,)),
    ),
    "an empty group is an axis of 1": (
        (256,),
        (256, 3, 5),
        (((0,), (0,)), ((), ())),
        ((), (1,), (256,), (15,)),
    ),
    "batch stays": (
        (3, 5, 256),
        (3, 256, 7),
        (((2,), (1,)), ((0,), (0,))),
        ((3,), (5,), (256,), (7,)),
    ),
}


def view_of(lhs, rhs, dimension_numbers):
    geometry = TrainingGeometry.of(dimension_numbers, len(lhs), len(rhs))
    return view_for(128, geometry, (lhs, rhs))


def sizes(view, lhs, rhs):
    """Of the axes of each group of the view: batch, m, k, n."""
    fprop = view.geometry.fprop
    batch, m, k = fprop.lhs.shape(jax.eval_shape(view.of_x, np.zeros(lhs)).shape)
    of_w = fprop.rhs.shape(jax.eval_shape(view.of_w, np.zeros(rhs)).shape)
    assert (of_w[0], of_w[2]) == (batch, k)
    return batch, m, k, of_w[1]


@pytest.mark.parametrize("case", VIEWS)
def test_groups(case):
    lhs, rhs, dimension_numbers, merged = VIEWS[case]
    view = view_of(lhs, rhs, dimension_numbers)
    assert sizes(view, lhs, rhs) == merged
    x, w = (
        jax.eval_shape(of, np.zeros(shape)) for of, shape in ((view.of_x, lhs), (view.of_w, rhs))
    )
    assert (x.shape, w.shape) == (sum(merged[:3], ()), (*merged[0], *merged[2], *merged[3]))


def test_an_axis_that_is_merged_into_another_cannot_be_split():
    view = view_of((8, 100, 256), (256, 12, 64), (((2,), (0,)), ((), ())))
    assert sizes(view, (8, 100, 256), (256, 12, 64)) == ((), (800,), (256,), (768,))
    assert [view.of_x.axis(0), view.of_x.axis(2)] == [0, 1]
    assert [view.of_w.axis(0), view.of_w.axis(1)] == [0, 1]
    for axis_of, axis in ((view.of_x.axis, 1), (view.of_w.axis, 2)):
        with pytest.raises(
            ValueError, match=f"axis {axis}, along which an operand is split, is merged into"
        ):
            axis_of(axis)
    assert view.out_sharding(jax.P("data", None, "tp")) == jax.P("data", "tp")
    with pytest.raises(ValueError, match="splits an axis"):
        view.out_sharding(jax.P(None, "data"))
