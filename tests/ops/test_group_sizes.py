"""Sizes of groups, and shapes: what is accepted, what is clamped, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ragged_cases import RECIPES, SIZES, E, K, N, arrays, cotangents

import jaxfp8 as fp8


def test_sizes_that_only_the_device_knows_are_clamped():
    """And nothing is compiled again when they change."""
    x, w, _ = arrays(6)
    compiled = jax.jit(lambda x, w, s: fp8.ragged_dot(x, w, s, recipe=RECIPES["current"]))
    got = compiled(x, w, np.array([-5, 150, 2**31 - 1, 7, -(2**31)], np.int32))
    want = compiled(x, w, np.int32([0, 150, 50, 0, 0]))
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert np.asarray(want, np.float32).any(axis=1).all()
    for sizes in SIZES.values():
        compiled(x, w, np.int32(sizes))
    assert compiled._cache_size() == 1


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
    x, w, g = arrays()
    ragged = lambda x, w: fp8.ragged_dot(x, w, np.zeros(E, int), recipe=RECIPES["blockwise"])
    y, dx, dw = jax.jit(lambda *given: cotangents(ragged, *given))(x[:0], w, g[:0])
    assert y.shape == (0, N)
    assert dx.shape == (0, K)
    assert not np.asarray(dw, np.float32).any()


@pytest.mark.parametrize(
    "dtype",
    [
        *("int8", "uint8", "uint32"),
        *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("int16", "uint16")),
    ],
)
def test_sizes_of_any_integer_dtype(dtype):
    """T is larger than any int8 and uint8."""
    x, w = np.ones((300, K), np.float32), np.ones((2, K, N), np.float32)
    w[1], bias = 3, np.broadcast_to(np.float32([[1], [2]]), (2, N))
    sizes = np.array([127, 100], dtype)
    run = lambda sizes: fp8.ragged_dot(x, w, sizes, recipe=RECIPES["current"], bias=bias)
    want = np.repeat([K + 1.0, 3 * K + 2.0, 0.0], [127, 100, 73])
    concrete = jnp.asarray(sizes)
    # Sizes of NumPy, of jax, and traced ones.
    for y in jax.jit(lambda traced: (run(sizes), run(concrete), run(traced)))(sizes):
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
