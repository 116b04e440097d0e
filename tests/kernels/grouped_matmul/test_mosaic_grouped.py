"""Hopper's grouped matmul, interpreted without a GPU and with a search for races."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_cases import GEOMETRY, RECIPES, SIZES, operands
from interpreter import interpreted, needs_mosaic

import jaxfp8 as fp8
from jaxfp8.kernels.grouped_matmul import _api
from jaxfp8.kernels.grouped_matmul._groups import Groups
from jaxfp8.kernels.scaled_matmul._call import MatmulCall

pytestmark = needs_mosaic


def check(matmul, name, sizes, tokens, k=160, n=96, dtype=jnp.float32, **options):
    from jaxfp8.kernels.grouped_matmul import _mosaic

    call = MatmulCall(geometry=GEOMETRY[matmul], out_dtype=jnp.dtype(dtype), **options)
    given = operands(matmul, RECIPES[name], sizes, tokens, k, n)
    got = interpreted(lambda *given: _mosaic.grouped_matmul(*given, call), *given)
    want = _api._grouped_by_definition(*given, call)
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    got, want = (np.asarray(each.astype(jnp.float32)) for each in (got, want))
    bound = 1e-6 if dtype == jnp.float32 else 8e-3
    np.testing.assert_allclose(got, want, rtol=bound, atol=bound * (np.abs(want).max() + 1e-30))
    return got, want


# tests/silicon compares the bits of these two.
IN_SILICON = {("fprop", "float32_scales"), ("wgrad", "current")}


@pytest.mark.parametrize(
    ("matmul", "name"),
    [
        pytest.param(matmul, name, marks=[pytest.mark.slow] * ((matmul, name) in IN_SILICON))
        for matmul in GEOMETRY
        for name in RECIPES
    ],
)
def test_ragged_groups_of_every_recipe(matmul, name):
    sizes, tokens = SIZES["ragged"]
    got, _ = check(matmul, name, sizes, tokens)
    if matmul == "wgrad":
        assert not got[1].any()
    else:
        assert not got[sum(sizes) :].any()


# dgrad has the groups of fprop: rows of lhs.
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(
    "matmul", ["fprop", pytest.param("dgrad", marks=pytest.mark.slow), "wgrad"]
)
def test_all_kinds_of_groups(matmul, sizes):
    check(matmul, "blockwise", *SIZES[sizes], dtype=jnp.bfloat16)


@pytest.mark.parametrize("matmul", ["fprop"])
def test_fast_accumulation(matmul):
    check(matmul, "current", *SIZES["ragged"], dtype=jnp.bfloat16, fast_accumulation=True)


@pytest.mark.parametrize(
    "name", ["blockwise", "mxfp8", pytest.param("rowwise", marks=pytest.mark.slow), "current"]
)
def test_ragged_dot_by_kernels_forward_and_backward(name):
    """Casts read rows in their places, and all three matmuls are those of Hopper."""
    recipe, (sizes, tokens) = RECIPES[name], SIZES["ragged"]
    keys = jax.random.split(jax.random.key(2), 3)
    x, g = (
        jax.random.normal(key, (tokens, size))
        for key, size in zip(keys[:2], (192, 64), strict=True)
    )
    x, g = (each.at[sum(sizes) :].set(jnp.nan).astype(jnp.bfloat16) for each in (x, g))
    w = jax.random.normal(keys[2], (len(sizes), 192, 64), jnp.bfloat16)

    def run(x, w, g, sizes, kernels):
        function = functools.partial(fp8.ragged_dot, recipe=recipe, kernels=kernels)
        y, pull = jax.vjp(lambda x, w: function(x, w, sizes), x, w)
        return y, *pull(g)

    sizes = jnp.array(sizes)
    got = interpreted(lambda *given: run(*given, fp8.Kernels("h200")), x, w, g, sizes)
    want = run(x, w, g, sizes, None)
    for mine, other in zip(got, want, strict=True):
        mine, other = (np.asarray(each.astype(jnp.float32)) for each in (mine, other))
        assert np.isfinite(mine).all()
        np.testing.assert_allclose(mine, other, rtol=8e-3, atol=4e-3 * np.abs(other).max())
    assert not np.asarray(got[2][1].astype(jnp.float32)).any()


def test_mapped_over_layers():
    """Under `jax.vmap` one kernel after the other runs, on arrays of each."""
    from jaxfp8.kernels.grouped_matmul import _mosaic

    sizes, tokens = SIZES["one"]
    call = MatmulCall(geometry=GEOMETRY["fprop"], out_dtype=jnp.dtype("float32"))
    lhs, rhs, groups = operands("fprop", RECIPES["blockwise"], sizes, tokens, 128, 64)
    run = functools.partial(_mosaic.grouped_matmul, call=call)
    both = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), rhs)
    got = interpreted(lambda a, b, c: jax.vmap(run, in_axes=(None, 0, None))(a, b, c), lhs, both,
                      groups)  # fmt: skip
    want = _api._grouped_by_definition(lhs, rhs, groups, call)
    for each in got:
        np.testing.assert_allclose(np.asarray(each), np.asarray(want), rtol=1e-5, atol=1e-5)


def test_what_the_kernel_cannot_do_is_said():
    from jaxfp8.kernels.grouped_matmul import _mosaic

    sizes, tokens = SIZES["one"]
    call = MatmulCall(geometry=GEOMETRY["fprop"], out_dtype=jnp.dtype("float32"))
    lhs, rhs, _ = operands("fprop", RECIPES["blockwise"], sizes, tokens, 128, 64)
    groups = Groups.of(jnp.array(sizes), tokens=tokens, tile=256)
    with pytest.raises(NotImplementedError, match="blocks of 128 rows"):
        _mosaic.grouped_matmul(lhs, rhs, groups, call)
    mixed = operands("fprop", RECIPES["current"], sizes, tokens, 128, 64)[0]
    groups = Groups.of(jnp.array(sizes), tokens=tokens, tile=128)
    with pytest.raises(NotImplementedError, match="tiles only with tiles"):
        _mosaic.grouped_matmul(mixed, rhs, groups, call)
