"""Reshapes on an Explicit mesh.

Values equal those of NumPy, and mesh axes stay on their array axes.
"""

import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfp8.numerics._per_block import merge_axes, split_axis

NAMES = ("data", "fsdp", "tensor")


def place(shape, spec, sizes, kind=AxisType.Explicit):
    devices = jax.devices()[: math.prod(sizes)]
    mesh = jax.make_mesh(sizes, NAMES, axis_types=(kind,) * 3, devices=devices)
    return jax.device_put(
        np.arange(math.prod(shape), dtype=np.float32).reshape(shape), NamedSharding(mesh, spec)
    )


# spec, sizes of the mesh axes, cells, the spec of (cells, side), and what JAX's own rule says where
# that differs
SPLITS = [
    (P(("data", "fsdp")), (4, 1, 1), 4, P(("data", "fsdp"), None), P("data", "fsdp")),
    (P(("fsdp", "data")), (1, 4, 1), 4, P(("fsdp", "data"), None), P("fsdp", "data")),
    (P(("data", "fsdp")), (4, 1, 1), 8, P(("data", "fsdp"), None), None),
    (P(("data", "fsdp")), (1, 4, 1), 4, P(("data", "fsdp"), None), None),
    (P(("data", "fsdp")), (2, 2, 1), 4, P(("data", "fsdp"), None), None),
    (P(("data", "fsdp", "tensor")), (2, 2, 1), 4, P(NAMES, None), P(("data", "fsdp"), "tensor")),
    (P("data"), (1, 1, 1), 1, P(None, None), P(None, "data")),
]


@pytest.mark.parametrize(("spec", "sizes", "cells", "want", "jax_gives"), SPLITS, ids=str)
def test_split_axis(spec, sizes, cells, want, jax_gives):
    x = place((16,), spec, sizes)
    split = split_axis(x, 0, cells)
    assert jax.typeof(split).sharding.spec == want
    np.testing.assert_array_equal(split, np.asarray(x).reshape(cells, 16 // cells))
    # Without the difference the row would say nothing of `split_axis`.
    of_jax = jax.typeof(x.reshape(cells, 16 // cells)).sharding.spec
    assert of_jax == (want if jax_gives is None else jax_gives)


# shape, spec, sizes of the mesh axes, counts, the spec of the merged array
MERGES = [
    (
        (4, 4, 3),
        P(("data", "fsdp"), None, "tensor"),
        (4, 1, 1),
        (2, 1),
        P(("data", "fsdp"), "tensor"),
    ),
    ((4, 4, 3), P("data", "tensor", None), (2, 1, 1), (2, 1), P("data", None)),
    ((4, 4, 3), P(None, "tensor", None), (2, 1, 1), (1, 2), P(None, "tensor")),
    ((4, 4, 3), P(None, "tensor", None), (2, 1, 1), (2, 1), P(None, None)),  # JAX's rule refuses it
    ((1, 4, 3), P("fsdp", "data", None), (2, 1, 1), (2, 1), P("data", None)),
    ((1, 4, 3), P(None, "data", "tensor"), (2, 1, 1), (3,), P("data")),  # this, too
    # and two at once
    ((2, 4, 4, 2), P("data", None, "fsdp", None), (2, 2, 1), (2, 2), P("data", "fsdp")),
    ((4, 4, 3), P("data", None, None), (2, 1, 1), (1, 2, 0), P("data", None, None)),
    # by JAX's rule
    ((2, 4, 3), P("data", "fsdp", None), (2, 2, 1), (2, 1), P(("data", "fsdp"), None)),
]


@pytest.mark.parametrize(("shape", "spec", "sizes", "counts", "want"), MERGES, ids=str)
def test_merge_axes(shape, spec, sizes, counts, want):
    x = place(shape, spec, sizes)
    merged = merge_axes(x, counts)
    assert jax.typeof(merged).sharding.spec == want
    np.testing.assert_array_equal(merged, np.asarray(x).reshape(merged.shape))


def test_an_array_of_that_shape_is_left_alone():
    x = place((4, 3), P("data", None), (4, 1, 1))
    assert merge_axes(x, (1, 1)) is x


def test_under_transformations():
    """vmap over an axis that is split, and the gradient, which lies as the array."""
    x = place((2, 8), P("tensor", ("data", "fsdp")), (4, 1, 2))
    with jax.set_mesh(x.sharding.mesh):
        split = jax.jit(jax.vmap(lambda row: split_axis(row, 0, 4)))(x)
        back = jax.jit(jax.grad(lambda x: jax.numpy.sum(split_axis(x, 1, 4) ** 2)))(x)
    assert jax.typeof(split).sharding.spec == P("tensor", ("data", "fsdp"), None)
    assert jax.typeof(back).sharding.spec == P("tensor", ("data", "fsdp"))
    np.testing.assert_array_equal(back, 2 * np.asarray(x))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_without_a_mesh_that_is_set(kind):
    x = place((8,), P(("data", "fsdp")), (4, 1, 1), kind)
    np.testing.assert_array_equal(
        jax.jit(lambda x: split_axis(x, 0, 4))(x), np.arange(8).reshape(4, 2)
    )
