"""Matmuls on an Auto mesh, with a plain product in place of a kernel's.

Scales in every shape, K and N in whole tiles.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfp8.kernels.scaled_matmul._partitioned import Cells, partition_matmul

B, M, STEP = 2, 8, 128
CELLS = {
    "1x128 @ 128x128": Cells(step=STEP, columns=128),
    "1x128 @ 1x128": Cells(step=STEP),
    "1x32 @ 32x32": Cells(step=STEP, parts=4, columns=32),
    "1x32 @ 1x32": Cells(step=STEP, parts=4),
    "rows": Cells(step=STEP, parts=0),
}
# Where lhs [B, M, K] and rhs [B, N, K] lie.
LAYOUTS = {
    "rows, columns": ((None, "data", None), (None, "model", None)),
    "columns by both": ((None, None, None), (None, ("data", "model"), None)),
    "contracted": ((None, None, "data"), (None, None, "data")),
    "contracted, columns": ((None, None, "model"), (None, "data", "model")),
    "contracted apart": ((None, "model", "data"), (None, None, None)),
    "batch": (("model", "data", None), ("model", None, None)),
}
SHAPES = ((128, 200), (256, 512), (512, 128), (512, 96))


def local(cells):
    """The product of one device, which holds whole steps and the scales of all its columns, or
    fails.
    """

    def product(a, b, a_scale, b_scale):
        k, n = a.shape[2], b.shape[1]
        assert k % STEP == 0
        each = k if cells.parts == 0 else STEP // cells.parts
        assert b_scale.shape[1] == -(-n // cells.columns)
        b_scale = jnp.repeat(b_scale, cells.columns, axis=1)[:, :n]
        a, b = (
            v.astype(jnp.float32) * jnp.repeat(s, each, axis=2)
            for v, s in ((a, a_scale), (b, b_scale))
        )
        return jnp.einsum("bmk,bnk->bmn", a, b, precision="highest")

    return product


def expected(cells, a, b, a_scale, b_scale):
    """`local` in NumPy."""
    k, n = a.shape[2], b.shape[1]
    each = k if cells.parts == 0 else STEP // cells.parts
    b_scale = np.repeat(b_scale, cells.columns, axis=1)[:, :n]
    a, b = (
        v.astype(np.float64) * np.repeat(s, each, axis=2) for v, s in ((a, a_scale), (b, b_scale))
    )
    return np.einsum("bmk,bnk->bmn", a, b).astype(np.float32)


def operands(cells, k, n):
    """Small integers, and powers of two as scales: every sum is exact."""
    random = np.random.default_rng(k + n)
    values = [random.integers(-4, 5, (B, rows, k)) for rows in (M, n)]
    steps = k // STEP * cells.parts or 1
    scales = [
        2.0 ** random.integers(-2, 3, (B, rows, steps)) for rows in (M, -(-n // cells.columns))
    ]
    return [v.astype(jnp.float8_e4m3fn) for v in values] + [s.astype(np.float32) for s in scales]


def table():
    """A quarter of the product, in which each two choices meet; the rest by hand."""
    for i, name in enumerate(CELLS):
        for j, layout in enumerate(LAYOUTS):
            for n, shape in enumerate(SHAPES):
                marks = () if (i + j + n) % 4 == 0 else pytest.mark.slow
                yield pytest.param(name, layout, shape, id=f"{name}-{layout}-{shape}", marks=marks)


@pytest.mark.parametrize(("name", "layout", "shape"), list(table()))
def test_is_the_product_of_one_device(name, layout, shape):
    cells, specs = CELLS[name], LAYOUTS[layout]
    arguments = operands(cells, *shape)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def dot(*arguments):
        values = [
            jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))
            for x, spec in zip(arguments[:2], specs, strict=True)
        ]
        return partition_matmul(local(cells), cells)(*values, *arguments[2:])

    compiled = jax.jit(dot).lower(*arguments).compile()
    np.testing.assert_array_equal(compiled(*arguments), expected(cells, *arguments))
    text, (k, n) = compiled.as_text(), shape
    devices = {"data": 4, "model": 2}.get(specs[0][2]) if specs[0][2] == specs[1][2] else None
    if devices and k % (devices * STEP) == 0:
        assert "all-reduce" in text  # partial sums
        if layout == "contracted":
            assert "all-gather" not in text
    if layout == "rows, columns" and n % (2 * cells.columns) == 0:
        assert "all-" not in text
