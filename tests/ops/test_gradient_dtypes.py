"""A gradient has the dtype of its tensor and is rounded to it once, whatever dtype y has.

All values are integers with exact FP8 copies, and float32 holds every sum. Only the last step
rounds, and NumPy computes it.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import jaxfp8 as fp8

M, K, N = 24, 32, 40
RECIPES = {
    "delayed": fp8.recipes.delayed(),
    "current": fp8.recipes.current(),
    "rowwise": fp8.recipes.rowwise(),
    "rowwise_hp_wgrad": fp8.recipes.rowwise(high_precision_wgrad=True),
    "blockwise": fp8.recipes.blockwise(),
    "mxfp8": fp8.recipes.mxfp8(),
    "static": fp8.recipes.static(x_scale=2.0**-6, w_scale=2.0**-6, g_scale=2.0**-13),
}
# Of x, w and y.
DTYPES = [
    ("float32", "float32", "bfloat16"),  # a gradient in y's dtype has too few bits
    ("bfloat16", "bfloat16", "float32"),  # a gradient in y's dtype has too many
    ("bfloat16", "float32", "bfloat16"),
    ("float32", "bfloat16", "float16"),
]


def integers(seed, *shape):
    """From 1 to 7, with a 7 in each row and column.

    7 is 1.75 times a power of two, as 448 and 57344 are. So all scales are powers of two.
    """
    values = np.random.default_rng(seed).integers(1, 8, shape).astype(np.float64)
    values[0], values[:, 0] = 7, 7
    return values


X, W, G = integers(0, M, K), integers(1, K, N), integers(2, M, N)
WANTED = {"dx": G @ W.T, "dw": X.T @ G}


def gradients(dot, state, dtypes):
    x, w = (jnp.asarray(value, dtype) for value, dtype in zip((X, W), dtypes, strict=False))

    def loss(operands, state):
        y = dot(*operands, state)
        return jnp.sum(y * G.astype(y.dtype), dtype=jnp.float32)

    step = lambda *args: fp8.value_and_grad(loss)(*args)[1]
    # XLA may drop a rounding to bfloat16 and back, which would hide one that is too many.
    step = jax.jit(step, compiler_options={"xla_allow_excess_precision": False})
    return dict(zip(WANTED, step((x, w), state), strict=True))


# By default every dtype for matmuls of tensors, of tiles, and in high precision; the other recipes
# differ from these in quantizers, which see no dtype of y.
MIXED = {
    "current": DTYPES[:2],
    "blockwise": DTYPES[2:],
    "rowwise_hp_wgrad": DTYPES[1:3],
    "delayed": DTYPES[:1],
}
CASES = [
    pytest.param(name, dtypes, marks=() if quick else (pytest.mark.slow,))
    for name in RECIPES
    for dtypes in DTYPES
    for quick in [dtypes in MIXED.get(name, ())]
]


@pytest.mark.parametrize(("name", "dtypes"), CASES, ids=str)
def test_is_rounded_once(name, dtypes):
    how = {"recipe": RECIPES[name], "preferred_element_type": dtypes[2]}
    dot = lambda x, w, state: fp8.dot(x, w, state=state, **how)
    got = gradients(dot, fp8.init_state(RECIPES[name]), dtypes)
    for (tensor, want), dtype in zip(WANTED.items(), dtypes, strict=False):
        assert got[tensor].dtype == dtype, tensor
        np.testing.assert_array_equal(got[tensor], want.astype(dtype), err_msg=tensor)


def test_bfloat16_would_show():
    for want in WANTED.values():
        assert (want.astype(ml_dtypes.bfloat16) != want).mean() > 0.5


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_identity_rounds_as_jax_does(dtypes):
    """JAX itself may round to y's dtype on the way."""
    how = {"preferred_element_type": dtypes[2]}
    jaxs = lambda x, w, state: lax.dot_general(x, w, (((1,), (0,)), ((), ())), **how)
    mine = lambda x, w, state: fp8.dot(x, w, recipe=fp8.recipes.identity(), **how)
    got, want = gradients(mine, (), dtypes), gradients(jaxs, (), dtypes)
    for tensor, dtype in zip(WANTED, dtypes, strict=False):
        assert got[tensor].dtype == dtype, tensor
        np.testing.assert_array_equal(got[tensor], want[tensor], err_msg=tensor)


@pytest.mark.parametrize("dtypes", DTYPES[:2], ids=str)
def test_identity_of_groups_rounds_once(dtypes):
    """As the docstring of `ragged_dot` promises. JAX's own may round to y's dtype on the way."""
    how = {"recipe": fp8.recipes.identity(), "preferred_element_type": dtypes[2]}
    ragged = lambda x, w, state: fp8.ragged_dot(x, w[None], np.array([M]), **how)
    got = gradients(ragged, (), dtypes)
    for (tensor, want), dtype in zip(WANTED.items(), dtypes, strict=False):
        assert got[tensor].dtype == dtype, tensor
        np.testing.assert_array_equal(got[tensor], want.astype(dtype), err_msg=tensor)


@pytest.mark.parametrize("name", ["current", "blockwise", "identity"])
@pytest.mark.parametrize("of_x", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("of_w", ["bfloat16", "float16"])
def test_a_result_has_the_dtype_that_jax_gives_it(of_x, of_w, name):
    """`dot_general` of lax takes the larger range, and `einsum` of jnp promotes."""
    how = {"recipe": RECIPES.get(name, fp8.recipes.identity())}
    x, w = jax.ShapeDtypeStruct((32, 128), of_x), jax.ShapeDtypeStruct((128, 32), of_w)
    matrices, sizes = jax.ShapeDtypeStruct((1, *w.shape), of_w), np.array([32])
    numbers = (((1,), (0,)), ((), ()))
    dtype = lambda f, *given: jax.eval_shape(f, *given).dtype
    wanted = dtype(lambda x, w: lax.dot_general(x, w, numbers), x, w)
    assert dtype(lambda x, w: fp8.dot(x, w, **how), x, w) == wanted
    assert dtype(lambda x, w: fp8.dot_general(x, w, numbers, **how), x, w) == wanted
    assert dtype(lambda x, w: lax.ragged_dot(x, w, sizes), x, matrices) == wanted
    assert dtype(lambda x, w: fp8.ragged_dot(x, w, sizes, **how), x, matrices) == wanted
    with jax.numpy_dtype_promotion("standard"):
        wanted = dtype(lambda x, w: jnp.einsum("mk,kn", x, w), x, w)
        assert dtype(lambda x, w: fp8.einsum("mk,kn->mn", x, w, **how), x, w) == wanted


def test_a_scaled_matmul_has_the_dtype_that_jax_gives_it():
    x, w = (jnp.ones((32, 32), dtype) for dtype in ("bfloat16", "float16"))
    y = fp8.scaled_matmul(fp8.quantize(x, fp8.E4M3), fp8.quantize(w, fp8.E4M3))
    assert y.dtype == jnp.bfloat16
