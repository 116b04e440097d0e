"""Sizes of groups, and shapes: what is accepted, what is clamped, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged_cases import RECIPES, SIZES, E, K, N, arrays, cotangents

import jaxfp8 as fp8


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


def test_no_rows():
    x, w, _ = arrays()
    y, dx, dw = cotangents(
        lambda x, w: fp8.ragged_dot(x, w, jnp.zeros(E, jnp.int32), recipe=RECIPES["blockwise"]),
        x[:0], w, jnp.zeros((0, N), jnp.bfloat16),
    )  # fmt: skip
    assert y.shape == (0, N)
    assert dx.shape == (0, K)
    assert not np.asarray(dw, np.float32).any()


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
