"""The axes of matmuls, held against what `jax.lax.dot_general` and its gradient do."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax import lax

from jaxfp8._geometry import (
    Geometry,
    OperandAxes,
    TrainingGeometry,
    check_dimension_numbers,
    inverse_permutation,
)

CASES = {
    "matrices": ((2, 3), (3, 4), (((1,), (0,)), ((), ()))),
    "wgrad": ((3, 2), (3, 4), (((0,), (0,)), ((), ()))),
    "vectors": ((3,), (3,), (((0,), (0,)), ((), ()))),
    "outer": ((2, 3), (4,), (((), ()), ((), ()))),
    "batch": ((5, 2, 3), (5, 3, 4), (((2,), (1,)), ((0,), (0,)))),
    "batch inside": ((2, 3, 5), (3, 5, 4), (((-2,), (0,)), ((-1,), (1,)))),
    "batches swapped": ((5, 6, 2, 3), (6, 3, 5, 4), (((3,), (1,)), ((1, 0), (0, 2)))),
    "two contracted": ((7, 2, 3), (7, 3, 4), (((0, 2), (0, 1)), ((), ()))),
    "contracted in another order": ((3, 7, 2), (4, 7, 3), (((1, 0), (1, 2)), ((), ()))),
    "contracted in another order of w": ((3, 7, 2), (4, 7, 3), (((0, 1), (2, 1)), ((), ()))),
    "all kept": ((2, 8, 3), (4, 3, 9), (((2,), (1,)), ((), ()))),
}


def dot_general(x, w, dimension_numbers):
    """`lax.dot_general` in NumPy, where an operation is no program."""
    (x_contracted, w_contracted), (x_batch, w_batch) = dimension_numbers
    of_x = list(range(x.ndim))
    of_w = list(range(x.ndim, x.ndim + w.ndim))
    for i, j in zip((*x_contracted, *x_batch), (*w_contracted, *w_batch), strict=True):
        of_w[j] = of_x[i]
    out = [of_x[a] for a in x_batch]
    out += [of_x[a] for a in range(x.ndim) if a not in (*x_contracted, *x_batch)]
    out += [of_w[a] for a in range(w.ndim) if a not in (*w_contracted, *w_batch)]
    return np.einsum(x, of_x, w, of_w, out)


@functools.cache
def arrays_of(name):
    """Integers, whose products are exact: x, w, g, and of JAX y and the gradients of x and w."""
    x_shape, w_shape, dimension_numbers = CASES[name]
    dimension_numbers = check_dimension_numbers(x_shape, w_shape, dimension_numbers)
    product = functools.partial(lax.dot_general, dimension_numbers=dimension_numbers)
    random = np.random.default_rng(0)
    x, w = (np.float32(random.integers(-8, 9, shape)) for shape in (x_shape, w_shape))
    g = np.float32(random.integers(-8, 9, jax.eval_shape(product, x, w).shape))

    @jax.jit
    def run(x, w, g):
        y, vjp = jax.vjp(product, x, w)
        return y, *vjp(g)

    return x, w, g, *map(np.asarray, run(x, w, g)), dimension_numbers


@pytest.fixture(params=CASES)
def case(request):
    return arrays_of(request.param)


def test_the_result(case):
    x, w, _, y, *_, dimension_numbers = case
    geometry = Geometry.of(dimension_numbers, x.ndim, w.ndim)
    np.testing.assert_array_equal(dot_general(x, w, dimension_numbers), y, strict=True)
    assert geometry.out_shape(x.shape, w.shape) == y.shape
    for operand, axes, added in zip((x, w), geometry.sides, geometry.added_axes, strict=True):
        sides = [operand.shape[a] for a in axes.batch + axes.kept]
        expanded = np.expand_dims(np.ones(sides), added)
        assert expanded.ndim == y.ndim
        assert np.broadcast_shapes(expanded.shape, y.shape) == y.shape
    # As matrices [B, M, K] and [B, N, K] it is one einsum.
    a, b = (
        operand.transpose(axes.order).reshape(axes.matrix_shape(operand.shape))
        for operand, axes in zip((x, w), geometry.sides, strict=True)
    )
    np.testing.assert_array_equal(np.einsum("bmk,bnk->bmn", a, b).reshape(y.shape), y)


def test_other_orders_of_the_same_matmul(case):
    x, w, _, y, *_, dimension_numbers = case
    geometry = Geometry.of(dimension_numbers, x.ndim, w.ndim)
    in_order = dataclasses.replace(geometry, lhs=geometry.lhs.in_order)
    transposed = x.transpose(geometry.lhs.order)
    np.testing.assert_array_equal(dot_general(transposed, w, in_order.dimension_numbers), y)
    assert in_order.lhs.order == tuple(range(x.ndim))
    for pair, (left, right) in enumerate(zip(*dimension_numbers[0], strict=True)):
        other = geometry.with_innermost(pair)
        assert (other.lhs.contracted[-1], other.rhs.contracted[-1]) == (left, right)
        np.testing.assert_array_equal(dot_general(x, w, other.dimension_numbers), y)


def test_the_gradient(case):
    x, w, g, _, wanted_dx, wanted_dw, dimension_numbers = case
    training = TrainingGeometry.of(dimension_numbers, x.ndim, w.ndim)
    operands = {"x": x, "w": w, "g": g}
    dx = dot_general(g, w, training.dgrad.dimension_numbers)
    dw = dot_general(x, g, training.wgrad.dimension_numbers)
    np.testing.assert_array_equal(dx.transpose(inverse_permutation(training.dx_axes)), wanted_dx)
    np.testing.assert_array_equal(dw.transpose(inverse_permutation(training.dw_axes)), wanted_dw)
    for matmul, pair in {"fprop": "xw", "dgrad": "gw", "wgrad": "xg"}.items():
        for tensor in pair:
            axes = training.axes(matmul, tensor)
            assert sorted(axes.order) == list(range(operands[tensor].ndim))
            assert axes in getattr(training, matmul).sides


@pytest.mark.parametrize(
    ("axes", "transposed"),
    [
        (OperandAxes((), (0,), (1,)), False),
        (OperandAxes((), (1,), (0,)), True),
        (OperandAxes((2,), (0,), (1,)), True),
        (OperandAxes((1,), (2,), (0,)), False),
        (OperandAxes((), (), (0,)), False),
    ],
)
def test_is_transposed(axes, transposed):
    assert axes.is_transposed is transposed
