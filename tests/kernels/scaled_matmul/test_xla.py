"""Operands in every order of axes.

XLA:CPU chooses a matmul by layout, and may choose one that it cannot run.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8 as fp8

# name: (lhs shape, rhs shape, axes of the given lhs and rhs, shapes that they are reshaped to,
# dimension numbers)
LAYOUTS = {
    "fprop": ((64, 32), (32, 48), (0, 1), (0, 1), None, None, (((1,), (0,)), ((), ()))),
    "dgrad": ((64, 32), (48, 32), (0, 1), (0, 1), None, None, (((1,), (1,)), ((), ()))),
    "wgrad": ((32, 64), (32, 48), (0, 1), (0, 1), None, None, (((0,), (0,)), ((), ()))),
    "transposed lhs": ((32, 64), (32, 48), (1, 0), (0, 1), None, None, (((1,), (0,)), ((), ()))),
    "transposed lhs, new axis": (
        (32, 64),
        (32, 48),
        (1, 0),
        (0, 1),
        (64, 1, 32),
        None,
        (((2,), (0,)), ((), ())),
    ),
    "transposed lhs, split": (
        (32, 64),
        (32, 48),
        (1, 0),
        (0, 1),
        (4, 16, 32),
        None,
        (((2,), (0,)), ((), ())),
    ),
    "transposed lhs, batch": (
        (32, 64),
        (32, 48),
        (1, 0),
        (0, 1),
        (1, 64, 32),
        (1, 32, 48),
        (((2,), (1,)), ((0,),) * 2),
    ),
    "transposed rhs, new axis": (
        (64, 32),
        (48, 32),
        (0, 1),
        (1, 0),
        None,
        (32, 1, 48),
        (((1,), (0,)), ((), ())),
    ),
    "two contracted axes": (
        (4, 8, 64),
        (4, 8, 48),
        (0, 1, 2),
        (0, 1, 2),
        None,
        None,
        (((0, 1), (0, 1)), ((), ())),
    ),
    "batched wgrad": (
        (4, 8, 64),
        (4, 8, 48),
        (0, 1, 2),
        (0, 1, 2),
        None,
        None,
        (((1,), (1,)), ((0,), (0,))),
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_of_the_payloads_is_multiplied(name):
    l_shape, r_shape, l_axes, r_axes, l_new, r_new, dimension_numbers = LAYOUTS[name]
    draw = np.random.default_rng(0)
    given = [draw.normal(size=shape).astype(jnp.float8_e4m3fn) for shape in (l_shape, r_shape)]

    def arranged(lhs, rhs):
        for values, axes, shape in ((lhs, l_axes, l_new), (rhs, r_axes, r_new)):
            values = values.transpose(axes)
            yield values if shape is None else values.reshape(shape)

    @jax.jit
    def product(lhs, rhs):
        operands = [
            fp8.QuantizedTensor(values, jnp.float32(0.5), fp8.PerTensor(), jnp.dtype(jnp.float32))
            for values in arranged(lhs, rhs)
        ]
        return fp8.scaled_matmul(
            *operands, dimension_numbers=dimension_numbers, kernels=fp8.Kernels(matmuls="xla")
        )

    # NumPy: batch axes, other axes of lhs and of rhs.
    (l_sum, r_sum), (l_batch, r_batch) = dimension_numbers
    lhs, rhs = (values.astype(np.float64) for values in arranged(*given))
    l_names, r_names = [*"abc"[: lhs.ndim]], [*"xyz"[: rhs.ndim]]
    for i, j in zip((*l_sum, *l_batch), (*r_sum, *r_batch), strict=True):
        r_names[j] = l_names[i]
    batch, summed = ([l_names[i] for i in axes] for axes in (l_batch, l_sum))
    others = [n for n in (*l_names, *r_names) if n not in batch and n not in summed]
    subscripts = ",".join(map("".join, (l_names, r_names))) + "->" + "".join([*batch, *others])
    want = 0.25 * np.einsum(subscripts, lhs, rhs)
    np.testing.assert_allclose(product(*given), want, rtol=1e-5, atol=1e-5)


def test_wgrad_multiplies_bfloat16_on_cpus():
    """The fast routine: where it is not found, XLA converts the operands to float32 first."""
    if jax.default_backend() != "cpu":
        pytest.skip("about XLA:CPU")
    x, g = (jnp.ones((256, n), jnp.float8_e4m3fn) for n in (512, 1024))

    def wgrad(x, g):
        x, g = (
            fp8.QuantizedTensor(v, jnp.float32(1.0), fp8.PerTensor(), jnp.dtype(jnp.bfloat16))
            for v in (x, g)
        )
        return fp8.scaled_matmul(x, g, dimension_numbers=(((0,), (0,)), ((), ())))

    compiled = jax.jit(wgrad).lower(x, g).compile().as_text()
    assert "f32[512,256]" not in compiled
    assert "f32[256,1024]" not in compiled


@pytest.mark.parametrize("name", ["blockwise", "mxfp8", "current"])
def test_a_transposed_product(name):
    """Which XLA:CPU would fold into a matmul that it does not have."""
    recipe = fp8.recipes.get(name)
    x, w = jnp.ones((16, 64), jnp.bfloat16), jnp.ones((64, 32), jnp.bfloat16)
    y = jax.jit(lambda x, w: fp8.dot(x, w, recipe=recipe).T)(x, w)
    np.testing.assert_array_equal(y.astype(jnp.float32), np.full((32, 16), 64.0))
    gradient = jax.grad(
        lambda w: jnp.sum(fp8.einsum("bd,dn->nb", x, w, recipe=recipe).astype(jnp.float32))
    )
    np.testing.assert_array_equal(jax.jit(gradient)(w).astype(jnp.float32), np.full((64, 32), 16.0))
